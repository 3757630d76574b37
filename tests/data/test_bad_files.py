"""Files that cannot be read: each is refused with its name, the line or row, and what to do."""

import codecs
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualkg.data.archives import find_sources
from dualkg.data.formats.delimited import read_labels
from dualkg.data.loading import load_graph
from dualkg.errors import DataError, RequestError
from tests.data.test_openke import openke_files

QUOTE = "a quote is opened and not closed. Close it, or double each quote that belongs to a name."
NOTHING = "holds no triples; at least one is expected."
MANY = b"f,g,h\n" * 50_000
GOOD = b"".join(b"e%d\tr\te%d\n" % (i, i + 1) for i in range(2_344))


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"h": ["x"] * 3, "r": ["r"] * 3, **columns}), sink)
    return sink.getvalue()


def invalid(*values: bytes) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


# name, content, the sentence after the name
CASES = [
    # text: the number of columns
    ("m.tsv", b"a\tr\tb\n\na\tr\n", ", line 3: expected 3 columns separated by tabs, found 2: "),
    ("m.tsv", b"a\tr\tb\tc\n", ", line 1: expected 3 columns separated by tabs, found 4: 'a',"),
    ("m.txt", b"a,r,b\n", ", line 1: expected 3 columns separated by tabs, found 1: 'a,r,b'. If"),
    ("m.txt", b"a r b c\n", ", line 1: expected 3 columns separated by tabs, found 1: 'a r b"),
    ("m.txt", b'{"head": "a"}\n', ", line 1: expected 3 columns separated by tabs, found 1:"),
    ("m.csv", b"a\tr\tb\n", ", line 1: expected 3 columns separated by commas, found 1:"),
    ("m.csv", b"head;relation;tail\na;r\n", ", line 2: expected 3 columns separated by"),
    ("m.tsv", b"a\tr\tb\n   \na\tr\tb\n", ", line 2: expected 3 columns separated by tabs,"),
    ("m.tsv", b"a\tr\tb\t\nx\tr\ty\n", ", line 2: expected 3 columns separated by tabs and 1"),
    ("m.tsv", b"a\tr\tb\t\nx\tr\ty\tz\n", ", line 2: expected 3 columns separated by tabs and 1"),
    ("m.tsv", b"# one\na\tr\tb\n# two\nc\tr\n", ", line 4: expected 3 columns"),
    ("m.tsv", GOOD + b"x\tr\n" + GOOD, ", line 2,345: expected 3 columns"),
    ("m.txt", b"a\tr b\nc\tr d\n", ", line 1: expected 3 columns separated by tabs"),
    ("m.tsv", b"a\tr\tb\nc\tr\t" + 5 * 2**20 * b"x", " has a line longer than 4 MiB, too long"),
    # text: empty and invalid names
    ("m.tsv", b"head\trelation\ttail\r\na\tr\tb\r\na\t\tb\r\n", ", line 3: the relation is"),
    ("m.csv", b'a,r,"x\ny"\na,r,""\n', ", line 3: the tail is empty."),
    ("m.tsv", b"a\tr\tb\ncaf\xe9\tr\tb\na\tr\n", ", line 2: the head is not valid UTF-8"),
    ("m.tsv", GOOD + b"x\tr\t\xc3\n" + GOOD, ", line 2,345: the tail is not valid UTF-8"),
    ("m.tsv", "a\tr\tb\n".encode("utf-16"), " should be UTF-8, and it is written in UTF-16."),
    # text: quotes
    ("m.csv", b'a,r,b\na,"r,b\nc,d,e\n' + MANY, f", line 2: {QUOTE}"),
    ("m.csv", b'"' + MANY, f", line 1: {QUOTE}"),
    ("m.csv", b'a,r,b\n\na,r,"b\nc,d,e\n', f", line 3: {QUOTE}"),
    ("m.csv", b'a,r,"b\n', f", line 1: {QUOTE}"),
    ("m.csv", b'a,r,6"\n\na,r,"b\nc,d,e', f", line 3: {QUOTE}"),
    ("m.csv", b'a,r,b\n"', f", line 2: {QUOTE}"),
    ("m.csv", b'head,relation,tail,more\na,r,b,"x\nc,d,e,f', f", line 2: {QUOTE}"),
    # nothing
    ("m.tsv", b"", f" {NOTHING}"),
    ("m.tsv", b"\n\r\n", f" {NOTHING}"),
    ("m.tsv", b"# one\n# two\n", f" {NOTHING} 2 lines that begin with # were skipped"),
    ("m.csv", codecs.BOM_UTF8 + b"head,relation,tail\r\n\r\n", f" {NOTHING} The first line of"),
    ("m.jsonl", b"\n", f" {NOTHING}"),
    ("m.parquet", parquet(t=["a"] * 3)[:-20], " is damaged, cut short, or not the kind of file"),
    # the number of triples
    ("m.txt", b"7\n0\t1\t0\n1\t2\t0\n", " should have 7 triples, by its first line, and it has"),
    ("m.txt", b"2\n3\n4\n", ", line 1: expected 3 columns"),
    ("m.txt", b"2\n0\t1\t2\n2\t1\t0\n", " begins with the number of its triples, as files of"),
    ("m.txt", b"2\nanna\tbob\tknows\n0\t1\t2\n", " begins with the number of its triples"),
    # columns
    ("m.parquet", parquet(x=["a"] * 3, y=["a"] * 3), " should have three columns, or some named"),
    ("m.parquet", parquet(t=[0.5] * 3), " should have text or whole numbers as tails, and"),
    # rows
    ("m.jsonl", b'{"h": "a", "r": "r", "t": "b"}\nnot json\n', ", line 2: this is not JSON"),
    ("m.jsonl", b'{"h": "a", "r": "r", "t": "b"}\n{"h": "a"}\n', ", line 2: expected the keys"),
    ("m.jsonl", b'{"h": "a", "r": true, "t": "b"}\n', ", line 1: the relation should be text or"),
    ("m.jsonl", b'{"h": "a", "r": "r", "t": "\xff"}\n', ", line 1: this is not valid UTF-8."),
    ("m.jsonl", b'{"h": "", "r": "r", "t": "b"}\n', ", line 1: the head is empty. Give it a"),
    ("m.jsonl", b'{"x": 1, "y": 2, "z": 3, "w": 4}\n', " should have three keys, or some named"),
    ("m.jsonl", b'["a", "r"]\n', ", line 1: expected head, relation and tail, found ['a',"),
    ("m.jsonl", b'"a"\n', ", line 1: expected head, relation and tail, found 'a'."),
    ("m.parquet", parquet(t=["a", None, "b"]), ", row 2: the tail is missing. Give"),
    ("m.parquet", parquet(t=["a", "b", ""]), ", row 3: the tail is empty."),
    ("m.parquet", parquet(t=invalid(b"a", b"\xff", b"b")), ", row 2: the tail is not valid"),
    ("m.parquet", parquet(t=pa.array([b"a", b"b", b"\xff"])), ", row 3: the tail is not valid"),
    ("m.nt", b"<a:a> <a:b> <a:c> .\n<a:a> oops\n<a:a> .\n", ", line 2: this is not valid"),
    ("m.nt", b'<a:a> <a:b> "text" .\n', f" {NOTHING} "),
    # triples that cannot be split
    ("m.tsv", b"a\tr\tb\nb\ts\tc\n", " cannot be split: of its 2 triples none can go to valid"),
]
# with options
OPTIONS: list[tuple[str, bytes, str, dict[str, Any]]] = [
    ("m.csv", b"head,rel,tail\na,r,b\n", " has no column", {"columns": ("hed", "rel", "tail")}),
    ("m.csv", b"a,r,b\n", " has 3 columns, and column 5 was given. Choose", {"columns": (1, 2, 5)}),
    ("m.csv", b"a,b,b,c\n1,2,3,4\n", " has 2 columns named 'b'. Cho", {"columns": ("a", "b", "c")}),
    ("m.csv", b"x,y,z\na,r,b\n", " has one column that ('x', 1, 'z')", {"columns": ("x", 1, "z")}),
    ("m.jsonl", b'{"x": 1, "y": 2, "z": 3}\n', " has no column nam", {"columns": ("x", "y", "zz")}),
    ("m.jsonl", b'{"x": 1, "y": 2, "z": 3}\n', " has rows with keys. Choo", {"columns": (1, 2, 3)}),
    ("m.jsonl", b"[1, 2, 3]\n", " has rows without keys. Choose col", {"columns": ("x", "y", "z")}),
    ("m.jsonl", b"[1, 2, 3]\n", " has no delimiter, as .jsonl is no text of c", {"delimiter": ","}),
    ("m.nt", b"<a:a> <a:b> <a:c> .\n", " is RDF, which has no columns to", {"columns": (1, 2, 3)}),
]


@pytest.mark.parametrize(
    ("name", "content", "sentence", "options"),
    [*[(*case, {}) for case in CASES], *OPTIONS],
    ids=range(len(CASES) + len(OPTIONS)),
)
def test_a_bad_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    sentence: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError) as caught:
        load_graph(tmp_path / name, **options)
    assert str(caught.value).startswith(f"{tmp_path / name}{sentence}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a\tA\nb\n", ", line 2: expected 2 columns separated by tabs, found 1: 'b'. Correct"),
        (b"a\tA\nb\tB\tC\n", ", line 2: expected 2 columns separated by tabs, found 3"),
        (b"a\tA\n\n\tB\n", ", line 3: the name is empty."),
        (b"a\t\xff\n", ", line 1: the label is not valid UTF-8 ('\\xff')."),
    ],
)
def test_bad_labels_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "labels.tsv"
    path.write_bytes(content)
    [source] = find_sources(path)
    with pytest.raises(DataError) as caught:
        read_labels(source)
    assert str(caught.value).startswith(f"{path}{sentence}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train2id.txt": "5\n0 1 0\n"}, "/train2id.txt should have 5 triples, by its first line"),
        ({"test2id.txt": "0 1 0\n"}, "/test2id.txt, line 1: expected the number of triples"),
        ({"train2id.txt": "1\n0 9 0\n"}, "/train2id.txt has the tail 9, which is not one of the 5"),
        ({"train2id.txt": "2\n0 1 0\n0 1\n"}, "/train2id.txt, line 3: expected 3 columns"),
        ({"entity2id.txt": "1\nanna\n"}, "/entity2id.txt, line 2: expected a name and its id"),
        ({"entity2id.txt": "2\na\t0\na\t1\n"}, "/entity2id.txt has ids with the same name."),
        ({"valid2id.txt": None}, " has train2id.txt, so it should hold the files of OpenKE, and "),
    ],
)
def test_bad_files_of_openke_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    sentence: str,
) -> None:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in (openke_files() | changes).items():
        if content is not None:
            (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        load_graph(folder)
    assert str(caught.value).startswith(f"{folder}{sentence}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"columns": (1, 2)}, "columns should be three different names or numbers"),
        ({"columns": "abc"}, "columns should be three different names or numbers"),
        ({"columns": (True, 2, 3)}, "columns should be three different names or numbers"),
        ({"columns": (0, 1, 2)}, "columns should be counted from 1; 0 was given."),
        ({"delimiter": "::"}, "delimiter should be one character such as ',' or '|', or one of"),
        ({"delimiter": '"'}, "delimiter should be one character"),
        ({"split": "80/20"}, "split should be three percentages that add up to 100"),
        ({"split": "110/-5/-5"}, "split should be three percentages that add up to 100"),
        ({"split": "nan/10/10"}, "split should be three percentages that add up to 100"),
        ({"seed": -1}, "seed should be a whole number, 0 or more; -1 was given."),
        ({"max_size": "1 apple"}, "max_size should be a number of bytes such as 500M or 16G"),
        ({"max_size": "9" * 5000}, "max_size should be a number of bytes such as 500M or 16G"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.tsv").write_bytes(GOOD)
    with pytest.raises(RequestError) as caught:
        load_graph(tmp_path / "m.tsv", **options)
    assert str(caught.value).replace("`", "").startswith(sentence)


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"a,r,b\n", "If commas separate the columns, use `delimiter='comma'`."),
        (b"a r b c\n", "If spaces separate the columns, use `delimiter='space'`."),
        (b"a:r:b\n", "If colons separate the columns, use `delimiter=':'`."),
        (b'{"head": "a"}\n', "If each line is JSON, give the file a name that ends in .jsonl."),
        (b"a\tr\tb\n   \n", "found 1: '   '. Remove the line."),
        (b"a\tr\tb\tc\n", "choose three columns with `columns=(1, 2, 3)`, or by name if line 1 is"),
    ],
)
def test_a_bad_line_gets_advice(tmp_path: Path, content: bytes, advice: str) -> None:
    (tmp_path / "m.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_graph(tmp_path / "m.txt")
    assert advice in str(caught.value)


def test_what_was_never_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid text in a column that was not chosen."""
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.tsv").write_bytes(b"a\tr\tb\t\xff\nc\tr\td\t\n")
    assert len(load_graph(tmp_path / "m.tsv", columns=(1, 2, 3), split="100/0/0").train) == 2

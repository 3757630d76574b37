"""TSV and CSV: separators, quotes, headers, columns, and errors that name the first bad line."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest

from dualkg.data.formats.delimited import read_labels
from dualkg.data.readers import one_source
from dualkg.errors import DataError, InvalidValue, RequestError

Write = Callable[[str, bytes], Path]
ABC = [("a", "r", "b"), ("c", "r", "d")]
NO_TRIPLES_AFTER_HEADER = (
    "m.csv holds no triples; at least one is expected. The first line of m.csv was read as a "
    "header."
)


@pytest.mark.parametrize(
    "content",
    [
        b"a\tr\tb\nc\tr\td\n",
        b"a\tr\tb\nc\tr\td",
        b"a\tr\tb\r\nc\tr\td\r\n",
        b"a\tr\tb\r\nc\tr\td",
        b"a\tr\tb\rc\tr\td\r",
        codecs.BOM_UTF8 + b"a\tr\tb\nc\tr\td\n",
        codecs.BOM_UTF8 + b"\na\tr\tb\nc\tr\td\n",
        codecs.BOM_UTF8 + b"\r\n\na\tr\tb\n\n\r\nc\tr\td\n\n\n",
    ],
)
def test_line_ends_byte_order_marks_and_blank_lines(kit, write: Write, content: bytes) -> None:
    assert kit.named(kit.read(write("mine.tsv", content))) == ABC
    assert kit.named(kit.read(write("mine.csv", content.replace(b"\t", b",")))) == ABC
    assert kit.named(kit.read(write("mine.csv", content.replace(b"\t", b";")))) == ABC


def test_tsv_reads_names_verbatim(kit, write: Write) -> None:
    content = b'"a\tr\\t\tb, c\nNA\tnull\t""\n# x\t-\t1e5\n'
    assert kit.named(kit.read(write("mine.tsv", content))) == [
        ('"a', "r\\t", "b, c"),
        ("NA", "null", '""'),
        ("# x", "-", "1e5"),
    ]


def test_csv_follows_quotes(kit, write: Write) -> None:
    content = b'"a, ""x""",r,"two\nlines"\nNA,null,01\n'
    assert kit.named(kit.read(write("mine.csv", content))) == [
        ('a, "x"', "r", "two\nlines"),
        ("NA", "null", "01"),
    ]
    content = b'6" nail,r,b\n"c"x,r,d'
    assert kit.named(kit.read(write("odd.csv", content))) == [
        ('6" nail', "r", "b"),
        ("cx", "r", "d"),
    ]
    content = b'"a; b";r,s;c\n'
    assert kit.named(kit.read(write("semi.csv", content))) == [("a; b", "r,s", "c")]


@pytest.mark.parametrize(
    "header",
    [
        b"head\trelation\ttail",
        b"Subject\tPREDICATE\tobject",
        b"s\tp\to",
        b"h\tr\tt",
        b"source\trel\ttarget",
        b"source\tlabel\ttarget",
        b" subject\tproperty \tobject",
    ],
)
def test_a_recognised_header_is_not_a_triple(kit, write: Write, header: bytes) -> None:
    data = b"a\tr\tb\nc\tr\td"
    for content in (header + b"\n" + data, codecs.BOM_UTF8 + b"\n" + header + b"\r\n" + data):
        path = write("mine.tsv", content)
        read = kit.read(path)
        assert kit.named(read) == ABC
        remarks = read.notes
        assert remarks == [f"The first line of {path} was read as a header."]


def test_a_header_may_have_any_order_and_other_columns(kit, write: Write) -> None:
    path = write("mine.csv", b"object,id,subject,source,relation\nb,1,a,web,r\nd,2,c,,r\n")
    assert kit.named(kit.read(path)) == ABC


def test_lines_inside_quotes_may_cross_blocks(kit, write: Write) -> None:
    triples = [(f"{i}\n{i}", "r,\r\ns", f'{i}\n"') for i in range(100)]
    rows = [
        '"' + '","'.join(name.replace('"', '""') for name in triple) + '"\n' for triple in triples
    ]
    path = write("mine.csv", "".join(rows).encode())
    assert kit.named(kit.read(path, block_bytes=64)) == triples


def test_an_exact_column_name_precedes_other_cases(kit, write: Write) -> None:
    path = write("mine.csv", b"x,X,y,z\n1,2,r,3\n")
    assert kit.named(kit.read(path, ("X", "y", "z"))) == [("2", "r", "3")]
    assert kit.named(kit.read(path, ("x", "Y", "z"))) == [("1", "r", "3")]


def test_two_of_three_header_names_are_a_triple(kit, write: Write) -> None:
    read = kit.read(write("mine.tsv", b"head\tis\ttail\na\tr\tb\n"))
    assert kit.named(read) == [("head", "is", "tail"), ("a", "r", "b")]
    assert read.notes == []


@pytest.mark.parametrize(
    "columns", [("von", "kante", "zu"), ("VON", "kante", "zu "), (4, 2, 1), ("von", 2, "zu")]
)
def test_columns_by_name_and_number(kit, write: Write, columns: tuple[str | int, ...]) -> None:
    content = b"zu\tkante\tjahr\tvon\nb\tr\t1\ta\nd\tr\t\tc\n"
    expected = [("von", "kante", "zu"), *ABC] if columns == (4, 2, 1) else ABC
    assert kit.named(kit.read(write("mine.tsv", content), columns)) == expected
    assert kit.named(kit.read(write("mine.csv", content.replace(b"\t", b",")), columns)) == expected


def test_columns_by_number_still_skip_a_recognised_header(kit, write: Write) -> None:
    path = write("mine.tsv", b"relation\ttail\thead\tid\nr\tb\ta\t1\nr\td\tc\t2\n")
    assert kit.named(kit.read(path, (3, 1, 2))) == ABC


def test_an_unknown_column_lists_the_columns(kit, write: Write) -> None:
    path = write("mine.csv", b"subject,predicate,object\na,r,b\n")
    with pytest.raises(DataError) as caught:
        kit.read(path, ("subjekt", "predicate", "object"))
    assert "subjekt" in str(caught.value)
    assert str(caught.value) == (
        f"{path} has no column named 'subjekt'. Its columns are 'subject', 'predicate', 'object'. "
        "Did you mean 'subject' or 'object'?"
    )
    with pytest.raises(DataError) as bad_number:
        kit.read(path, (1, 2, 5))
    assert "has 3 columns, and column 5 was given" in str(bad_number.value)
    assert "Choose numbers from 1 to 3." in str(bad_number.value)
    twice = write("twice.csv", b"a,b,b,c\n1,2,3,4\n")
    with pytest.raises(DataError) as repeated:
        kit.read(twice, ("a", "b", "c"))
    assert "has 2 columns named 'b'" in str(repeated.value)
    with pytest.raises(RequestError) as same:
        kit.read(path, ("subject", 1, "object"))
    assert "has one column that ('subject', 1, 'object') means twice" in str(same.value)


@pytest.mark.parametrize("columns", [(1, 2), "abc", (1, 1, 2), (True, 2, 3), (1.5, 2, 3)])
def test_columns_that_are_not_three_are_refused(kit, write: Write, columns: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        kit.read(write("mine.tsv", b"a\tr\tb\n"), columns)
    assert (caught.value.setting, caught.value.found) == ("columns", columns)
    assert str(caught.value).startswith("`columns` should be three different names or numbers")


def test_columns_are_counted_from_1(kit, write: Write) -> None:
    with pytest.raises(InvalidValue) as caught:
        kit.read(write("mine.tsv", b"a\tr\tb\n"), (0, 1, 2))
    assert str(caught.value) == "`columns` should be counted from 1; 0 was given."


def sentence(kit, path: Path, **limits: int) -> str:
    with pytest.raises(DataError) as caught:
        kit.read(path, **limits)
    return str(caught.value).replace(str(path), path.name)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "m.tsv",
            b"a\tr\tb\n\na\tr\n",
            "m.tsv, line 3: expected 3 columns separated by tabs, found 2: 'a', 'r'. Correct the "
            "line, or remove it.",
        ),
        (
            "m.tsv",
            b"a\tr\tb\tc\n",
            "m.tsv, line 1: expected 3 columns separated by tabs, found 4: 'a', 'r', 'b', 'c'. "
            "Correct the line, or choose three columns with `columns=(1, 2, 3)`, or by name if "
            "line 1 is a header.",
        ),
        (
            "m.txt",
            b"a,r,b\n",
            "m.txt, line 1: expected 3 columns separated by tabs, found 1: 'a,r,b'. "
            "If commas separate the columns, use `delimiter='comma'`.",
        ),
        (
            "m.txt",
            b"a r b c\n",
            "m.txt, line 1: expected 3 columns separated by tabs, found 1: 'a r b c'. "
            "If spaces separate the columns, use `delimiter='space'`.",
        ),
        (
            "m.txt",
            b'{"head": "a"}\n',
            'm.txt, line 1: expected 3 columns separated by tabs, found 1: \'{"head": "a"}\'. '
            "If each line is JSON, give the file a name that ends in .jsonl.",
        ),
        (
            "m.txt",
            b"a r b\nc r d\nc\n",
            "m.txt, line 1: expected 3 columns separated by tabs, found 1: 'a r b'. "
            "If spaces separate the columns, use `delimiter='space'`.",
        ),
        (
            "m.csv",
            b"a\tr\tb\n",
            "m.csv, line 1: expected 3 columns separated by commas, found 1: 'a\\tr\\tb'. "
            "If tabs separate the columns, use `delimiter='tab'`.",
        ),
        (
            "m.tsv",
            b"a\tr\tb\n   \na\tr\tb\n",
            "m.tsv, line 2: expected 3 columns separated by tabs, found 1: '   '. Remove the line.",
        ),
        (
            "m.tsv",
            b"head\trelation\ttail\r\na\tr\tb\r\na\t\tb\r\n",
            "m.tsv, line 3: the relation is empty. Give it a name, or remove the line.",
        ),
        (
            "m.tsv",
            b"\ta\tb\n",
            "m.tsv, line 1: the head is empty. Give it a name, or remove the line.",
        ),
        (
            "m.csv",
            b'a,r,"x\ny"\na,r,""\n',
            "m.csv, line 3: the tail is empty. Give it a name, or remove the line.",
        ),
        (
            "m.tsv",
            b"a\tr\tb\ncaf\xe9\tr\tb\na\tr\n",
            "m.tsv, line 2: the head is not valid UTF-8 ('caf\\xe9'). Save the file as UTF-8.",
        ),
        (
            "m.csv",
            b"head,relation,tail\n\na,r,b\na,r,\xff\n",
            "m.csv, line 4: the tail is not valid UTF-8 ('\\xff'). Save the file as UTF-8.",
        ),
        (
            "m.csv",
            b"head;relation;tail\na;r\n",
            "m.csv, line 2: expected 3 columns separated by semicolons, "
            "found 2: 'a', 'r'. Correct the line, or remove it.",
        ),
        (
            "m.csv",
            b'a,r,b\na,"r,b\nc,d,e\n' + b"f,g,h\n" * 50_000,
            "m.csv, line 2: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.csv",
            b'"' + b"f,g,h\n" * 50_000,
            "m.csv, line 1: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.csv",
            b'a,r,b\n\na,r,"b\nc,d,e\n',
            "m.csv, line 3: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.csv",
            b'a,r,"b\n',
            "m.csv, line 1: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.csv",
            b'a,r,6"\n\na,r,"b\nc,d,e',
            "m.csv, line 3: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.csv",
            b'a,r,b\n"',
            "m.csv, line 2: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.csv",
            b'head,relation,tail,more\na,r,b,"x\nc,d,e,f',
            "m.csv, line 2: a quote is opened and not closed. Close it, or double each quote "
            "that belongs to a name.",
        ),
        (
            "m.tsv",
            "a\tr\tb\n".encode("utf-16"),
            "m.tsv should be UTF-8, and it is written in UTF-16. Save it as UTF-8.",
        ),
        ("m.tsv", b"", "m.tsv holds no triples; at least one is expected."),
        ("m.tsv", b"\n\r\n", "m.tsv holds no triples; at least one is expected."),
        ("m.csv", b"head,relation,tail", NO_TRIPLES_AFTER_HEADER),
        ("m.csv", codecs.BOM_UTF8 + b"head,relation,tail\r\n\r\n", NO_TRIPLES_AFTER_HEADER),
    ],
)
def test_the_first_bad_line_is_named(
    kit, write: Write, name: str, content: bytes, expected: str
) -> None:
    assert sentence(kit, write(name, content)) == expected


def test_a_bad_line_far_down_is_counted_exactly(kit, write: Write) -> None:
    good = b"".join(b"e%d\tr\te%d\n" % (i, i + 1) for i in range(2_344))
    for bad in (b"x\tr\n", b"x\t\ty\n", b"x\tr\t\xc3\n", b"x\tr\ty\tz\n"):
        path = write("mine.tsv", good + bad + good)
        with pytest.raises(DataError) as caught:
            kit.read(path, block_bytes=4096)
        assert "line 2,345" in str(caught.value)


def test_invalid_text_in_an_unused_column_is_ignored(kit, write: Write) -> None:
    path = write("mine.tsv", b"a\tr\tb\t\xff\nc\tr\td\t\n")
    assert kit.named(kit.read(path, (1, 2, 3))) == ABC


def test_a_line_longer_than_a_block_is_an_error(kit, write: Write) -> None:
    path = write("mine.tsv", b"a\tr\tb\nc\tr\t" + b"x" * (3 << 20) + b"\nc\tr\td\n")
    found = sentence(kit, path, block_bytes=1 << 20)
    assert found.startswith("mine.tsv has a line longer than 1 MiB")


def test_labels(kit, write: Write) -> None:
    content = '\ufeffa\tAnna\r\nb\tBéla "B"\r\n\r\nc\t\r\na\tsecond\r\n'.encode()
    assert read_labels(one_source(write("labels.tsv", content))) == {"a": "Anna", "b": 'Béla "B"'}
    assert read_labels(one_source(write("labels.csv", b'a,"x, y"\n'))) == {"a": "x, y"}
    assert (
        read_labels(one_source(write("labels.tsv.gz", kit.compressed(content, ".gz"))))["a"]
        == "Anna"
    )
    assert read_labels(one_source(write("labels.tsv", b""))) == {}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"a\tA\nb\n",
            "labels.tsv, line 2: expected 2 columns separated by tabs, found 1: 'b'. Correct the "
            "line, or remove it.",
        ),
        (
            b"a\tA\nb\tB\tC\n",
            "labels.tsv, line 2: expected 2 columns separated by tabs, found 3: 'b', 'B', 'C'. "
            "Correct the line, or remove it.",
        ),
        (
            b"a\t\nb\n",
            "labels.tsv, line 2: expected 2 columns separated by tabs, found 1: 'b'. Correct the "
            "line, or remove it.",
        ),
        (
            b"a\tA\n\n\tB\n",
            "labels.tsv, line 3: the name is empty. Give it a name, or remove the line.",
        ),
        (
            b"a\t\xff\n",
            "labels.tsv, line 1: the label is not valid UTF-8 ('\\xff'). Save the file as UTF-8.",
        ),
    ],
)
def test_bad_labels_are_named_by_line(write: Write, content: bytes, expected: str) -> None:
    path = write("labels.tsv", content)
    with pytest.raises(DataError) as caught:
        read_labels(one_source(path))
    assert str(caught.value).replace(str(path), path.name) == expected

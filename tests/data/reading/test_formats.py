"""Every format under every compression reads as the same triples."""

import csv
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data import encoding
from dualkg.data import triples as triples_module
from dualkg.data.archives import find_sources
from dualkg.data.encoding import read_triples
from dualkg.data.readers import one_source

Write = Callable[[str, bytes], Path]
TRIPLES = [
    ("http://a/France", "http://a/capital", "http://a/Paris"),
    ("http://a/Paris", "http://a/in", "http://a/France"),
    ("http://a/Île", "http://a/in", "http://a/France"),
]


def as_tsv(triples: list[tuple[str, str, str]]) -> bytes:
    return "".join("\t".join(triple) + "\n" for triple in triples).encode()


def as_csv(triples: list[tuple[str, str, str]]) -> bytes:
    sink = io.StringIO(newline="")
    csv.writer(sink).writerows(triples)
    return sink.getvalue().encode()


def as_parquet(triples: list[tuple[str, str, str]]) -> bytes:
    sink = pa.BufferOutputStream()
    columns = [pa.array(column, pa.string()) for column in zip(*triples, strict=True)]
    pq.write_table(pa.table(columns, names=["head", "relation", "tail"]), sink)
    return bytes(sink.getvalue().to_pybytes())


def as_rdf(triples: list[tuple[str, str, str]]) -> bytes:
    return "".join(f"<{h}> <{r}> <{t}> .\n" for h, r, t in triples).encode()


def as_json(triples: list[tuple[str, str, str]]) -> bytes:
    return "".join(
        json.dumps(dict(zip(("s", "p", "o"), triple, strict=True))) + "\n" for triple in triples
    ).encode()


FORMATS = {
    ".tsv": as_tsv,
    ".txt": as_tsv,
    ".other": as_tsv,
    ".csv": as_csv,
    ".parquet": as_parquet,
    ".nt": as_rdf,
    ".ttl": as_rdf,
    ".nq": as_rdf,
    ".trig": as_rdf,
    ".jsonl": as_json,
    ".ndjson": as_json,
    ".json": lambda triples: json.dumps(triples).encode(),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".bz2", ".zst"])
def test_compressed_files_read_as_written(kit, write: Write, suffix: str, compression: str) -> None:
    path = write(
        f"mine{suffix}{compression}", kit.compressed(FORMATS[suffix](TRIPLES), compression)
    )
    read = kit.read(path)
    assert kit.named(read) == TRIPLES
    assert read.notes == []


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "archive", [".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst"]
)
def test_an_archive_of_one_file_reads_as_that_file(
    kit, write: Write, suffix: str, archive: str
) -> None:
    members = {f"folder/train{suffix}": FORMATS[suffix](TRIPLES)}
    if archive == ".zip":
        content = kit.zipped(members)
    else:
        content = kit.tarred(members, {".tgz": ".gz"}.get(archive, archive.removeprefix(".tar")))
    assert kit.named(kit.read(write(f"mine{archive}", content))) == TRIPLES


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".parquet", ".nt", ".nq", ".jsonl", ".json"])
def test_ids_follow_first_appearance_in_every_format(kit, write: Write, suffix: str) -> None:
    read = kit.read(write(f"mine{suffix}", FORMATS[suffix](TRIPLES)))
    assert read.entities.to_pylist() == ["http://a/France", "http://a/Paris", "http://a/Île"]
    assert read.relations.to_pylist() == ["http://a/capital", "http://a/in"]
    assert read.triples["all"].dtype == np.int32
    assert read.triples["all"].tolist() == [[0, 0, 1], [1, 1, 0], [2, 1, 0]]


def test_files_of_different_formats_share_one_vocabulary(write: Write) -> None:
    sources = {
        "train": one_source(write("train.tsv", b"a\tr\tb\nb\tr\tc\n")),
        "valid": one_source(write("valid.csv", b"c,s,a\n")),
        "test": one_source(write("test.txt", b"d\tr\ta\n")),
    }
    read = read_triples(sources)
    assert read.entities.to_pylist() == ["a", "b", "c", "d"]
    assert read.relations.to_pylist() == ["r", "s"]
    assert {split: ids.tolist() for split, ids in read.triples.items()} == {
        "train": [[0, 0, 1], [1, 0, 2]],
        "valid": [[2, 1, 0]],
        "test": [[3, 0, 0]],
    }


def test_ids_do_not_depend_on_how_a_file_is_cut_into_blocks(
    kit, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    triples = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rng.integers(0, 500, (5000, 3)).tolist()]
    path = write("mine.tsv", as_tsv(triples))
    whole = kit.read(path)
    monkeypatch.setattr(encoding, "MAX_WAITING", 50)
    monkeypatch.setattr(triples_module, "ROWS", 64)
    cut = kit.read(path, block_bytes=1000)
    assert kit.named(whole) == triples
    assert cut.entities.equals(whole.entities)
    assert cut.relations.equals(whole.relations)
    assert np.array_equal(cut.triples["all"], whole.triples["all"])
    names = [name for head, _, tail in triples for name in (head, tail)]
    assert whole.entities.to_pylist() == list(dict.fromkeys(names))


def test_a_fingerprint_is_of_the_bytes_as_stored(kit, write: Write) -> None:
    # The sha256 of "a\tr\tb\n", by sha256sum.
    expected = "b664af6cca16a3aa9a1e51c01d8c710759a7b326a534b5d92ab4eff03affe72a"
    content = b"a\tr\tb\n"
    assert one_source(write("mine.tsv", content)).checksum(stored=True) == expected
    assert (
        one_source(write("mine.zip", kit.zipped({"x/mine.tsv": content}))).checksum(stored=True)
        == expected
    )
    archive = write("mine.tar.xz", kit.tarred({"mine.tsv": content}, ".xz"))
    assert one_source(archive).checksum(stored=True) == expected
    assert (
        one_source(write("mine.tsv.gz", kit.compressed(content, ".gz"))).checksum(stored=True)
        != expected
    )


LINE_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\r\n")).filter(
    str.strip
)
ANY_NAMES = st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)


def tables(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, str, str]]]:
    # The first row is fixed, so that no drawn one is taken for a header.
    return st.lists(st.tuples(names, names, names)).map(lambda rows: [("x", "y", "z"), *rows])


@pytest.mark.parametrize(
    ("suffix", "names"),
    [(".tsv", LINE_NAMES), (".csv", ANY_NAMES), (".parquet", ANY_NAMES), (".jsonl", ANY_NAMES)],
)
def test_any_names_are_read_as_written(kit, suffix: str, names: st.SearchStrategy[str]) -> None:
    @given(tables(names))
    def check(triples: list[tuple[str, str, str]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"mine{suffix}"
            path.write_bytes(FORMATS[suffix](triples))
            assert kit.named(kit.read(path)) == [
                tuple(name.strip() for name in row) for row in triples
            ]

    check()


def test_the_members_of_an_archive_are_sources_with_names(kit, write: Write) -> None:
    members = {
        "WN/train.txt": b"a\tr\tb\n",
        "WN/labels.tsv": b"a\tA\n",
        "../../evil\x1b.txt": b"c\tr\td\n",
        "__MACOSX/WN/._train.txt": b"\0",
        "WN/more.txt.gz": kit.compressed(b"e\tr\tf\n", ".gz"),
    }
    for name, content in {
        "WN.tar.xz": kit.tarred(members, ".xz"),
        "WN.zip": kit.zipped(members),
    }.items():
        path = write(name, content)
        found = {source.name.removeprefix(f"{path}:"): source for source in find_sources(path)}
        assert list(found) == ["WN/train.txt", "WN/labels.tsv", "../../evil?.txt", "WN/more.txt.gz"]
        assert [source.file_name for source in found.values()] == [
            "train.txt",
            "labels.tsv",
            "evil?.txt",
            "more.txt",
        ]
        del found["WN/labels.tsv"]
        read = read_triples(found)
        assert read.entities.to_pylist() == list("abcdef")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["WN.tar.xz", "WN.zip"]


def test_one_file_of_triples_is_found_beside_a_licence_and_labels(kit, write: Write) -> None:
    path = write(
        "mine.zip",
        kit.zipped(
            {
                "LICENSE.txt": b"free",
                "labels.tsv": b"a\tA\n",
                "picture.png": b"\0",
                "mine.csv": b"a,r,b\n",
            }
        ),
    )
    assert kit.named(kit.read(path)) == [("a", "r", "b")]


def test_names_of_more_text_than_32_bits_address(
    kit, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mine.tsv", as_tsv(TRIPLES))
    monkeypatch.setattr(encoding, "MAX_TEXT", 20)
    read = kit.read(path)
    assert read.entities.type == pa.large_string()
    assert kit.named(read) == TRIPLES

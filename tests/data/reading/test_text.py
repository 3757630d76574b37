"""TSV and CSV: separators, quotes, headers, columns, and errors that name the first bad line."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest

from dualkg.data.formats.delimited import read_labels
from dualkg.data.readers import one_source

Write = Callable[[str, bytes], Path]
ABC = [("a", "r", "b"), ("c", "r", "d")]


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


def test_labels(kit, write: Write) -> None:
    content = '\ufeffa\tAnna\r\nb\tBéla "B"\r\n\r\nc\t\r\na\tsecond\r\n'.encode()
    assert read_labels(one_source(write("labels.tsv", content))) == {"a": "Anna", "b": 'Béla "B"'}
    assert read_labels(one_source(write("labels.csv", b'a,"x, y"\n'))) == {"a": "x, y"}
    assert (
        read_labels(one_source(write("labels.tsv.gz", kit.compressed(content, ".gz"))))["a"]
        == "Anna"
    )
    assert read_labels(one_source(write("labels.tsv", b""))) == {}

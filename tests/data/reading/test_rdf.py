"""RDF: IRIs as names, labels, and notes of skipped triples."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dualkg.data.encoding import ReadTriples
from dualkg.errors import DataError, MissingExtra

Write = Callable[[str, bytes], Path]
LABEL = "<http://www.w3.org/2000/01/rdf-schema#label>"


def remarks(read: ReadTriples) -> list[str]:
    return read.notes


def test_iris_are_names_and_the_rest_is_counted(kit, write: Write) -> None:
    path = write(
        "mine.nt",
        b"""
<http://x/a> <http://x/r> <http://x/b> .
<http://x/a> <http://x/age> "7" .
<http://x/a> <http://x/age> "8"^^<http://www.w3.org/2001/XMLSchema#integer> .
_:n <http://x/r> <http://x/b> .
# a comment
<http://x/b> <http://x/r> <http://x/a> .
""",
    )
    read = kit.read(path, block_rows=1)
    assert kit.named(read) == [
        ("http://x/a", "http://x/r", "http://x/b"),
        ("http://x/b", "http://x/r", "http://x/a"),
    ]
    assert remarks(read) == [f"{path}: triples skipped: 2 with a literal, 1 with a blank node."]
    assert read.labels == {}


def test_turtle_with_prefixes(kit, write: Write) -> None:
    path = write("mine.ttl", b"@prefix x: <http://x/> .\nx:a x:r x:b, [] ; a x:c .\n")
    read = kit.read(path)
    assert kit.named(read) == [
        ("http://x/a", "http://x/r", "http://x/b"),
        ("http://x/a", "http://www.w3.org/1999/02/22-rdf-syntax-ns#type", "http://x/c"),
    ]
    assert remarks(read) == [f"{path}: triples skipped: 1 with a blank node."]


def test_labels_in_english_precede_untagged_ones(kit, write: Write) -> None:
    lines = [
        "<http://x/a> <http://x/r> <http://x/b> .",
        f'<http://x/a> {LABEL} "Anna" .',
        f'<http://x/a> {LABEL} "Ann"@en .',
        f'<http://x/a> {LABEL} "Annie"@en .',
        f'<http://x/b> {LABEL} "Bea"@fr .',
        f'<http://x/b> {LABEL} "Bee"@en-GB .',
        f'<http://x/b> {LABEL} "B" .',
        f'<http://x/r> {LABEL} "knows" .',
    ]
    path = write("mine.nt", "\n".join(lines).encode())
    read = kit.read(path)
    assert read.labels == {"http://x/a": "Ann", "http://x/b": "B", "http://x/r": "knows"}
    assert remarks(read) == [f"{path}: triples skipped: 1 with a literal."]


def test_without_pyoxigraph_the_install_line_is_given(
    kit, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyoxigraph", None)
    path = write("mine.nt", b"<http://x/a> <http://x/r> <http://x/b> .\n")
    with pytest.raises(MissingExtra) as caught:
        kit.read(path)
    assert str(caught.value) == (
        f"{path} is RDF, and reading it needs pyoxigraph. Install it: pip install 'dualkg[rdf]'"
    )


def test_named_graphs_are_put_together(kit, write: Write) -> None:
    content = b"<a:a> <a:r> <a:b> <a:g> .\n<a:b> <a:r> <a:c> <a:h> .\n<a:c> <a:r> <a:a> .\n"
    path = write("mine.nq", content)
    read = kit.read(path)
    assert kit.named(read) == [("a:a", "a:r", "a:b"), ("a:b", "a:r", "a:c"), ("a:c", "a:r", "a:a")]
    assert remarks(read) == [f"{path}: the triples of 3 named graphs were put together."]
    path = write("mine.nt", content)
    with pytest.raises(DataError, match="line 1") as caught:
        kit.read(path)
    assert "this is not valid N-Triples" in str(caught.value)


def test_rdf_xml(kit, write: Write) -> None:
    content = b"""<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:x="a:">
    <rdf:Description rdf:about="a:a"><x:r rdf:resource="a:b"/></rdf:Description></rdf:RDF>"""
    assert kit.named(kit.read(write("mine.rdf", content))) == [("a:a", "a:r", "a:b")]

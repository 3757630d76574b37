"""The registry of readers: formats of dualkg, and those of other packages."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualkg.data import readers
from dualkg.data.formats.delimited import TextReader
from dualkg.data.formats.openke import OpenKeReader
from dualkg.data.formats.parquet import ParquetReader
from dualkg.data.readers import READERS, Reader, find_reader, reads
from dualkg.errors import DualkgError, RequestError
from dualkg.registry import Registry

Write = Callable[[str, bytes], Path]
PACKAGE = '''
from dualkg.data.readers import Reader, blocks_of


class ArrowsReader(Reader):
    """Lines such as `a -r-> b`."""

    def blocks(self):
        with self.data.open() as stream:
            lines = [line.decode().split() for line in stream]
        triples = ((head, arrow.strip("->"), tail) for head, arrow, tail in lines)
        return blocks_of(triples, self.options.block_rows)
'''


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with a reader, and with one that cannot be imported."""
    (tmp_path / "my_kg_readers.py").write_text(PACKAGE)
    info = tmp_path / "my_kg_readers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kg-readers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dualkg.readers]\n.arrows = my_kg_readers:ArrowsReader\n.broken = my_kg_readers:Nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type[Reader]] = Registry("reader", group="dualkg.readers")
    find_reader("mine.tsv")  # imports the formats of dualkg
    for ending, reader in READERS.items():
        registry.add(ending, reader)
    monkeypatch.setattr(readers, "READERS", registry)
    yield
    sys.modules.pop("my_kg_readers", None)


@pytest.mark.parametrize(
    ("file_name", "reader"),
    [
        ("mine.tsv", TextReader),
        ("MINE.CSV", TextReader),
        ("mine.parquet", ParquetReader),
        ("train2id.txt", OpenKeReader),  # the longest ending counts
        ("mine.other", None),
        ("tsv", None),
    ],
)
def test_the_reader_of_a_file_name(file_name: str, reader: type[Reader] | None) -> None:
    assert find_reader(file_name) is reader


def test_an_ending_has_one_reader() -> None:
    with pytest.raises(RequestError, match="The reader .parquet"):
        reads(".parquet")(TextReader)


def test_another_package_reads_a_format(kit, write: Write, other_package: None) -> None:
    path = write("mine.arrows", b"a -r-> b\nb -s-> c\n")
    assert "my_kg_readers" not in sys.modules
    assert kit.named(kit.read(path)) == [("a", "r", "b"), ("b", "s", "c")]


def test_an_archive_may_hold_a_format_of_another_package(
    kit, write: Write, other_package: None
) -> None:
    members = {"mine.arrows": b"a -r-> b\n", "notes.md": b"about"}
    assert kit.named(kit.read(write("mine.zip", kit.zipped(members)))) == [("a", "r", "b")]


def test_a_reader_that_cannot_be_imported_is_named_when_it_is_needed(
    kit, write: Write, other_package: None
) -> None:
    assert kit.named(kit.read(write("mine.tsv", b"a\tr\tb\n"))) == [("a", "r", "b")]
    with pytest.raises(DualkgError, match="The entry point .broken of the group"):
        kit.read(write("mine.broken", b""))

"""Helpers to write compressed files and archives, and to read triples back as names."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from dualkg.data.columns import check_columns
from dualkg.data.encoding import ReadTriples, encode
from dualkg.data.formats.delimited import TextReader
from dualkg.data.readers import ReadOptions, one_source, open_reader

Names = list[tuple[str, str, str]]


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return bytes(pa.compress(content, codec="zstd", asbytes=True))
    return {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix](
        content
    )


def tarred(members: dict[str, bytes], compression: str = "") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return compressed(sink.getvalue(), compression)


def zipped(members: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return sink.getvalue()


def named(read: ReadTriples, split: str = "all") -> Names:
    entities = read.entities.to_pylist()
    relations = read.relations.to_pylist()
    return [(entities[h], relations[r], entities[t]) for h, r, t in read.triples[split].tolist()]


class Kit:
    """What tests of reading share."""

    compressed = staticmethod(compressed)
    tarred = staticmethod(tarred)
    zipped = staticmethod(zipped)
    named = staticmethod(named)

    @staticmethod
    def read(path: Path, columns: object = None, **limits: int) -> ReadTriples:
        """Read a file; `limits` are sizes of blocks."""
        check_columns(columns)  # type: ignore[arg-type]
        options = ReadOptions(columns=columns, **limits)  # type: ignore[arg-type]
        reader = open_reader(one_source(path), options, default=TextReader)
        return encode({"all": reader})


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def written(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return written

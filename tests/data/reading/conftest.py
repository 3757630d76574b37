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

from dualkg.data.archives import one_source
from dualkg.data.encoding import ReadTriples, read_triples

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
    def read(path: Path, columns: object = None) -> ReadTriples:
        return read_triples({"all": one_source(path)}, columns=columns)  # type: ignore[arg-type]


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

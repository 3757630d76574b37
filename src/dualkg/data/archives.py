"""Input files: plain, compressed or inside an archive, with errors that name them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from dualkg.errors import DataError, did_you_mean

TRIPLE_SUFFIXES = (
    ".tsv",
    ".txt",
    ".csv",
    ".parquet",
    ".jsonl",
    ".ndjson",
    ".json",
    ".nt",
    ".ttl",
    ".nq",
    ".trig",
    ".rdf",
)
NOT_TRIPLES = ("readme", "license", "licence", "copying", "citation", "changelog", "labels")
BUFFER_SIZE = 1 << 20

COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": lambda stream: pa.CompressedInputStream(stream, "zstd"),
}
TARS = {f".tar{compression}": compression for compression in ("", *COMPRESSIONS)}
TARS |= {".tgz": ".gz", ".txz": ".xz", ".tbz2": ".bz2"}
# What the libraries raise for a damaged file; zipfile raises RuntimeError for an encrypted one.
UNREADABLE = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    struct.error,
    UnicodeDecodeError,
    RuntimeError,
    pa.ArrowException,
)


@dataclass(frozen=True)
class Source:
    """A file or a member of an archive; `name` is what errors call it."""

    name: str
    file_name: str
    compression: str
    path: Path
    opener: Callable[[], Any] = field(repr=False, compare=False)

    def open(self) -> io.BufferedReader:
        """The decompressed bytes from their beginning."""
        return io.BufferedReader(_Guarded(self, self.compression), BUFFER_SIZE)

    def fingerprint(self) -> str:
        """The sha256 of the bytes as they are stored; a member of an archive is hashed by itself."""
        with io.BufferedReader(_Guarded(self, ""), BUFFER_SIZE) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def checksum(self, kind: str = "sha256") -> str:
        """The checksum of the decompressed bytes."""
        with self.open() as stream:
            return hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()

    @property
    def suffix(self) -> str:
        """The suffix of the format: `.tsv` for `train.tsv.gz`."""
        return PurePosixPath(self.file_name).suffix.lower()


class _Guarded(io.RawIOBase):
    """A stream whose failures, while opening or reading, are errors that name its source."""

    def __init__(self, source: Source, compression: str) -> None:
        self._source = source
        self._open: list[Any] = []
        try:
            self._open.append(source.opener())
            if compression:
                self._open.append(COMPRESSIONS[compression](self._open[0]))
        except UNREADABLE as error:
            self.close()
            raise unreadable(error, source.path, source.name) from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._open[-1].seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._open[-1].seek(offset, whence))

    def tell(self) -> int:
        return int(self._open[-1].tell())

    def readinto(self, buffer: Any, /) -> int:
        try:
            return int(self._open[-1].readinto(buffer))
        except UNREADABLE as error:
            raise unreadable(error, self._source.path, self._source.name) from error

    def close(self) -> None:
        for stream in reversed(self._open):
            # Closing a broken compressed stream may raise again; the first error is the useful one.
            with suppress(*UNREADABLE):
                stream.close()
        super().close()


def unreadable(error: Exception, path: Path, name: str) -> DataError:
    """The error for a file that cannot be opened or is incomplete."""
    if isinstance(error, FileNotFoundError):
        if not path.parent.is_dir():
            return DataError(f"There is no file {path}: the folder {path.parent} does not exist.")
        names = []
        with suppress(OSError):
            names = [entry.name for entry in path.parent.iterdir()]
        return DataError(f"There is no file {path}.{did_you_mean(path.name, names)}")
    if isinstance(error, IsADirectoryError):
        return DataError(f"{name} is a folder where a file of triples was expected. Name a file inside it.")
    if isinstance(error, PermissionError):
        return DataError(f"{name} exists but may not be read. Change its permissions, or copy it.")
    if isinstance(error, RuntimeError) and "password" in str(error):
        return DataError(f"{name} is encrypted, and only plain archives are read. Extract it first.")
    detail = str(error).rstrip(".") or type(error).__name__
    return DataError(
        f"{name} is damaged, cut short, or not the kind of file its name says ({detail}). Fetch it or make it again."
    )


def find_sources(path: str | Path) -> list[Source]:
    """The source of a file, or those of the files inside a .zip or .tar archive."""
    path = Path(path)
    lowered = path.name.lower()
    if lowered.endswith(".zip"):
        return _members(path, _zip_members)
    if lowered.endswith(tuple(TARS)):
        return _members(path, _tar_members)
    source = Source(str(path), *_uncompressed(path.name), path, partial(path.open, "rb"))
    source.open().close()
    return [source]


def one_source(path: str | Path) -> Source:
    """A file, or the only file of triples in an archive."""
    return only_triples(find_sources(path), path)


def only_triples(sources: list[Source], path: str | Path) -> Source:
    """The only source, or the only one of triples."""
    found = sources if len(sources) == 1 else [source for source in sources if holds_triples(source)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(source.file_name for source in (found or sources)[:5]) or "none"
    raise DataError(
        f"One file of triples was expected in {path}, and it holds {len(found)}. Its files: {names}. "
        "Make an archive of one, or extract the one you mean."
    )


def holds_triples(source: Source) -> bool:
    """Whether the name of a file is that of a file of triples, not of labels or a licence."""
    stem = PurePosixPath(source.file_name).stem.lower()
    return source.suffix in TRIPLE_SUFFIXES and stem not in NOT_TRIPLES


def _uncompressed(file_name: str) -> tuple[str, str]:
    suffix = PurePosixPath(file_name).suffix
    return (file_name.removesuffix(suffix), suffix.lower()) if suffix.lower() in COMPRESSIONS else (file_name, "")


def _members(path: Path, list_members: Callable[[Path], dict[str, Callable[[], Any]]]) -> list[Source]:
    try:
        members = list_members(path)
    except UNREADABLE as error:
        raise unreadable(error, path, str(path)) from error
    sources = []
    for name, opener in members.items():
        if PurePosixPath(name).name.startswith("."):  # of an operating system, such as `__MACOSX/._train.txt`
            continue
        # The path of a member is only printed: the archive may hold any name.
        printable = "".join(letter if letter.isprintable() else "?" for letter in name)
        file_name = PurePosixPath(printable.replace("\\", "/")).name
        sources.append(Source(f"{path}:{printable}", *_uncompressed(file_name), path, opener))
    return sources


def _zip_members(path: Path) -> dict[str, Callable[[], Any]]:
    def open_member(member: zipfile.ZipInfo) -> Any:
        with zipfile.ZipFile(path) as archive:
            return archive.open(member)

    with zipfile.ZipFile(path) as archive:
        return {member.filename: partial(open_member, member) for member in archive.infolist() if not member.is_dir()}


def _tar_members(path: Path) -> dict[str, Callable[[], Any]]:
    compression = next(kind for suffix, kind in TARS.items() if path.name.lower().endswith(suffix))
    with Source(str(path), path.name, compression, path, partial(path.open, "rb")).open() as stream:
        content = stream.read()
    members: dict[str, Callable[[], Any]] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            end = member.offset_data + member.size
            if member.isreg() and not member.issparse():
                members[member.name] = partial(pa.BufferReader, memoryview(content)[member.offset_data : end])
        # tarfile reads a broken header as the end; a true end is followed by zeros alone.
        if content[archive.offset :].strip(b"\0"):
            raise tarfile.ReadError("a broken header inside the archive")
    return members

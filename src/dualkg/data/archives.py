"""Input files: plain, compressed or inside an archive, with errors that name them."""

import bz2
import gzip
import hashlib
import io
import lzma
import mmap
import os
import re
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.errors import DataError, RequestError, did_you_mean

RDF_FORMATS = {
    ".nt": "N_TRIPLES",
    ".ttl": "TURTLE",
    ".nq": "N_QUADS",
    ".trig": "TRIG",
    ".rdf": "RDF_XML",
}
TRIPLE_SUFFIXES = (".tsv", ".txt", ".csv", ".parquet", ".jsonl", ".ndjson", ".json", *RDF_FORMATS)
NOT_TRIPLES = ("readme", "license", "licence", "copying", "citation", "changelog", "labels")
BUFFER_SIZE = 1 << 20
MAX_SIZE = 16 << 30
MAX_RATIO = 100  # bytes that a file may expand to, in all and for each byte that is stored
FREE_SIZE = 16 << 20  # bytes that any file may expand to
IN_MEMORY = 256 << 20  # bytes of an archive; larger ones are decompressed into a temporary file

COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": lambda stream: pa.CompressedInputStream(stream, "zstd"),
}
TARS = {f".tar{compression}": compression for compression in ("", *COMPRESSIONS)}
TARS |= {".tgz": ".gz", ".txz": ".xz", ".tbz2": ".bz2"}
# What the libraries raise for damaged files, some for numbers in headers; zipfile a RuntimeError
# for an encrypted one.
NUMBERS = (ValueError, OverflowError, IndexError, struct.error)
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)
UNREADABLE = (OSError, pa.ArrowException, *NUMBERS, *DAMAGED)


@dataclass(frozen=True)
class Source:
    """A file or a member of an archive; `name` is what errors call it, `limit` the bytes it may
    expand to.
    """

    name: str
    file_name: str
    compression: str
    path: Path
    opener: Callable[[], Any] = field(repr=False, compare=False)
    limit: int = MAX_SIZE
    in_archive: bool = False

    def check_size(self, size: int) -> None:
        """Refuse more bytes than the limit."""
        if size > self.limit:
            raise DataError(
                f"{self.name} expands to more than {self.limit / 2**20:,.0f} MiB, "
                f"{self.limit // _size_of(self.path):,} times the size of {self.path.name}. "
                f"If you expect that, allow more with max_size='{max(1, (8 * self.limit) >> 30)}G'."
            )

    def open(self, *, stored: bool = False) -> io.BufferedReader:
        """The bytes from their beginning, decompressed or as they are stored."""
        return io.BufferedReader(_Guarded(self, "" if stored else self.compression), BUFFER_SIZE)

    def checksum(self, kind: str = "sha256", *, stored: bool = False) -> str:
        """The checksum of the bytes; a member of an archive is hashed by itself."""
        with self.open(stored=stored) as stream:
            return hashlib.file_digest(
                stream, lambda: hashlib.new(kind, usedforsecurity=False)
            ).hexdigest()

    @property
    def suffix(self) -> str:
        """The suffix of the format: `.tsv` for `train.tsv.gz`."""
        return PurePosixPath(self.file_name).suffix.lower()


class _Guarded(io.RawIOBase):
    """A stream whose failures, while opening or reading, are errors that name its source."""

    def __init__(self, source: Source, compression: str) -> None:
        self._source = source
        self._expands = bool(compression) or source.in_archive
        self._open: list[Any] = []
        self._num_read = 0
        try:
            self._open.append(source.opener())
            if compression:
                self._open.append(COMPRESSIONS[compression](self._open[0]))
        except UNREADABLE as error:
            self.close()
            raise unreadable(error, source.path, source.name) from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            num_read = int(self._open[-1].readinto(buffer))
        except UNREADABLE as error:
            raise unreadable(error, self._source.path, self._source.name) from error
        self._num_read += num_read
        if self._expands:
            self._source.check_size(self._num_read)
        return num_read

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
        names = (
            [entry.name for entry in path.parent.iterdir()]
            if os.access(path.parent, os.R_OK)
            else []
        )
        return DataError(f"There is no file {path}.{did_you_mean(path.name, names)}")
    if isinstance(error, IsADirectoryError):
        return DataError(
            f"{name} is a folder where a file of triples was expected. Name a file inside it."
        )
    if isinstance(error, PermissionError):
        return DataError(f"{name} exists but may not be read. Change its permissions, or copy it.")
    if isinstance(error, RuntimeError) and "password" in str(error):
        return DataError(
            f"{name} is encrypted, and only plain archives are read. Extract it first."
        )
    if (
        isinstance(error, OSError) and error.strerror
    ):  # of the system, such as a name too long or a failing disk
        return DataError(f"{name} cannot be read: {error.strerror}.")
    detail = str(error).rstrip(".") or type(error).__name__
    return DataError(
        f"{name} is damaged, cut short, or not the kind of file its name says ({detail}). Fetch "
        "it or make it again."
    )


def cache_folder() -> Path:
    """The folder of downloaded and cached graphs: DUALKG_CACHE, or the user's cache folder."""
    import pooch

    return Path(os.environ.get("DUALKG_CACHE") or pooch.os_cache("dualkg")).expanduser()


def temporary_file() -> tuple[IO[bytes], str]:
    """A file without a name in the cache folder, as /tmp may be in memory, or else in /tmp; and its
    folder.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder), str(folder)
    except OSError:
        return tempfile.TemporaryFile(), tempfile.gettempdir()


def find_sources(path: str | Path, *, max_size: int | str | None = None) -> list[Source]:
    """The source of a file, or those of the files inside a .zip or .tar archive.

    A file that is decompressed may have `max_size` bytes, or by default `MAX_SIZE` and `MAX_RATIO`
    times its size.
    """
    path = Path(path)
    limit = (
        min(MAX_SIZE, max(FREE_SIZE, MAX_RATIO * _size_of(path)))
        if max_size is None
        else parse_size(max_size)
    )
    if path.name.lower().endswith((".zip", *TARS)):
        return _members(path, limit)
    source = Source(str(path), *_uncompressed(path.name), path, partial(path.open, "rb"), limit)
    source.open().close()
    return [source]


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file, but none whose metadata name far more rows than it can hold: few bytes
    can stand for many.

    `pq.read_table` would load another library.
    """
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        limit = max(FREE_SIZE, MAX_RATIO * _size_of(path))
        if parquet_size(file.metadata) > limit:
            raise DataError(
                f"{path} expands to more than {limit >> 20:,} MiB, far more than it holds. Make "
                "it again."
            )
        return file.read()


def parquet_size(about: Any) -> int:
    """The bytes that a file of three columns expands to, by its metadata."""
    sizes = (about.row_group(group).total_byte_size for group in range(about.num_row_groups))
    return int(max(24 * about.num_rows, sum(sizes)))


def _size_of(path: Path) -> int:
    try:
        return max(1, path.stat().st_size)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise unreadable(error, path, str(path)) from None


def parse_size(size: int | str) -> int:
    """A number of bytes, or text such as `500M` or `16G`."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?", str(size).strip().lower())
    if not found or not float(found[1]):
        raise RequestError(f"A size is a number of bytes such as 500M or 16G; '{size}' was given.")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


def one_source(path: str | Path, *, max_size: int | str | None = None) -> Source:
    """A file, or the only file of triples in an archive."""
    return only_triples(find_sources(path, max_size=max_size), path)


def only_triples(sources: list[Source], path: str | Path) -> Source:
    """The only source, or the only one of triples."""
    found = (
        sources if len(sources) == 1 else [source for source in sources if holds_triples(source)]
    )
    if len(found) == 1:
        return found[0]
    names = ", ".join(source.file_name for source in (found or sources)[:5]) or "none"
    raise DataError(
        f"One file of triples was expected in {path}, and it holds {len(found)}. Its files: "
        f"{names}. "
        "Make an archive of one, or extract the one you mean."
    )


def holds_triples(source: Source) -> bool:
    """Whether the name of a file is that of a file of triples, not of labels or a licence."""
    stem = PurePosixPath(source.file_name).stem.lower()
    return source.suffix in TRIPLE_SUFFIXES and stem not in NOT_TRIPLES


def _uncompressed(file_name: str) -> tuple[str, str]:
    suffix = PurePosixPath(file_name).suffix
    return (
        (file_name.removesuffix(suffix), suffix.lower())
        if suffix.lower() in COMPRESSIONS
        else (file_name, "")
    )


def _members(path: Path, limit: int) -> list[Source]:
    try:
        members = (_zip_members if path.name.lower().endswith(".zip") else _tar_members)(
            path, limit
        )
    except UNREADABLE as error:
        raise unreadable(error, path, str(path)) from error
    sources = []
    for name, opener in members.items():
        if PurePosixPath(name).name.startswith(
            "."
        ):  # of an operating system, such as `__MACOSX/._train.txt`
            continue
        # The path of a member is only printed: the archive may hold any name.
        printable = "".join(letter if letter.isprintable() else "?" for letter in name)
        file_name = PurePosixPath(printable.replace("\\", "/")).name
        sources.append(
            Source(f"{path}:{printable}", *_uncompressed(file_name), path, opener, limit, True)
        )
    return sources


def _zip_members(path: Path, _: int) -> dict[str, Callable[[], Any]]:
    def open_member(member: zipfile.ZipInfo) -> Any:
        with zipfile.ZipFile(path) as archive:
            return archive.open(member)

    with zipfile.ZipFile(path) as archive:
        return {
            member.filename: partial(open_member, member)
            for member in archive.infolist()
            if not member.is_dir()
        }


def _tar_members(path: Path, limit: int) -> dict[str, Callable[[], Any]]:
    compression = next(kind for suffix, kind in TARS.items() if path.name.lower().endswith(suffix))
    whole = Source(str(path), path.name, compression, path, partial(path.open, "rb"), limit)
    with whole.open() as stream:
        content = _decompressed(stream, limit) if compression else pa.OSFile(str(path))
    with tarfile.open(fileobj=content, mode="r:") as archive:
        plain = [member for member in archive if member.isreg() and not member.issparse()]
        content.seek(archive.offset)
    # tarfile reads a broken header as the end; a true end is followed by zeros alone.
    while block := content.read(BUFFER_SIZE):
        if block.strip(b"\0"):
            raise tarfile.ReadError("a broken header inside the archive")
    return {
        member.name: partial(content.get_stream, member.offset_data, member.size)
        for member in plain
    }


def _decompressed(stream: io.BufferedReader, limit: int) -> pa.NativeFile:
    """The content of a stream in memory or in a temporary file, to be read from any position."""
    content = stream.read(min(IN_MEMORY, limit + 1))
    if not stream.peek(1):
        return pa.BufferReader(content)
    with temporary_file()[0] as file:
        file.write(content)
        shutil.copyfileobj(stream, file, BUFFER_SIZE)
        file.flush()
        return pa.BufferReader(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))

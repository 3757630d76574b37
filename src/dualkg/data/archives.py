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

from dualkg.errors import DataError, InvalidValue, close_matches, one_of
from dualkg.files import open_regular, regular_file

BUFFER_SIZE = 1 << 20
MAX_SIZE = 16 << 30  # bytes that a file may expand to
# The bytes that a file may expand to, in all and for each byte that is stored.
FREE_SIZE = 16 << 20
MAX_RATIO = 100
IN_MEMORY = 256 << 20  # bytes of an archive; a larger archive is in a temporary file

COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": lambda stream: pa.CompressedInputStream(stream, "zstd"),
}
TARS = {f".tar{compression}": compression for compression in ("", *COMPRESSIONS)}
TARS |= {".tgz": ".gz", ".txz": ".xz", ".tbz2": ".bz2"}

# Libraries raise the first kind for impossible numbers in headers, and the second for damaged
# content. zipfile raises a RuntimeError for an encrypted archive.
BAD_NUMBERS = (ValueError, OverflowError, IndexError, struct.error)
BAD_CONTENT = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    RuntimeError,
)
UNREADABLE = (OSError, pa.ArrowException, *BAD_NUMBERS, *BAD_CONTENT)

Opener = Callable[[], Any]


# -- sources -----------------------------------------------------------------


class ExpandsTooMuch(DataError):
    """A compressed file expands to more bytes than it may."""


@dataclass(frozen=True)
class Source:
    """A file, or a member of an archive.

    `name` is what errors call it, and `limit` the bytes that it may expand to.
    """

    name: str
    file_name: str
    compression: str
    path: Path
    opener: Opener = field(repr=False, compare=False)
    limit: int = MAX_SIZE
    in_archive: bool = False

    @property
    def suffix(self) -> str:
        """The suffix of the format: `.tsv` for `train.tsv.gz`."""
        return PurePosixPath(self.file_name).suffix.lower()

    def check_size(self, size: int) -> None:
        """Refuse more bytes than the limit."""
        if size > self.limit:
            ratio = self.limit // _size_of(self.path)
            raise ExpandsTooMuch(
                f"{self.name} expands to more than {self.limit / 2**20:,.0f} MiB, {ratio:,} times "
                f"the size of {self.path.name}. If you expect that, allow more with "
                f"`max_size='{max(1, (8 * self.limit) >> 30)}G'`."
            )

    def open(self, *, stored: bool = False) -> io.BufferedReader:
        """The bytes from their beginning, decompressed or as they are stored."""
        compression = "" if stored else self.compression
        return io.BufferedReader(_CheckedStream(self, compression), BUFFER_SIZE)

    def open_for_arrow(self) -> pa.NativeFile:
        """The decompressed bytes, to be read by Arrow from any position."""
        if not self.compression and not self.in_archive:
            return pa.OSFile(str(regular_file(self.path)))
        with self.open() as stream:
            return in_arrow_memory(stream.read())

    def checksum(self, kind: str = "sha256", *, stored: bool = False) -> str:
        """The checksum of the bytes; a member of an archive is hashed by itself."""
        new_hash = partial(hashlib.new, kind, usedforsecurity=False)
        with self.open(stored=stored) as stream:
            return hashlib.file_digest(stream, new_hash).hexdigest()


def in_arrow_memory(content: bytes) -> pa.NativeFile:
    """A file with a copy of some bytes in memory of Arrow.

    Arrow gets a path or such a file, never an object of Python: a thread of Arrow has its file for
    a moment after an error, and if Python ended while the thread drops the last reference to an
    object of Python, the process would be aborted (status 134).
    """
    buffer = pa.allocate_buffer(len(content))
    memoryview(buffer).cast("B")[:] = content
    return pa.BufferReader(buffer)


class _CheckedStream(io.RawIOBase):
    """A stream whose failures, while opening or reading, are errors that name its source."""

    def __init__(self, source: Source, compression: str) -> None:
        self._source = source
        self._expands = bool(compression) or source.in_archive
        self._streams: list[Any] = []  # the stored bytes, then the decompressed bytes
        self._num_read = 0
        try:
            self._streams.append(source.opener())
            if compression:
                decompress = COMPRESSIONS[compression]
                self._streams.append(decompress(self._streams[0]))
        except UNREADABLE as error:
            self.close()
            raise unreadable(error, source.path, source.name) from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            num_read = int(self._streams[-1].readinto(buffer))
        except UNREADABLE as error:
            raise unreadable(error, self._source.path, self._source.name) from error

        self._num_read += num_read
        if self._expands:
            self._source.check_size(self._num_read)
        return num_read

    def close(self) -> None:
        for stream in reversed(self._streams):
            # Closing a broken compressed stream may raise again; the first error is the useful one.
            with suppress(*UNREADABLE):
                stream.close()
        super().close()


def unreadable(error: Exception, path: Path, name: str) -> DataError:
    """The error for a file that cannot be opened or is incomplete."""
    if isinstance(error, FileNotFoundError):
        if not path.parent.is_dir():
            return DataError(f"There is no file {path}: the folder {path.parent} does not exist.")
        return DataError(f"There is no file {path}.{one_of(_similar_files(path))}")
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
    # The system gives a reason, such as a name that is too long or a failing disk.
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{name} cannot be read: {error.strerror}.")
    reason = str(error).rstrip(".") or type(error).__name__
    return DataError(
        f"{name} is damaged, cut short, or not the kind of file its name says ({reason}). Fetch it "
        "or make it again."
    )


def _similar_files(path: Path) -> list[str]:
    if not os.access(path.parent, os.R_OK):
        return []
    return close_matches(path.name, [neighbour.name for neighbour in path.parent.iterdir()])


# -- sizes -------------------------------------------------------------------


def parse_size(size: int | str) -> int:
    """A number of bytes, or text such as `500M` or `16G`."""
    pattern = r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?"
    match = re.fullmatch(pattern, str(size).strip().lower())
    if not match or not float(match[1]):
        expected = "a number of bytes such as 500M or 16G"
        raise InvalidValue("max_size", expected=expected, found=size)

    power = " kmgt".index(match[2] or " ")
    return int(float(match[1]) * 1024**power)


def expansion_limit(stored: int) -> int:
    """The bytes that a file may expand to, by those that are stored."""
    return max(FREE_SIZE, MAX_RATIO * stored)


def _size_limit(path: Path, max_size: int | str | None) -> int:
    """The bytes that a file may expand to."""
    if max_size is not None:
        return parse_size(max_size)
    return min(MAX_SIZE, expansion_limit(_size_of(path)))


def _size_of(path: Path) -> int:
    try:
        return max(1, path.stat().st_size)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise unreadable(error, path, str(path)) from None


# -- temporary files ---------------------------------------------------------


def cache_folder() -> Path:
    """The folder of downloaded and cached graphs: DUALKG_CACHE, or the user's cache folder."""
    import platformdirs

    cache = os.environ.get("DUALKG_CACHE") or platformdirs.user_cache_dir("dualkg")
    return Path(cache).expanduser()


def temporary_file() -> IO[bytes]:
    """A file without a name.

    It is in the cache folder, as /tmp may be in memory; in /tmp if the cache cannot be written.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return tempfile.TemporaryFile()


# -- archives ----------------------------------------------------------------


def find_one_source(path: str | Path, *, content: str, max_size: int | str | None = None) -> Source:
    """The source of one file, whose content an error names."""
    sources = find_sources(path, max_size=max_size)
    if len(sources) != 1:
        raise DataError(
            f"{path} holds {len(sources)} files, and one file of {content} was expected. Name one "
            "file."
        )
    return sources[0]


def find_sources(path: str | Path, *, max_size: int | str | None = None) -> list[Source]:
    """The source of a file, or those of the files inside a .zip or .tar archive.

    A file that is decompressed may have `max_size` bytes, or by default `MAX_SIZE` and 100
    times its size.
    """
    path = Path(path)
    if not _is_text(str(path)):
        raise DataError(
            f"{path} has a name that is not UTF-8, which no saved graph could hold. Rename it."
        )
    limit = _size_limit(path, max_size)
    if path.name.lower().endswith((".zip", *TARS)):
        return _members(path, limit)

    file_name, compression = uncompressed(path.name)
    source = Source(str(path), file_name, compression, path, partial(open_regular, path), limit)
    source.open().close()
    return [source]


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8; other bytes of it are surrogates."""
    return name.encode("utf-8", "ignore").decode() == name


def uncompressed(file_name: str) -> tuple[str, str]:
    """The name of a file without the suffix of its compression, and that suffix."""
    suffix = PurePosixPath(file_name).suffix
    if suffix.lower() not in COMPRESSIONS:
        return file_name, ""
    return file_name.removesuffix(suffix), suffix.lower()


def _members(path: Path, limit: int) -> list[Source]:
    try:
        if path.name.lower().endswith(".zip"):
            members = _zip_members(path)
        else:
            members = _tar_members(path, limit)
    except UNREADABLE as error:
        raise unreadable(error, path, str(path)) from error

    sources = []
    for name, opener in members.items():
        # An operating system adds hidden files, such as `__MACOSX/._train.txt`.
        if PurePosixPath(name).name.startswith("."):
            continue

        # The path of a member is only printed: the archive may hold any name.
        printable = "".join(letter if letter.isprintable() else "?" for letter in name)
        inner = PurePosixPath(printable.replace("\\", "/")).name
        file_name, compression = uncompressed(inner)
        source_name = f"{path}:{printable}"
        sources.append(Source(source_name, file_name, compression, path, opener, limit, True))
    return sources


def _zip_members(path: Path) -> dict[str, Opener]:
    def open_member(member: zipfile.ZipInfo) -> Any:
        with zipfile.ZipFile(regular_file(path)) as archive:
            return archive.open(member)

    with zipfile.ZipFile(regular_file(path)) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
    return {member.filename: partial(open_member, member) for member in members}


def _tar_members(path: Path, limit: int) -> dict[str, Opener]:
    """The members of a .tar, which is decompressed once, into memory or a temporary file."""
    lower_name = path.name.lower()
    compression = next(kind for suffix, kind in TARS.items() if lower_name.endswith(suffix))
    content = pa.OSFile(str(regular_file(path)))
    if compression:
        opener = partial(open_regular, path)
        content = _decompressed(Source(str(path), path.name, compression, path, opener, limit))
    with tarfile.open(fileobj=content, mode="r:") as archive:
        members = [member for member in archive if member.isreg() and not member.issparse()]
        content.seek(archive.offset)

    # tarfile reads a broken header as the end; a true end is followed by zeros alone.
    while block := content.read(BUFFER_SIZE):
        if block.strip(b"\0"):
            raise tarfile.ReadError("a broken header inside the archive")
    return {
        member.name: partial(content.get_stream, member.offset_data, member.size)
        for member in members
    }


def _decompressed(source: Source) -> pa.NativeFile:
    """The content of a file, to be read from any position."""
    with source.open() as stream:
        content = stream.read(min(IN_MEMORY, source.limit + 1))
        if not stream.peek(1):
            return pa.BufferReader(content)
        with temporary_file() as file:
            file.write(content)
            shutil.copyfileobj(stream, file, BUFFER_SIZE)
            file.flush()
            return pa.BufferReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

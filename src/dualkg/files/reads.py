"""Careful reads: regular files only, no wait, limited sizes, and JSON of a known type."""

import errno
import functools
import hashlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from dualkg.errors import DamagedFile, FileTooLarge, NotRegularFile

MAX_TEXT = 1 << 28  # bytes of a file that is read as a whole
# The bytes that a file may have, in all and for each byte that is stored, whether it is compressed,
# has holes, or repeats entries of a dictionary.
FREE_SIZE = 16 << 20
MAX_RATIO = 100
MAX_PARTS = 1000  # of a sparse file, which are counted
NO_CHECKSUM = "0" * 64  # in the place of the checksum while it is computed
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path, *, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a file to read it; a pipe, a device, a socket, and a file that is too large are refused.

    Opening never waits, as it would for the other end of a pipe. A file whose holes are more than
    `MAX_RATIO` times what is stored is too large, as a compressed one would be.
    """
    file = open(path, "rb", opener=regular_descriptor)  # noqa: SIM115 - the caller closes it
    try:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise FileTooLarge(path, size, limit=max_bytes)
        _check_holes(file, size, path)
    except BaseException:
        file.close()
        raise
    return file


def regular_file(path: str | Path) -> Path:
    """A path that `open_regular` accepts, for a library that opens files by their paths."""
    open_regular(path).close()
    return Path(path)


def read_bytes(path: str | Path, *, max_bytes: int = MAX_TEXT) -> bytes:
    """The content of a regular file."""
    with open_regular(path, max_bytes=max_bytes) as file:
        return file.read(max_bytes)


def read_text(path: str | Path, *, max_bytes: int = MAX_TEXT, errors: str = "strict") -> str:
    """The text of a regular file, with its line ends as \\n."""
    text = read_bytes(path, max_bytes=max_bytes).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def expansion_limit(stored: int) -> int:
    """The bytes that a file may expand to, by those that are stored."""
    return max(FREE_SIZE, MAX_RATIO * stored)


def regular_descriptor(path: str, flags: int, *, folder: int | None = None) -> int:
    """Open a regular file without waiting for anything; `folder` is a descriptor."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666, dir_fd=folder)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegularFile(path, KINDS.get(kind, "a special file"))


def _check_holes(file: BinaryIO, size: int, path: str | Path) -> None:
    """Refuse a sparse file that expands as far as no compressed file may."""
    blocks = os.fstat(file.fileno()).st_blocks
    if size <= expansion_limit(512 * blocks):
        return
    # Some file systems report no blocks; those that know no holes report one part.
    stored = 0
    end = 0
    try:
        for _ in range(MAX_PARTS):
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            stored += end - start
            if size <= expansion_limit(stored):
                break
    except OSError as error:
        if error.errno != errno.ENXIO:  # there are no data after this position
            return
    finally:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
    limit = expansion_limit(stored)
    if size > limit:
        raise FileTooLarge(path, size, limit=limit, stored=stored)


def exists(path: Path) -> bool:
    """Whether there is a file or folder; a link that leads nowhere is not taken for no file."""
    if path.exists():
        return True
    if path.is_symlink():
        raise DamagedFile(path, f"it is a link to {path.readlink()}, which cannot be found")
    return False


def read_json(path: Path, kind: Any = Any, *, checksum: bool = False) -> Any:
    """The content of a JSON file as a type; a damaged file raises `DamagedFile`.

    With `checksum`, the file was written by `write_json`.
    """
    exists(path)  # refuses a link that leads nowhere
    try:
        text = read_bytes(path)
        content = json.loads(text.decode())
    except (NotRegularFile, FileTooLarge) as error:
        raise DamagedFile(path, str(error.strerror)) from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"it is not JSON ({error})") from None
    if checksum:
        saved = content.pop("sha256", None) if isinstance(content, dict) else None
        _check_checksum(path, text, content, saved=saved)
    return check_type(content, kind, source=path)


def _check_checksum(path: Path, text: bytes, content: Any, *, saved: Any) -> None:
    """Refuse a JSON file whose bytes have another checksum than the saved one."""
    if saved is None:
        raise DamagedFile(path, "it has no checksum (the entry 'sha256')")
    parts = text.rsplit(f'"{saved}"'.encode(errors="replace"), 1)
    without_checksum = f'"{NO_CHECKSUM}"'.encode().join(parts)
    before_0_2 = json.dumps(content).encode()  # what was hashed before 0.2.0
    checksums = [hashlib.sha256(hashed).hexdigest() for hashed in (without_checksum, before_0_2)]
    if saved not in checksums:
        raise DamagedFile(path, "its checksum is not that of its content")


def check_type(content: Any, kind: Any, *, source: object) -> Any:
    """What a file holds as a type, such as `dict[str, Any]`; else `DamagedFile` is raised."""
    if kind is Any:
        return content
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise DamagedFile(source, reason) from None


@functools.cache  # an adapter takes a millisecond or more to build
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)

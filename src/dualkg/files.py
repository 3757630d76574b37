"""Files and folders: JSON with a checksum, atomic writes, one lock, and checksums.

A reader never sees an incomplete file or folder, whenever a process is killed. A kill may leave a
temporary file `.xxxxxxxx.tmp.NAME`, which nothing reads; `locked` removes it later.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dualkg.errors import DamagedFile, DualkgError, LockedError, PathExists, RequestError

MAX_TEXT = 1 << 28  # bytes of a file that is read as a whole
MAX_LOCK = 1 << 16  # bytes of the text of a lock
NO_CHECKSUM = "0" * 64  # in the place of the checksum while it is computed
REMEMBERED_BYTES = 2**22  # files of this size are hashed on first use only, smaller ones always
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp\..+")
HIDDEN = re.compile(r"\..+\.(lock|old)")  # locks, and folders that are being replaced
STALE_SECONDS = 60  # no process pauses for so long while it writes a temporary file
HANDOVER_SECONDS = 0.2  # in which a process that ends may release its lock
POLL_SECONDS = 0.02
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # a file system without locks
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some file systems cannot sync a folder

_HELD: set[tuple[int, Path]] = set()  # the locks of this process, by thread and path


# -- reading -----------------------------------------------------------------


def open_regular(path: str | Path, *, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a file to read it; a pipe, a device, or a file that is too large is refused."""
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        reason = "it is a pipe, a socket or a device, not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        reason = f"it has {status.st_size:,} bytes, and at most {max_bytes:,} are read"
        raise OSError(errno.EFBIG, reason, str(path))
    return path.open("rb")


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


def exists(path: Path) -> bool:
    """Whether there is a file or folder; a link that leads nowhere is damage."""
    if path.is_symlink() and not path.exists():
        raise DamagedFile(path, f"it is a link to {path.readlink()}, which cannot be found")
    return path.exists()


def read_json(path: Path, kind: Any = Any, *, checksum: bool = False) -> Any:
    """The content of a JSON file as a type; a damaged file raises `DamagedFile`.

    With `checksum`, the file was written by `write_json`.
    """
    if exists(path) and not path.is_file():
        raise DamagedFile(path, "it is not a regular file")
    text = read_bytes(path)
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"it is not JSON ({error})") from None
    if checksum:
        saved = content.pop("sha256", None) if isinstance(content, dict) else None
        if not isinstance(saved, str):
            raise DamagedFile(path, "it has no checksum (the entry 'sha256')")
        parts = text.rsplit(f'"{saved}"'.encode(errors="replace"), 1)
        hashed = f'"{NO_CHECKSUM}"'.encode().join(parts)
        if hashlib.sha256(hashed).hexdigest() != saved:
            raise DamagedFile(path, "its checksum is not that of its content")
    return check_type(content, kind, source=path)


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


# -- writing -----------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block succeeds, and is deleted when it fails.

    Its name ends as that of the file, as some libraries choose a format by the ending. A link is
    replaced: in the run of somebody else it could lead to any file of the user's.
    """
    path = Path(os.path.realpath(path.parent), path.name)
    _check_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _temporary(path.parent, path.name)
    try:
        with _naming(path, fresh):
            yield fresh
            sync(fresh)
            fresh.replace(path)
        sync(path.parent)
    finally:
        # A failure leaves it, and so does a rename to another name of the same file.
        fresh.unlink(missing_ok=True)


@contextmanager
def atomic_folder(
    path: Path,
    *,
    existing: Literal["refuse", "keep", "replace"] = "refuse",
    last: str = "",
    keep: Collection[str] = (),
) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block succeeds, and is deleted when it fails.

    An existing folder is kept, refused, or replaced but for its files in `keep`. An empty one is
    taken over. One that cannot get another inode, such as the working folder or a mount point, is
    filled, the file named `last` last.
    """
    path = _place(path)
    is_empty = path.is_dir() and not contents(path)
    is_filled = is_empty and (path.is_mount() or path.samefile(os.curdir) or any(path.iterdir()))
    parent = path if is_filled else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    fresh = _temporary(parent, path.name)
    fresh.mkdir()
    try:
        with _naming(path, fresh):
            yield fresh
            for folder, _, names in os.walk(fresh, topdown=False):
                for name in names:
                    sync(Path(folder, name))
                sync(Path(folder))
            if is_filled:
                for child in sorted(fresh.iterdir(), key=lambda child: child.name == last):
                    child.rename(path / child.name)
            elif existing == "replace" and path.exists():
                _replace(fresh, path, keep=keep)
            else:
                try:
                    fresh.rename(path)
                except OSError:
                    # Another process was faster.
                    if existing != "keep" or not path.is_dir():
                        raise
        sync(parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(fresh: Path, path: Path, *, keep: Collection[str]) -> None:
    """Put a folder in the place of another, whose files in `keep` it takes over.

    The former one is renamed first. After a kill between the two renames, `recover` renames it
    back.
    """
    aside = hidden(path, "old")
    shutil.rmtree(aside, ignore_errors=True)
    with folder_lock(path):
        for name in keep:
            if (path / name).is_file():
                link_or_copy(path / name, fresh / name)
        path.rename(aside)
        try:
            fresh.rename(path)
        except BaseException:
            aside.rename(path)
            raise
    sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(path: str | Path) -> None:
    """Rename back a folder that a killed process had renamed in order to replace it."""
    path = Path(os.path.realpath(path))
    aside = hidden(path, "old")
    if aside.exists() and not path.exists() and lock_holder(path) is None:
        with suppress(OSError):  # another user's, or another process was faster
            aside.rename(path)


def _place(path: str | Path) -> Path:
    """Where a path leads; a name that JSON and libraries in C cannot hold is refused."""
    place = Path(os.path.realpath(path))
    _check_name(place)
    return place


def _check_name(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        sentence = f"{path}: its name, or that of its folder, is not UTF-8."
        raise RequestError(sentence) from None


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{secrets.token_hex(4)}.tmp.{name}"


@contextmanager
def _naming(path: Path, fresh: Path) -> Iterator[None]:
    """Name the file that was to be written in errors, and not the temporary one."""
    try:
        yield
    except OSError as error:
        if str(error.filename).startswith(str(fresh)):
            place = str(path) + str(error.filename).removeprefix(str(fresh))
            raise OSError(error.errno, error.strerror, place) from error
        raise


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 1) -> None:
    """Write JSON with a checksum of its bytes at the end."""
    text = json.dumps({**content, "sha256": NO_CHECKSUM}, indent=indent, ensure_ascii=False)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    before, after = text.rsplit(NO_CHECKSUM, 1)
    write_text(path, f"{before}{checksum}{after}")


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise the errors of a library that writes a file as OSError with its name."""
    try:
        yield
    except errors as error:
        reason = re.sub(r"^.*?(I/O error|[Ww]rite error)", r"\1", str(error), flags=re.DOTALL)
        reason = reason.replace(str(path), "").strip()
        raise OSError(errno.EIO, f"it could not be written ({reason})", str(path)) from error


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if the file system has none."""
    with atomic_write(target) as fresh:
        regular_file(source)
        try:
            fresh.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, fresh)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC or not path.is_dir():
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def check_new_file(path: Path) -> None:
    """Refuse what exists, before the work that would make it."""
    if path.exists():
        raise PathExists(path, overwritable=False)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that is not empty, before the work that would fill it."""
    if not path.is_dir() or contents(path):
        check_new_file(path)


def contents(folder: Path) -> list[str]:
    """Names of the files in a folder, without locks and temporary files."""
    names = sorted(child.name for child in folder.iterdir())
    return [name for name in names if not TEMPORARY.fullmatch(name) and not HIDDEN.fullmatch(name)]


def hidden(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{suffix}"


def folder_check(file: Path) -> Callable[[], None]:
    """A function that fails unless the folder of a file has the file that it has now.

    The inode of the folder alone would not do: a new folder may get that of one that was removed.
    """
    before = _identity(file)

    def check() -> None:
        if _identity(file) != before:
            raise DualkgError(
                f"{file.parent} was moved, removed or replaced during the training, so its results "
                "were not written. If it was moved, resume it where it is now with: dualkg resume "
                "FOLDER"
            )

    return check


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


# -- locks -------------------------------------------------------------------


@contextmanager
def locked(path: str | Path | None, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a file or folder that is being written; others are refused, or wait.

    The lock is the file `.NAME.lock` beside it. The operating system releases it if the process is
    killed. A thread may hold it more than once. None needs no lock, and a place that cannot be
    written, or whose file system has no locks, gets none.
    """
    if path is None:
        yield
        return
    place = _place(path)
    key = (threading.get_ident(), place)
    if key in _HELD:
        yield
        return

    missing = [parent for parent in place.parents if not parent.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    file = hidden(place, "lock")
    descriptor = _acquire(file, path, wait=wait)
    _HELD.add(key)
    try:
        aside = hidden(place, "old")
        if aside.exists() and not place.exists():
            aside.rename(place)
        _remove_stale(place)
        yield
    finally:
        _HELD.remove(key)
        if descriptor is not None:
            file.unlink(missing_ok=True)
            os.close(descriptor)
        for parent in missing:
            with suppress(OSError):  # it is not empty
                parent.rmdir()


def _acquire(file: Path, given: str | Path, *, wait: bool) -> int | None:
    """Lock a file, and write into it which process holds it; return its descriptor."""
    deadline = time.monotonic() + HANDOVER_SECONDS
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno in NOT_WRITABLE:
                return None
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former holder may have removed the file that was locked here.
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
                text = f"process {os.getpid()} on {socket.gethostname()} since {now}"
                os.ftruncate(descriptor, 0)
                os.write(descriptor, text.encode())
                return descriptor
        except BlockingIOError:
            if not wait and time.monotonic() > deadline:
                holder = os.pread(descriptor, MAX_LOCK, 0).decode(errors="replace")
                os.close(descriptor)
                raise LockedError(given, holder=holder) from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            os.close(descriptor)
            if error.errno in NO_LOCKS:
                return None
            raise
        os.close(descriptor)


def _remove_stale(place: Path) -> None:
    """Remove the temporary files that killed processes left in a folder, or beside it."""
    candidates = [hidden(place, "old")]
    candidates += place.parent.glob(f".*.tmp.{glob.escape(place.name)}")
    candidates += place.glob(".*.tmp.*")
    for path in candidates:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                remove(path)


def lock_holder(path: str | Path, *, other: bool = False) -> str | None:
    """`process 12 on host since …`, if a process holds the lock of a file or folder.

    With `other`, a lock of this process does not count.
    """
    file = hidden(Path(os.path.realpath(path)), "lock")
    with suppress(OSError), open_regular(file, max_bytes=MAX_LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read().decode(errors="replace") or "another process"
            own = f"process {os.getpid()} on {socket.gethostname()} "
            return None if other and holder.startswith(own) else holder
    return None


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder itself, for a short change of one of its files.

    A folder that is replaced meanwhile is locked again. The lock leaves no file.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


class Token(NamedTuple):
    """A file with random text, by which other machines find out whether they see the same folder.

    `name` is that of the file, in a folder that exists, or else beside it.
    """

    name: str
    text: str
    is_inside: bool

    def is_seen(self, path: Path) -> bool:
        """Whether this machine has the file at the path that it has written, or was given."""
        place = Path(os.path.realpath(path))
        home = place if self.is_inside else place.parent
        try:
            return read_text(home / self.name) == self.text
        except (OSError, ValueError):
            return False


@contextmanager
def written_token(path: Path) -> Iterator[Token]:
    """Write a token in a folder, or where it will be, and remove it at the end."""
    place = Path(os.path.realpath(path))
    is_inside = place.is_dir()
    file = _temporary(place if is_inside else place.parent, "token")
    text = secrets.token_hex(32)
    file.write_text(text)
    try:
        yield Token(file.name, text, is_inside)
    finally:
        file.unlink(missing_ok=True)


# -- checksums ---------------------------------------------------------------


@dataclass(frozen=True)
class FileRecord:
    """What `file_record` saves, to check a file of records by."""

    bytes: int
    sha256: str


def file_record(path: Path) -> dict[str, Any]:
    """The size and the checksum of a file."""
    with open_regular(path) as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def file_damage(
    path: Path,
    record: dict[str, Any],
    *,
    memory: Path | None = None,
    remembered_bytes: int = REMEMBERED_BYTES,
) -> str | None:
    """What is wrong with a file, by its `file_record`; None if nothing is.

    The file `memory` remembers which large files, of at least `remembered_bytes`, were good, by
    name, size and time, so that each is hashed once.
    """
    try:
        status = path.stat()
        if status.st_size != record["bytes"]:
            return f"it has {status.st_size:,} bytes in place of {record['bytes']:,}"
        facts = (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)
        line = hashlib.sha256(repr((facts, record["sha256"])).encode()).hexdigest()
        remembered = memory if status.st_size >= remembered_bytes else None
        if remembered and remembered.exists() and line in read_text(remembered):
            return None
        if file_record(path)["sha256"] != record["sha256"]:
            return "its content has changed: its sha256 is not the one in the report"
    except FileNotFoundError:
        return "it is missing"
    except (OSError, KeyError, TypeError) as error:
        return f"it cannot be checked ({error})"
    if remembered:
        with suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            keep = remembered.exists() and remembered.stat().st_size < 10**5
            with remembered.open("a" if keep else "w") as file:
                file.write(f"{line}\n")
    return None

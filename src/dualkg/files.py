"""Files and folders: careful reads, atomic writes, locks and checksums.

A reader never sees an incomplete file or folder. What a killed process leaves is finished or undone
by `recover` when the folder is next opened, and removed when it is next locked. A folder that is
locked is held by its descriptor: what is written goes there or nowhere, whatever takes its name.
Every file that is read is opened here, or by a library after `regular_file`.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import inspect
import io
import json
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple, ParamSpec, TypeVar

from dualkg.errors import (
    DamagedFile,
    DualkgError,
    FileTooLarge,
    FolderMoved,
    LockedError,
    NameNotText,
    NotRegularFile,
    PathExists,
    RequestError,
)

# A complete folder that is moved file by file is `full`.
TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.(tmp|full)")
MAX_LOCK = 1 << 16  # bytes of a lock: process, host and time
INNER_LOCK = ".dualkg.lock"  # in a folder, whatever its name and wherever it is mounted
MAX_READS = 5  # of a folder that is replaced again and again
MAX_NAME = 200  # bytes of a name that others are made from; file systems allow 255
REMEMBERED_BYTES = 2**22  # files of this size are hashed on first use only, smaller ones always
HANDOVER_SECONDS = 0.2  # in which a process that ends may release its lock
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # there is nothing of this name
# Some systems cannot sync a folder.
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS)
NO_CHECKSUM = "0" * 64  # in the place of the checksum while it is computed
_HAS_LOCKS: dict[int, bool] = {}  # by device
MAX_TEXT = 1 << 28  # bytes of a file that is read as a whole
# The bytes that a file may have, in all and for each byte that is stored, whether it is compressed,
# has holes, or repeats entries of a dictionary.
FREE_SIZE = 16 << 20
MAX_RATIO = 100
MAX_PARTS = 1000  # of a sparse file, which are counted
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# -- careful reads -----------------------------------------------------------


def open_regular(path: str | Path, *, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a file to read it; a pipe, a device, a socket, and a file that is too large are refused.

    Opening never waits, as it would for the other end of a pipe. A file whose holes are more than
    `MAX_RATIO` times what is stored is too large, as a compressed one would be.
    """
    file = open(path, "rb", opener=_regular_descriptor)  # noqa: SIM115 - the caller closes it
    try:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise FileTooLarge(path, size, limit=max_bytes)
        _check_holes(file, size, path)
    except BaseException:
        file.close()
        raise
    return file


def regular_file(path: str | Path, *, max_bytes: int | None = None) -> Path:
    """A path that `open_regular` accepts, for a library that opens files by their paths."""
    open_regular(path, max_bytes=max_bytes).close()
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


def _regular_descriptor(path: str, flags: int, *, folder: int | None = None) -> int:
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


# -- atomic writes -----------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block succeeds, and is deleted when it fails.

    It is in a folder of its own, as some libraries write temporary files beside it.
    """
    _check_name(path)
    make_folder(path.parent)
    with _temporary(path, path.parent) as folder:
        fresh = folder / path.name
        yield fresh
        fresh.chmod(0o666 & ~_umask())
        if not _is_temporary(path.parent):  # whose files are written to disk together
            sync(fresh)
        _put(fresh, path)


@contextmanager
def atomic_folder(
    path: Path,
    *,
    existing: Literal["refuse", "keep", "replace"] = "refuse",
    last: str = "",
    keep: Collection[str] = (),
) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block succeeds, and is deleted when it fails.

    An existing folder is kept, refused, or replaced but for its files in `keep`; an empty one is
    filled, the file named `last` last.
    """
    path = Path(os.path.realpath(path))
    _check_name(path)
    is_empty_folder = path.is_dir() and not contents(path)
    parent = path if is_empty_folder else path.parent
    make_folder(parent)
    if existing == "keep":
        remove_strays(path, inside=False)

    with _temporary(path, parent) as fresh:
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        if not _is_temporary(parent):
            _sync_tree(fresh)
        check_held(path)
        if is_empty_folder:
            full = fresh.with_suffix(".full")
            _put(fresh, full)
            _fill(path, full, last=last)
        elif existing == "replace" and path.exists():
            _replace(fresh, path, keep=keep)
        else:
            try:
                with _taken_over(fresh, path):
                    _put(fresh, path)
            except OSError:
                if existing != "keep" or not path.is_dir():
                    raise


def _sync_tree(folder: Path) -> None:
    """Wait until a folder and all files in it are on the disk."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(inner, name))
        sync(Path(inner))


def _replace(fresh: Path, path: Path, *, keep: Collection[str]) -> None:
    """Put a folder in the place of another, whose files in `keep` it takes over."""
    with _own_lock(path) as former:
        check_held(path)
        for name in keep:
            if (path / name).exists():
                link_or_copy(path / name, fresh / name)
                sync(fresh / name)
        sync(fresh)
        with _taken_over(fresh, path):
            _exchange(fresh, path, former=former)


@contextmanager
def _temporary(path: Path, parent: Path) -> Iterator[Path]:
    """A new folder, deleted at the end; its lock keeps others from taking it for a stray one."""
    name = ""
    try:
        while not name or not Path(name).exists():  # it may have been removed before it was locked
            name = tempfile.mkdtemp(prefix=f".{_short(path)}.", suffix=".tmp", dir=parent)
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield Path(name)
        finally:
            os.close(descriptor)
            _remove(Path(name))
    except OSError as error:
        if error.filename is not None and (not name or not str(error.filename).startswith(name)):
            raise
        # The error names the file that was to be written, not the temporary one.
        place = str(error.filename or name).replace(f"{name}/{path.name}", name)
        place = place.replace(name, str(path), 1)
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), place) from error


class Token(NamedTuple):
    """A file with random text, by which other machines find out whether they see the same folder.

    `name` is that of the file, in a folder that exists, or else beside it.
    """

    name: str
    text: str
    is_inside: bool

    def is_seen(self, path: Path) -> bool:
        """Whether this machine has the file at the path that it has written, or was given."""
        real_path = Path(os.path.realpath(path))
        home = real_path if self.is_inside else real_path.parent
        try:
            return read_text(home / self.name) == self.text
        except (OSError, ValueError):
            return False


@contextmanager
def written_token(path: Path) -> Iterator[Token]:
    """Write a token in a folder, or where it will be, and remove it at the end."""
    real_path = Path(os.path.realpath(path))
    is_inside = real_path.is_dir()
    home = real_path if is_inside else real_path.parent
    with _temporary(real_path, home) as folder:
        file = folder / "token"
        text = secrets.token_hex(32)
        file.write_text(text)
        # Machines of another user may read it.
        folder.chmod(0o777 & ~_umask())
        yield Token(f"{folder.name}/{file.name}", text, is_inside)


def _check_name(path: Path) -> None:
    """Refuse to write what has a name that JSON and libraries in C cannot hold."""
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        raise NameNotText(path) from None


def _put(fresh: Path, path: Path) -> None:
    """Give a file or folder its name, on the disk too; if that fails, take a new name back."""
    with _opened(path.parent) as folder:
        is_new = not _is_in(folder, path.name)
        os.replace(fresh, path.name, dst_dir_fd=folder)
        if _is_temporary(path.parent):
            return
        try:
            _sync_folder(folder)
        except OSError:
            if is_new:
                with suppress(OSError):
                    os.replace(path.name, fresh, src_dir_fd=folder)
                with suppress(OSError):  # if the disk refuses that, too
                    _remove_in(folder, path.name)
            raise


def _is_in(folder: int, name: str) -> bool:
    """Whether a folder, by its descriptor, has a name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove_in(folder: int, name: str) -> None:
    """Remove a file or folder of a folder, by its descriptor, if it is there."""
    with suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that is not empty, before the work that would fill it."""
    if path.exists() and (not path.is_dir() or contents(path)):
        raise PathExists(path, overwritable=False)


def contents(folder: Path) -> list[str]:
    """Names of the files in a folder, without a lock and temporary files."""
    names = sorted(child.name for child in folder.iterdir())
    return [name for name in names if name != INNER_LOCK and not TEMPORARY.fullmatch(name)]


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if the file system has none.

    The former target stays until the new one is complete.
    """
    with atomic_write(target) as fresh:
        regular_file(source)
        try:
            fresh.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, fresh)


def exists(path: Path) -> bool:
    """Whether there is a file or folder; a link that leads nowhere is not taken for no file."""
    if path.exists():
        return True
    if path.is_symlink():
        raise DamagedFile(path, f"it is a link to {path.readlink()}, which cannot be found")
    return False


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if path.is_dir():
            _sync_folder(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise the errors of a library that writes a file as OSError with its name."""
    try:
        yield
    except errors as error:
        pattern = r"^.*?(I/O error|[Ww]rite error)"
        reason = re.sub(pattern, r"\1", str(error), flags=re.DOTALL)
        reason = reason.replace(str(path), "").strip()
        raise OSError(errno.EIO, f"it could not be written ({reason})", str(path)) from error


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


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 1) -> None:
    """Write JSON with a checksum of its bytes at the end."""
    text = json.dumps({**content, "sha256": NO_CHECKSUM}, indent=indent, ensure_ascii=False)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    before, after = text.rsplit(NO_CHECKSUM, 1)
    write_text(path, f"{before}{checksum}{after}")


def _open_text(path: Path, mode: Literal["a", "w"]) -> IO[str]:
    """Open a regular file to write it in its place, which no reader depends on."""
    return open(path, mode, encoding="utf-8", opener=_regular_descriptor)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


# -- replacing a folder ------------------------------------------------------


def _exchange(fresh: Path, path: Path, *, former: int) -> None:
    """Replace a folder, by its descriptor, by another, which gets its name.

    A folder that has taken the name meanwhile is put back, and `FolderMoved` is raised. If the
    process is killed in between, `recover` finds the former one.
    """
    if _exchange_names(fresh, path):
        try:
            _check_is(fresh, former, path)
            sync(path.parent)  # the former folder is deleted only then
        except (OSError, FolderMoved):
            _exchange_names(fresh, path)
            raise
        return
    aside = _hidden(path, "old")
    _remove(aside)
    path.rename(aside)
    try:
        _check_is(aside, former, path)
        _put(fresh, path)
    except BaseException:
        recover(path)
        raise
    aside.rename(fresh)


def _check_is(place: Path, folder: int, name: Path) -> None:
    """Refuse a place that does not have a folder, by its descriptor, whose name was `name`."""
    if not os.path.samestat(place.stat(), os.fstat(folder)):
        raise FolderMoved(name, now=_place_of(folder))


def _exchange_names(fresh: Path, path: Path) -> bool:
    """Exchange two names in one step, if the system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    fresh_name = os.fsencode(fresh)
    name = os.fsencode(path)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        at_fdcwd = -100
        rename_exchange = 2
        return bool(libc.renameat2(at_fdcwd, fresh_name, at_fdcwd, name, rename_exchange) == 0)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        rename_swap = 2
        return bool(libc.renamex_np(fresh_name, name, rename_swap) == 0)
    return False


def _fill(path: Path, full: Path, *, last: str = "") -> None:
    """Move the files of a complete folder into an empty one; two processes may do so together."""
    for child in sorted(full.iterdir(), key=lambda child: child.name == last):
        with suppress(FileNotFoundError):
            child.rename(path / child.name)
    sync(path)
    with suppress(OSError):
        full.rmdir()


def recover(path: Path) -> None:
    """Finish or undo what a killed process began to put in a folder's place; remove its lock."""
    path = Path(os.path.realpath(path))
    with suppress(OSError):
        for file in (_hidden(path, "lock"), path / INNER_LOCK):
            if file.exists() and _has_locks(file.parent):
                _is_left(file, remove=True)
    with suppress(OSError):  # of another user, or recovered by another process
        if not path.exists():
            _hidden(path, "old").rename(path)
        for child in _children(path):
            if child.suffix == ".full" and TEMPORARY.fullmatch(child.name):
                _fill(path, child)


def strays(path: Path, *, inside: bool = True) -> list[Path]:
    """Temporary files and folders that killed processes left beside a file or folder, or in it."""
    short_name = _short(path)
    candidates = [
        child for child in _children(path.parent) if TEMPORARY.sub(r"\1", child.name) == short_name
    ]
    if inside:
        candidates += _children(path)
    return [
        candidate
        for candidate in candidates
        if candidate.suffix == ".tmp"
        and TEMPORARY.fullmatch(candidate.name)
        and _is_left(candidate)
    ]


def remove_strays(path: Path, *, inside: bool = True) -> None:
    for stray in strays(path, inside=inside):
        _is_left(stray, remove=True)


def _is_left(stray: Path, *, remove: bool = False) -> bool:
    """Whether no process holds the lock of a temporary file or folder, or of a lock file."""
    try:
        descriptor = os.open(stray, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        was_replaced = not os.path.samestat(os.fstat(descriptor), stray.lstat())
        if was_replaced:
            return False
        if remove:
            _remove(stray)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # no folder, or not ours to read
        return []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


# -- locks -------------------------------------------------------------------


@contextmanager
def locked(path: str | Path | None, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a file or folder that is being written; others are refused, or wait.

    The lock is the file `.NAME.lock` beside it, for what does not exist yet, and `.dualkg.lock` in
    a folder, which stays with it under any name. It names process and host, and is released by the
    operating system if the process is killed. A thread may hold it more than once. None needs no
    lock, and a place that cannot be written gets none.

    If the folder is moved, removed or replaced in the block, nothing more is written, and
    `FolderMoved` is raised.
    """
    if path is None:
        yield
        return

    real_path = Path(os.path.realpath(path))
    _check_name(real_path)
    missing = [parent for parent in real_path.parents if not parent.exists()]
    make_folder(real_path.parent)
    lock = _acquire(real_path, path, wait=wait)
    if lock is None:
        yield
        return

    # A soft lock is a file that filelock writes itself.
    names_holder = not lock.is_nested and not lock.is_soft
    folder = os.open(lock.file.parent, os.O_RDONLY)
    try:
        if names_holder:
            _write_holder(lock.file)
        if lock.is_nested:
            yield
            return
        is_locked_inside = lock.file.name != INNER_LOCK and not lock.is_soft
        held = _HeldFolder(path, _names_of(path), is_locked_inside=is_locked_inside)
        if real_path.is_dir():
            held.take(real_path)
        with _registered(held):
            recover(real_path)
            remove_strays(real_path)
            if real_path.exists():
                _remove(_hidden(real_path, "old"))
            yield
    finally:
        if names_holder:
            # While the lock is held: filelock tries again if the file that it locked has no name.
            lock.remove(folder)
        os.close(folder)
        lock.release()
        for parent in missing:
            with suppress(OSError):  # it is not empty
                parent.rmdir()


class _HeldLock(NamedTuple):
    """A lock that this process holds; it is nested if the same thread held it already."""

    file: Path
    status: os.stat_result
    release: Callable[[], None]
    is_nested: bool
    is_soft: bool

    def remove(self, folder: int) -> None:
        """Remove the file that was locked from its folder, whatever the name of that is now."""
        with suppress(OSError):
            status = os.stat(self.file.name, dir_fd=folder)
            if os.path.samestat(status, self.status):
                os.unlink(self.file.name, dir_fd=folder)


def _acquire(path: Path, given: str | Path, *, wait: bool) -> _HeldLock | None:
    """Lock a file or folder, which messages call `given`; None if no lock can be written."""
    from filelock import FileLock, SoftFileLock, Timeout

    for file in (_hidden(path, "lock"), path / INNER_LOCK):
        try:
            is_soft = not _has_locks(file.parent)
            kind = SoftFileLock if is_soft else FileLock
            lock = kind(file, mode=0o666, is_singleton=True)
            is_nested = lock.is_locked
            lock.acquire(timeout=-1 if wait else HANDOVER_SECONDS, poll_interval=0.02)
            return _HeldLock(file, file.stat(), lock.release, is_nested, is_soft)
        except Timeout:
            raise _refusal(given, file) from None
        except OSError as error:
            if error.errno not in (*NOT_WRITABLE, errno.ENOENT, errno.ENOTDIR):
                raise
            if file.exists():
                raise _refusal(given, file) from None
    return None


def _write_holder(file: Path) -> None:
    """Write process, host and time into the file of a lock, for messages to others."""
    with suppress(OSError), _open_text(file, "w") as lock:
        lock.write(_holder_text())


def _holder_text() -> str:
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{os.getpid()}\n{socket.gethostname()}\n{now}\n"


def _has_locks(folder: Path) -> bool:
    """Whether the file system has locks; on others, the existence of a file is the lock."""
    device = folder.stat().st_dev
    if device not in _HAS_LOCKS:
        has_locks = True
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            has_locks = error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
        _HAS_LOCKS[device] = has_locks
    return _HAS_LOCKS[device]


P = ParamSpec("P")
T = TypeVar("T")


def locks(argument: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that holds the lock of the file or folder given as this argument."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def holding(*args: P.args, **options: P.kwargs) -> T:
            path = None
            # A wrong call raises TypeError; the call below raises it with the function's name.
            with suppress(TypeError):
                path = signature.bind(*args, **options).arguments.get(argument)
            with locked(path):
                return function(*args, **options)

        return holding

    return wrap


def rereads(argument: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that reads the folder given as this argument.

    If another process puts another folder in its place meanwhile, it is read again: what was read
    may be of both.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def reading(*args: P.args, **options: P.kwargs) -> T:
            path = signature.bind(*args, **options).arguments[argument]
            for _ in range(MAX_READS - 1):
                folder = _identity(path)
                try:
                    result = function(*args, **options)
                except (DualkgError, OSError):
                    if _identity(path) == folder:
                        raise
                else:
                    if _identity(path) == folder:
                        return result
            return function(*args, **options)

        return reading

    return wrap


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def lock_holder(path: str | Path, *, other: bool = False) -> str | None:
    """`process 12 on host`, if a process holds the lock of a file or folder.

    With `other`, a lock of this process does not count.
    """
    path = Path(os.path.realpath(path))
    for file in (_hidden(path, "lock"), path / INNER_LOCK):
        with suppress(OSError):
            text = read_text(file, max_bytes=MAX_LOCK, errors="replace")
            holder = _holder_of(text, other=other)
            if holder is not None:
                return holder or None
    return None


def _holder_of(text: str, *, other: bool = False) -> str | None:
    """`process 12 on host`, by the text of a lock; None if that process has ended.

    With `other`, it is empty for this process.
    """
    try:
        pid, host, *rest = text.splitlines()
        if host == socket.gethostname():
            if other and int(pid) == os.getpid():
                return ""
            with suppress(PermissionError):  # a process of another user
                os.kill(int(pid), 0)  # raises ProcessLookupError, an OSError, if it has ended
        holder = f"process {int(pid)} on {host}"
    except (OSError, ValueError):
        return None
    # The third line is a time, or a mark of filelock's.
    if rest and ":" in rest[0]:
        holder = f"{holder} since {rest[0]}"
    return holder


def _refusal(path: str | Path, file: Path) -> LockedError:
    for _ in range(40):  # the holder writes its name just after it has the lock
        holder = lock_holder(path)
        if holder or not file.exists():
            break
        time.sleep(0.005)
    return LockedError(path, holder=holder or "")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder itself, for a short change of one of its files.

    A folder that is replaced meanwhile is locked again. The lock leaves no file. If the folder is
    moved in the block, `FolderMoved` is raised.
    """
    with _own_lock(folder) as descriptor:
        held = _HeldFolder(folder, _names_of(folder), descriptor=os.dup(descriptor))
        with _registered(held):
            yield


@contextmanager
def _own_lock(folder: Path) -> Iterator[int]:
    """Wait for the lock of a folder itself; the value is its descriptor."""
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            break
        os.close(descriptor)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# -- folders that are held ---------------------------------------------------


@dataclass(eq=False)
class _HeldFolder:
    """A folder that is being written: `given` as it is called in messages, and its `paths`.

    The descriptor is None until the folder exists. `inner_lock` is that of the file INNER_LOCK in
    it, if it `is_locked_inside`.
    """

    given: str | Path
    paths: list[Path]
    is_locked_inside: bool = False
    descriptor: int | None = None
    inner_lock: int | None = None

    def check(self) -> None:
        """Raise `FolderMoved` if another folder, or none, has the name of this one."""
        if self.descriptor is None:
            return
        status = os.fstat(self.descriptor)
        for path in self.paths:
            try:
                is_there = os.path.samestat(status, path.stat())
            except OSError as error:
                if error.errno not in GONE:
                    raise
                is_there = False
            if not is_there:
                raise FolderMoved(self.given, now=_place_of(self.descriptor))

    def take(self, folder: Path) -> None:
        """Hold a folder, in place of the former one; refuse one that another process holds."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        inner_lock = None
        try:
            if not os.path.samestat(os.fstat(descriptor), folder.stat()):
                # It was replaced at this moment, or the file system has no lasting inodes.
                os.close(descriptor)
                return
            if self.is_locked_inside:
                inner_lock = _lock_inside(descriptor, self.given)
        except BaseException:
            os.close(descriptor)
            raise
        self.release()
        self.descriptor = descriptor
        self.inner_lock = inner_lock

    def release(self) -> None:
        """Let the folder go, wherever it is, and leave no lock in it."""
        if self.inner_lock is not None:
            with suppress(OSError):
                os.unlink(INNER_LOCK, dir_fd=self.descriptor)
            os.close(self.inner_lock)
            self.inner_lock = None
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


_HELD: list[_HeldFolder] = []  # innermost last
_HELD_LOCK = threading.RLock()


@contextmanager
def watched(path: str | Path) -> Iterator[None]:
    """Hold a folder that another process has locked for this one, from the first write on."""
    with _registered(_HeldFolder(path, _names_of(path))):
        yield


@contextmanager
def _registered(held: _HeldFolder) -> Iterator[None]:
    """Let all writes below a folder go to the folder that is held, or nowhere.

    An error that comes of a folder that is gone is raised as `FolderMoved`.
    """
    with _HELD_LOCK:
        _HELD.append(held)
    try:
        yield
        held.check()
    except Exception as error:
        # An error of a library or of a request may come of a folder that is gone. One of training,
        # such as divergence, does not.
        if isinstance(error, RequestError) or not isinstance(error, DualkgError):
            held.check()
        raise
    finally:
        with _HELD_LOCK:
            _HELD.remove(held)
            held.release()


def _names_of(path: str | Path) -> list[Path]:
    """The path as it was given, which may be a link, and where that leads."""
    return [Path(path).absolute(), Path(os.path.realpath(path))]


def _held_above(path: Path) -> tuple[_HeldFolder, Path] | None:
    """The innermost folder that is held and contains a path or is it; and the path in it."""
    names = _names_of(path)
    with _HELD_LOCK:
        for held in reversed(_HELD):
            for name in names:
                for home in held.paths:
                    if name.is_relative_to(home):
                        return held, name.relative_to(home)
    return None


def check_held(path: Path) -> None:
    """Raise `FolderMoved` if a folder that is held, and has this path in it, was moved."""
    with _HELD_LOCK:
        found = _held_above(path)
        if found is None:
            return
        held, _ = found
        if held.descriptor is None and held.paths[0].is_dir():
            held.take(held.paths[0])
        held.check()


def is_held(path: Path) -> bool:
    """Whether `check_held` raises nothing."""
    try:
        check_held(path)
    except FolderMoved:
        return False
    return True


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The descriptor of a folder; below a folder that is held, whatever has its name now."""
    check_held(folder)
    with _HELD_LOCK:
        found = _held_above(folder)
        home = None
        if found is not None and found[0].descriptor is not None:
            home = os.dup(found[0].descriptor)
    if found is None or home is None:
        descriptor = os.open(folder, os.O_RDONLY)
    else:
        try:
            descriptor = os.open(found[1], os.O_RDONLY, dir_fd=home)
        finally:
            os.close(home)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _taken_over(fresh: Path, path: Path) -> Iterator[None]:
    """Hold a folder that gets the name of one that is held, from before it has the name."""
    with _HELD_LOCK:
        held = None
        for candidate in reversed(_HELD):
            if path in candidate.paths:
                held = candidate
                break
    if held is None:
        yield
        return
    former = replace(held)
    held.descriptor = None
    held.inner_lock = None
    try:
        held.take(fresh)
        yield
    except BaseException:
        held.release()
        held.descriptor = former.descriptor
        held.inner_lock = former.inner_lock
        raise
    former.release()


def make_folder(path: Path) -> None:
    """Make a folder and those above it; below a folder that is held, only in that."""
    check_held(path)
    with _HELD_LOCK:
        found = _held_above(path)
        if found is None or found[0].descriptor is None:
            home = None
        else:
            home = os.dup(found[0].descriptor)
    if found is None or home is None:
        path.mkdir(parents=True, exist_ok=True)
        check_held(path)
        return
    try:
        for folder in reversed([found[1], *found[1].parents][:-1]):
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=home)
    finally:
        os.close(home)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; below a folder that is held, only from that."""
    if not path.parent.exists():
        check_held(path)
        return
    with _opened(path.parent) as folder:
        _remove_in(folder, path.name)


def _place_of(descriptor: int) -> Path | None:
    """Where a folder is now, if the system says it and it was not removed."""
    with suppress(OSError):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if os.path.samestat(place.stat(), os.fstat(descriptor)):
            return place
    return None


def _lock_inside(folder: int, given: str | Path) -> int | None:
    """Lock a folder by a file in it, whatever its name; None if no lock can be written.

    The file is opened through the descriptor of the folder. Another process that holds it has the
    folder under another name: it was moved or is mounted there.
    """
    deadline = time.monotonic() + HANDOVER_SECONDS
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = _regular_descriptor(INNER_LOCK, flags, folder=folder)
        except OSError as error:
            if error.errno in (*NOT_WRITABLE, errno.ELOOP, errno.ENOENT):
                return None
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.stat(INNER_LOCK, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(status, os.fstat(descriptor)):
                os.ftruncate(descriptor, 0)
                with suppress(OSError):  # a full disk
                    os.write(descriptor, _holder_text().encode())
                return descriptor
        except FileNotFoundError:
            pass  # the former holder has removed the file that was locked here
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = _holder_of(os.pread(descriptor, 1000, 0).decode(errors="replace"))
                os.close(descriptor)
                raise LockedError(given, holder=holder or "") from None
            time.sleep(0.02)
        except OSError:
            os.close(descriptor)
            return None  # a file system without locks
        os.close(descriptor)


# -- checksums ---------------------------------------------------------------


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
        identity = f"{path.resolve()} {status.st_dev} {status.st_ino}"
        version = f"{status.st_size} {status.st_mtime_ns} {record['sha256']}"
        line = hashlib.sha256(os.fsencode(f"{identity} {version}")).hexdigest()
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
            with _open_text(remembered, "a" if keep else "w") as file:
                file.write(f"{line}\n")
    return None


def _hidden(path: Path, suffix: str) -> Path:
    return path.parent / f".{_short(path)}.{suffix}"  # the folder / has no name, and gets one


def _short(path: Path) -> str:
    """The name of a file, or a shorter one that stands for it."""
    name = os.fsencode(path.name)
    return path.name if len(name) <= MAX_NAME else hashlib.sha256(name).hexdigest()[:32]


def _is_temporary(folder: Path) -> bool:
    return any(TEMPORARY.fullmatch(name) for name in folder.parts)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

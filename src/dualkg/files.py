"""Files and folders: atomic writes, locks, and checksums. A reader never sees an incomplete file or
folder.

What a killed process leaves is finished or undone by `recover` when the folder is next opened, and
removed when it is next locked.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from dualkg.errors import LockedError, RequestError

TEMPORARY = re.compile(
    r"\.(.+)\.[a-z0-9_]{8}\.(tmp|full)"
)  # a complete folder that is moved file by file is `full`
INNER_LOCK = ".lock"  # of a folder whose parent cannot be written
MAX_NAME = 200  # bytes of a name that others are made from; file systems allow 255
REMEMBERED_BYTES = 2**22  # files of this size are hashed on first use only, smaller ones always
HANDOVER_SECONDS = 0.2  # in which a process that ends may release its lock
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
CANNOT_SYNC = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.ENOSYS,
)  # a folder, on some systems
NO_CHECKSUM = "0" * 64  # in the place of the checksum while it is computed
_HAS_LOCKS: dict[int, bool] = {}  # by device


# -- atomic writes -----------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block succeeds, and is deleted when it fails.

    It is in a folder of its own, as some libraries write temporary files beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
    filling = path.is_dir() and not contents(path)
    parent = path if filling else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    if existing == "keep":
        remove_strays(path, inside=False)
    with _temporary(path, parent) as fresh:
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        if not _is_temporary(parent):
            for folder, _, names in os.walk(fresh, topdown=False):
                for name in names:
                    sync(Path(folder, name))
                sync(Path(folder))
        if filling:
            full = fresh.with_suffix(".full")
            _put(fresh, full)
            _fill(path, full, last=last)
        elif existing == "replace" and path.exists():
            with folder_lock(path):
                for name in keep:
                    if (path / name).exists():
                        link_or_copy(path / name, fresh / name)
                        sync(fresh / name)
                sync(fresh)
                _exchange(fresh, path)
        else:
            try:
                _put(fresh, path)
            except OSError:
                if existing != "keep" or not path.is_dir():
                    raise


@contextmanager
def _temporary(path: Path, parent: Path) -> Iterator[Path]:
    """A new folder, deleted at the end. It is locked, so that no other process takes it for a stray
    one.
    """
    name = ""
    try:
        while not name or not Path(name).exists():  # it may have been removed before it was locked
            name = tempfile.mkdtemp(prefix=f".{_short(path)}.", suffix=".tmp", dir=parent)
            try:
                descriptor = os.open(name, os.O_RDONLY)
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
        place = (
            str(error.filename or name)
            .replace(f"{name}/{path.name}", name)
            .replace(name, str(path), 1)
        )
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), place) from error


def _put(fresh: Path, path: Path) -> None:
    """Give a file or folder its name, on the disk too; where that fails, a new name is taken
    back.
    """
    is_new = not path.exists()
    fresh.replace(path)
    if _is_temporary(path.parent):
        return
    try:
        sync(path.parent)
    except OSError:
        if is_new:
            with suppress(OSError):
                path.replace(fresh)
            _remove(path)  # if the disk refuses that, too
        raise


def check_new_folder(path: Path) -> None:
    """Refuse a folder that is not empty, before the work that would fill it."""
    if path.exists() and (not path.is_dir() or contents(path)):
        raise RequestError(f"{path} exists already. Name a new folder with --out.")


def contents(folder: Path) -> list[str]:
    """Names of the files in a folder, without a lock and temporary files."""
    names = sorted(one.name for one in folder.iterdir() if not TEMPORARY.fullmatch(one.name))
    return [name for name in names if name != INNER_LOCK]


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a copy if the file system has none; the former target stays until there is
    one.
    """
    with atomic_write(target) as fresh:
        try:
            fresh.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, fresh)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise the errors of a library that writes a file as OSError with its name."""
    try:
        yield
    except errors as error:
        reason = re.sub(
            r"^.*?(I/O error|[Ww]rite error)", r"\1", str(error), flags=re.DOTALL
        ).replace(str(path), "")
        raise OSError(
            errno.EIO, f"it could not be written ({reason.strip()})", str(path)
        ) from error


def read_json(path: Path, kind: Any = Any, *, checksum: bool = False) -> Any:
    """The content of a JSON file as a type; a damaged one raises `RequestError`. With `checksum`,
    of `write_json`.
    """
    content = path.read_bytes()
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is damaged: it is not JSON ({error}).") from None
    if checksum:
        saved = found.pop("sha256", None) if isinstance(found, dict) else None
        if saved is None:
            raise RequestError(f"{path} is damaged: it has no checksum (the entry 'sha256').")
        blank = f'"{NO_CHECKSUM}"'.encode().join(
            content.rsplit(f'"{saved}"'.encode(errors="replace"), 1)
        )
        former = json.dumps(found).encode()  # what it was computed of before 0.2.0
        if saved not in [hashlib.sha256(one).hexdigest() for one in (blank, former)]:
            raise RequestError(f"{path} is damaged: its checksum is not that of its content.")
    return check_type(found, kind, source=path)


def check_type(found: Any, kind: Any, *, source: object) -> Any:
    """What a file holds as a type, such as `dict[str, Any]`; anything else raises
    `RequestError`.
    """
    from pydantic import ValidationError

    try:
        return found if kind is Any else _adapter(kind).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(
            f"{source} is damaged: {place and f'{place}: '}{first['msg']}."
        ) from None


@functools.cache  # an adapter takes a millisecond or more to build
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 1) -> None:
    """Write JSON with a checksum of its bytes at the end."""
    text = json.dumps({**content, "sha256": NO_CHECKSUM}, indent=indent, ensure_ascii=False)
    write_text(path, hashlib.sha256(text.encode()).hexdigest().join(text.rsplit(NO_CHECKSUM, 1)))


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


# -- replacing a folder ------------------------------------------------------


def _exchange(fresh: Path, path: Path) -> None:
    """Replace a folder by another, which gets its name; killed in between, `recover` finds the
    former one.
    """
    if _exchange_names(fresh, path):
        try:
            sync(path.parent)  # the former one is deleted only then
        except OSError:
            _exchange_names(fresh, path)
            raise
        return
    aside = _hidden(path, "old")
    _remove(aside)
    path.rename(aside)
    try:
        _put(fresh, path)
    except BaseException:
        recover(path)
        raise
    aside.rename(fresh)


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step, if the system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        return bool(
            libc.renameat2(-100, names[0], -100, names[1], 2) == 0
        )  # AT_FDCWD, RENAME_EXCHANGE
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        return bool(libc.renamex_np(*names, 2) == 0)  # RENAME_SWAP
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
    """Finish or undo what a killed process began to put in the place of a folder, and remove its
    lock.
    """
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
    found = [
        one for one in _children(path.parent) if TEMPORARY.sub(r"\1", one.name) == _short(path)
    ]
    found += _children(path) if inside else []
    return [
        one
        for one in found
        if one.suffix == ".tmp" and TEMPORARY.fullmatch(one.name) and _is_left(one)
    ]


def remove_strays(path: Path, *, inside: bool = True) -> None:
    for stray in strays(path, inside=inside):
        _is_left(stray, remove=True)


def _is_left(stray: Path, *, remove: bool = False) -> bool:
    """Whether no process holds the lock of a temporary file or folder, or of a lock file."""
    try:
        descriptor = os.open(stray, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(
            os.fstat(descriptor), stray.lstat()
        ):  # it has been removed and made again
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
    """Hold the lock of a file or folder that is being written; another process is refused, or
    waits.

    The lock is the file `.NAME.lock` beside it, or `.lock` in a folder whose parent cannot be
    written. It names process and host, and is released by the operating system if the process is
    killed. A thread may hold it more than once. None needs no lock, and a place that cannot be
    written gets none.
    """
    if path is None:
        yield
        return
    from filelock import FileLock, SoftFileLock, Timeout

    given = path
    path = Path(os.path.realpath(path))
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock: FileLock | SoftFileLock | None = None
    for file in (_hidden(path, "lock"), path / INNER_LOCK):
        try:
            kind = FileLock if _has_locks(file.parent) else SoftFileLock
            lock = kind(file, mode=0o666, is_singleton=True)
            nested = lock.is_locked
            lock.acquire(timeout=-1 if wait else HANDOVER_SECONDS, poll_interval=0.02)
            break
        except Timeout:
            raise LockedError(_refusal(given, file)) from None
        except OSError as error:
            lock = None
            if error.errno not in (*NOT_WRITABLE, errno.ENOENT, errno.ENOTDIR):
                raise
            if file.exists():
                raise LockedError(_refusal(given, file)) from None
    if lock is None:
        yield
        return
    named = not nested and isinstance(lock, FileLock)
    try:
        if named:
            with suppress(OSError):
                now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
                file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n{now}\n", encoding="utf-8")
        if not nested:
            recover(path)
            remove_strays(path)
            if path.exists():
                _remove(_hidden(path, "old"))
        yield
    finally:
        if named:
            _remove(
                file
            )  # while it is held: filelock tries again where it has locked a file without a name
        lock.release()
        for parent in missing:
            with suppress(OSError):  # it is not empty
                parent.rmdir()


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
    """Decorate a function that writes the file or folder given as this argument: it holds the lock
    of it.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def holding(*args: P.args, **options: P.kwargs) -> T:
            path = None
            with suppress(
                TypeError
            ):  # of a wrong call, which the call below raises with the function's name
                path = signature.bind(*args, **options).arguments.get(argument)
            with locked(path):
                return function(*args, **options)

        return holding

    return wrap


def lock_holder(path: str | Path) -> str | None:
    """`process 12 on host`, if a process holds the lock of a file or folder."""
    path = Path(os.path.realpath(path))
    for file in (_hidden(path, "lock"), path / INNER_LOCK):
        with suppress(OSError, ValueError):
            pid, host, *since = file.read_text(encoding="utf-8").splitlines()
            if host == socket.gethostname():
                with suppress(PermissionError):  # a process of another user
                    os.kill(int(pid), 0)  # raises ProcessLookupError, an OSError, if it has ended
            time = (
                f" since {since[0]}" if since and ":" in since[0] else ""
            )  # else a mark of filelock's
            return f"process {int(pid)} on {host}{time}"
    return None


def _refusal(path: str | Path, file: Path) -> str:
    for _ in range(40):  # the holder writes its name just after it has the lock
        holder = lock_holder(path)
        if holder or not file.exists():
            break
        time.sleep(0.005)
    return (
        f"{path} is being written by {holder or 'another process'}. Try again when that has ended."
    )


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder itself, for a short change of one of its files; one that is
    replaced meanwhile is locked again. It holds no other process up, and leaves no file.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


# -- checksums ---------------------------------------------------------------


def file_record(path: Path) -> dict[str, Any]:
    """The size and the checksum of a file."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def file_damage(path: Path, record: dict[str, Any], *, memory: Path | None = None) -> str | None:
    """What is wrong with a file, by its `file_record`; None if nothing is.

    The file `memory` remembers which large files were good, by name, size and time, so that each is
    hashed once.
    """
    try:
        stat = path.stat()
        if stat.st_size != record["bytes"]:
            return f"it has {stat.st_size:,} bytes in place of {record['bytes']:,}"
        about = f"{path.resolve()} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {record['sha256']}"
        line = hashlib.sha256(os.fsencode(about)).hexdigest()
        remembered = memory if stat.st_size >= REMEMBERED_BYTES else None
        if remembered and remembered.exists() and line in remembered.read_text(encoding="utf-8"):
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
            with remembered.open("a" if keep else "w", encoding="utf-8") as file:
                file.write(f"{line}\n")
    return None


def _hidden(path: Path, suffix: str) -> Path:
    return path.parent / f".{_short(path)}.{suffix}"  # also of /, which has no name


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

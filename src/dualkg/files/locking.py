"""The locks of files and folders that are written."""

import errno
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from dualkg.errors import DualkgError, LockedError
from dualkg.files.held import (
    HANDOVER_SECONDS,
    INNER_LOCK,
    NOT_WRITABLE,
    HeldFolder,
    check_held,
    holder_of,
    holder_text,
    make_folder,
    names_of,
    own_lock,
    registered,
)
from dualkg.files.reads import read_text
from dualkg.files.writes import (
    check_name,
    has_locks,
    hidden,
    open_text,
    recover,
    remove_path,
    remove_strays,
)

MAX_LOCK = 1 << 16  # bytes of a lock: process, host and time
MAX_READS = 5  # of a folder that is replaced again and again
P = ParamSpec("P")
T = TypeVar("T")


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

    # A link in the place of a folder above that is held would lead the real path elsewhere.
    check_held(Path(path))
    real_path = Path(os.path.realpath(path))
    check_name(real_path)
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
        held = HeldFolder(path, names_of(path), is_locked_inside=is_locked_inside)
        if real_path.is_dir():
            held.take(real_path)
        with registered(held):
            recover(real_path)
            remove_strays(real_path)
            if real_path.exists():
                remove_path(hidden(real_path, "old"))
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

    for file in (hidden(path, "lock"), path / INNER_LOCK):
        try:
            is_soft = not has_locks(file.parent)
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
    with suppress(OSError), open_text(file, "w") as lock:
        lock.write(holder_text())


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
    for file in (hidden(path, "lock"), path / INNER_LOCK):
        with suppress(OSError):
            text = read_text(file, max_bytes=MAX_LOCK, errors="replace")
            holder = holder_of(text, other=other)
            if holder is not None:
                return holder or None
    return None


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
    with own_lock(folder) as descriptor:
        held = HeldFolder(folder, names_of(folder), descriptor=os.dup(descriptor))
        with registered(held):
            yield

"""The locks of files and folders that are written."""

import errno
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from dualkg.errors import DualkgError, LockedError
from dualkg.files.held import (
    HANDOVER_SECONDS,
    INNER_LOCK,
    NOT_WRITABLE,
    HeldFolder,
    holder_of,
    lock_file,
    make_folder,
    names_of,
    naming,
    opened,
    own_lock,
    real_path,
    registered,
)
from dualkg.files.reads import read_text
from dualkg.files.writes import (
    check_name,
    has_locks,
    hidden,
    recover,
    remove_path,
    remove_strays,
)

MAX_LOCK = 1 << 16  # bytes of a lock: process, host and time
MAX_READS = 5  # of a folder that is replaced again and again
# The locks that threads of this process hold: the thread, the folder by its inode, and the file.
_OWN_LOCKS: set[tuple[int, int, int, str]] = set()
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

    place = real_path(path)
    check_name(place)
    missing = [parent for parent in place.parents if not parent.exists()]
    make_folder(place.parent)
    try:
        with ExitStack() as stack:
            lock = _lock(stack, place, path, wait=wait)
            if lock is None or lock.is_nested:
                yield
                return
            # Its folder may have the lock inside already.
            is_locked_inside = lock.name != INNER_LOCK and not lock.is_soft
            held = HeldFolder(path, [Path(path).absolute(), place], is_locked_inside)
            if place.is_dir():
                held.take(place)
            with registered(held):
                recover(place)
                remove_strays(place)
                if place.exists():
                    remove_path(hidden(place, "old"))
                yield
    finally:
        for parent in missing:
            with suppress(OSError):  # it is not empty
                parent.rmdir()


class _Lock(NamedTuple):
    """A lock that this process holds; it is nested if the same thread held it already."""

    name: str
    is_nested: bool = False
    is_soft: bool = False  # the existence of the file, where the file system has no locks


def _lock(stack: ExitStack, path: Path, given: str | Path, *, wait: bool) -> _Lock | None:
    """Lock a file or folder, which messages call `given`, until the stack ends.

    None if no lock can be written.
    """
    for file in (hidden(path, "lock"), path / INNER_LOCK):
        try:
            if not has_locks(file.parent):
                return stack.enter_context(_soft_lock(file, given, wait=wait))
            folder = stack.enter_context(opened(file.parent))
            with naming(file):
                return stack.enter_context(_file_lock(folder, file.name, given, wait=wait))
        except OSError as error:
            if error.errno not in (*NOT_WRITABLE, errno.ENOENT, errno.ENOTDIR):
                raise
            if file.exists():
                raise _refusal(given, file) from None
    return None


@contextmanager
def _file_lock(folder: int, name: str, given: str | Path, *, wait: bool) -> Iterator[_Lock]:
    """Hold the lock of a file of a folder, by its descriptor, whatever its name."""
    status = os.fstat(folder)
    key = (threading.get_ident(), status.st_dev, status.st_ino, name)
    if key in _OWN_LOCKS:
        yield _Lock(name, is_nested=True)
        return
    descriptor = lock_file(folder, name, given, wait=wait)
    _OWN_LOCKS.add(key)
    try:
        yield _Lock(name)
    finally:
        _OWN_LOCKS.remove(key)
        with suppress(OSError):
            present = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(present, os.fstat(descriptor)):
                os.unlink(name, dir_fd=folder)
        os.close(descriptor)


@contextmanager
def _soft_lock(file: Path, given: str | Path, *, wait: bool) -> Iterator[_Lock]:
    """Hold the lock of a file system without locks, a file that filelock writes."""
    from filelock import SoftFileLock, Timeout

    lock = SoftFileLock(file, mode=0o666, is_singleton=True)
    is_nested = lock.is_locked
    try:
        lock.acquire(timeout=-1 if wait else HANDOVER_SECONDS, poll_interval=0.02)
    except Timeout:
        raise _refusal(given, file) from None
    try:
        yield _Lock(file.name, is_nested=is_nested, is_soft=True)
    finally:
        lock.release()


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

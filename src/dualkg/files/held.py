"""Folders that are held by their descriptors while they are written.

What is written goes to the folder that was locked or nowhere, whatever takes its name.
"""

import errno
import fcntl
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from dualkg.errors import DualkgError, FolderMoved, LockedError, RequestError
from dualkg.files.reads import regular_descriptor

INNER_LOCK = ".dualkg.lock"  # in a folder, whatever its name and wherever it is mounted
HANDOVER_SECONDS = 0.2  # in which a process that ends may release its lock
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # a file system without locks
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # there is nothing of this name


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the whole path in errors of calls on a descriptor, which know a part of it or none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def remove_in(folder: int, name: str) -> None:
    """Remove a file or folder of a folder, by its descriptor, if it is there."""
    with suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def holder_text() -> str:
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{os.getpid()}\n{socket.gethostname()}\n{now}\n"


def holder_of(text: str, *, other: bool = False) -> str | None:
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


@contextmanager
def own_lock(folder: Path) -> Iterator[int]:
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


@dataclass(eq=False)
class HeldFolder:
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
                raise FolderMoved(self.given, now=place_of(self.descriptor))

    def take(self, folder: Path) -> None:
        """Hold a folder, in place of the former one; refuse one that another process holds.

        A file that is complete is held, too: it cannot be lost unseen.
        """
        descriptor = _open(folder, os.O_RDONLY | os.O_NONBLOCK)
        inner_lock = None
        try:
            if not os.path.samestat(os.fstat(descriptor), folder.stat()):
                # It was replaced at this moment, or the file system has no lasting inodes.
                os.close(descriptor)
                return
            if self.is_locked_inside and folder.is_dir():
                with naming(folder / INNER_LOCK):
                    inner_lock = lock_inside(descriptor, self.given)
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


HELD: list[HeldFolder] = []  # innermost last
_HELD_LOCK = threading.RLock()


@contextmanager
def watched(path: str | Path) -> Iterator[None]:
    """Hold a folder that another process has locked for this one, from the first write on."""
    with registered(HeldFolder(path, names_of(path))):
        yield


@contextmanager
def registered(held: HeldFolder) -> Iterator[None]:
    """Let all writes below a folder go to the folder that is held, or nowhere.

    An error that comes of a folder that is gone is raised as `FolderMoved`.
    """
    with _HELD_LOCK:
        HELD.append(held)
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
            HELD.remove(held)
            held.release()


def names_of(path: str | Path) -> list[Path]:
    """The path as it was given, which may be a link, and where that leads."""
    return [Path(path).absolute(), Path(os.path.realpath(path))]


def real_path(path: str | Path) -> Path:
    """Where a path leads, unless a folder above it that is held was moved.

    A link in the place of such a folder would lead elsewhere.
    """
    place = Path(os.path.realpath(path))
    check_held(Path(path))
    return place


def _held_above(path: Path) -> list[tuple[HeldFolder, Path]]:
    """The folders that are held and contain a path or are it, innermost first; the path in each."""
    names = names_of(path)
    above = []
    with _HELD_LOCK:
        for held in reversed(HELD):
            inner = _name_in(held, names)
            if inner is not None:
                above.append((held, inner))
    return above


def _name_in(held: HeldFolder, names: list[Path]) -> Path | None:
    """The path in a folder that is held of something with these names, if that is in it."""
    for name in names:
        for home in held.paths:
            if name.is_relative_to(home):
                return name.relative_to(home)
    return None


def _descriptor_above(path: Path) -> tuple[int, Path] | None:
    """A new descriptor of the innermost folder that is held above a path; and the path in it.

    The descriptor is to be closed.
    """
    with _HELD_LOCK:
        for held, name in _held_above(path):
            if held.descriptor is not None:
                return os.dup(held.descriptor), name
    return None


def check_held(path: Path) -> None:
    """Raise `FolderMoved` if a folder that is held, and has this path in it, was moved.

    All of them are looked at, the outermost first: one that was held after an outer one was moved
    may be in the folder that took its name.
    """
    with _HELD_LOCK:
        for held, _ in reversed(_held_above(path)):
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
def opened(folder: Path) -> Iterator[int]:
    """The descriptor of a folder; below a folder that is held, whatever has its name now."""
    check_held(folder)
    descriptor = _open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    above = _descriptor_above(path)
    if above is None:
        return os.open(path, flags)
    home, name = above
    try:
        with naming(path):
            return os.open(name, flags, dir_fd=home)
    finally:
        os.close(home)


@contextmanager
def taken_over(fresh: Path, path: Path) -> Iterator[None]:
    """Hold what gets the name of a file or folder that is held, from before it has the name.

    A link in its place would be replaced, and not what that leads to.
    """
    place = Path(os.path.realpath(path.parent), path.name)
    with _HELD_LOCK:
        all_held = [held for held in HELD if place == held.paths[-1]]
    all_former = [replace(held) for held in all_held]
    for held in all_held:
        held.descriptor = None
        held.inner_lock = None
    try:
        for held in all_held:
            held.take(fresh)
        yield
    except BaseException:
        for held, former in zip(all_held, all_former, strict=True):
            held.release()
            held.descriptor = former.descriptor
            held.inner_lock = former.inner_lock
        raise
    for former in all_former:
        former.release()


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write it in its place; below a folder that is held, only in that.

    For files of which no reader knows before they are complete; others need `atomic_write`.
    """
    with opened(path.parent) as folder, naming(path):

        def open_in_folder(name: str, flags: int) -> int:
            return regular_descriptor(name, flags, folder=folder)

        with open(path.name, "wb", opener=open_in_folder) as file:
            yield file


def make_folder(path: Path) -> None:
    """Make a folder and those above it; below a folder that is held, only in that."""
    check_held(path)
    above = _descriptor_above(path)
    if above is None:
        path.mkdir(parents=True, exist_ok=True)
        check_held(path)
        return
    home, name = above
    try:
        for folder in reversed([name, *name.parents][:-1]):
            with suppress(FileExistsError), naming(path):
                os.mkdir(folder, dir_fd=home)
    finally:
        os.close(home)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; below a folder that is held, only from that."""
    if not path.parent.exists():
        check_held(path)
        return
    with opened(path.parent) as folder, naming(path):
        remove_in(folder, path.name)


def place_of(descriptor: int) -> Path | None:
    """Where a folder is now, if the system says it and it was not removed."""
    with suppress(OSError):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if os.path.samestat(place.stat(), os.fstat(descriptor)):
            return place
    return None


def lock_inside(folder: int, given: str | Path) -> int | None:
    """Lock a folder by a file in it, whatever its name; None if no lock can be written.

    Another process that holds it has the folder under another name: it was moved or is mounted
    there.
    """
    try:
        return lock_file(folder, INNER_LOCK, given)
    except OSError as error:
        if error.errno in (*NOT_WRITABLE, *NO_LOCKS, errno.ELOOP, errno.ENOENT):
            return None
        raise


def lock_file(folder: int, name: str, given: str | Path, *, wait: bool = False) -> int:
    """Lock a file of a folder, which has the process that holds it; return its descriptor.

    The file is opened through the descriptor of the folder. What is no regular file is refused:
    whoever removed it could remove the lock of another process that does the same.
    """
    deadline = time.monotonic() + HANDOVER_SECONDS
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = regular_descriptor(name, flags, folder=folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(status, os.fstat(descriptor)):
                with suppress(OSError):  # a full disk
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, holder_text().encode())
                return descriptor
        except FileNotFoundError:
            pass  # the former holder has removed the file that was locked here
        except BlockingIOError:
            is_late = not wait and time.monotonic() > deadline
            holder = holder_of(os.pread(descriptor, 1000, 0).decode(errors="replace"))
            # The holder writes its name just after it has the lock.
            if is_late and (holder or time.monotonic() > deadline + HANDOVER_SECONDS):
                os.close(descriptor)
                raise LockedError(given, holder=holder or "") from None
            time.sleep(0.02)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)

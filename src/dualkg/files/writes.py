"""Atomic writes of files and folders, and what a killed process leaves of them."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from dualkg.errors import FolderMoved, NameNotText, PathExists
from dualkg.files.held import (
    INNER_LOCK,
    NO_LOCKS,
    HeldFolder,
    check_held,
    make_folder,
    names_of,
    naming,
    opened,
    own_lock,
    place_of,
    real_path,
    registered,
    remove_in,
    taken_over,
)
from dualkg.files.reads import NO_CHECKSUM, read_text, regular_descriptor, regular_file

# A complete folder that is moved file by file is `full`.
TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.(tmp|full)")
MAX_NAME = 200  # bytes of a name that others are made from; file systems allow 255
# Some systems cannot sync a folder.
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS)
_HAS_LOCKS: dict[int, bool] = {}  # by device


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block succeeds, and is deleted when it fails.

    It is in a folder of its own, as some libraries write temporary files beside it.
    """
    check_name(path)
    make_folder(path.parent)
    with _temporary(path, path.parent) as folder:
        fresh = folder / path.name
        yield fresh
        fresh.chmod(0o666 & ~_umask())
        if not _is_temporary(path.parent):  # whose files are written to disk together
            sync(fresh)
        with taken_over(fresh, path):
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
    path = real_path(path)
    check_name(path)
    is_empty_folder = path.is_dir() and not contents(path)
    parent = path if is_empty_folder else path.parent
    make_folder(parent)
    if existing == "keep":
        remove_strays(path, inside=False)

    with _temporary(path, parent) as fresh:
        # Files that follow go to this folder, and not to a new one if a folder above it was moved.
        with registered(HeldFolder(path, names_of(fresh), descriptor=_descriptor(fresh))):
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
                with taken_over(fresh, path):
                    _put(fresh, path)
            except OSError:
                if existing != "keep" or not path.is_dir():
                    raise


def _descriptor(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync_tree(folder: Path) -> None:
    """Wait until a folder and all files in it are on the disk."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(inner, name))
        sync(Path(inner))


def _replace(fresh: Path, path: Path, *, keep: Collection[str]) -> None:
    """Put a folder in the place of another, whose files in `keep` it takes over."""
    with own_lock(path) as former:
        check_held(path)
        for name in keep:
            if (path / name).exists():
                link_or_copy(path / name, fresh / name)
                sync(fresh / name)
        sync(fresh)
        with taken_over(fresh, path):
            _exchange(fresh, path, former=former)


@contextmanager
def _temporary(path: Path, parent: Path) -> Iterator[Path]:
    """A new folder, deleted at the end; its lock keeps others from taking it for a stray one."""
    name = ""
    with opened(parent) as home:
        try:
            with naming(path):
                short_name, descriptor = _new_folder(path, home)
            name = str(parent / short_name)
            try:
                yield Path(name)
            finally:
                os.close(descriptor)
                shutil.rmtree(short_name, ignore_errors=True, dir_fd=home)
        except OSError as error:
            if error.filename is not None and not (name and str(error.filename).startswith(name)):
                raise
            # The error names the file that was to be written, not the temporary one.
            place = str(error.filename or name).replace(f"{name}/{path.name}", name)
            place = place.replace(name, str(path), 1)
            raise OSError(error.errno or errno.EIO, error.strerror or str(error), place) from error


def _new_folder(path: Path, home: int) -> tuple[str, int]:
    """Make and lock a temporary folder for a path in a folder; its name and its descriptor."""
    while True:
        name = f".{_short(path)}.{secrets.token_hex(4)}.tmp"
        if _is_in(home, name):
            continue
        os.mkdir(name, 0o700, dir_fd=home)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=home)
        except FileNotFoundError:  # it was taken for a stray one, and removed
            continue
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_in(home, name):
            return name, descriptor
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
    place = real_path(path)
    is_inside = place.is_dir()
    home = place if is_inside else place.parent
    with _temporary(place, home) as folder:
        file = folder / "token"
        text = secrets.token_hex(32)
        file.write_text(text)
        # Machines of another user may read it.
        folder.chmod(0o777 & ~_umask())
        yield Token(f"{folder.name}/{file.name}", text, is_inside)


def check_name(path: Path) -> None:
    """Refuse to write what has a name that JSON and libraries in C cannot hold."""
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        raise NameNotText(path) from None


def _put(fresh: Path, path: Path) -> None:
    """Give a file or folder its name, on the disk too; if that fails, take a new name back."""
    with opened(path.parent) as folder:
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
                    remove_in(folder, path.name)
            raise


def _is_in(folder: int, name: str) -> bool:
    """Whether a folder, by its descriptor, has a name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def check_new_file(path: Path) -> None:
    """Refuse what exists, before the work that would make it.

    A command that is refused does not come to its lock, so what the one left that made the file or
    folder, and was killed just after that, is removed here.
    """
    if path.exists():
        recover(path)
        remove_strays(real_path(path))
        raise PathExists(path, overwritable=False)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that is not empty, before the work that would fill it."""
    if not path.is_dir() or contents(path):
        check_new_file(path)


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


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with naming(path):
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


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 1) -> None:
    """Write JSON with a checksum of its bytes at the end."""
    text = json.dumps({**content, "sha256": NO_CHECKSUM}, indent=indent, ensure_ascii=False)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    before, after = text.rsplit(NO_CHECKSUM, 1)
    write_text(path, f"{before}{checksum}{after}")


def open_text(path: Path, mode: Literal["a", "w"]) -> IO[str]:
    """Open a regular file to write it in its place, which no reader depends on."""
    return open(path, mode, encoding="utf-8", opener=regular_descriptor)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def _exchange(fresh: Path, path: Path, *, former: int) -> None:
    """Replace a folder, by its descriptor, by another, which gets its name.

    A folder that has taken the name meanwhile is put back, and `FolderMoved` is raised. If the
    process is killed in between, `recover` finds the former one.
    """
    if _exchange_names(fresh, path):
        try:
            _check_is(fresh, former, path)
            with naming(path):
                sync(path.parent)  # the former folder is deleted only then
        except (OSError, FolderMoved):
            _exchange_names(fresh, path)
            raise
        return
    aside = hidden(path, "old")
    remove_path(aside)
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
        raise FolderMoved(name, now=place_of(folder))


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
        for file in (hidden(path, "lock"), path / INNER_LOCK):
            if file.exists() and has_locks(file.parent):
                is_left(file, remove=True)
    with suppress(OSError):  # of another user, or recovered by another process
        if not path.exists():
            hidden(path, "old").rename(path)
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
        if candidate.suffix == ".tmp" and TEMPORARY.fullmatch(candidate.name) and is_left(candidate)
    ]


def remove_strays(path: Path, *, inside: bool = True) -> None:
    for stray in strays(path, inside=inside):
        is_left(stray, remove=True)


def is_left(stray: Path, *, remove: bool = False) -> bool:
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
            remove_path(stray)
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


def remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def has_locks(folder: Path) -> bool:
    """Whether the file system has locks; on others, the existence of a file is the lock."""
    device = folder.stat().st_dev
    if device not in _HAS_LOCKS:
        has_locks = True
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            has_locks = error.errno not in NO_LOCKS
        _HAS_LOCKS[device] = has_locks
    return _HAS_LOCKS[device]


def hidden(path: Path, suffix: str) -> Path:
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

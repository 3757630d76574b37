"""Atomic writes of files and folders: a reader never sees an incomplete one."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from dualkg.errors import RequestError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block succeeds, and is deleted when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    fresh = Path(name)
    try:
        yield fresh
        fresh.chmod(0o666 & ~_umask())
        with fresh.open("rb") as written:
            os.fsync(written.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def atomic_folder(
    path: Path, *, existing: Literal["refuse", "keep", "replace"] = "refuse", last: str = ""
) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block succeeds, and is deleted when it fails.

    An existing folder is kept, replaced or refused; an empty one is filled, the file named `last` last.
    """
    path = path.absolute()
    filling = path.is_dir() and not any(path.iterdir())
    parent = path if filling else path.parent
    parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent))
    try:
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        if filling:
            for child in sorted(fresh.iterdir(), key=lambda child: child.name == last):
                child.rename(path / child.name)
        elif existing == "replace" and path.exists():
            _swap(fresh, path)
        else:
            try:
                fresh.replace(path)
            except OSError:
                if existing != "keep" or not path.is_dir():
                    raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that is not empty, before the work that would fill it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(f"{path} exists already. Name a new folder with --out.")


def _swap(fresh: Path, path: Path) -> None:
    """Replace a folder by another."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        path.rename(aside / "old")
        fresh.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a copy if the file system has none."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        with atomic_write(target) as fresh:
            shutil.copyfile(source, fresh)


def read_json(path: Path) -> Any:
    """The content of a JSON file; a damaged one raises `RequestError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{path} is damaged: it is not JSON ({error}).") from None


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

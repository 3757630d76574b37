"""Writing files so that a reader, or a kill, never meets half of one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` that takes its place when the block ends well, and vanishes when it does not."""
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
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder that becomes `path` when the block ends well; what another process put there first stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        try:
            fresh.replace(path)
        except OSError:
            if not path.is_dir():  # a folder that is there already, and not empty, is no failure
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

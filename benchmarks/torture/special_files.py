"""Files that are no plain files: pipes, sockets, endless devices, and sparse ones."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

SPARSE_BYTES = 10 << 30


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_sparse(path: Path) -> None:
    """A file with a little content, then a hole."""
    path.write_bytes(b"{")
    os.truncate(path, SPARSE_BYTES)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "endless": make_endless,
    "socket": make_socket,
    "sparse": make_sparse,
}


def replace_by_special(path: Path, kind: str) -> None:
    """Put a special file in the place of a file or folder, which need not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    SPECIAL[kind](path)

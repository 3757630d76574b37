"""The files of `torch.distributed.checkpoint`, in the folder that is held."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem

from dualkg.files import create_file, make_folder


class HeldFiles(FileSystem):
    """Folders and files are made below the folder that is held, whatever has its name now."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to write it."""
        if mode != "wb":
            raise ValueError(f"files are only written here, and not opened as {mode}")
        with create_file(Path(path)) as file:
            yield cast(io.IOBase, file)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder, and those above it."""
        make_folder(Path(path))

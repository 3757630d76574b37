"""Triton kernels, each with the function that launches it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def obstacle() -> str | None:
    """Why kernels cannot be compiled here, as the end of a sentence: Triton starts them by a bit of C."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "clang", "gcc") if name):
        return "needs a C compiler, which Triton calls; neither gcc nor clang is here"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "needs the headers of Python (Debian's python3-dev), which Triton compiles against"
    return None

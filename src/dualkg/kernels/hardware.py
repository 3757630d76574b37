"""What this machine can compute with: Triton kernels, bfloat16 products, TF32 products."""

import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # the last is ARM's


@cache
def gpu_kernels_unavailable() -> str | None:
    """Why Triton kernels cannot be compiled here, as the end of a sentence, or None."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    compilers = [os.environ.get("CC", ""), "clang", "gcc"]
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        return "needs a C compiler, which Triton calls; neither gcc nor clang is here"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "needs the headers of Python (Debian's python3-dev), which Triton compiles against"
    return None


@cache
def has_bf16_products(description: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bfloat16 matrix products; False if Linux does not report it."""
    if not description.is_file():
        return False
    text = description.read_text(encoding="utf-8", errors="replace")
    features = re.search(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)
    return features is not None and not BF16_FLAGS.isdisjoint(features[1].split())


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """With "tf32", compute float32 products on a GPU in TF32 within the block.

    Any other precision changes nothing.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if precision == "tf32":
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before

"""Sums over coordinates of a function of the difference, for all pairs of rows, without an array of the differences.

A coordinate is one number or two; a row holds all its first numbers, then all its second ones. The function is the
modulus, |d|, or |sin d|. Both are even, so what gives the gradient of one side gives that of the other.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # the last is ARM's


@cache
def has_bf16_products(description: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor itself multiplies matrices of bfloat16; not known, so False, where Linux does not say."""
    if not description.is_file():
        return False
    for line in description.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return not BF16_FLAGS.isdisjoint(flags.split())
    return False


def apply_to(vectors: Tensor) -> bool:
    """Whether there is a kernel for such vectors here."""
    if vectors.is_cuda:
        return vectors.dtype == torch.float32 and obstacle() is None
    from dualkg.kernels.cpu import compile  # here, for it imports numba

    return compile.HAS_NUMBA and vectors.dtype in (torch.float32, torch.float64)


def sums_of_moduli(one: Tensor, other: Tensor, *, parts: int) -> Tensor:
    """Σ|x − y| for each of `(batch, width)` and each of `(n, width)`, by coordinates of some numbers: `(batch, n)`."""
    found: Tensor = _Sums.apply(one, other, parts, False)  # type: ignore[no-untyped-call]
    return found


def sums_of_sines(one: Tensor, other: Tensor) -> Tensor:
    """Σ|sin(x − y)| for each of `(batch, width)` and each of `(n, width)`: `(batch, n)`."""
    found: Tensor = _Sums.apply(one, other, 2, True)  # type: ignore[no-untyped-call]
    return found


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, parts: int, sine: bool) -> Tensor:
        one, other = (_sines_and_cosines(angles) if sine else angles.contiguous() for angles in (one, other))
        ctx.save_for_backward(one, other)
        ctx.choices = {"parts": parts, "sine": sine}
        found: Tensor = _kernels(one).sums(one, other, **ctx.choices)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (one, other), (slope,) = ctx.saved_tensors, upstream
        gradient = _kernels(one).gradient
        to_one = gradient(one, other, slope, **ctx.choices) if ctx.needs_input_grad[0] else None
        to_other = gradient(other, one, slope.T, **ctx.choices) if ctx.needs_input_grad[1] else None
        return to_one, to_other, None, None


def _sines_and_cosines(angles: Tensor) -> Tensor:
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _kernels(vectors: Tensor) -> ModuleType:
    if vectors.is_cuda:
        from dualkg.kernels.gpu import distances as on_gpu

        return on_gpu
    from dualkg.kernels.cpu import distances as on_cpu

    return on_cpu


# Steele, Lea and Flood's SplitMix64: a bijection of 64 bits, so that no two numbers become the same.
UNSIGNED = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STEP, FIRST, SECOND = (value - 2**64 if value >= 2**63 else value for value in UNSIGNED)


def mixed(bits: Tensor) -> Tensor:
    """Every bit of an int64 depends on all of them."""
    if bits.is_cuda and obstacle() is None:
        from dualkg.kernels.gpu import distances as on_gpu

        return on_gpu.mixed(bits, first=UNSIGNED[1], second=UNSIGNED[2])
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits = (bits ^ shifted(bits, shift)) * factor
    return bits ^ shifted(bits, 31)


def shifted(bits: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in: PyTorch's own shift repeats the sign."""
    return torch.bitwise_and(bits >> places, 2 ** (64 - places) - 1)


def chained(seed: int, *columns: Tensor) -> Tensor:
    """One number a row, from the seed and from what stands in each of several columns `(rows,)`, in their order."""
    start = mixed(torch.full_like(columns[0], seed) * STEP)
    for column in columns:
        start = mixed(start + column * STEP)
    return start


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """With "tf32", products of float32 on a GPU are for a while in TF32; with anything else, as they were."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if precision == "tf32":
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class Targets(NamedTuple):
    """Those of question q are `entities[starts[q] : starts[q + 1]]`; each counts in the loss by its share."""

    entities: Tensor
    shares: Tensor
    starts: Tensor

    @staticmethod
    def one_each(entities: Tensor, shares: Tensor) -> Targets:
        """Of questions with one answer."""
        return Targets(entities, shares, torch.arange(len(entities) + 1, device=entities.device))

    def part(self, first: int, last: int) -> Targets:
        """Of the questions from `first` to before `last`."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        return Targets(self.entities[begin:end], self.shares[begin:end], self.starts[first : last + 1] - begin)

    @property
    def questions(self) -> Tensor:
        """The question of each answer."""
        counts = self.starts.diff()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

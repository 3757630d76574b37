"""Sums over coordinates of |d| or |sin d| for the differences d of all pairs of rows, without an
array of differences.

A coordinate is one number or two; a row holds the first numbers of all coordinates, then the second
ones. Both functions are even, so one kernel computes the gradients of both sides.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dualkg.kernels.hardware import gpu_kernels_unavailable


def available_for(vectors: Tensor) -> bool:
    """Whether there is a kernel for the device and type of these vectors."""
    if vectors.is_cuda:
        return vectors.dtype == torch.float32 and gpu_kernels_unavailable() is None
    from dualkg.kernels import cpu  # imports numba

    return cpu.HAS_NUMBA and vectors.dtype in (torch.float32, torch.float64)


def pairwise_modulus_sums(one: Tensor, other: Tensor, *, parts: int) -> Tensor:
    """Σ|x − y| for each of `(batch, width)` and each of `(n, width)`, `parts` numbers per
    coordinate: `(batch, n)`.
    """
    found: Tensor = _Sums.apply(one, other, parts, False)  # type: ignore[no-untyped-call]
    return found


def pairwise_sine_sums(one: Tensor, other: Tensor) -> Tensor:
    """Σ|sin(x − y)| for each of `(batch, width)` and each of `(n, width)`: `(batch, n)`."""
    found: Tensor = _Sums.apply(one, other, 2, True)  # type: ignore[no-untyped-call]
    return found


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, parts: int, sine: bool) -> Tensor:
        if sine:
            one, other = (
                torch.cat([angles.sin(), angles.cos()], dim=-1) for angles in (one, other)
            )
        one = one.contiguous()
        other = other.contiguous()
        ctx.save_for_backward(one, other)
        ctx.choices = {"parts": parts, "sine": sine}
        found: Tensor = _kernels(one).pairwise_sums(one, other, **ctx.choices)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (one, other), (slope,) = ctx.saved_tensors, upstream
        gradient = _kernels(one).pairwise_gradient
        to_one = gradient(one, other, slope, **ctx.choices) if ctx.needs_input_grad[0] else None
        to_other = gradient(other, one, slope.T, **ctx.choices) if ctx.needs_input_grad[1] else None
        return to_one, to_other, None, None


def _kernels(vectors: Tensor) -> ModuleType:
    return import_module("dualkg.kernels.gpu.pairwise" if vectors.is_cuda else "dualkg.kernels.cpu")

"""Sums over coordinates of |d| or |sin d| for the differences d of all pairs of rows.

No array of differences is made. A coordinate is one number or two; a row holds the first numbers of
all coordinates, then the second ones. Both functions are even, so one kernel computes the gradients
of both sides.
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
    # The import takes time, because it imports numba.
    from dualkg.kernels import cpu

    return cpu.HAS_NUMBA and vectors.dtype in (torch.float32, torch.float64)


def pairwise_modulus_sums(queries: Tensor, candidates: Tensor, *, parts: int) -> Tensor:
    """Σ|x − y| for each of `(batch, width)` and each of `(n, width)`: `(batch, n)`.

    A coordinate has `parts` numbers: one, or the two of a complex number.
    """
    sums: Tensor = _Sums.apply(queries, candidates, parts, False)  # type: ignore[no-untyped-call]
    return sums


def pairwise_sine_sums(queries: Tensor, candidates: Tensor) -> Tensor:
    """Σ|sin(x − y)| for each of `(batch, width)` and each of `(n, width)`: `(batch, n)`."""
    sums: Tensor = _Sums.apply(queries, candidates, 2, True)  # type: ignore[no-untyped-call]
    return sums


class _Sums(torch.autograd.Function):
    """The sums of all pairs, `(batch, n)`; angles are given to kernels as sines and cosines."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor, parts: int, sine: bool) -> Tensor:
        if sine:
            queries = _sines_and_cosines(queries)
            candidates = _sines_and_cosines(candidates)
        queries = queries.contiguous()
        candidates = candidates.contiguous()

        ctx.save_for_backward(queries, candidates)
        ctx.options = {"parts": parts, "sine": sine}
        sums: Tensor = _kernels(queries).pairwise_sums(queries, candidates, **ctx.options)
        return sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        queries, candidates = ctx.saved_tensors
        [grad_sums] = upstream
        gradient = _kernels(queries).pairwise_gradient
        grad_queries = None
        grad_candidates = None
        if ctx.needs_input_grad[0]:
            grad_queries = gradient(queries, candidates, grad_sums, **ctx.options)
        if ctx.needs_input_grad[1]:
            grad_candidates = gradient(candidates, queries, grad_sums.T, **ctx.options)
        return grad_queries, grad_candidates, None, None


def _sines_and_cosines(angles: Tensor) -> Tensor:
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _kernels(vectors: Tensor) -> ModuleType:
    where = "gpu.pairwise" if vectors.is_cuda else "cpu_pairwise"
    return import_module(f"dualkg.kernels.{where}")

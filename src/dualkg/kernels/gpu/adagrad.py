"""Adagrad, and the low-precision copy of a table, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _adagrad(table, sums, gradient, copy, learning_rate, eps, num_numbers, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_numbers
    rate = tl.load(learning_rate)
    slope = tl.load(gradient + places, mask=inside).to(tl.float32)
    seen = tl.load(sums + places, mask=inside) + slope * slope
    value = tl.load(table + places, mask=inside) - rate * slope / (tl.sqrt(seen) + eps)
    tl.store(sums + places, seen, mask=inside)
    tl.store(table + places, value, mask=inside)
    if HAS_COPY:
        tl.store(copy + places, value.to(copy.dtype.element_ty), mask=inside)


def adagrad_(
    table: Tensor, sums: Tensor, gradient: Tensor, copy: Tensor | None, learning_rate: Tensor, *, eps: float
) -> None:
    """Step a float32 table by its gradient, and write its `copy`; padding rows of either are left alone.

    The learning rate is a tensor on the device, so that a captured step can change it.
    """
    num_numbers = table.numel()
    grid = (triton.cdiv(num_numbers, BLOCK),)
    target = table if copy is None else copy
    _adagrad[grid](
        table, sums, gradient, target, learning_rate, eps, num_numbers, HAS_COPY=copy is not None, BLOCK=BLOCK
    )

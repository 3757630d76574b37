"""Adagrad, and the bfloat16 copy of a table, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import HAS_NUMBA, bits_of, compiled, in_parallel, narrowed, widened

BLOCK = 1 << 20  # numbers that the plain form takes at a time: enough for all threads, and few beside the table


def adagrad_(
    table: Tensor, sums: Tensor, gradient: Tensor, copy: Tensor | None, learning_rate: float | Tensor, *, eps: float
) -> None:
    """Step a table by its gradient, and write its bfloat16 `copy`; padding rows of either are left alone."""
    num_numbers = table.numel()
    values, totals, slopes = (tensor.view(-1)[:num_numbers] for tensor in (table, sums, gradient))
    copies = None if copy is None else copy.view(-1)[:num_numbers]
    if HAS_NUMBA and table.dtype == torch.float32:
        numbers, bits = (None, slopes) if gradient.dtype == torch.bfloat16 else (slopes, None)
        arrays = [None if tensor is None else bits_of(tensor) for tensor in (values, totals, numbers, bits, copies)]
        in_parallel(_adagrad, num_numbers, *arrays, np.float32(float(learning_rate)), np.float32(eps))
    else:
        _in_blocks(values, totals, slopes, copies, float(learning_rate), eps)


def _in_blocks(
    table: Tensor, sums: Tensor, gradient: Tensor, copy: Tensor | None, learning_rate: float, eps: float
) -> None:
    """The same in PyTorch."""
    for first in range(0, len(table), BLOCK):
        block = slice(first, first + BLOCK)
        slope = gradient[block].to(table.dtype)
        sums[block].addcmul_(slope, slope)
        table[block].addcdiv_(slope, sums[block].sqrt().add_(eps), value=-learning_rate)
        if copy is not None:
            copy[block] = table[block]


@compiled("contract")
def _adagrad(first, last, table, sums, gradient, halves, copy, rate, eps):
    """Step the numbers from first to last; the gradient is `halves`, the bits of bfloat16, where that is given."""
    values, totals = table[first:last], sums[first:last]
    if gradient is not None:
        slopes = gradient[first:last]
    if halves is not None:
        slopes = halves[first:last]
    if copy is not None:
        copies = copy[first:last]
    for place in range(len(values)):
        if gradient is not None:
            slope = slopes[place]
        if halves is not None:
            slope = widened(slopes[place])
        total = totals[place] + slope * slope
        value = values[place] - rate * slope / (np.sqrt(total) + eps)
        totals[place] = total
        values[place] = value
        if copy is not None:
            copies[place] = narrowed(value)

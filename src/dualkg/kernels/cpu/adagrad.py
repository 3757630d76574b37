"""Adagrad, and the bfloat16 copy of a table, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import HAS_NUMBA, bits_of, compiled, in_parallel, narrowed, widened

BLOCK = 1 << 20  # numbers per block of the plain form: enough for all threads, and few compared to the table


def adagrad_(
    table: Tensor, sums: Tensor, gradient: Tensor, copy: Tensor | None, learning_rate: float | Tensor, *, eps: float
) -> None:
    """Step a table by its gradient, and write its bfloat16 `copy`; padding rows of either are left alone."""
    num_numbers = table.numel()
    values, totals, gradients = (tensor.view(-1)[:num_numbers] for tensor in (table, sums, gradient))
    copies = None if copy is None else copy.view(-1)[:num_numbers]
    if HAS_NUMBA and table.dtype == torch.float32:
        numbers, bits = (None, gradients) if gradient.dtype == torch.bfloat16 else (gradients, None)
        arrays = [None if tensor is None else bits_of(tensor) for tensor in (values, totals, numbers, bits, copies)]
        in_parallel(_adagrad, num_numbers, *arrays, np.float32(float(learning_rate)), np.float32(eps))
    else:
        _in_blocks(values, totals, gradients, copies, float(learning_rate), eps)


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
def _adagrad(first, last, table, sums, gradient, bf16_gradient, copy, rate, eps):
    """Step the numbers from first to last; `bf16_gradient`, if given, has the bits of a bfloat16 gradient."""
    values, totals = table[first:last], sums[first:last]
    if gradient is not None:
        gradients = gradient[first:last]
    if bf16_gradient is not None:
        gradients = bf16_gradient[first:last]
    if copy is not None:
        copies = copy[first:last]
    for i in range(len(values)):
        if gradient is not None:
            slope = gradients[i]
        if bf16_gradient is not None:
            slope = widened(gradients[i])
        total = totals[i] + slope * slope
        value = values[i] - rate * slope / (np.sqrt(total) + eps)
        totals[i] = total
        values[i] = value
        if copy is not None:
            copies[i] = narrowed(value)

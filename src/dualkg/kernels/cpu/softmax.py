"""Softmax cross entropy and logsumexp of rows while they are in the processor's cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import HAS_NUMBA, bits_of, compiled, in_parallel, narrowed, widened
from dualkg.kernels.targets import Targets

BLOCK = 256  # rows per block of the plain form, which copies bfloat16 to float32
CHUNK = 1024  # numbers summed in float32 before the sum continues in float64
# Less than e⁻⁶⁴ of the largest counts as 0, which also avoids denormal numbers: they are slow.
LOWEST = np.float32(-64)
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
# A float32 of this size has no fraction, and its last bits are those of an integer.
LARGE = np.float32(1.5 * 2**23)
# exp on |x| ≤ ln 2 / 2 is 1 + x + x²(C2 + C3 x + …), these fitted to the least relative error, 3e-9.
C2, C3, C4, C5, C6 = (np.float32(c) for c in (0.49999994, 0.1666652, 0.0416684, 0.00836885, 0.00138143))
ZERO, ONE = np.float32(0), np.float32(1)
MANTISSA, BITS_OF_ONE = np.int32(23), np.int32(0x3F800000)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int) -> Tensor:
    """Overwrite scores `(queries, padded columns)` by the gradient of Σ weight · −log softmax(scores)[target].

    Only the first `num_columns` are scores; the rest become 0. Returns the loss of each query, `(queries,)`.
    """
    if not HAS_NUMBA or scores.dtype not in (torch.float32, torch.bfloat16):
        return _in_blocks(scores, targets, num_columns)
    losses = torch.empty(len(scores))
    if len(scores):
        # Flat, since numba does not know that the rows of a wider array are contiguous.
        (num_rows, width), stride = scores.shape, scores.stride(0)
        flat = bits_of(scores.as_strided(((num_rows - 1) * stride + width,), (1,)))
        of_targets = (
            array.contiguous().numpy() for array in (targets.entities, targets.weights.float(), targets.starts)
        )
        arrays = flat, *of_targets, losses.numpy()
        in_parallel(
            _bf16_rows if flat.dtype == np.uint16 else _float32_rows, num_rows, *arrays, num_columns, width, stride
        )
    return losses


def _in_blocks(scores: Tensor, targets: Targets, num_columns: int) -> Tensor:
    """The same in PyTorch."""
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    losses = torch.empty(len(scores), dtype=exact)
    for first in range(0, len(scores), BLOCK):
        block, loss = (rows[first : first + BLOCK] for rows in (scores, losses))
        values, found = block[:, :num_columns].to(exact), targets.part(first, first + len(block))
        queries, weights = found.queries, found.weights.to(exact)
        positions, top = (queries, found.entities), values.amax(dim=-1)
        query_weights = loss.new_zeros(len(block)).index_add_(0, queries, weights)
        loss.zero_().index_add_(0, queries, weights * (top[queries] - values[positions]))
        torch.softmax(values, dim=-1, out=values)
        loss -= query_weights * values.amax(dim=-1).log()  # log-sum-exp minus the maximum
        values *= query_weights[:, None]
        values.index_put_(positions, -weights, accumulate=True)
        block[:, :num_columns] = values
        block[:, num_columns:] = 0
    return losses


@compiled()
def _float32_rows(first, last, scores, targets, weights, starts, losses, num_columns, width, stride):
    """Rows of float32, each overwritten at every pass."""
    for row in range(first, last):
        start, begin, end = row * stride, starts[row], starts[row + 1]
        values = scores[start : start + num_columns]
        top = np.int32(_largest(values.view(np.int32), np.int32(0x7FFFFFFF))).view(np.float32)
        weight = distance = 0.0
        for i in range(begin, end):
            weight += weights[i]
            distance += weights[i] * (top - values[targets[i]])
        total = 0.0
        for column in range(0, num_columns, CHUNK):
            total += _exponentials(values[column : column + CHUNK], top)
        losses[row] = distance + weight * np.log(total)
        _scale(values, np.float32(weight / total))
        for i in range(begin, end):
            values[targets[i]] -= weights[i]
        scores[start + num_columns : start + width] = ZERO


@compiled()
def _bf16_rows(first, last, scores, targets, weights, starts, losses, num_columns, width, stride):
    """Rows of bfloat16, given as their bits; a row is converted to float32 between passes."""
    values = np.empty(num_columns, np.float32)
    for row in range(first, last):
        start, begin, end = row * stride, starts[row], starts[row + 1]
        bits = scores[start : start + num_columns]
        top = widened(np.uint16(_largest(bits.view(np.int16), np.int16(0x7FFF))))
        weight = distance = 0.0
        for i in range(begin, end):
            weight += weights[i]
            distance += weights[i] * (top - widened(bits[targets[i]]))
        total = 0.0
        for column in range(0, num_columns, CHUNK):
            total += _bf16_exponentials(bits[column : column + CHUNK], values[column : column + CHUNK], top)
        losses[row] = distance + weight * np.log(total)
        if weight > 0.0:
            for i in range(begin, end):  # before scaling, so that a repeated target counts twice
                values[targets[i]] -= np.float32(weights[i] / weight * total)
        _scale_to_bf16(values, np.float32(weight / total), bits)
        scores[start + num_columns : start + width] = 0


@compiled()
def _largest(bits, digits):
    """The bits of the largest number, or of a NaN: LLVM vectorizes a maximum of floats only without NaN.

    The bits of floats are ordered like integers, except that those below the sign of negative ones are inverted.
    """
    largest = bits.dtype.type(~digits)
    for i in range(len(bits)):
        here = bits[i]
        ordered = bits.dtype.type(here ^ digits if here < 0 else here)
        largest = max(largest, ordered)
    return bits.dtype.type(largest ^ digits if largest < 0 else largest)


@compiled("contract")
def exp(x):
    """exp(x) for x < 88 to a relative error of 1e-7; a call of the C library would prevent vectorization."""
    shifted = x * LOG2_E + LARGE
    rest = x - (shifted - LARGE) * LN_2
    square = rest * rest
    near_one = (ONE + rest) + square * ((C2 + rest * C3) + square * ((C4 + rest * C5) + square * C6))
    power = (np.float32(shifted).view(np.int32) << MANTISSA) + BITS_OF_ONE
    return ZERO if x < LOWEST else near_one * np.int32(power).view(np.float32)


@compiled("contract", "reassoc")
def _exponentials(values, top):
    """Overwrite numbers by exp(number − top) and sum them."""
    total = ZERO
    for i in range(len(values)):
        values[i] = exponential = exp(values[i] - top)
        total += exponential
    return total


@compiled("contract", "reassoc")
def _bf16_exponentials(bits, values, top):
    total = ZERO
    for i in range(len(bits)):
        values[i] = exponential = exp(widened(bits[i]) - top)
        total += exponential
    return total


@compiled()
def _scale(values, factor):
    for i in range(len(values)):
        values[i] *= factor


@compiled()
def _scale_to_bf16(values, factor, bits):
    for i in range(len(values)):
        bits[i] = narrowed(values[i] * factor)


__all__ = ["HAS_NUMBA", "logsumexp_rows"]

DIGITS = np.int32(0x7FFFFFFF)


def logsumexp_rows(scores: Tensor) -> Tensor:
    """Scores `(batch, n)` in float32, each row contiguous → `(batch,)`."""
    sums = torch.empty(len(scores))
    in_parallel(_rows, len(scores), scores.numpy(), sums.numpy())
    return sums


@compiled()
def _rows(first: int, last: int, scores: Any, sums: Any) -> None:
    for row in range(first, last):
        values = scores[row]
        top = np.int32(_largest(values.view(np.int32), DIGITS)).view(np.float32)
        total = 0.0
        for begin in range(0, len(values), CHUNK):
            total += _sum_of_exponentials(values[begin : begin + CHUNK], top)
        sums[row] = top + np.log(total)


@compiled("contract", "reassoc")
def _sum_of_exponentials(values: Any, top: Any) -> Any:
    total = ZERO
    for i in range(len(values)):
        total += exp(values[i] - top)
    return total

"""The logarithm of the sum of exp(score) over a row while it is in the cache. Loads numba; without it, never called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import HAS_NUMBA, bits_of, compiled, in_parallel, narrowed, widened
from dualkg.kernels.targets import Targets

BLOCK = 256  # rows that the plain form takes at a time: few enough to have bfloat16 in float32 beside it
CHUNK = 1024  # numbers summed in float32 before the sum goes on in float64
# What is less than e⁻⁶⁴ of the largest is taken for nothing, which also keeps clear of denormal numbers: they are slow.
LOWEST = np.float32(-64)
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
# A float32 as large as this has no digits behind the point, and its last bits are those of an integer.
LARGE = np.float32(1.5 * 2**23)
# exp on |x| ≤ ln 2 / 2 is 1 + x + x²(C2 + C3 x + …), these fitted to the least relative error, 3e-9.
C2, C3, C4, C5, C6 = (np.float32(c) for c in (0.49999994, 0.1666652, 0.0416684, 0.00836885, 0.00138143))
ZERO, ONE = np.float32(0), np.float32(1)
MANTISSA, BITS_OF_ONE = np.int32(23), np.int32(0x3F800000)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int) -> Tensor:
    """Overwrite scores `(queries, padded columns)` by the gradient of Σ weight · −log softmax(scores)[target].

    Only the first `num_columns` are scores; the rest become 0. What each query adds is returned, `(queries,)`.
    """
    if not HAS_NUMBA or scores.dtype not in (torch.float32, torch.bfloat16):
        return _in_blocks(scores, targets, num_columns)
    losses = torch.empty(len(scores))
    if len(scores):
        # One long array, for numba takes rows of a wider one to be no arrays of neighbouring numbers.
        (num_rows, width), stride = scores.shape, scores.stride(0)
        flat = bits_of(scores.as_strided(((num_rows - 1) * stride + width,), (1,)))
        of_targets = (
            array.contiguous().numpy() for array in (targets.entities, targets.weights.float(), targets.starts)
        )
        arrays = flat, *of_targets, losses.numpy()
        in_parallel(_halves if flat.dtype == np.uint16 else _floats, num_rows, *arrays, num_columns, width, stride)
    return losses


def _in_blocks(scores: Tensor, targets: Targets, num_columns: int) -> Tensor:
    """The same in PyTorch."""
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    losses = torch.empty(len(scores), dtype=exact)
    for first in range(0, len(scores), BLOCK):
        block, loss = (rows[first : first + BLOCK] for rows in (scores, losses))
        values, found = block[:, :num_columns].to(exact), targets.part(first, first + len(block))
        queries, weights = found.queries, found.weights.to(exact)
        places, top = (queries, found.entities), values.amax(dim=-1)
        query_weights = loss.new_zeros(len(block)).index_add_(0, queries, weights)
        loss.zero_().index_add_(0, queries, weights * (top[queries] - values[places]))
        torch.softmax(values, dim=-1, out=values)
        loss -= (
            query_weights * values.amax(dim=-1).log()
        )  # the largest is one in the sum, so this is the sum's logarithm
        values *= query_weights[:, None]
        values.index_put_(places, -weights, accumulate=True)
        block[:, :num_columns] = values
        block[:, num_columns:] = 0
    return losses


@compiled()
def _floats(first, last, scores, targets, weights, starts, losses, num_columns, width, stride):
    """Rows of float32, each overwritten at every pass."""
    for row in range(first, last):
        start, begin, end = row * stride, starts[row], starts[row + 1]
        values = scores[start : start + num_columns]
        top = np.int32(_largest(values.view(np.int32), np.int32(0x7FFFFFFF))).view(np.float32)
        weight = distance = 0.0
        for place in range(begin, end):
            weight += weights[place]
            distance += weights[place] * (top - values[targets[place]])
        total = 0.0
        for column in range(0, num_columns, CHUNK):
            total += _exponentials(values[column : column + CHUNK], top)
        losses[row] = distance + weight * np.log(total)
        _scale(values, np.float32(weight / total))
        for place in range(begin, end):
            values[targets[place]] -= weights[place]
        scores[start + num_columns : start + width] = ZERO


@compiled()
def _halves(first, last, scores, targets, weights, starts, losses, num_columns, width, stride):
    """Rows of bfloat16, given as their bits; between two passes a row is kept in float32."""
    values = np.empty(num_columns, np.float32)
    for row in range(first, last):
        start, begin, end = row * stride, starts[row], starts[row + 1]
        bits = scores[start : start + num_columns]
        top = widened(np.uint16(_largest(bits.view(np.int16), np.int16(0x7FFF))))
        weight = distance = 0.0
        for place in range(begin, end):
            weight += weights[place]
            distance += weights[place] * (top - widened(bits[targets[place]]))
        total = 0.0
        for column in range(0, num_columns, CHUNK):
            total += _exponentials_of_halves(bits[column : column + CHUNK], values[column : column + CHUNK], top)
        losses[row] = distance + weight * np.log(total)
        if weight > 0.0:
            for place in range(begin, end):  # before all is scaled, so that one that comes twice counts twice
                values[targets[place]] -= np.float32(weights[place] / weight * total)
        _scale_to_halves(values, np.float32(weight / total), bits)
        scores[start + num_columns : start + width] = 0


@compiled()
def _largest(bits, digits):
    """The bits of the largest of some numbers, or of a NaN; of floats LLVM would vectorise this only without NaN.

    The bits of floats are ordered as integers, but for the digits below the sign of negative ones.
    """
    largest = bits.dtype.type(~digits)
    for place in range(len(bits)):
        here = bits[place]
        ordered = bits.dtype.type(here ^ digits if here < 0 else here)
        largest = max(largest, ordered)
    return bits.dtype.type(largest ^ digits if largest < 0 else largest)


@compiled("contract")
def exp(x):
    """exp(x) for x < 88, to 1e-7 of it: a call of the C library's would keep the loop from being vectorised."""
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
    for place in range(len(values)):
        values[place] = exponential = exp(values[place] - top)
        total += exponential
    return total


@compiled("contract", "reassoc")
def _exponentials_of_halves(bits, values, top):
    total = ZERO
    for place in range(len(bits)):
        values[place] = exponential = exp(widened(bits[place]) - top)
        total += exponential
    return total


@compiled()
def _scale(values, weight):
    for place in range(len(values)):
        values[place] *= weight


@compiled()
def _scale_to_halves(values, weight, bits):
    for place in range(len(values)):
        bits[place] = narrowed(values[place] * weight)


__all__ = ["HAS_NUMBA", "logsumexp_rows"]

DIGITS = np.int32(0x7FFFFFFF)


def logsumexp_rows(scores: Tensor) -> Tensor:
    """Scores `(batch, n)` in float32, each row in one piece → `(batch,)`."""
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
    for place in range(len(values)):
        total += exp(values[place] - top)
    return total

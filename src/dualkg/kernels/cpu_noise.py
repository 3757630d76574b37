"""numba forms of the random numbers of `noise.py`."""

import numpy as np
from torch import Tensor

from dualkg.kernels.cpu import compiled, in_parallel
from dualkg.kernels.hashing import UNSIGNED_FIRST, UNSIGNED_SECOND, UNSIGNED_STEP

# Unsigned numbers of 64 bits: numba makes a float of a signed and an unsigned one.
HASH_STEP = np.uint64(UNSIGNED_STEP)
HASH_FIRST = np.uint64(UNSIGNED_FIRST)
HASH_SECOND = np.uint64(UNSIGNED_SECOND)
SHIFT_27 = np.uint64(27)
SHIFT_30 = np.uint64(30)
SHIFT_31 = np.uint64(31)
SHIFT_37 = np.uint64(37)
SHIFT_40 = np.uint64(40)
SHIFT_49 = np.uint64(49)
POSITION_BITS = np.uint64(2**12 - 1)
SIGN_BIT = np.uint64(1)
HALF_RANGE = np.int32(2**24)


def normal_rows_(numbers: Tensor, rows: Tensor, key: int, starts: Tensor, steps: Tensor) -> None:
    """`noise.fill_normal_` of float32 numbers, with the same bits."""
    arrays = (numbers.numpy(), rows.contiguous().numpy(), np.uint64(key % 2**64))
    in_parallel(_normal_rows, len(rows), *arrays, starts.numpy(), steps.numpy())


def uniform_rows_(numbers: Tensor, rows: Tensor, key: int, step: Tensor) -> None:
    """`noise.fill_uniform_` of float32 numbers, with the same bits."""
    arrays = (numbers.numpy(), rows.contiguous().numpy(), np.uint64(key % 2**64))
    in_parallel(_uniform_rows, len(rows), *arrays, np.float32(step.item()))


@compiled()
def _hashed(state):
    """SplitMix64 of a state."""
    bits = (state ^ (state >> SHIFT_30)) * HASH_FIRST
    bits = (bits ^ (bits >> SHIFT_27)) * HASH_SECOND
    return bits ^ (bits >> SHIFT_31)


@compiled()
def _normal_rows(first, last, numbers, rows, key, starts, steps):
    width = numbers.shape[1]
    for i in range(first, last):
        start = key + np.uint64(rows[i]) * np.uint64(width) * HASH_STEP
        for column in range(width):
            bits = _hashed(start + np.uint64(column + 1) * HASH_STEP)
            segment = bits >> SHIFT_49
            position = np.int32((bits >> SHIFT_37) & POSITION_BITS)
            value = starts[segment] + steps[segment] * np.float32(2 * position + 1)
            numbers[i, column] = -value if bits & SIGN_BIT else value


@compiled()
def _uniform_rows(first, last, numbers, rows, key, step):
    width = numbers.shape[1]
    for i in range(first, last):
        start = key + np.uint64(rows[i]) * np.uint64(width) * HASH_STEP
        for column in range(width):
            bits = _hashed(start + np.uint64(column + 1) * HASH_STEP)
            drawn = np.int32(bits >> SHIFT_40)
            numbers[i, column] = np.float32(2 * drawn + 1 - HALF_RANGE) * step

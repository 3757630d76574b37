"""SplitMix64: random numbers that depend on a seed and on ids alone, the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.kernels.hardware import gpu_kernels_unavailable

# Steele, Lea and Flood's SplitMix64: a bijection of 64 bits, so that no two numbers become the same.
UNSIGNED = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STEP, FIRST, SECOND = (value - 2**64 if value >= 2**63 else value for value in UNSIGNED)


def splitmix64(bits: Tensor) -> Tensor:
    """Every bit of an int64 depends on all of them."""
    if bits.is_cuda and gpu_kernels_unavailable() is None:
        from dualkg.kernels.gpu.hashing import splitmix64 as on_gpu

        return on_gpu(bits, first=UNSIGNED[1], second=UNSIGNED[2])
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits = (bits ^ shift_right(bits, shift)) * factor
    return bits ^ shift_right(bits, 31)


def shift_right(bits: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in: PyTorch's own shift repeats the sign."""
    return torch.bitwise_and(bits >> places, 2 ** (64 - places) - 1)


def hash_columns(seed: int, *columns: Tensor) -> Tensor:
    """One number a row, from the seed and from what stands in each of several columns `(rows,)`, in their order."""
    start = splitmix64(torch.full_like(columns[0], seed) * STEP)
    for column in columns:
        start = splitmix64(start + column * STEP)
    return start

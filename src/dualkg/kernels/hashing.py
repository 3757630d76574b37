"""SplitMix64: random numbers that depend on a seed and on ids alone, the same on every device."""

import torch
from torch import Tensor

from dualkg.kernels.hardware import gpu_kernels_unavailable

# SplitMix64 (Steele, Lea and Flood, 2014) is a bijection of 64 bits: different numbers have
# different hashes. Its constants are unsigned, and PyTorch computes with signed integers.
UNSIGNED_STEP = 0x9E3779B97F4A7C15
UNSIGNED_FIRST = 0xBF58476D1CE4E5B9
UNSIGNED_SECOND = 0x94D049BB133111EB
STEP = UNSIGNED_STEP - 2**64
FIRST = UNSIGNED_FIRST - 2**64
SECOND = UNSIGNED_SECOND - 2**64
DIGITS = 24  # binary digits in which a random number is compared with a share


def splitmix64(bits: Tensor) -> Tensor:
    """Hash int64 numbers: every bit of the result depends on all bits."""
    if bits.is_cuda and gpu_kernels_unavailable() is None:
        from dualkg.kernels.gpu.elementwise import splitmix64 as on_gpu

        return on_gpu(bits, first=UNSIGNED_FIRST, second=UNSIGNED_SECOND)
    bits = (bits ^ shift_right(bits, 30)) * FIRST
    bits = (bits ^ shift_right(bits, 27)) * SECOND
    return bits ^ shift_right(bits, 31)


def shift_right(bits: Tensor, shift: int) -> Tensor:
    """Logical shift; that of PyTorch repeats the sign bit."""
    return torch.bitwise_and(bits >> shift, 2 ** (64 - shift) - 1)


def reaches_share(hashes: Tensor, share: float) -> Tensor:
    """Whether each hash, as a number between 0 and 1, is at least `share`."""
    reached: Tensor = shift_right(hashes, 64 - DIGITS) >= round(share * 2**DIGITS)
    return reached


def hash_columns(seed: int, *columns: Tensor) -> Tensor:
    """One hash per row of the seed and of several columns `(rows,)`.

    It depends on the order of the columns.
    """
    hashes = splitmix64(torch.full_like(columns[0], seed) * STEP)
    for column in columns:
        hashes = splitmix64(hashes + column * STEP)
    return hashes

"""SplitMix64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers per program


@triton.jit
def _mix(bits, found, num, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(bits + positions, mask=positions < num, other=0).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    value = value ^ (value >> 31)
    tl.store(found + positions, value.to(tl.int64, bitcast=True), mask=positions < num)


def splitmix64(bits: Tensor, *, first: int, second: int) -> Tensor:
    """Hash an int64 tensor; the two factors are unsigned."""
    bits = bits.contiguous()
    found = torch.empty_like(bits)
    if num := bits.numel():
        _mix[(triton.cdiv(num, BLOCK),)](bits, found, num, first, second, BLOCK)
    return found

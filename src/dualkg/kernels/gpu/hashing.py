"""SplitMix64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a program


@triton.jit
def _mix(bits, found, num, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(bits + places, mask=places < num, other=0).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    value = value ^ (value >> 31)
    tl.store(found + places, value.to(tl.int64, bitcast=True), mask=places < num)


def splitmix64(bits: Tensor, *, first: int, second: int) -> Tensor:
    """An int64 tensor, and the two factors as they are without a sign."""
    bits = bits.contiguous()
    found = torch.empty_like(bits)
    if num := bits.numel():
        _mix[(triton.cdiv(num, BLOCK),)](bits, found, num, first, second, BLOCK)
    return found

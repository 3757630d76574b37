"""The order in which an epoch sees its triples: the same on every device, made where it is used."""

from __future__ import annotations

import torch
from torch import Tensor

# Steele, Lea and Flood's SplitMix64: a bijection of 64 bits, so that no two positions get the same key.
STEP, FIRST, SECOND = (
    value - 2**64 if value >= 2**63 else value for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def shuffled(size: int, *, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The numbers below `size` in an order that depends on seed and epoch alone, `(size,)`.

    Whole numbers are mixed and sorted, so the order needs no generator whose numbers differ between devices.
    """
    start = int(_mixed(_mixed(torch.tensor(seed) * STEP) + torch.tensor(epoch) * STEP))
    return torch.argsort(_mixed(torch.arange(size, device=device) * STEP + start))


def _mixed(bits: Tensor) -> Tensor:
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in: PyTorch's own shift repeats the sign."""
    return torch.bitwise_and(bits >> places, 2 ** (64 - places) - 1)

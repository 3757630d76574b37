"""How the processor calculates while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def tiny_numbers_as_zero() -> Iterator[None]:
    """Take numbers below 10⁻³⁸ for zero: processors are slow with them, and early in training there are many."""
    before = _takes_tiny_numbers_as_zero()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _takes_tiny_numbers_as_zero() -> bool:
    return bool(torch.tensor([2.0**-126]).mul(0.5) == 0)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the one that kernels are started on, where there are several."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

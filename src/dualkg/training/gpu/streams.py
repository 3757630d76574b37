"""The streams of trainings, the same for each: libraries keep a workspace for every stream that they have seen."""

from __future__ import annotations

from functools import cache

import torch


@cache
def stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a device for a purpose."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

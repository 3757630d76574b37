"""The sum of an epoch's losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """A sum, and of how many steps."""

    loss_sum: float
    step: int


class Tally:
    """Sums losses where they are; what it held a while ago can be read without making the device wait."""

    def __init__(self, device: torch.device, start: float) -> None:
        self._sum = torch.tensor(start, dtype=torch.float64, device=device)
        self._waits = device.type == "cuda"
        self._copy = torch.empty((), dtype=torch.float64, pin_memory=self._waits)
        self._under_way: tuple[torch.cuda.Event, int] | None = None

    def add(self, loss: Tensor) -> None:
        self._sum += loss

    def glance(self, step: int) -> Seen | None:
        """The sum, if it is there; on a GPU that of an earlier glance, whose copy has arrived meanwhile."""
        if not self._waits:
            return Seen(self.total(), step)
        seen = None
        if self._under_way and self._under_way[0].query():  # type: ignore[no-untyped-call]
            seen = Seen(float(self._copy), self._under_way[1])
            self._under_way = None
        if not self._under_way:
            self._copy.copy_(self._sum, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._under_way = (event, step)
        return seen

    def total(self) -> float:
        """The sum of all that was added, waited for."""
        return float(self._sum)

"""Which questions a batch asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Questions(NamedTuple):
    """Neighbours in a batch with the same head and relation ask one question, and are its answers.

    `starts` says where the answers of each begin, and where the last ones end; `rows` which question each triple is of.
    """

    starts: Tensor
    rows: Tensor

    @staticmethod
    def of(heads: Tensor, relations: Tensor, *, room: int | None = None) -> Questions:
        """The questions of a batch, or with `room` so many of them, the last ones without an answer."""
        rows = (asks_anew(heads, relations).cumsum(0) - 1).contiguous()
        num = int(rows[-1]) + 1 if room is None else room
        return Questions(torch.searchsorted(rows, torch.arange(num + 1, device=rows.device)), rows)

    @property
    def first(self) -> Tensor:
        """The first triple of each question; for one without an answer, any."""
        return self.starts[:-1].clamp(max=len(self.rows) - 1)

    @property
    def rows_of_first(self) -> Tensor:
        """The question that a triple is the first of, or −1."""
        here = torch.arange(len(self.rows), device=self.rows.device)
        return torch.where(self.starts[self.rows] == here, self.rows, -1)


def asks_anew(heads: Tensor, relations: Tensor) -> Tensor:
    """Whether a triple asks another question than the one before it."""
    same = (heads[1:] == heads[:-1]) & (relations[1:] == relations[:-1])
    return torch.cat([torch.ones_like(heads[:1], dtype=torch.bool), ~same])

"""The answers of a batch's questions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """Those of question q are `entities[starts[q] : starts[q + 1]]`; each counts in the loss by its share."""

    entities: Tensor
    shares: Tensor
    starts: Tensor

    @staticmethod
    def one_each(entities: Tensor, shares: Tensor) -> Targets:
        """Of questions with one answer."""
        return Targets(entities, shares, torch.arange(len(entities) + 1, device=entities.device))

    def part(self, first: int, last: int) -> Targets:
        """Of the questions from `first` to before `last`."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        return Targets(self.entities[begin:end], self.shares[begin:end], self.starts[first : last + 1] - begin)

    @property
    def questions(self) -> Tensor:
        """The question of each answer."""
        counts = self.starts.diff()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

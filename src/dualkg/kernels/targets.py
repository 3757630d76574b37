"""The target entities of a batch of queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """The targets of query q are `entities[starts[q] : starts[q + 1]]`, each with its weight in the loss."""

    entities: Tensor
    weights: Tensor
    starts: Tensor

    @staticmethod
    def one_each(entities: Tensor, weights: Tensor) -> Targets:
        """One target for each query."""
        return Targets(entities, weights, torch.arange(len(entities) + 1, device=entities.device))

    def part(self, first: int, last: int) -> Targets:
        """The targets of the queries `first` to `last` − 1."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        return Targets(self.entities[begin:end], self.weights[begin:end], self.starts[first : last + 1] - begin)

    @property
    def queries(self) -> Tensor:
        """The query of each target."""
        counts = self.starts.diff()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

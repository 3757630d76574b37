"""Groups of neighbouring triples in a batch that answer the same query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class QueryGroups(NamedTuple):
    """Neighbours in a batch with the same head and relation are answers of one query.

    The answers of query q are the triples `starts[q] : starts[q + 1]`; `rows` is the query of each triple.
    """

    starts: Tensor
    rows: Tensor

    @staticmethod
    def of(heads: Tensor, relations: Tensor, *, room: int | None = None) -> QueryGroups:
        """The queries of a batch, padded to `room` by queries without an answer."""
        rows = (starts_query(heads, relations).cumsum(0) - 1).contiguous()
        num = int(rows[-1]) + 1 if room is None else room
        return QueryGroups(torch.searchsorted(rows, torch.arange(num + 1, device=rows.device)), rows)

    @property
    def first(self) -> Tensor:
        """The first triple of each query; any triple for a query without an answer."""
        return self.starts[:-1].clamp(max=len(self.rows) - 1)

    @property
    def rows_of_first(self) -> Tensor:
        """The query that a triple is the first of, or −1."""
        here = torch.arange(len(self.rows), device=self.rows.device)
        return torch.where(self.starts[self.rows] == here, self.rows, -1)


def starts_query(heads: Tensor, relations: Tensor) -> Tensor:
    """Whether a triple has another head or relation than the one before it, `(batch,)`."""
    same = (heads[1:] == heads[:-1]) & (relations[1:] == relations[:-1])
    return torch.cat([torch.ones_like(heads[:1], dtype=torch.bool), ~same])

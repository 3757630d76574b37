"""The vectors of a batch of triples, as losses and regularizers see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from dualkg.models.base import EmbeddingModel, Side


@dataclass
class Factors:
    """The vectors of a batch, `(batch, width)`, each gathered or mapped when first asked for, and then kept."""

    model: EmbeddingModel
    given_heads: Tensor | None
    given_relations: Tensor | None
    given_tails: Tensor | None

    @property
    def heads(self) -> Tensor:
        return _given(self.given_heads, "heads")

    @property
    def relations(self) -> Tensor:
        return _given(self.given_relations, "relations")

    @property
    def tails(self) -> Tensor:
        return _given(self.given_tails, "tails")

    @cached_property
    def head(self) -> Tensor:
        return rows(self.model.head_table, self.heads)

    @cached_property
    def tail(self) -> Tensor:
        return rows(self.model.tail_table, self.tails)

    def candidates(self, ids: Tensor, *, side: Side) -> Tensor:
        """Rows of entities in the place of the tails, or heads, `(…, width)`.

        If it is the first that is asked of the batch, its heads and tails are gathered by the same look-up: each
        look-up costs a backward pass a gradient as large as the table.
        """
        model = self.model
        gathered = not {"head", "tail"}.isdisjoint(vars(self))
        if gathered or model.two_entity_tables or self.given_heads is None or self.given_tails is None:
            return rows(model.tail_table if side == "tail" else model.head_table, ids)
        parts = (self.given_heads, self.given_tails, ids.flatten())
        found = rows(model.head_table, torch.cat(parts))
        self.head, self.tail, chosen = torch.split(found, [len(part) for part in parts])
        return chosen.view(*ids.shape, -1)

    @cached_property
    def relation(self) -> Tensor:
        """The rows of the relations. Only for diagonal models: a matrix per triple must never be gathered."""
        return rows(self.model.relations, self.relations)

    @cached_property
    def relation_norm(self) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`."""
        return self.model.relation_norms(self.relations)

    @cached_property
    def mapped_head(self) -> Tensor:
        return self.model.map_head(self.head, self.relations)

    @cached_property
    def mapped_tail(self) -> Tensor:
        return self.model.map_tail(self.tail, self.relations)

    @property
    def tail_gap(self) -> Tensor:
        """What the tail lacks of the mapped head: the dual on the tail's side scores by its length."""
        return self.mapped_head - self.tail

    @property
    def head_gap(self) -> Tensor:
        return self.mapped_tail - self.head


def rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table by id. An embedding look-up sums its gradient in a fixed order; indexing does not."""
    return F.embedding(ids, table)


def _given(ids: Tensor | None, what: str) -> Tensor:
    if ids is None:
        raise ValueError(f"these factors are of queries that do not give their {what}")
    return ids

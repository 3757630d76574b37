"""The vectors of a batch of triples, as losses and regularizers see them."""

from __future__ import annotations

from collections.abc import Sequence
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
    def tail_residual(self) -> Tensor:
        """What the tail lacks of the mapped head: the dual on the tail's side scores by its length."""
        return self.mapped_head - self.tail

    @property
    def head_residual(self) -> Tensor:
        return self.mapped_tail - self.head


def rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table by id. An embedding look-up sums its gradient in a fixed order; indexing does not."""
    return F.embedding(ids, table)


def _given(ids: Tensor | None, what: str) -> Tensor:
    if ids is None:
        raise ValueError(f"these factors are of queries that do not give their {what}")
    return ids


MOST_PADDING = 32  # rows with their padding for each row, up to which a GPU multiplies all groups at once


class RelationGroups:
    """The rows of a batch by their relation ids `(batch,)`; `distinct` are the relations in the order of the groups."""

    def __init__(self, relations: Tensor) -> None:
        self.order = torch.argsort(relations, stable=True)
        self.distinct, counts = torch.unique_consecutive(relations[self.order], return_counts=True)
        self.sizes: list[int] = counts.tolist()

    def of(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors `(batch, width)` → those of each relation."""
        return torch.split(rows(vectors, self.order), self.sizes)

    def slots(self, room: int) -> Tensor:
        """The place of each row of the batch where every group has so much room, `(batch,)`."""
        counts = torch.tensor(self.sizes, device=self.order.device)
        numbers = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        behind = torch.arange(len(self.order), device=counts.device) - (counts.cumsum(0) - counts)[numbers]
        return torch.empty_like(self.order).index_copy_(0, self.order, numbers * room + behind)

    def joined(self, parts: Sequence[Tensor], *, empty: Tensor) -> Tensor:
        """What was made of each group, in the order of the batch; `empty` where the batch has no row."""
        return rows(torch.cat(list(parts)), torch.argsort(self.order)) if parts else empty


def multiply_groups(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """Each vector times the matrix of its relation, `(num_groups, width, width)`, one for each group."""
    if vectors.is_cuda and groups.sizes and len(groups.sizes) * max(groups.sizes) <= MOST_PADDING * len(vectors):
        return padded_products(matrices, groups, vectors)
    return products(matrices, groups, vectors)


def products(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """Group by group."""
    parts = [group @ matrix for group, matrix in zip(groups.of(vectors), matrices.unbind(), strict=True)]
    return groups.joined(parts, empty=vectors)


def padded_products(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """All groups in one product, filled up with zeros to the largest: on a GPU many calls cost more than zeros do."""
    num_groups, largest = len(groups.sizes), max(groups.sizes)
    slots = groups.slots(largest)
    padded = vectors.new_zeros(num_groups * largest, vectors.shape[1]).index_copy(0, slots, vectors)
    return rows((padded.view(num_groups, largest, -1) @ matrices).flatten(0, 1), slots)

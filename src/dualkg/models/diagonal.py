"""What the models share whose relations act on each coordinate alone."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from dualkg.data.graph import GraphShape
from dualkg.models.base import BilinearModel, InitScale, rows


class DiagonalModel(BilinearModel):
    """A relation is one row of numbers. Its score is linear in them, so all relations are one product."""

    diagonal = True
    numbers_per_coordinate = 1

    def __init__(
        self,
        shape: GraphShape,
        *,
        dim: int,
        reciprocal: bool = True,
        init_scale: InitScale = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(shape, dim=dim, reciprocal=reciprocal, init_scale=init_scale, seed=seed)
        self.width = dim * self.numbers_per_coordinate
        self.entities = self.table(self.shape.num_entities, self.width)
        self.relations = self.table(self.num_relation_ids, self.width)

    @property
    def head_table(self) -> Tensor:
        return self.entities

    @property
    def tail_table(self) -> Tensor:
        return self.entities

    @property
    def relation_table(self) -> Tensor:
        return self.relations

    @abstractmethod
    def relation_between(self, head: Tensor, tail: Tensor) -> Tensor:
        """The row q with ⟨h R, t⟩ = ⟨q, r⟩, `(batch, width)`."""

    def score_relations(self, heads: Tensor, tails: Tensor) -> Tensor:
        between = self.relation_between(rows(self.head_table, heads), rows(self.tail_table, tails))
        return between @ self.relations.T


class RealDiagonalModel(DiagonalModel):
    """A relation scales each real coordinate, so its map is its own transpose."""

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return head * rows(self.relations, relations)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self.map_head(tail, relations)

    def relation_between(self, head: Tensor, tail: Tensor) -> Tensor:
        return head * tail

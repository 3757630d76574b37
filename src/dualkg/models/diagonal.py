"""What the models share whose relations act on each coordinate alone."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from dualkg.models.base import BilinearModel, Factors, rows


class DiagonalModel(BilinearModel):
    """A relation is one row of numbers. Its score is linear in them, so all relations are one product."""

    diagonal = True

    @abstractmethod
    def relation_between(self, head: Tensor, tail: Tensor) -> Tensor:
        """The row q with ⟨h R, t⟩ = ⟨q, r⟩, `(batch, width)`."""

    def relation_scores(self, f: Factors) -> Tensor:
        return self.relation_between(f.head, f.tail) @ self.relations.T

    def image_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """A coordinate's modulus is multiplied by the relation's, so all norms are one product."""
        table = self.tail_table if transposed else self.head_table
        return self.squared_modulus(rows(self.relations, relations)) @ self.squared_modulus(table).T


class RealDiagonalModel(DiagonalModel):
    """A relation scales each real coordinate, so its map is its own transpose."""

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return head * rows(self.relations, relations)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self.map_head(tail, relations)

    def relation_between(self, head: Tensor, tail: Tensor) -> Tensor:
        return head * tail

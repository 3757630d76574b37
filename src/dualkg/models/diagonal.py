"""What the models share whose relations act on each coordinate alone."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from dualkg.models.bilinear import BilinearModel
from dualkg.models.factors import Factors, rows


class DiagonalModel(BilinearModel):
    """A relation is one row of numbers, and multiplies each coordinate of an entity by its own.

    A coordinate is a tuple of `numbers_per_coordinate` real numbers; a row holds all its first numbers, then all
    its second ones. A model writes how two coordinates are multiplied, and the conjugate: ⟨x·r, y⟩ = ⟨x, y·r̄⟩ and
    ⟨x·r, y⟩ = ⟨r, x̄·y⟩. Both are plain arithmetic on `x[0]`, `x[1]`, …, so that kernels compile the same lines.
    """

    diagonal = True
    one_modulus = True  # whether the numbers of a coordinate have one modulus, which products multiply: |x·r| = |x||r|

    @staticmethod
    @abstractmethod
    def times(x: "Any", r: "Any") -> "Any":
        """The product of two coordinates."""

    @staticmethod
    @abstractmethod
    def conjugate(x: "Any") -> "Any":
        """The coordinate whose product is the transpose of the product with `x`."""

    @property
    def multipliers(self) -> Tensor:
        """The rows that relations multiply by: those that are stored, or what a model makes of them."""
        return self.relations

    @property
    def linear_in_relations(self) -> bool:
        """Whether scores are linear in the stored numbers of a relation, as steps without autograd take them."""
        return self.multipliers is self.relations

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return self._joined(self.times(self._parts(head), self._parts(rows(self.multipliers, relations))))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        turned = self.conjugate(self._parts(rows(self.multipliers, relations)))
        return self._joined(self.times(self._parts(tail), turned))

    def relation_between(self, head: Tensor, tail: Tensor) -> Tensor:
        """The row q with ⟨h R, t⟩ = ⟨q, r⟩, `(batch, width)`."""
        return self._joined(self.times(self.conjugate(self._parts(head)), self._parts(tail)))

    def relation_scores(self, f: Factors) -> Tensor:
        """The score is linear in the numbers that a relation multiplies by, so all relations are one product."""
        return self.relation_between(f.head, f.tail) @ self.multipliers.T

    def stretch(self, relation: Tensor) -> Tensor:
        """What products with rows multiply |x|² of every coordinate by: ‖x·r‖² = Σᵢ |xᵢ|² stretchᵢ."""
        return self.squared_modulus(relation)

    def image_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """A relation stretches each coordinate, whatever entity it is of, so all norms are one product."""
        table = self.tail_table if transposed else self.head_table
        stretches = self._stretches(rows(self.multipliers, relations), transposed=transposed)
        return stretches @ self.squared_modulus(table).T

    def sums_of_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Coordinate by coordinate: Σ|hᵢ|² times the sum of what relations stretch it by."""
        of_entities = self.squared_modulus(self.tail_table if transposed else self.head_table).sum(0)
        return of_entities.sum(), of_entities @ self._stretches(self.multipliers, transposed=transposed).sum(0)

    def _stretches(self, relation: Tensor, *, transposed: bool) -> Tensor:
        return self.stretch(self._joined(self.conjugate(self._parts(relation))) if transposed else relation)

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        if not self.one_modulus:
            return vectors.square()
        first, *others = (part.square() for part in self._parts(vectors))
        return sum(others, start=first)

    def _parts(self, vectors: Tensor) -> tuple[Tensor, ...]:
        return vectors.chunk(self.numbers_per_coordinate, dim=-1)

    def _joined(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class RealDiagonalModel(DiagonalModel):
    """A relation scales each real coordinate, so its map is its own transpose."""

    @staticmethod
    def times(x: "Any", r: "Any") -> "Any":
        return (x[0] * r[0],)

    @staticmethod
    def conjugate(x: "Any") -> "Any":
        return x

"""Diagonal bilinear models: CP, DistMult, ComplEx, QuatE and SimplE."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualkg.data.triples import GraphShape
from dualkg.kernels import products
from dualkg.models.base import MODELS, Factors
from dualkg.models.bilinear import BilinearModel
from dualkg.tables.base import lookup

if TYPE_CHECKING:
    from dualkg.data.graph import Graph

__all__ = ["CP", "ComplEx", "DistMult", "QuatE", "SimplE"]


class DiagonalModel(BilinearModel):
    """A relation is one row of numbers that multiplies the coordinates of an entity elementwise.

    A coordinate is a tuple of `numbers_per_coordinate` real numbers; a row holds the first numbers
    of all coordinates, then the second ones. A model defines the product of two coordinates and the
    conjugate, with ⟨x·r, y⟩ = ⟨x, y·r̄⟩ and ⟨x·r, y⟩ = ⟨r, x̄·y⟩. Both use plain arithmetic on
    `x[0]`, `x[1]`, …, so that Triton compiles the same lines.
    """

    diagonal = True
    relation_kernel = "rows"
    # Whether a coordinate has one modulus, with |x·r| = |x||r|.
    multiplicative_modulus = True

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
        """The rows that entities are multiplied by, `(num_relation_ids, width)`.

        They are the relations as stored, or normalized.
        """
        return self.relations

    @property
    def linear_in_relations(self) -> bool:
        """Whether scores are linear in the stored relations, as the fast step requires."""
        return self.multipliers is self.relations

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        multiplier = self._parts(lookup(self.multipliers, relations))
        return self._joined(self.times(self._parts(head), multiplier))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        multiplier = self._parts(lookup(self.multipliers, relations))
        return self._joined(self.times(self._parts(tail), self.conjugate(multiplier)))

    def relation_query(self, head: Tensor, tail: Tensor) -> Tensor:
        """The row q with ⟨h R, t⟩ = ⟨q, r⟩, `(batch, width)`."""
        return self._joined(self.times(self.conjugate(self._parts(head)), self._parts(tail)))

    def relation_scores(self, f: Factors) -> Tensor:
        """One matrix product, since the score is linear in the multipliers."""
        return self.relation_query(f.head, f.tail) @ self.multipliers.T

    def squared_scale(self, relation: Tensor) -> Tensor:
        """The factors of |x|² in a product with a relation: ‖x·r‖² = Σᵢ |xᵢ|² squared_scaleᵢ."""
        return self.squared_modulus(relation)

    def mapped_squared_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """One matrix product, since a relation scales |xᵢ|² by the same factor for every entity."""
        table = self.tail_table if transposed else self.head_table
        multipliers = lookup(self.multipliers, relations)
        squared_scales = self._squared_scales(multipliers, transposed=transposed)
        return squared_scales @ self.squared_modulus(table).T

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Coordinate by coordinate: Σ|hᵢ|² times the sum of the squared scales of all relations."""
        table = self.tail_table if transposed else self.head_table
        of_entities = self.squared_modulus(table).sum(0)
        squared_scales = self._squared_scales(self.multipliers, transposed=transposed)
        return of_entities.sum(), of_entities @ squared_scales.sum(0)

    def _squared_scales(self, relation: Tensor, *, transposed: bool) -> Tensor:
        if transposed:
            relation = self._joined(self.conjugate(self._parts(relation)))
        return self.squared_scale(relation)

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        if not self.multiplicative_modulus:
            return vectors.square()
        first, *others = (part.square() for part in self._parts(vectors))
        return sum(others, start=first)

    def _parts(self, vectors: Tensor) -> tuple[Tensor, ...]:
        return vectors.chunk(self.numbers_per_coordinate, dim=-1)

    def _joined(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class RealDiagonalModel(DiagonalModel):
    """A relation scales each real coordinate, so its map is its own transpose."""

    times = staticmethod(products.real_product)
    conjugate = staticmethod(products.real_conjugate)


@MODELS.register
class ComplEx(DiagonalModel):
    """Relations scale and rotate complex coordinates (Trouillon et al., 2016).

    A row holds the real parts of all coordinates, then the imaginary parts.

    Examples:
        >>> model = kg.ComplEx(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    numbers_per_coordinate = 2
    times = staticmethod(products.complex_product)
    conjugate = staticmethod(products.complex_conjugate)


@MODELS.register
class CP(RealDiagonalModel):
    """A relation scales each coordinate (Hitchcock, 1927).

    An entity has one vector as head and another as tail.

    Examples:
        >>> model = kg.CP(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    two_entity_tables = True


@MODELS.register
class DistMult(RealDiagonalModel):
    """A relation scales each coordinate (Yang et al., 2015), so all are symmetric.

    Examples:
        >>> model = kg.DistMult(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """


@MODELS.register
class QuatE(DiagonalModel):
    """A relation rotates each quaternion coordinate (Zhang et al., 2019).

    Unless it is `normalized`, a relation also scales the coordinate.
    A row holds all real parts, then all of i, of j and of k. `dim` counts quaternions. Those of a
    relation are divided by their modulus when used, and regularizers see them as stored. A
    quaternion of modulus 0 stays 0.

    Args:
        shape: A graph, or its shape.
        normalized: Whether a relation only rotates.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.QuatE(graph.shape, dim=8, normalized=False)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    numbers_per_coordinate = 4
    times = staticmethod(products.quaternion_product)
    conjugate = staticmethod(products.quaternion_conjugate)
    options = ("normalized",)

    def __init__(
        self, shape: Graph | GraphShape, *, normalized: bool = True, **config: Any
    ) -> None:
        super().__init__(shape, **config)
        self.normalized = normalized

    @property
    def multipliers(self) -> Tensor:
        if not self.normalized:
            return self.relations
        modulus = self.modulus(self.relations)
        divisor = modulus.masked_fill(modulus == 0, 1.0)
        return self.relations / divisor.repeat(1, self.numbers_per_coordinate)

    def squared_scale(self, relation: Tensor) -> Tensor:
        """Without a gradient if normalized.

        A rotation has scale 1. Its gradient would be rounding, which Adagrad amplifies.
        """
        squared = super().squared_scale(relation)
        return squared.detach() if self.normalized else squared


@MODELS.register
class SimplE(DiagonalModel):
    """CP in which every triple updates both vectors of its entities (Kazemi and Poole, 2018).

    The row of an entity holds its vector as head, then as tail, of length `dim` each; that of a
    relation r, then r′ of its inverse: s = ½ (⟨h as head, r, t as tail⟩ + ⟨t as head, r′, h as
    tail⟩).

    Examples:
        >>> model = kg.SimplE(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    numbers_per_coordinate = 2
    multiplicative_modulus = False
    times = staticmethod(products.swapped_product)
    conjugate = staticmethod(products.swapped_conjugate)

    def squared_scale(self, relation: Tensor) -> Tensor:
        """A product swaps the halves and multiplies each number by the one at its position."""
        return relation.square() / 4

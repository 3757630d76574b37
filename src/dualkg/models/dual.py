"""The distance-based duals of a bilinear model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.models.base import BilinearModel, Factors, Model, rows

Side = Literal["tail", "head"]


class Dual(Model):
    """Scores by distance after the same map, with the parameters of the model it is the dual of.

    side="tail": −‖hR − t‖² = 2⟨hR, t⟩ − ‖hR‖² − ‖t‖²;   side="head": −‖tRᵀ − h‖² = 2⟨hR, t⟩ − ‖tRᵀ‖² − ‖h‖².
    All scores come from the primal's products and the two norms, so that nothing of size batch × entities ×
    width ever exists.
    """

    def __init__(self, primal: BilinearModel, side: Side = "tail") -> None:
        if side not in ("tail", "head"):
            raise RequestError(f"A dual has side 'tail' or 'head'; '{side}' was asked for.")
        super().__init__(primal.shape, reciprocal=primal.reciprocal)
        self.primal = primal
        self.side = side

    @property
    def bilinear(self) -> BilinearModel:
        return self.primal

    @property
    def choices(self) -> dict[str, object]:
        return {**self.primal.choices, "dual": self.side}

    def factors(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Factors:
        return self.primal.factors(heads, relations, tails)

    def entity_vectors(self) -> Tensor:
        return self.primal.entity_vectors()

    def score(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        factors = self.factors(heads, relations, tails)
        if self.side == "tail":
            return -(factors.mapped_head - factors.tail).square().sum(-1)
        return -(factors.mapped_tail - factors.head).square().sum(-1)

    def score_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        head = rows(self.primal.head_table, heads)
        doubled = 2 * self.primal.score_tails(heads, relations)
        if self.side == "tail":
            mapped = self.primal.map_head(head, relations)
            return doubled - _norms(mapped)[:, None] - _norms(self.primal.tail_table)
        return doubled - _norms(head)[:, None] - self._norms_of_all(relations)

    def score_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        tail = rows(self.primal.tail_table, tails)
        doubled = 2 * self.primal.score_heads(relations, tails)
        if self.side == "head":
            mapped = self.primal.map_tail(tail, relations)
            return doubled - _norms(mapped)[:, None] - _norms(self.primal.head_table)
        return doubled - _norms(tail)[:, None] - self._norms_of_all(relations)

    def score_relations(self, heads: Tensor, tails: Tensor) -> Tensor:
        """The norm of the mapped vector varies with the relation, so it stays."""
        primal = self.primal
        head, tail = rows(primal.head_table, heads), rows(primal.tail_table, tails)
        if self.side == "tail":
            mapped, fixed = primal.map_by_every_relation(head), tail
        else:
            mapped, fixed = primal.map_by_every_relation(tail, transposed=True), head
        return torch.stack([-_norms(image - fixed) for image in mapped], dim=-1)

    def _norms_of_all(self, relations: Tensor) -> Tensor:
        """‖tRᵀ‖² of all tails (or ‖hR‖² of all heads), one row a query, computed once a relation."""
        distinct, position = torch.unique(relations, return_inverse=True)
        images = (self._image_of_all(relation) for relation in distinct)
        return rows(torch.stack([_norms(image) for image in images]), position)

    def _image_of_all(self, relation: Tensor) -> Tensor:
        if self.side == "head":
            table = self.primal.tail_table
            return self.primal.map_tail(table, relation.expand(len(table)))
        table = self.primal.head_table
        return self.primal.map_head(table, relation.expand(len(table)))


def _norms(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1)

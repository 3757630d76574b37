"""Bilinear models and their duals: a score ⟨h R, t⟩, written once in terms of the relation's map
and its transpose.

A model implements `map_head` and `map_tail` with ⟨map_head(h, r), t⟩ = ⟨h, map_tail(t, r)⟩. Scores
of triples, tails, heads and relations, the dual models and the regularizers follow from the two.
"""

from typing import Literal

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.models.base import EmbeddingModel, Factors, Model, ScoreForm, Side, lookup


class BilinearModel(EmbeddingModel):
    """A model that scores by ⟨h R, t⟩; subclasses define their tables and the two maps."""

    has_adjoint = True
    shares_candidates = True
    # What GPU kernels take relations for: rows that act on coordinates, stored matrices, or
    # mixtures of a core.
    relation_kernel: Literal["rows", "matrices", "mixtures"] | None = None

    @property
    def score_form(self) -> ScoreForm | None:
        return "products" if self.scores_as(BilinearModel) else None

    def triple_scores(self, f: Factors) -> Tensor:
        return (f.mapped_head * f.tail).sum(-1)

    def tail_scores(self, f: Factors) -> Tensor:
        return f.mapped_head @ self.tail_table.T

    def head_scores(self, f: Factors) -> Tensor:
        return f.mapped_tail @ self.head_table.T

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        chosen = f.candidates(candidates, side=side)
        query = f.query(side)
        return (
            query @ chosen.T
            if candidates.dim() == 1
            else (chosen @ query.unsqueeze(-1)).squeeze(-1)
        )

    def relation_scores(self, f: Factors) -> Tensor:
        return torch.stack(
            [(mapped * f.tail).sum(-1) for mapped in self.map_by_all_relations(f.head)], dim=-1
        )

    def mapped_squared_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """‖h R‖² of all heads, or ‖t Rᵀ‖² of all tails, for relations `(n,)`: `(n,
        num_entities)`.
        """
        table, apply = (
            (self.tail_table, self.map_tail) if transposed else (self.head_table, self.map_head)
        )
        mapped = (apply(table, relation.expand(len(table))) for relation in relations)
        return torch.stack([vectors.square().sum(-1) for vectors in mapped])

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Σ‖h‖² over all heads, and Σ‖h R‖² over all heads and relations; or those of tails, t and
        t Rᵀ.
        """
        table = self.tail_table if transposed else self.head_table
        relations = torch.arange(self.num_relation_ids, device=table.device)
        return table.square().sum(), self.mapped_squared_norms(
            relations, transposed=transposed
        ).sum()


class Dual(Model):
    """Scores by distance after the same map, with the parameters of the model it is the dual of.

    side="tail": −‖hR − t‖² = 2⟨hR, t⟩ − ‖hR‖² − ‖t‖²;   side="head": −‖tRᵀ − h‖² = 2⟨hR, t⟩ −
    ‖tRᵀ‖² − ‖h‖².
    """

    score_arrays = 5

    def __init__(self, primal: BilinearModel, side: Side = "tail") -> None:
        if side not in ("tail", "head"):
            raise RequestError(f"A dual has side 'tail' or 'head'; '{side}' was given.")
        if not (isinstance(primal, BilinearModel) and primal.has_adjoint):
            raise RequestError(
                "A dual is that of a bilinear model, whose relations are linear maps with a "
                f"transpose; this {type(primal).__name__} is not one. Leave model.dual out."
            )
        super().__init__(primal.shape, reciprocal=primal.reciprocal)
        self.primal = primal
        self.side = side

    @property
    def embedding(self) -> BilinearModel:
        return self.primal

    @property
    def config(self) -> dict[str, object]:
        return {**self.primal.config, "dual": self.side}

    @property
    def score_form(self) -> ScoreForm | None:
        """Squared distances where tails are predicted; heads would be, by the norms of their own
        images.
        """
        fits = (
            type(self) is Dual
            and self.side == "tail"
            and self.reciprocal
            and self.primal.score_form == "products"
        )
        return "squared distances" if fits else None

    def entity_vectors(self) -> Tensor:
        return self.primal.entity_vectors()

    def triple_scores(self, f: Factors) -> Tensor:
        return -_norms(f.tail_residual if self.side == "tail" else f.head_residual)

    def tail_scores(self, f: Factors) -> Tensor:
        return self._minus_norms(2 * self.primal.tail_scores(f), f, "tail")

    def head_scores(self, f: Factors) -> Tensor:
        return self._minus_norms(2 * self.primal.head_scores(f), f, "head")

    def relation_scores(self, f: Factors) -> Tensor:
        """By distances: the norm of the mapped vector differs between relations."""
        moved, fixed = (f.head, f.tail) if self.side == "tail" else (f.tail, f.head)
        mapped = self.primal.map_by_all_relations(moved, transposed=self.side == "head")
        return torch.stack([-_norms(vectors - fixed) for vectors in mapped], dim=-1)

    def _minus_norms(self, doubled: Tensor, f: Factors, side: Side) -> Tensor:
        """Scores of a side; that of the dual is fixed, the other is mapped, once per relation of
        the batch.
        """
        if side == self.side:
            table = self.primal.tail_table if side == "tail" else self.primal.head_table
            return doubled - _norms(f.query(side))[:, None] - _norms(table)
        found = doubled - _norms(f.head if side == "tail" else f.tail)[:, None]
        distinct, position = torch.unique(f.relations, return_inverse=True)
        return found - lookup(
            self.primal.mapped_squared_norms(distinct, transposed=self.side == "head"), position
        )


def _norms(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1)

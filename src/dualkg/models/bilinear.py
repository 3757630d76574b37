"""Bilinear models: a score ⟨h R, t⟩, written once in terms of the relation's map and its transpose.

A model implements `map_head` and `map_tail` with ⟨map_head(h, r), t⟩ = ⟨h, map_tail(t, r)⟩. Scores of triples, tails,
heads and relations, the dual models and the regularizers follow from the two."""

from typing import Literal

import torch
from torch import Tensor

from dualkg.models.base import EmbeddingModel, Factors, ScoreForm, Side


class BilinearModel(EmbeddingModel):
    """A model that scores by ⟨h R, t⟩; subclasses define their tables and the two maps."""

    has_adjoint = True
    # What GPU kernels take relations for: rows that act on coordinates, stored matrices, or mixtures of a core.
    relation_kernel: Literal["rows", "matrices", "mixtures"] | None = None

    @property
    def score_form(self) -> ScoreForm | None:
        return "products" if self.scores_as(BilinearModel) else None

    @property
    def shares_candidates(self) -> bool:
        return True

    def triple_scores(self, f: Factors) -> Tensor:
        return (f.mapped_head * f.tail).sum(-1)

    def tail_scores(self, f: Factors) -> Tensor:
        return f.mapped_head @ self.tail_table.T

    def head_scores(self, f: Factors) -> Tensor:
        return f.mapped_tail @ self.head_table.T

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        chosen = f.candidates(candidates, side=side)
        query = f.mapped_head if side == "tail" else f.mapped_tail
        return query @ chosen.T if candidates.dim() == 1 else (chosen @ query.unsqueeze(-1)).squeeze(-1)

    def relation_scores(self, f: Factors) -> Tensor:
        return torch.stack([(mapped * f.tail).sum(-1) for mapped in self.map_by_all_relations(f.head)], dim=-1)

    def mapped_squared_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """‖h R‖² of all heads, or ‖t Rᵀ‖² of all tails, for relations `(n,)`: `(n, num_entities)`."""
        table, apply = (self.tail_table, self.map_tail) if transposed else (self.head_table, self.map_head)
        mapped = (apply(table, relation.expand(len(table))) for relation in relations)
        return torch.stack([vectors.square().sum(-1) for vectors in mapped])

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Σ‖h‖² over all heads, and Σ‖h R‖² over all heads and relations; or those of tails, t and t Rᵀ."""
        table = self.tail_table if transposed else self.head_table
        relations = torch.arange(self.num_relation_ids, device=table.device)
        return table.square().sum(), self.mapped_squared_norms(relations, transposed=transposed).sum()

"""Bilinear models and their duals.

A bilinear model scores by ⟨h R, t⟩. It implements `map_head` and `map_tail` with
⟨map_head(h, r), t⟩ = ⟨h, map_tail(t, r)⟩. Scores of triples, tails, heads and relations, the dual
models and the regularizers follow from the two.
"""

from typing import Literal

import torch
from torch import Tensor

from dualkg.errors import InvalidValue, RequestError
from dualkg.models.base import EmbeddingModel, Factors, Model, ScoreForm
from dualkg.tables.base import Side, lookup

__all__ = ["BilinearModel", "Dual"]


class BilinearModel(EmbeddingModel):
    """A model that scores by ⟨h R, t⟩; subclasses define their tables and the two maps.

    Examples:
        >>> h, r, t = (torch.tensor([id]) for id in (3, 1, 7))
        >>> model = run.model
        >>> mapped = model.map_head(model.head_table[h], r)
        >>> torch.allclose(model.score(h, r, t), (mapped * model.tail_table[t]).sum(-1))
        True
    """

    has_adjoint = True
    shares_candidates = True
    # The form of relations in GPU kernels: rows that act on coordinates, stored matrices, or
    # mixtures of the slices of a core. None if no kernel has the model.
    relation_kernel: Literal["rows", "matrices", "mixtures"] | None = None

    @property
    def numbers_per_score(self) -> int:
        """One: candidates are scored by matrix products."""
        return 1

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
        vectors = f.candidates(candidates, side=side)
        query = f.query(side)
        if candidates.dim() == 1:
            return query @ vectors.T
        return (vectors @ query.unsqueeze(-1)).squeeze(-1)

    def relation_scores(self, f: Factors) -> Tensor:
        mapped_heads = self.map_by_all_relations(f.head)
        return torch.stack([(mapped * f.tail).sum(-1) for mapped in mapped_heads], dim=-1)

    def mapped_squared_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """‖h R‖² of all heads, or ‖t Rᵀ‖² of all tails, for relations `(n,)`.

        The result is `(n, num_entities)`.
        """
        table = self.tail_table if transposed else self.head_table
        apply = self.map_tail if transposed else self.map_head
        norms = []
        for relation in relations:
            mapped = apply(table, relation.expand(len(table)))
            norms.append(mapped.square().sum(-1))
        return torch.stack(norms)

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Σ‖h‖² over all heads, and Σ‖h R‖² over all heads and relations.

        If `transposed`, they are those of tails, t and t Rᵀ.
        """
        table = self.tail_table if transposed else self.head_table
        relations = torch.arange(self.num_relation_ids, device=table.device)
        mapped = self.mapped_squared_norms(relations, transposed=transposed)
        return table.square().sum(), mapped.sum()


class Dual(Model):
    """Scores by distance after the same map, with the parameters of the model it is the dual of.

    With side "tail", a score is −‖hR − t‖² = 2⟨hR, t⟩ − ‖hR‖² − ‖t‖².
    With side "head", a score is −‖tRᵀ − h‖² = 2⟨hR, t⟩ − ‖tRᵀ‖² − ‖h‖².

    Args:
        primal: A bilinear model, whose parameters the dual shares.
        side: The side whose vector is mapped: "tail" compares hR with t.

    Examples:
        >>> model = kg.ComplEx(graph.shape, dim=8)
        >>> h, r, t = (torch.tensor([id]) for id in (3, 1, 7))
        >>> difference = model.map_head(model.head_table[h], r) - model.tail_table[t]
        >>> torch.allclose(kg.Dual(model).score(h, r, t), -difference.square().sum(-1))
        True
    """

    def __init__(self, primal: BilinearModel, side: Side = "tail") -> None:
        if side not in ("tail", "head"):
            raise InvalidValue("side", expected="'tail' or 'head'", found=side)
        if not (isinstance(primal, BilinearModel) and primal.has_adjoint):
            raise RequestError(
                f"The dual of this {type(primal).__name__} does not exist: duals are of bilinear "
                "models, whose relations are linear maps with a transpose. Leave `model.dual` out."
            )
        super().__init__(primal.shape, reciprocal=primal.reciprocal)
        self.primal = primal
        self.side = side

    @property
    def embedding(self) -> BilinearModel:
        return self.primal

    @property
    def device(self) -> torch.device:
        """The device of the primal model."""
        return self.primal.device

    @property
    def config(self) -> dict[str, object]:
        return {**self.primal.config, "dual": self.side}

    @property
    def score_form(self) -> ScoreForm | None:
        """Squared distances where tails are predicted.

        Heads would be predicted by the norms of their own mapped vectors.
        """
        is_plain = type(self) is Dual and self.primal.score_form == "products"
        predicts_tails = self.side == "tail" and self.reciprocal
        return "squared distances" if is_plain and predicts_tails else None

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
        """Subtract both squared norms from doubled products.

        The entities of the dual's own side are fixed. Those of the other side are mapped, once for
        each relation of the batch.
        """
        if side == self.side:
            table = self.primal.tail_table if side == "tail" else self.primal.head_table
            return doubled - _norms(f.query(side))[:, None] - _norms(table)
        scores = doubled - _norms(f.head if side == "tail" else f.tail)[:, None]
        distinct, position = torch.unique(f.relations, return_inverse=True)
        norms = self.primal.mapped_squared_norms(distinct, transposed=self.side == "head")
        return scores - lookup(norms, position)


def _norms(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1)

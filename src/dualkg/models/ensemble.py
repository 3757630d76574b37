"""Several models as one, which scores by the weighted sum of their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor, nn

from dualkg.data.graph import Graph
from dualkg.errors import InvalidValue
from dualkg.models.base import EmbeddingModel, Factors, Model, NoEmbeddings
from dualkg.tables.base import EntityTables, local_tables
from dualkg.tables.lookup import Side

__all__ = ["EnsembleModel"]


def no_embeddings(name: str) -> NoEmbeddings:
    """The error of asking an ensemble for embeddings."""
    return NoEmbeddings(f"An ensemble ({name})", advice="Name one of its runs instead.")


class EnsembleModel(Model):
    """Scores by Σ wᵢ sᵢ, the weighted sum of the scores of its members.

    Ranks and softmax of candidates are those by Σ wᵢ log softmax(sᵢ), which subtracts a constant
    from all. It is reciprocal if one of its members is; in a member that is not, an inverse
    relation exchanges head and tail.

    Args:
        members: Models of the same graph.
        weights: wᵢ; 1 for each if left out.

    Examples:
        >>> kg.Ensemble([run, run], weights="equal").model.weights
        (1.0, 1.0)
    """

    members: Sequence[Model]

    def __init__(self, members: Sequence[Model], *, weights: Sequence[float] | None = None) -> None:
        if not members:
            raise InvalidValue("members", expected="at least one model", found="none")
        for member in members[1:]:
            member.check_shape(members[0].shape)
        super().__init__(members[0].shape, reciprocal=any(member.reciprocal for member in members))
        self.members = nn.ModuleList(members)  # type: ignore[assignment]
        self.weights = weights if weights is not None else [1.0] * len(members)

    @property
    def weights(self) -> tuple[float, ...]:
        """One for each member, in their order."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        num_members = len(self.members)
        if len(weights) != num_members:
            expected = f"one number for each of the {num_members} members of the ensemble"
            raise InvalidValue("weights", expected=expected, found=f"{len(weights)} numbers")
        are_valid = all(isfinite(weight) and weight >= 0 for weight in weights)
        if not are_valid or not any(weights):
            listed = ", ".join(f"{weight:g}" for weight in weights)
            raise InvalidValue("weights", expected="at least 0, and one above 0", found=listed)
        self._weights = tuple(float(weight) for weight in weights)

    @property
    def name(self) -> str:
        """Such as `RESCAL + HAKE`, or `3 × ComplEx`."""
        names = [type(member.named).__name__ for member in self.members]
        counts = {name: names.count(name) for name in names}
        parts = []
        for name, number in counts.items():
            parts.append(name if number == 1 else f"{number} × {name}")
        return " + ".join(parts)

    @property
    def embedding(self) -> EmbeddingModel:
        raise no_embeddings(self.name)

    @property
    def tables(self) -> EntityTables:
        return local_tables(self.shape.num_entities)

    def read_graph(self, graph: Graph) -> None:
        for member in self.members:
            member.read_graph(graph)

    @property
    def numbers_per_score(self) -> int:
        """Those of the member that needs most."""
        return max(member.numbers_per_score for member in self.members)

    @property
    def scores_all_at_once(self) -> bool:  # type: ignore[override]
        """Whether one of the members does."""
        return any(member.scores_all_at_once for member in self.members)

    @property
    def config(self) -> dict[str, object]:
        return {"weights": list(self.weights)}

    @property
    def has_entity_vectors(self) -> bool:
        return any(member.has_entity_vectors for member in self.members)

    def entity_vectors(self) -> Tensor:
        """The vectors of all members that have some side by side, each at length 1.

        Their cosine is the mean cosine of these members.
        """
        if not self.has_entity_vectors:
            raise no_embeddings(self.name)
        vectors = []
        for member in self.members:
            if member.has_entity_vectors:
                vectors.append(nn.functional.normalize(member.entity_vectors(), dim=-1))
        return torch.cat(vectors, dim=-1)

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        """The factors of the first member, of which only the ids are used.

        Each member looks up its own vectors.
        """
        return self.members[0].factors(heads, relations, tails)

    def triple_scores(self, f: Factors) -> Tensor:
        def scores(member: Model) -> Tensor:
            if member.reciprocal or not self.reciprocal:
                return member.score(f.heads, f.relations, f.tails)
            inverse = f.relations >= self.shape.num_relations
            heads = torch.where(inverse, f.tails, f.heads)
            tails = torch.where(inverse, f.heads, f.tails)
            return member.score(heads, f.relations % self.shape.num_relations, tails)

        return self._sum(scores)

    def tail_scores(self, f: Factors) -> Tensor:
        return self._sum(lambda member: self._query_scores(member, f, "tail", None))

    def head_scores(self, f: Factors) -> Tensor:
        return self._sum(lambda member: self._query_scores(member, f, "head", None))

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        return self._sum(lambda member: self._query_scores(member, f, side, candidates))

    def relation_scores(self, f: Factors) -> Tensor:
        def scores(member: Model) -> Tensor:
            forward = member.score_relations(f.heads, f.tails)
            if member.reciprocal or not self.reciprocal:
                return forward
            inverse = member.score_relations(f.tails, f.heads)
            return torch.cat([forward, inverse], dim=-1)

        return self._sum(scores)

    def _sum(self, scores: Callable[[Model], Tensor]) -> Tensor:
        total: Tensor | None = None
        for member, weight in zip(self.members, self.weights, strict=True):
            if not weight:
                continue
            own = scores(member)
            total = own * weight if total is None else total.add_(own, alpha=weight)
        assert total is not None
        return total

    def _query_scores(
        self, member: Model, f: Factors, side: Side, candidates: Tensor | None
    ) -> Tensor:
        """A member's scores of all entities, or of candidates, as heads or as tails.

        Candidates are `(n,)` or `(batch, n)`.
        """
        given = f.given(side)
        relations = f.relations
        ids = relations if member.reciprocal else relations % self.shape.num_relations

        def scores(side: Side, rows: Tensor | slice) -> Tensor:
            queries = member.queries(given[rows], ids[rows], side)
            if candidates is None:
                return member(queries, side)  # type: ignore[no-any-return]
            is_shared = candidates.dim() == 1 or len(candidates) == 1
            chosen = candidates if is_shared else candidates[rows]
            return member.candidate_scores(queries, chosen, side)

        other: Side = "head" if side == "tail" else "tail"
        inverse = relations >= self.shape.num_relations
        if member.reciprocal or not self.reciprocal or not bool(inverse.any()):
            return scores(side, slice(None))
        if bool(inverse.all()):
            return scores(other, slice(None))
        forward_scores = scores(side, ~inverse)
        total = forward_scores.new_empty(len(relations), forward_scores.shape[1])
        total[~inverse] = forward_scores
        total[inverse] = scores(other, inverse)
        return total

"""Several models as one, which scores by the weighted sum of their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor, nn

from dualkg.errors import RequestError
from dualkg.models.base import EmbeddingModel, Factors, Model, Side


class EnsembleModel(Model):
    """Scores by Σ wᵢ sᵢ, the weighted sum of the scores of its members.

    Ranks and softmax of candidates are those by Σ wᵢ log softmax(sᵢ), which subtracts a constant
    from all. It is reciprocal if one of its members is; in a member that is not, an inverse
    relation exchanges head and tail.
    """

    members: Sequence[Model]

    def __init__(self, members: Sequence[Model], *, weights: Sequence[float] | None = None) -> None:
        if not members:
            raise RequestError("An ensemble has at least one member; none was given.")
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
        if len(weights) != (expected := len(self.members)):
            raise RequestError(
                f"The weights of an ensemble are one number for each of its {expected} members; "
                f"got {len(weights)}."
            )
        if not all(isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            listed = ", ".join(f"{weight:g}" for weight in weights)
            raise RequestError(
                f"The weights of an ensemble are at least 0, and one is above 0; got {listed}."
            )
        self._weights = tuple(map(float, weights))

    @property
    def name(self) -> str:
        """Such as `RESCAL + HAKE`, or `3 × ComplEx`."""
        names = [type(member.embedding).__name__ for member in self.members]
        counts = {name: names.count(name) for name in names}
        return " + ".join(
            name if number == 1 else f"{number} × {name}" for name, number in counts.items()
        )

    @property
    def embedding(self) -> EmbeddingModel:
        raise RequestError(
            f"An ensemble ({self.name}) has no embeddings of its own, which this needs. Name one "
            "of its runs instead."
        )

    @property
    def config(self) -> dict[str, object]:
        return {"weights": list(self.weights)}

    def entity_vectors(self) -> Tensor:
        """The vectors of all members side by side, at length 1: their cosine is the mean cosine of
        the members.
        """
        return torch.cat(
            [nn.functional.normalize(one.entity_vectors(), dim=-1) for one in self.members], dim=-1
        )

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        """The ids alone: each member looks up its own vectors."""
        return Factors(self, heads, relations, tails)  # type: ignore[arg-type]

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
            found = member.score_relations(f.heads, f.tails)
            if member.reciprocal or not self.reciprocal:
                return found
            return torch.cat([found, member.score_relations(f.tails, f.heads)], dim=-1)

        return self._sum(scores)

    def _sum(self, scores: Callable[[Model], Tensor]) -> Tensor:
        total: Tensor | None = None
        for member, weight in zip(self.members, self.weights, strict=True):
            if weight:
                found = scores(member)
                total = found * weight if total is None else total.add_(found, alpha=weight)
        assert total is not None
        return total

    def _query_scores(
        self, member: Model, f: Factors, side: Side, candidates: Tensor | None
    ) -> Tensor:
        """A member's scores of all entities, or of candidates `(n,)` or `(batch, n)`, as heads or
        as tails.
        """
        given = f.given(side)
        relations = f.relations
        ids = relations if member.reciprocal else relations % self.shape.num_relations

        def scores(side: Side, rows: Tensor | slice) -> Tensor:
            queries = member.queries(given[rows], ids[rows], side)
            if candidates is None:
                return (
                    member.tail_scores(queries) if side == "tail" else member.head_scores(queries)
                )
            shared = candidates.dim() == 1 or len(candidates) == 1
            return member.candidate_scores(
                queries, candidates if shared else candidates[rows], side
            )

        other: Side = "head" if side == "tail" else "tail"
        inverse = relations >= self.shape.num_relations
        if member.reciprocal or not self.reciprocal or not bool(inverse.any()):
            return scores(side, slice(None))
        if bool(inverse.all()):
            return scores(other, slice(None))
        found = scores(side, ~inverse)
        total = found.new_empty(len(relations), found.shape[1])
        total[~inverse], total[inverse] = found, scores(other, inverse)
        return total

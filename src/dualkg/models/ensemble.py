"""Several models as one, which scores by the weighted sum of their scores; and the inverse of a
model, which an ensemble adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.data.triples import inverse_relations
from dualkg.errors import InvalidValue, RequestError
from dualkg.models.base import EmbeddingModel, Factors, Model
from dualkg.tables.base import EntityTables, Side, local_tables

if TYPE_CHECKING:
    from dualkg.data.graph import Graph

__all__ = ["EnsembleModel", "InverseModel"]

MAX_SCORES = 2**26  # of all entities for the entities that are asked for


def no_embeddings(name: str) -> RequestError:
    """The error of asking an ensemble for embeddings."""
    return RequestError(
        f"An ensemble ({name}) has no embeddings of its own, which this needs. Name one of its "
        "runs instead."
    )


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


class _Answers(NamedTuple):
    """What a model answers to the queries (e, r, ?) of all entities e.

    `scores`, `(num_tails, num_entities)`, are those of some `tails`, which are sorted. `sums` are
    the log-sum-exp of all tails, `(num_entities,)`.
    """

    tails: Tensor
    scores: Tensor
    sums: Tensor

    def of(self, tails: Tensor, *, normalized: bool) -> Tensor:
        """The scores of tails, or their log-probabilities, `(len(tails), num_entities)`."""
        scores = self.scores[torch.searchsorted(self.tails, tails)]
        return scores - self.sums if normalized else scores


class InverseModel(Model):
    """Scores (h, r, t) by a model's score of (t, r⁻¹, h), or by its log-probability.

    Of embeddings with reciprocal relations and of a path network, the two are different scores of
    one triple. As members of an `EnsembleModel` they are added. The tails of a query (h, r, ?) take
    the scores of (e, r⁻¹, h) for all entities e, which is a query for each entity: a path network
    needs seconds for a graph of thousands of entities.

    Args:
        model: A model with reciprocal relations, whose parameters are shared.
        normalized: Whether a score is log p(h | t, r⁻¹): less the log-sum-exp of all entities.

    Examples:
        >>> h, r, t = (torch.tensor([id]) for id in (3, 1, 7))
        >>> other = kg.InverseModel(run.model).score(h, r, t)
        >>> torch.allclose(other, run.model.score(t, r + graph.shape.num_relations, h))
        True
    """

    scores_all_at_once = True

    def __init__(self, model: Model, *, normalized: bool = False) -> None:
        if not model.reciprocal:
            raise RequestError(
                f"The inverse of this {type(model.named).__name__} does not exist: its relations "
                "have no inverses."
            )
        super().__init__(model.shape, reciprocal=True)
        self.model = model
        self.normalized = normalized
        self._kept: dict[int, _Answers] = {}

    @property
    def named(self) -> Model:
        return self.model.named

    @property
    def embedding(self) -> EmbeddingModel:
        return self.model.embedding

    @property
    def tables(self) -> EntityTables:
        return local_tables(self.shape.num_entities)

    @property
    def numbers_per_score(self) -> int:
        return self.model.numbers_per_score

    @property
    def config(self) -> dict[str, object]:
        return {"normalized": self.normalized}

    def read_graph(self, graph: Graph) -> None:
        self.model.read_graph(graph)

    @property
    def has_entity_vectors(self) -> bool:
        return self.model.has_entity_vectors

    def entity_vectors(self) -> Tensor:
        return self.model.entity_vectors()

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        """The factors of the model, of which only the ids are used."""
        return self.model.factors(heads, relations, tails)

    def triple_scores(self, f: Factors) -> Tensor:
        inverses = self._inverse(f.relations)
        if not self.normalized:
            scores: Tensor = self.model.score(f.tails, inverses, f.heads)
            return scores
        return self._answers(f.tails, inverses).gather(1, f.heads[:, None]).squeeze(1)

    def tail_scores(self, f: Factors) -> Tensor:
        inverses = self._inverse(f.relations)
        scores = None
        for relation in torch.unique(inverses).tolist():
            rows = (inverses == relation).nonzero().squeeze(1)
            answers = self._answers_to_all(relation, f.heads[rows])
            if scores is None:
                scores = answers.scores.new_empty(len(inverses), self.shape.num_entities)
            scores[rows] = answers.of(f.heads[rows], normalized=self.normalized)
        if scores is None:
            return torch.empty(0, self.shape.num_entities, device=inverses.device)
        return scores

    def head_scores(self, f: Factors) -> Tensor:
        return self._answers(f.tails, self._inverse(f.relations))

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        scores: Tensor = self(f, side)
        if candidates.dim() == 1:
            return scores[:, candidates]
        return scores.gather(1, candidates.expand(len(scores), -1))

    def relation_scores(self, f: Factors) -> Tensor:
        num_ids = self.num_relation_ids
        relations = torch.arange(num_ids, device=f.heads.device).repeat(len(f.heads))
        tails = f.tails.repeat_interleave(num_ids)
        heads = f.heads.repeat_interleave(num_ids)
        scores = self._answers(tails, self._inverse(relations)).gather(1, heads[:, None])
        return scores.view(len(f.heads), num_ids)

    def _answers(self, given: Tensor, relations: Tensor) -> Tensor:
        """The model's scores of all entities for queries (given, relation, ?)."""
        scores: Tensor = self.model.score_tails(given, relations)
        return scores.log_softmax(1) if self.normalized else scores

    def _inverse(self, relations: Tensor) -> Tensor:
        return inverse_relations(relations, self.shape.num_relations)

    def keep(self, heads: Tensor, relations: Tensor) -> None:
        """Compute the tails of queries (h, r, ?) beforehand, and keep their scores.

        Later rankings of these queries ask the model nothing.
        """
        inverses = self._inverse(relations)
        for relation in torch.unique(inverses).tolist():
            tails = heads[inverses == relation]
            self._kept[relation] = self._answers_to_all(relation, tails)

    def _answers_to_all(self, relation: int, tails: Tensor) -> _Answers:
        """The scores of some tails in the queries (e, relation, ?) of all entities e."""
        kept = self._kept.get(relation)
        if kept is not None and bool(torch.isin(tails, kept.tails).all()):
            return kept
        num_entities = self.shape.num_entities
        distinct = torch.unique(tails)
        size = max(1, MAX_SCORES // num_entities)
        blocks = []
        sums = []
        for start in range(0, num_entities, size):
            stop = min(start + size, num_entities)
            heads = torch.arange(start, stop, device=tails.device)
            scores = self.model.score_tails(heads, torch.full_like(heads, relation))
            blocks.append(scores[:, distinct].t())
            sums.append(scores.logsumexp(1))
        return _Answers(distinct, torch.cat(blocks, 1), torch.cat(sums))

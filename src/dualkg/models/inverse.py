"""A reciprocal model asked the other way round: by the tail and the inverse relation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualkg.data.filters import inverse_relations
from dualkg.data.graph import Graph
from dualkg.errors import Unsupported
from dualkg.models.base import EmbeddingModel, Factors, Model
from dualkg.tables.base import EntityTables, local_tables
from dualkg.tables.lookup import Side

__all__ = ["InverseModel"]

MAX_SCORES = 2**26  # of all entities for the entities that are asked for


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
            raise Unsupported(
                f"The inverse of this {type(model.named).__name__}",
                "does not exist: its relations have no inverses",
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

"""Prediction sets by split conformal prediction: few entities, which contain the missing answer
with a given coverage.

The nonconformity score of an answer is −log p(answer | query), a softmax over the entities that are
not other known answers. A prediction set contains the entities whose score is at most a threshold.
The threshold is a quantile of the scores of the valid answers in the same direction, of the same
relation if it has enough.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.errors import InvalidValue
from dualkg.inference.scoring import (
    Floats,
    Ids,
    MissingTriples,
    check_finite,
    score_blocks,
    score_queries,
)
from dualkg.models.base import Model
from dualkg.tables.base import Side

SIDES: tuple[Side, ...] = ("tail", "head")
MIN_TRIPLES = 50  # valid triples that a relation needs for a threshold of its own
DIGITS = 5  # decimals of the nonconformity scores, which are saved as text
ROUNDING = 1e-9  # error of a product such as 0.9 · 10, which must not change its ceiling


class PredictionSet(NamedTuple):
    """Entities, best first, and their scores."""

    entities: Ids
    scores: Floats


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """The nonconformity scores of the valid answers, which give a threshold for any coverage.

    `nonconformity` `(2, num_valid)` has a row for tail queries and one for head queries, and
    `relations` `(num_valid,)` has the relations of the valid triples.
    """

    nonconformity: Floats
    relations: Ids
    num_relations: int

    @classmethod
    def fit(cls, model: Model, graph: Graph) -> Self:
        """Score the valid triples in both directions."""
        if not len(graph.valid):
            raise MissingTriples(graph.name, "valid", purpose="Fitting prediction sets")
        known = KnownAnswers.of(graph)
        triples = graph.valid.astype(np.int64)

        nonconformity = np.empty((2, len(triples)))
        for row, side in zip(nonconformity, SIDES, strict=True):
            blocks = filtered_log_probabilities(model, triples, known, side=side)
            for block, log_probabilities, answers in blocks:
                of_answers = log_probabilities.gather(1, answers[:, None])[:, 0]
                row[block] = -of_answers.cpu().numpy()

        # Rounded up, so that saving excludes no answer.
        rounded = np.ceil(nonconformity * 10**DIGITS) / 10**DIGITS
        return cls(rounded, triples[:, 1], graph.shape.num_relations)

    @cached_property
    def _num_valid(self) -> Ids:
        """The number of valid triples of each relation, `(num_relations,)`."""
        return np.bincount(self.relations, minlength=self.num_relations)

    def has_own_threshold(self, relation: int, *, coverage: float = 0.9) -> bool:
        """Whether a relation has enough valid triples for its own threshold."""
        return bool(self._num_valid[relation] >= min_triples_for(coverage))

    def threshold(self, relation: int, side: Side, *, coverage: float = 0.9) -> float:
        """The largest nonconformity score in a prediction set.

        Relations with too few valid triples share a threshold; if their triples are too few
        together, it is a quantile of all triples.
        """
        needed = min_triples_for(coverage)
        if self.has_own_threshold(relation, coverage=coverage):
            used = self.relations == relation
        else:
            used = self._num_valid[self.relations] < needed
            if used.sum() < needed:
                used = np.ones_like(used)
        return quantile(self.nonconformity[SIDES.index(side), used], coverage)

    def of(
        self,
        model: Model,
        known: KnownAnswers,
        given: int,
        relation: int,
        *,
        side: Side = "tail",
        coverage: float = 0.9,
    ) -> PredictionSet:
        """The prediction set of new answers to (given, relation, ?).

        With side "head" it is the set of (?, relation, given). It is empty if no entity is likely
        enough, and complete if valid has too few triples for the coverage.
        """
        threshold = self.threshold(relation, side, coverage=coverage)
        if side == "head":
            relation = relation + model.shape.num_relations
        entities = np.array([given])
        relations = np.array([relation])

        # A copy, since a model may return a tensor that it keeps.
        scores = score_queries(model, entities, relations)[0].cpu().to(torch.float64, copy=True)
        check_finite(scores)
        _, known_answers = known(entities, relations)
        scores[torch.from_numpy(known_answers)] = -torch.inf

        inside = (scores.log_softmax(-1) >= -threshold) & torch.isfinite(scores)
        ranked = scores.masked_fill(~inside, -torch.inf).argsort(descending=True, stable=True)
        best = ranked[: int(inside.sum())]
        return PredictionSet(best.numpy(), scores[best].numpy())

    def as_dict(self) -> dict[str, Any]:
        scores = {}
        for side, row in zip(SIDES, self.nonconformity, strict=True):
            scores[side] = np.round(row, DIGITS).tolist()
        return {"relations": self.relations.tolist(), "nonconformity": scores}

    @classmethod
    def from_dict(cls, saved: dict[str, Any], num_relations: int) -> Self:
        """The inverse of `as_dict`; content that does not fit together raises ValueError."""
        rows = [saved["nonconformity"][side] for side in SIDES]
        nonconformity = np.array(rows, dtype=np.float64)
        relations = np.array(saved["relations"], dtype=np.int64)

        if nonconformity.shape != (2, len(relations)) or not len(relations):
            raise ValueError("its prediction sets have columns of different lengths")
        if relations.min() < 0 or relations.max() >= num_relations:
            raise ValueError(
                f"its prediction sets are of relations that are not among the {num_relations:,} "
                "of the graph"
            )
        return cls(nonconformity, relations, num_relations)


def min_triples_for(coverage: float) -> int:
    """The number of valid triples that a threshold needs.

    Fewer triples have no quantile that guarantees the coverage.
    """
    if not 0 < coverage < 1:
        raise InvalidValue("coverage", expected="between 0 and 1, such as 0.9", found=coverage)
    needed = math.ceil(coverage / (1 - coverage) - ROUNDING)
    return max(MIN_TRIPLES, needed)


def quantile(values: Floats, coverage: float) -> float:
    """The conformal quantile: the ⌈(n + 1) · coverage⌉-th smallest of n values.

    It is infinite if n is too small.
    """
    rank = math.ceil((len(values) + 1) * coverage - ROUNDING)
    if rank > len(values):
        return math.inf
    return float(np.sort(values)[rank - 1])


def filtered_log_probabilities(
    model: Model, triples: Ids, known: KnownAnswers, *, side: Side
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Log-probabilities of all entities as the missing `side` of triples, block by block.

    Yields which triples a block has, log p(entity | query) `(block, num_entities)` with −∞ for
    other known answers, and the answers `(block,)`.
    """
    heads, relations, tails = triples.T
    entities = heads if side == "tail" else tails
    answers = tails if side == "tail" else heads
    if side == "head":
        relations = relations + known.shape.num_relations
    answers_on_device = torch.from_numpy(answers).to(model.device)

    for block, scores in score_blocks(model, entities, relations):
        check_finite(scores)
        known_rows, known_answers = known(entities[block], relations[block])
        rows = torch.from_numpy(known_rows).to(model.device)
        columns = torch.from_numpy(known_answers).to(model.device)
        answers_of_block = answers_on_device[block]
        answer_scores = scores.gather(1, answers_of_block[:, None])

        filtered = scores.clone()  # A model may return a tensor that it keeps.
        filtered[rows, columns] = -torch.inf
        filtered.scatter_(1, answers_of_block[:, None], answer_scores)
        yield block, filtered.log_softmax(-1), answers_of_block

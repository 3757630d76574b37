"""Prediction sets by split conformal prediction: the few entities that contain the answer with a
given coverage.

The nonconformity score of an answer is −log p(answer | query), a softmax over the entities that are
not other known answers. A prediction set contains the entities whose score is at most a threshold:
a quantile of the scores of the valid answers in the same direction, of the same relation if it has
enough.
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
from dualkg.errors import RequestError
from dualkg.inference.scoring import Floats, Ids, check_finite, score_blocks, score_queries
from dualkg.models.base import Model, Side

SIDES: tuple[Side, ...] = ("tail", "head")
MIN_TRIPLES = 50  # valid triples for a threshold of a relation
DIGITS = 5  # of nonconformity scores that are saved


class PredictionSet(NamedTuple):
    """Entities, best first, and their scores."""

    entities: Ids
    scores: Floats


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """The nonconformity scores of the valid answers, which give a threshold for any coverage."""

    nonconformity: Floats  # `(2, num_valid)`: tail queries, then head queries
    relations: Ids  # of the valid triples, `(num_valid,)`
    num_relations: int

    @classmethod
    def fit(cls, model: Model, graph: Graph) -> Self:
        """Score the valid triples in both directions."""
        if not len(graph.valid):
            raise RequestError(
                f"Prediction sets need held-out triples, and {graph.name} has no valid triples. "
                f"Split the graph so that valid has some."
            )
        known = KnownAnswers.of(graph)
        triples = graph.valid.astype(np.int64)
        nonconformity = np.empty((2, len(triples)))
        for row, side in zip(nonconformity, SIDES, strict=True):
            for block, scores, answers in filtered_log_probabilities(model, triples, side, known):
                row[block] = -scores.gather(1, answers[:, None])[:, 0].cpu().numpy()
        # Rounded up, so that saving excludes no answer.
        return cls(
            np.ceil(nonconformity * 10**DIGITS) / 10**DIGITS,
            triples[:, 1],
            graph.shape.num_relations,
        )

    @cached_property
    def _counts(self) -> Ids:
        return np.bincount(self.relations, minlength=self.num_relations)

    def has_own_threshold(self, relation: int, *, coverage: float = 0.9) -> bool:
        """Whether a relation has enough valid triples for its own threshold."""
        return bool(self._counts[relation] >= min_triples_for(coverage))

    def threshold(self, relation: int, side: Side, *, coverage: float = 0.9) -> float:
        """The largest nonconformity score in a prediction set. Relations with too few triples share
        one.
        """
        needed = min_triples_for(coverage)
        if self.has_own_threshold(relation, coverage=coverage):
            used = self.relations == relation
        else:
            used = self._counts[self.relations] < needed
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
        """The prediction set of (given, relation, ?), or for side "head" of (?, relation, given),
        of new answers.

        It is empty if no entity is likely enough, and complete if valid has too few triples for the
        coverage.
        """
        threshold = self.threshold(relation, side, coverage=coverage)
        query = (
            np.array([given]),
            np.array([relation + (model.shape.num_relations if side == "head" else 0)]),
        )
        found = score_queries(model, *query)[0].cpu().to(torch.float64, copy=True)
        check_finite(found)
        found[torch.from_numpy(known(*query)[1])] = -torch.inf
        inside = (found.log_softmax(-1) >= -threshold) & torch.isfinite(found)
        order = found.masked_fill(~inside, -torch.inf).argsort(descending=True, stable=True)[
            : int(inside.sum())
        ]
        return PredictionSet(order.numpy(), found[order].numpy())

    def as_dict(self) -> dict[str, Any]:
        scores = {
            side: np.round(row, DIGITS).tolist()
            for side, row in zip(SIDES, self.nonconformity, strict=True)
        }
        return {"relations": self.relations.tolist(), "nonconformity": scores}

    @classmethod
    def from_dict(cls, saved: dict[str, Any], num_relations: int) -> Self:
        nonconformity = np.array([saved["nonconformity"][side] for side in SIDES], dtype=np.float64)
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
    """The number of valid triples for a threshold: fewer have no quantile that guarantees the
    coverage.
    """
    if not 0 < coverage < 1:
        raise RequestError(f"The coverage must be between 0 and 1, such as 0.9; got {coverage:g}.")
    return max(MIN_TRIPLES, math.ceil(coverage / (1 - coverage) - 1e-9))


def quantile(values: Floats, coverage: float) -> float:
    """The conformal quantile: the ⌈(n + 1) · coverage⌉-th smallest of n values, or infinity if n is
    too small.
    """
    rank = math.ceil((len(values) + 1) * coverage - 1e-9)
    return float(np.sort(values)[rank - 1]) if rank <= len(values) else math.inf


def filtered_log_probabilities(
    model: Model, triples: Ids, side: Side, known: KnownAnswers
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of triples: which, log p(entity | query) with −∞ for other known answers, and the
    answers `(batch,)`.
    """
    entities, relations, column = triples.T if side == "tail" else triples.T[::-1]
    relations = relations + (known.shape.num_relations if side == "head" else 0)
    column = torch.from_numpy(column).to(model.device)
    for block, scores in score_blocks(model, entities, relations):
        check_finite(scores)
        rows, others = (
            torch.from_numpy(ids).to(model.device)
            for ids in known(entities[block], relations[block])
        )
        answers = column[block]
        filtered = scores.clone()  # a model may return a tensor that it keeps
        filtered[rows, others] = -torch.inf
        filtered.scatter_(1, answers[:, None], scores.gather(1, answers[:, None]))
        yield block, filtered.log_softmax(-1), answers

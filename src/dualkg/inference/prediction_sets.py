"""Prediction sets: for a question, as few entities as hold its answer with a wanted coverage (split conformal prediction).

How odd an answer is, is −log p(answer | question): a softmax over the entities that the graph does not already give as
other answers. An prediction set has the entities that are at most as odd as a threshold. The threshold is a quantile of how
odd the answers of the valid split are, in the same direction, of the same relation where that has enough of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.evaluation.report import DIRECTIONS
from dualkg.inference.calibration import Floats, Ids, query_block_size
from dualkg.models.base import Model, Side

MIN_TRIPLES = 50  # valid triples that give a relation a threshold of its own
DIGITS = 5  # kept of how odd an answer is


class PredictionSet(NamedTuple):
    """Entities best first, and their scores."""

    entities: Ids
    scores: Floats


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """How odd the answers of the valid split are; from them thresholds for any coverage."""

    nonconformity: Floats  # `(2, num_valid)`: tails asked for, then heads
    relations: Ids  # of the valid triples, `(num_valid,)`
    num_relations: int

    @classmethod
    def fit(cls, model: Model, graph: Graph) -> PredictionSets:
        """Ask every triple of valid from both its ends."""
        if not len(graph.valid):
            raise RequestError(
                f"Prediction sets need withheld triples, and {graph.name} has no valid triples. "
                f"Split the graph so that valid has some."
            )
        known, triples = KnownAnswers.of(graph), graph.valid.astype(np.int64)
        rows = []
        for side in DIRECTIONS:
            found = [
                log_probabilities.gather(1, answers[:, None])[:, 0].cpu().numpy()
                for log_probabilities, answers in without_others(model, triples, _side(side), known)
            ]
            rows.append(-np.concatenate(found).astype(np.float64))
        # Rounded up, so that no answer is left out by a digit that is not kept.
        nonconformity = np.ceil(np.stack(rows) * 10**DIGITS) / 10**DIGITS
        return cls(nonconformity, triples[:, 1], graph.shape.num_relations)

    @cached_property
    def _counts(self) -> Ids:
        return np.bincount(self.relations, minlength=self.num_relations)

    def has_own_threshold(self, relation: int, *, coverage: float = 0.9) -> bool:
        """Whether a relation has enough valid triples for a threshold of its own."""
        return bool(self._counts[relation] >= min_triples_for(coverage))

    def threshold(self, relation: int, side: Side, *, coverage: float = 0.9) -> float:
        """How odd an answer may be. Relations that have too few triples alone are taken together."""
        needed = min_triples_for(coverage)
        if self.has_own_threshold(relation, coverage=coverage):
            alike = self.relations == relation
        else:
            alike = self._counts[self.relations] < needed
            if alike.sum() < needed:
                alike = np.ones_like(alike)
        return quantile(self.nonconformity[DIRECTIONS.index(side), alike], coverage)

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
        """The prediction set of (given, relation, ?), or with `side="head"` of (?, relation, given), without known answers.

        It is empty where no entity is likely enough, and has all that are not known where valid has too few triples.
        """
        most = self.threshold(relation, side, coverage=coverage)
        triple = np.array([[given, relation, given]])
        [(scores, _)] = _asked(model, triple, side)
        found = scores[0].cpu().to(torch.float64, copy=True)
        found[torch.from_numpy(known(*_query(triple, side, known.shape.num_relations))[1])] = -torch.inf
        inside = (found.log_softmax(-1) >= -most) & torch.isfinite(found)
        order = found.masked_fill(~inside, -torch.inf).argsort(descending=True, stable=True)[: int(inside.sum())]
        return PredictionSet(order.numpy(), found[order].numpy())

    def as_dict(self) -> dict[str, Any]:
        return {
            "relations": self.relations.tolist(),
            "nonconformity": {
                name: np.round(row, DIGITS).tolist() for name, row in zip(DIRECTIONS, self.nonconformity, strict=True)
            },
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any], num_relations: int) -> PredictionSets:
        nonconformity = np.array([found["nonconformity"][name] for name in DIRECTIONS], dtype=np.float64)
        relations = np.array(found["relations"], dtype=np.int64)
        if nonconformity.shape != (2, len(relations)) or not len(relations):
            raise ValueError("its prediction sets have columns of different lengths")
        if relations.min() < 0 or relations.max() >= num_relations:
            raise ValueError(
                f"its prediction sets are of relations that are not among the {num_relations:,} of the graph"
            )
        return cls(nonconformity, relations, num_relations)


def min_triples_for(coverage: float) -> int:
    """How many valid triples a threshold is made from: no quantile of fewer could promise that coverage."""
    if not 0 < coverage < 1:
        raise RequestError(f"A coverage is between 0 and 1, such as 0.9; {coverage:g} came.")
    return max(MIN_TRIPLES, math.ceil(coverage / (1 - coverage) - 1e-9))


def quantile(values: Floats, coverage: float) -> float:
    """The ⌈(n + 1) · coverage⌉-th smallest of n values: one more like them is at most that with that probability.

    Infinity where n is too small to promise anything.
    """
    place = math.ceil((len(values) + 1) * coverage - 1e-9)
    return float(np.sort(values)[place - 1]) if place <= len(values) else math.inf


def without_others(model: Model, triples: Ids, side: Side, known: KnownAnswers) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of log p(entity | question), `(batch, num_entities)`, and the answers `(batch,)`.

    Each triple asks for itself: its question's other known answers are left out before the softmax, and are −∞.
    """
    size = query_block_size(model)
    start = 0
    for scores, answers in _asked(model, triples, side):
        block = triples[start : start + size]
        start += len(block)
        rows, others = known(*_query(block, side, known.shape.num_relations))
        left = scores.clone()  # a model of one's own may give what it goes on using
        left[torch.from_numpy(rows).to(scores.device), torch.from_numpy(others).to(scores.device)] = -torch.inf
        yield left.scatter_(1, answers[:, None], scores.gather(1, answers[:, None])).log_softmax(-1), answers


@torch.no_grad()
def _asked(model: Model, triples: Ids, side: Side) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of scores of all entities, and the answers."""
    with full_precision(), eval_mode(model):
        for start in range(0, len(triples), query_block_size(model)):
            block = torch.from_numpy(triples[start : start + query_block_size(model)]).to(model.device)
            heads, relations, tails = block.unbind(1)
            asks_tails = side == "tail"
            scores = model.predict_tails(heads, relations) if asks_tails else model.predict_heads(relations, tails)
            if not bool(torch.isfinite(scores).all()):
                raise DivergedError(
                    "The model scores NaN or infinity for some question, so it has no probabilities. Its training has "
                    "diverged: lower the learning rate or raise the regularizer's weight."
                )
            yield scores, tails if asks_tails else heads


def _query(triples: Ids, side: Side, num_relations: int) -> tuple[Ids, Ids]:
    """What `KnownAnswers` is asked by."""
    if side == "tail":
        return triples[:, 0], triples[:, 1]
    return triples[:, 2], triples[:, 1] + num_relations


def _side(name: str) -> Side:
    return "tail" if name == "tail" else "head"

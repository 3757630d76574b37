"""Probabilities of triples from their log-probabilities by a saved calibration.

`inference.calibration` fits it, and describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Any, Self

import numpy as np

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import Graph
from dualkg.without_torch.prediction import Figures
from dualkg.without_torch.priors import Arrays, Doubles, QueryPriors, check_missing_share
from dualkg.without_torch.scores import Flags, Floats, Ids, SavedModel

NUM_PATTERNS = 4
BLOCK_SCORES = 2**23  # scores that are held in memory at once


@dataclass(frozen=True, eq=False)
class TripleProbabilities:
    """What a calibration says about triples, each `(num_triples,)`.

    `probability` is that of the triple, and `answer_probability` that of the triple if each of its
    queries has an answer that is missing. `log_odds` are those of `probability`.
    """

    log_odds: Doubles
    probability: Doubles
    answer_probability: Doubles

    def figures(self) -> Iterator[Figures]:
        """Probability and answer probability of each triple."""
        return zip(self.probability.tolist(), self.answer_probability.tolist(), strict=True)


@dataclass(frozen=True, eq=False)
class TripleCalibration:
    """A calibration with the priors of queries, as arrays.

    The fields are those of `Calibration` of `inference.calibration`; `knots` are those of the
    recalibration, and their values.
    """

    slopes: Floats
    offsets: Floats
    max_probability: float
    knots: tuple[Floats, Floats] | None
    priors: QueryPriors

    @classmethod
    def of(cls, saved: Mapping[str, Any], graph: Graph, *, priors: Arrays | None = None) -> Self:
        """The calibration that a file has; one of another form is an error.

        Without saved `priors` they are computed, which takes longer than a query.
        """
        slopes = np.array(saved["slopes"], dtype=np.float32)
        offsets = np.array(saved["offsets"], dtype=np.float32)
        check_lines(slopes, offsets, graph.shape.num_relations)
        recalibration = saved.get("recalibration")
        types = saved.get("types")
        if types is not None:
            types = EntityTypes.from_dict(types, graph.shape.num_entities)
        missing_share = saved.get("missing_share")
        if missing_share is not None:
            missing_share = float(missing_share)
            check_missing_share(missing_share)
        if priors is None:
            query_priors = QueryPriors.of(graph, types=types, missing_share=missing_share)
        else:
            query_priors = QueryPriors.of_arrays(priors, graph.shape, types)
        return cls(
            slopes,
            offsets_by_pattern(offsets, query_priors.query_classes.symmetric),
            float(saved["max_probability"]),
            None if recalibration is None else read_knots(recalibration),
            query_priors,
        )

    @property
    def symmetric(self) -> Flags:
        """Which relations are symmetric, `(num_relations,)`."""
        return self.priors.query_classes.symmetric

    def of_triples(self, triples: Ids, log_probabilities: Floats) -> TripleProbabilities:
        """The probabilities of triples `(num_triples, 3)`, given their log-probabilities."""
        ids = np.ascontiguousarray(triples, dtype=np.int64)
        values: Doubles = np.asarray(log_probabilities, dtype=np.float64)
        if_missing: Doubles = line_log_odds(
            self.slopes, self.offsets, values, ids[:, 1], self.priors.domain_range(ids)
        )
        if self.knots is not None:
            if_missing = interpolated(if_missing, *self.knots)
        largest = log_odds_of(self.max_probability)
        priors = self.priors.of_triples(ids)
        log_odds: Doubles = np.minimum(if_missing, largest) + np.log(priors)
        probability = sigmoid(log_odds)

        # To know that an answer is missing never makes a triple less probable.
        answer_probability = np.minimum(sigmoid(if_missing), self.max_probability)
        at_least = np.maximum(answer_probability, probability)
        return TripleProbabilities(
            log_odds=log_odds,
            probability=probability,
            answer_probability=np.where(priors > 1, at_least, answer_probability),
        )


def line_log_odds(
    slopes: Any, offsets: Any, log_probability: Any, relations: Any, patterns: Any
) -> Any:
    """Log odds by the lines of relations, of arrays or of tensors."""
    return slopes[relations] * log_probability + offsets[relations, patterns]


def interpolated(log_odds: Doubles, knots: Floats, values: Floats) -> Doubles:
    """Piecewise linear interpolation in float64, with slope 1 outside the knots."""
    inside = np.clip(log_odds, knots[0], knots[-1])
    upper = np.clip(np.searchsorted(knots, inside, side="right"), 1, len(knots) - 1)
    lower = upper - 1
    slopes = np.diff(values) / np.diff(knots)
    mapped = values[lower] + slopes[lower] * (inside - knots[lower])
    # Rounding must not lift the end of a piece above the start of the next.
    mapped = np.minimum(mapped, values[upper])
    exact: Doubles = mapped + (log_odds - inside)
    return exact


def sigmoid(logits: Doubles) -> Doubles:
    probability: Doubles = np.exp(-np.logaddexp(0, -logits))
    return probability


def log_odds_of(probability: float) -> float:
    """Log odds; infinite for probabilities 0 and 1."""
    if probability <= 0:
        return -inf
    if probability >= 1:
        return inf
    return log(probability / (1 - probability))


def offsets_by_pattern(offsets: Floats, symmetric: Flags) -> Floats:
    """The offsets of relations by pattern, `(num_relations, 4)`.

    A triple of a symmetric relation with one new end has the pattern 1 (see `DomainRange`).
    """
    by_pattern = offsets.copy()
    by_pattern[symmetric, 2] = by_pattern[symmetric, 1]
    return by_pattern


# -- saved values ------------------------------------------------------------


def check_lines(slopes: Floats, offsets: Floats, num_relations: int) -> None:
    """Refuse lines that are not those of the relations of a graph."""
    if slopes.shape != (num_relations,) or offsets.shape != (num_relations, NUM_PATTERNS):
        raise ValueError(
            f"it should have {num_relations:,} relations with {NUM_PATTERNS} offsets each"
        )
    if not (slopes > 0).all():
        raise ValueError("a slope is not above 0")


def read_knots(saved: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """The knots of a recalibration and their values; what does not increase is a `ValueError`."""
    knots = np.array(saved["knots"], dtype=np.float64)
    values = np.array(saved["values"], dtype=np.float64)
    if knots.ndim != 1 or len(knots) < 2 or values.shape != knots.shape:
        raise ValueError("its recalibration should have a value for each of two or more knots")
    for name, numbers in (("knots", knots), ("values", values)):
        # A comparison with NaN is false.
        if not (np.isfinite(numbers).all() and (np.diff(numbers) > 0).all()):
            raise ValueError(f"the {name} of its recalibration do not increase")
    return knots, values


# -- log-probabilities -------------------------------------------------------


def triple_log_probabilities(model: SavedModel, triples: Ids, *, symmetric: Flags) -> Floats:
    """The log-probabilities of triples `(n, 3)`, as in `inference.scoring`."""
    heads, relations, tails = np.asarray(triples, dtype=np.int64).T
    inverse = relations + model.num_relations
    of_tails = _answer_log_probabilities(model, (heads, relations), tails, symmetric=symmetric)
    of_heads = _answer_log_probabilities(model, (tails, inverse), heads, symmetric=symmetric)
    log_probabilities: Floats = (of_tails + of_heads) / 2
    return log_probabilities


def _answer_log_probabilities(
    model: SavedModel, queries: tuple[Ids, Ids], answers: Ids, *, symmetric: Flags
) -> Floats:
    """log p(answer | query), `(n,)`, of queries in one direction; those that are equal share it."""
    distinct, query_of_answer = np.unique(np.stack(queries), axis=1, return_inverse=True)
    query_of_answer = query_of_answer.reshape(-1)
    log_probabilities = np.empty(len(answers))
    block_size = max(1, BLOCK_SCORES // len(model.heads))
    for start in range(0, distinct.shape[1], block_size):
        entities, relations = distinct[:, start : start + block_size]
        scores = score_queries(model, entities, relations, symmetric=symmetric)
        largest = scores.max(axis=1, keepdims=True)
        normalizers = largest[:, 0] + np.log(np.exp(scores - largest).sum(axis=1))
        is_in_block = (query_of_answer >= start) & (query_of_answer < start + block_size)
        rows = query_of_answer[is_in_block] - start
        log_probabilities[is_in_block] = scores[rows, answers[is_in_block]] - normalizers[rows]
    return log_probabilities


def score_queries(model: SavedModel, entities: Ids, relations: Ids, *, symmetric: Flags) -> Floats:
    """Scores of all entities as answers, of symmetric relations the mean of both directions."""
    scores = model.score_queries(entities, relations)
    num_relations = model.num_relations
    rows = np.flatnonzero(symmetric[relations % num_relations])
    if len(rows):
        opposite = (relations[rows] + num_relations) % (2 * num_relations)
        scores = np.array(scores)  # one that can be written
        scores[rows] = (scores[rows] + model.score_queries(entities[rows], opposite)) / 2
    return scores

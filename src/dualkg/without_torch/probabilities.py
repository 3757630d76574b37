"""Probabilities of triples from their log-probabilities by a saved calibration.

`inference.calibration` fits it, and describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import InvalidValue
from dualkg.without_torch.domain_range import DomainRange
from dualkg.without_torch.prediction import Figures
from dualkg.without_torch.query_classes import QueryClasses
from dualkg.without_torch.scores import Flags, Floats, Ids, SavedModel

Doubles = npt.NDArray[np.float64]

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

    The fields are those of `Calibration` and `PriorCorrection` of `inference.calibration`; `knots`
    are those of the recalibration, and their values.
    """

    slopes: Floats
    offsets: Floats
    max_probability: float
    knots: tuple[Floats, Floats] | None
    domain_range: DomainRange
    query_classes: QueryClasses
    heads: Floats
    tails: Floats

    @classmethod
    def of(cls, saved: Mapping[str, Any], graph: Graph) -> Self:
        """The calibration that a file has; one of another form is an error."""
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
        symmetric = graph.symmetric_relations
        query_classes, heads, tails = query_priors(graph, types=types, missing_share=missing_share)
        return cls(
            slopes,
            offsets_by_pattern(offsets, symmetric),
            float(saved["max_probability"]),
            None if recalibration is None else read_knots(recalibration),
            DomainRange.of(graph, symmetric=symmetric),
            query_classes,
            heads,
            tails,
        )

    def of_triples(self, triples: Ids, log_probabilities: Floats) -> TripleProbabilities:
        """The probabilities of triples `(num_triples, 3)`, given their log-probabilities."""
        ids = np.ascontiguousarray(triples, dtype=np.int64)
        values: Doubles = np.asarray(log_probabilities, dtype=np.float64)
        if_missing: Doubles = line_log_odds(
            self.slopes, self.offsets, values, ids[:, 1], self.domain_range(ids)
        )
        if self.knots is not None:
            if_missing = interpolated(if_missing, *self.knots)
        largest = log_odds_of(self.max_probability)
        priors = self.priors_of(ids)
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

    def priors_of(self, triples: Ids) -> Doubles:
        """The priors of triples `(num_triples, 3)`: the means of those of their two queries."""
        heads, relations, tails = np.asarray(triples, dtype=np.int64).T
        classes = self.query_classes
        of_heads = classes.of_pairs(heads, classes.roles(relations, tails=False))
        of_tails = classes.of_pairs(tails, classes.roles(relations, tails=True))
        priors: Doubles = (self.heads[relations, of_heads] + self.tails[relations, of_tails]) / 2
        return priors


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


def query_priors(
    graph: Graph, *, types: EntityTypes | None, missing_share: float | None
) -> tuple[QueryClasses, Floats, Floats]:
    """The classes of queries, and the priors of each class, for heads and for tails.

    The priors are multiplied by the number of triples that the graph lacks for each of valid, so
    that the order of triples does not change.
    """
    query_classes = QueryClasses.of(graph, types=types)
    heads, tails = answered_shares(query_classes, QueryClasses.of(graph, split="valid"))
    per_valid = assumed_missing(graph, missing_share).per_valid
    return query_classes, heads * per_valid, tails * per_valid


def answered_shares(train: QueryClasses, valid: QueryClasses) -> tuple[Floats, Floats]:
    """The shares of queries with a valid answer by class, for heads and for tails.

    Both are `(num_relations, NUM_CLASSES)`. Additive smoothing towards the share of the class in
    all relations adds one answered query to 1 / share queries. If no relation has an answered query
    of a class, one is assumed.
    """
    num_queries = train.num_queries()
    num_answered = train.num_answered(valid)
    share_of_all = np.maximum(num_answered.sum(0), 1) / np.maximum(num_queries.sum(0), 1)
    shares = (num_answered + 1) / (num_queries + 1 / share_of_all)
    priors = np.minimum(shares, 1.0)
    return priors[: train.num_relations], priors[train.num_relations :]


class AssumedMissing(NamedTuple):
    """The true triples that a graph is taken to lack: their number, their share of all true
    triples, and their number for each validation triple.
    """

    number: float
    share: float
    per_valid: float


def check_missing_share(share: float) -> None:
    """Refuse a share of the true triples that cannot be missing."""
    if not 0 < share < 1:
        raise InvalidValue(
            "missing_share", expected="above 0 and below 1, such as 0.4", found=share
        )


def assumed_missing(graph: Graph, missing_share: float | None) -> AssumedMissing:
    """The triples that a graph lacks: as many as valid has, if no share is given."""
    num_known = sum(len(graph.split(name)) for name in SPLITS)
    num_valid = len(graph.valid)
    if missing_share is None:
        share = num_valid / max(1, num_known + num_valid)
        return AssumedMissing(float(num_valid), share, per_valid=1.0)
    number = num_known * missing_share / (1 - missing_share)
    return AssumedMissing(number, missing_share, per_valid=number / max(1, num_valid))


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

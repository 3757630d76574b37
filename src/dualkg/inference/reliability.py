"""Evaluation of calibrated probabilities and prediction sets on a split that they were not fitted
on.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Self

import numpy as np
import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.inference.prediction_sets import SIDES, PredictionSets, filtered_log_probabilities
from dualkg.inference.probability import Calibration, triple_log_probabilities
from dualkg.inference.sampling import sample_candidates
from dualkg.inference.scoring import Flags, Floats, Ids, MissingTriples
from dualkg.models.base import Model

NUM_BINS = 10
# Nearly all candidates are less probable than this, and dominate a mean over all.
LIKELY = 0.01
# The bins of the reliability table, and the confidence of its intervals.
TABLE_EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Coverage:
    """The share of queries whose prediction set contains the answer, and the sizes of the sets.

    `relation_specific` says, for one relation, whether it has its own threshold.
    """

    coverage: float
    mean_size: float
    median_size: float
    num_queries: int
    relation_specific: bool | None = None

    @classmethod
    def of(cls, covered: Flags, sizes: Ids, *, relation_specific: bool | None = None) -> Self:
        """Summarize whether sets contain their answers, and their sizes."""
        return cls(
            coverage=float(covered.mean()),
            mean_size=float(sizes.mean()),
            median_size=float(np.median(sizes)),
            num_queries=sizes.size,
            relation_specific=relation_specific,
        )


@dataclass(frozen=True)
class CoverageReport:
    """Coverage of all queries of a split in both directions."""

    graph: str
    split: str
    target_coverage: float
    overall: Coverage
    by_direction: dict[str, Coverage]
    by_relation: dict[str, Coverage]

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; `relation_specific` only where it is not None."""
        return asdict(self, dict_factory=_without_none)


def _without_none(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None}


def evaluate_coverage(
    prediction_sets: PredictionSets,
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    coverage: float = 0.9,
) -> CoverageReport:
    """Measure how often prediction sets contain the answers of a split, and their sizes."""
    triples = graph.split(split).astype(np.int64)
    if not len(triples):
        raise MissingTriples(graph.name, split, purpose="Evaluating prediction sets")
    known = KnownAnswers.of(graph)
    relations = triples[:, 1]
    present_relations, place_of_relation = np.unique(relations, return_inverse=True)

    covered = np.empty((2, len(triples)), dtype=bool)
    sizes = np.empty((2, len(triples)), dtype=np.int64)
    for row, side in enumerate(SIDES):
        thresholds = [
            prediction_sets.threshold(relation, side, coverage=coverage)
            for relation in present_relations.tolist()
        ]
        by_triple = torch.tensor(thresholds)[torch.from_numpy(place_of_relation)]
        min_log_probabilities = -by_triple.to(model.device)

        blocks = filtered_log_probabilities(model, triples, known, side=side)
        for block, log_probabilities, answers in blocks:
            likely = log_probabilities >= min_log_probabilities[block, None]
            inside = likely & torch.isfinite(log_probabilities)
            covered[row, block] = inside.gather(1, answers[:, None])[:, 0].cpu().numpy()
            sizes[row, block] = inside.sum(1).cpu().numpy()

    by_relation = {}
    for relation in present_relations.tolist():
        chosen = relations == relation
        by_relation[graph.relations[relation]] = Coverage.of(
            covered[:, chosen],
            sizes[:, chosen],
            relation_specific=prediction_sets.has_own_threshold(relation, coverage=coverage),
        )
    by_direction: dict[str, Coverage] = {
        side: Coverage.of(covered[row], sizes[row]) for row, side in enumerate(SIDES)
    }
    return CoverageReport(
        graph=graph.name,
        split=split,
        target_coverage=coverage,
        overall=Coverage.of(covered, sizes),
        by_direction=by_direction,
        by_relation=by_relation,
    )


@dataclass(frozen=True)
class ReliabilityBin:
    """Candidates of similar probability: the mean prediction and the observed share of true ones.

    `noise` is the mean difference between the two if every probability were right. The
    probabilities are in `[lower, upper]`, and `interval` is a confidence interval of the observed
    share.
    """

    predicted: float
    observed: float
    num_candidates: float
    num_true: int
    noise: float
    lower: float
    upper: float
    interval: tuple[float, float]

    @classmethod
    def of(
        cls,
        probabilities: Floats,
        true: Flags,
        weights: Floats,
        *,
        lower: float | None = None,
        upper: float | None = None,
    ) -> Self:
        """Summarize candidates; without bounds, they are the extreme probabilities."""
        num_candidates = float(weights.sum())
        predicted = float((weights * probabilities).sum()) / num_candidates
        observed = float((weights * true).sum()) / num_candidates

        # A true triple is a candidate in both directions, which doubles the variance of independent
        # candidates. The mean of |x| for a normal x is √(2 / π) standard deviations.
        variance = 2 * float((weights * probabilities * (1 - probabilities)).sum())
        noise = math.sqrt(2 / math.pi * variance) / num_candidates
        return cls(
            predicted=predicted,
            observed=observed,
            num_candidates=num_candidates,
            num_true=int(true.sum()),
            noise=noise,
            lower=float(probabilities.min()) if lower is None else lower,
            upper=float(probabilities.max()) if upper is None else upper,
            interval=share_interval(observed, effective_size(true, weights)),
        )


def effective_size(true: Flags, weights: Floats) -> float:
    """The number of independent candidates of weight 1 whose share of true ones is as certain.

    The share o of true candidates among N has the variance 2 o (1 − o) (1 − o + o m) / N, where m
    is the mean weight of false candidates, each counted by its weight. The factor 2 is for the two
    directions of a triple, which are not independent.
    """
    num_candidates = float(weights.sum())
    observed = float((weights * true).sum()) / num_candidates
    false_weights = weights[~true]
    mean_weight = 1.0
    if len(false_weights):
        mean_weight = float((false_weights**2).sum() / false_weights.sum())
    return num_candidates / (2 * (1 - observed + observed * mean_weight))


def share_interval(share: float, size: float) -> tuple[float, float]:
    """The Wilson score interval of a share that is observed in a sample of some size."""
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    squared = quantile**2 / size
    middle = (share + squared / 2) / (1 + squared)
    margin = math.sqrt(squared * (share * (1 - share) + squared / 4)) / (1 + squared)
    return max(middle - margin, 0.0), min(middle + margin, 1.0)


def reliability_table(
    probabilities: Floats, true: Flags, weights: Floats
) -> tuple[ReliabilityBin, ...]:
    """Weighted candidates `(n,)` in bins of fixed ranges, without bins that are empty.

    A bin contains its lower edge, and the last one also its upper edge.
    """
    bin_numbers = np.searchsorted(TABLE_EDGES, probabilities, side="right") - 1
    bin_numbers = np.minimum(bin_numbers, len(TABLE_EDGES) - 2)
    bins = []
    for bin_number in np.unique(bin_numbers).tolist():
        chosen = bin_numbers == bin_number
        bins.append(
            ReliabilityBin.of(
                probabilities[chosen],
                true[chosen],
                weights[chosen],
                lower=TABLE_EDGES[bin_number],
                upper=TABLE_EDGES[bin_number + 1],
            )
        )
    return tuple(bins)


@dataclass(frozen=True)
class Reliability:
    """The expected calibration error, the part that sampling noise explains, and the Brier score.

    All three are NaN without candidates.
    """

    ece: float
    noise: float
    brier: float
    num_candidates: float
    num_true: int
    bins: tuple[ReliabilityBin, ...]

    @classmethod
    def of(
        cls, probabilities: Floats, true: Flags, weights: Floats, *, num_bins: int = NUM_BINS
    ) -> Self:
        """Compare the probabilities of weighted candidates `(n,)` with their labels.

        The bins have equal mass, and the ECE is Σ mass · |predicted − observed|.
        """
        total = float(weights.sum())
        if not total:
            return cls(math.nan, math.nan, math.nan, num_candidates=0.0, num_true=0, bins=())

        order = np.argsort(probabilities, kind="stable")
        probabilities = probabilities[order]
        true = true[order]
        weights = weights[order]
        middles = np.cumsum(weights) - weights / 2
        bin_numbers = np.minimum((middles / total * num_bins).astype(np.int64), num_bins - 1)

        bins = []
        for bin_number in np.unique(bin_numbers):
            chosen = bin_numbers == bin_number
            bins.append(ReliabilityBin.of(probabilities[chosen], true[chosen], weights[chosen]))

        errors = (bin.num_candidates * abs(bin.predicted - bin.observed) for bin in bins)
        noises = (bin.num_candidates * bin.noise for bin in bins)
        squared_errors = (probabilities - true) ** 2
        return cls(
            ece=sum(errors) / total,
            noise=sum(noises) / total,
            brier=float((weights * squared_errors).sum() / total),
            num_candidates=total,
            num_true=int(true.sum()),
            bins=tuple(bins),
        )

    def as_dict(self) -> dict[str, Any]:
        """The metrics for JSON, which has no NaN: they are None without candidates."""
        metrics = asdict(self)
        if not self.bins:
            metrics.update(ece=None, noise=None, brier=None)
        return metrics


@dataclass(frozen=True)
class RelationCounts:
    """The expected and the actual number of true candidates of a relation."""

    expected: float
    num_true: int
    relation_specific: bool


@dataclass(frozen=True)
class CalibrationReport:
    """Reliability of all candidates of a split and of the likely ones, and counts by relation.

    `table` has all candidates in bins of fixed ranges; empty bins are left out. `log_loss` is a sum
    over all candidates, divided by the number of true ones.
    """

    graph: str
    split: str
    overall: Reliability
    likely: Reliability
    log_loss: float
    table: tuple[ReliabilityBin, ...]
    by_relation: dict[str, RelationCounts]

    def as_dict(self) -> dict[str, Any]:
        protocol = (
            "candidates of both directions that no other split contains; "
            f"{NUM_BINS} bins of equal mass, and a table of fixed ranges with "
            f"{CONFIDENCE:.0%} confidence intervals"
        )
        return {
            **asdict(self),
            "protocol": protocol,
            "overall": self.overall.as_dict(),
            "likely": {"min_probability": LIKELY, **self.likely.as_dict()},
        }


def evaluate_calibration(
    calibration: Calibration, model: Model, graph: Graph, *, split: Split = "test", seed: int = 0
) -> CalibrationReport:
    """Compare probabilities with a split that they were not fitted on.

    `seed` draws the false candidates.
    """
    candidates = sample_candidates(model, graph, split, seed=seed)
    true = candidates.true
    weights = candidates.weights

    symmetric = graph.symmetric_relations
    log_probabilities = triple_log_probabilities(model, candidates.triples, symmetric=symmetric)
    # A split has only a part of the triples that the graph may be said to lack.
    measured = calibration.on(graph).as_measured
    of_triples = measured.of_triples(candidates.triples, log_probabilities)
    probabilities = of_triples.answer_probability

    by_relation = {}
    for relation in np.unique(candidates.relations).tolist():
        chosen = candidates.relations == relation
        by_relation[graph.relations[relation]] = RelationCounts(
            expected=float((probabilities * weights)[chosen].sum()),
            num_true=int(true[chosen].sum()),
            relation_specific=bool(calibration.relation_specific[relation]),
        )

    # A probability that is rounded to 0 or 1 may have no logarithm.
    of_labels = np.where(true, probabilities, 1 - probabilities)
    losses = -np.log(np.maximum(of_labels, np.finfo(np.float64).tiny))

    likely = probabilities >= LIKELY
    return CalibrationReport(
        graph=graph.name,
        split=split,
        overall=Reliability.of(probabilities, true, weights),
        likely=Reliability.of(probabilities[likely], true[likely], weights[likely]),
        log_loss=float((weights * losses).sum() / true.sum()),
        table=reliability_table(probabilities, true, weights),
        by_relation=by_relation,
    )

"""Evaluation of calibrated probabilities and prediction sets on a split that they were not fitted
on.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.errors import RequestError
from dualkg.inference.calibration import Calibration, DomainRange, Flags, sample_candidates
from dualkg.inference.prediction_sets import SIDES, PredictionSets, filtered_log_probabilities
from dualkg.inference.scoring import Floats, triple_log_probabilities
from dualkg.models.base import Model

NUM_BINS = 10
LIKELY = 0.01  # nearly all candidates are less probable and dominate a mean over all


@dataclass(frozen=True)
class Coverage:
    """The share of queries whose prediction set contains the answer, and the sizes of the sets."""

    coverage: float
    mean_size: float
    median_size: float
    num_queries: int
    relation_specific: bool | None = None  # whether a relation has its own threshold


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
        """For JSON; `relation_specific` only where it is not None."""
        return asdict(
            self,
            dict_factory=lambda items: {name: value for name, value in items if value is not None},
        )


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
        raise RequestError(f"{graph.name} has no {split} triples to evaluate prediction sets on.")
    known = KnownAnswers.of(graph)
    relations = triples[:, 1]
    present, places = np.unique(relations, return_inverse=True)
    covered = np.empty((2, len(triples)), dtype=bool)
    sizes = np.empty((2, len(triples)), dtype=np.int64)
    for row, side in enumerate(SIDES):
        thresholds = [
            prediction_sets.threshold(relation, side, coverage=coverage)
            for relation in present.tolist()
        ]
        least = -torch.tensor(thresholds)[torch.from_numpy(places)].to(model.device)
        for block, log_probabilities, answers in filtered_log_probabilities(
            model, triples, side, known
        ):
            inside = (log_probabilities >= least[block, None]) & torch.isfinite(log_probabilities)
            covered[row, block] = inside.gather(1, answers[:, None])[:, 0].cpu().numpy()
            sizes[row, block] = inside.sum(1).cpu().numpy()

    def measure(part: Any, relation_specific: bool | None = None) -> Coverage:
        sizes_of_part = sizes[part]
        mean = float(sizes_of_part.mean())
        median = float(np.median(sizes_of_part))
        return Coverage(
            float(covered[part].mean()), mean, median, sizes_of_part.size, relation_specific
        )

    by_relation = {}
    for id in present.tolist():
        own = prediction_sets.has_own_threshold(id, coverage=coverage)
        by_relation[graph.relations[id]] = measure(np.s_[:, relations == id], own)
    by_direction: dict[str, Coverage] = {side: measure(row) for row, side in enumerate(SIDES)}
    return CoverageReport(graph.name, split, coverage, measure(...), by_direction, by_relation)


@dataclass(frozen=True)
class ReliabilityBin:
    """Candidates of similar probability: the mean prediction, the observed share of true ones, and
    sampling noise.
    """

    predicted: float
    observed: float
    num_candidates: float
    num_true: int
    noise: float  # the mean difference between the two if every probability were right


@dataclass(frozen=True)
class Reliability:
    """Expected calibration error, the part of it that sampling noise explains, and the Brier
    score.
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
        """Candidates `(n,)` with weights, in bins of equal mass; ECE is Σ mass · |predicted −
        observed|.
        """
        total = float(weights.sum())
        if not total:
            return cls(math.nan, math.nan, math.nan, num_candidates=0.0, num_true=0, bins=())
        order = np.argsort(probabilities, kind="stable")
        probabilities = probabilities[order]
        true = true[order]
        weights = weights[order]
        middles = np.cumsum(weights) - weights / 2
        places = np.minimum((middles / total * num_bins).astype(np.int64), num_bins - 1)
        bins = []
        for place in np.unique(places):
            p, is_true, mass = (
                values[places == place] for values in (probabilities, true, weights)
            )
            number = float(mass.sum())
            predicted = float((mass * p).sum()) / number
            observed = float((mass * is_true).sum()) / number
            # A true triple is a candidate in both directions, which doubles the variance of
            # independent ones.
            variance = 2 * float((mass * p * (1 - p)).sum())
            noise = math.sqrt(2 / math.pi * variance) / number  # the mean of |x| for a normal x
            bins.append(ReliabilityBin(predicted, observed, number, int(is_true.sum()), noise))
        ece = sum(one.num_candidates * abs(one.predicted - one.observed) for one in bins) / total
        noise = sum(one.num_candidates * one.noise for one in bins) / total
        brier = float((weights * (probabilities - true) ** 2).sum() / total)
        return cls(ece, noise, brier, total, int(true.sum()), tuple(bins))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: None without candidates."""
        return (
            asdict(self)
            if self.bins
            else {**asdict(self), "ece": None, "noise": None, "brier": None}
        )


@dataclass(frozen=True)
class RelationCounts:
    """The expected and the actual number of true candidates of a relation."""

    expected: float
    num_true: int
    relation_specific: bool


@dataclass(frozen=True)
class CalibrationReport:
    """Reliability of all candidates of a split and of those with p ≥ .01, and counts by
    relation.
    """

    graph: str
    split: str
    overall: Reliability
    likely: Reliability
    by_relation: dict[str, RelationCounts]

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "protocol": f"candidates of both directions that no other split contains; {NUM_BINS} bins of equal mass",
            "overall": self.overall.as_dict(),
            "likely": {"min_probability": LIKELY, **self.likely.as_dict()},
        }


def evaluate_calibration(
    calibration: Calibration, model: Model, graph: Graph, *, split: Split = "test", seed: int = 0
) -> CalibrationReport:
    """Compare probabilities with a split that they were not fitted on; `seed` draws the false
    candidates.
    """
    drawn = sample_candidates(model, graph, split, seed=seed)
    log_probability = triple_log_probabilities(model, drawn.triples).double().cpu()
    relations, patterns = (
        torch.from_numpy(ids) for ids in (drawn.relations, DomainRange.of(graph)(drawn.triples))
    )
    found = calibration.probability(log_probability, relations, patterns).numpy()
    likely = found >= LIKELY
    by_relation = {}
    for id in np.unique(drawn.relations).tolist():
        its = drawn.relations == id
        expected = float((found * drawn.weights)[its].sum())
        num_true = int(drawn.true[its].sum())
        by_relation[graph.relations[id]] = RelationCounts(
            expected, num_true, bool(calibration.relation_specific[id])
        )
    overall = Reliability.of(found, drawn.true, drawn.weights)
    part = Reliability.of(found[likely], drawn.true[likely], drawn.weights[likely])
    return CalibrationReport(graph.name, split, overall, part, by_relation)

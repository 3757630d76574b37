"""Whether prediction sets hold what they promise: how often they have the answer, and how large they are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.errors import RequestError
from dualkg.inference.calibration import (
    Calibration,
    DomainRange,
    Floats,
    Ids,
    sample_candidates,
    triple_log_probabilities,
)
from dualkg.inference.prediction_sets import PredictionSets, without_others
from dualkg.models.base import Model, Side

SIDES: tuple[Side, ...] = ("tail", "head")


@dataclass(frozen=True)
class Coverage:
    """Of some questions: the share whose prediction set has the answer, and the sizes of the sets."""

    coverage: float
    mean_size: float
    median_size: float
    num_queries: int
    relation_specific: bool | None = None  # of a relation: whether its threshold is its own

    @classmethod
    def of(cls, covered: npt.NDArray[np.bool_], sizes: Ids, *, relation_specific: bool | None = None) -> Coverage:
        return cls(float(covered.mean()), float(sizes.mean()), float(np.median(sizes)), covered.size, relation_specific)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class CoverageReport:
    """Prediction sets of every question of a split, both directions."""

    graph: str
    split: str
    target_coverage: float
    overall: Coverage
    by_direction: dict[str, Coverage]
    by_relation: dict[str, Coverage]

    def as_dict(self) -> dict[str, Any]:
        views = {"by_direction": self.by_direction, "by_relation": self.by_relation}
        return {
            "graph": self.graph,
            "split": self.split,
            "target_coverage": self.target_coverage,
            "overall": self.overall.as_dict(),
            **{view: {name: part.as_dict() for name, part in parts.items()} for view, parts in views.items()},
        }


def evaluate_coverage(
    prediction_sets: PredictionSets, model: Model, graph: Graph, *, split: Split = "test", coverage: float = 0.9
) -> CoverageReport:
    """Make the prediction set of every question of a split, and see whether the answer is in it."""
    triples = graph.split(split).astype(np.int64)
    if not len(triples):
        raise RequestError(f"{graph.name} has no {split} triples to check prediction sets by.")
    known = KnownAnswers.of(graph)
    found = [_sets_of(prediction_sets, model, triples, side, known, coverage) for side in SIDES]
    covered, sizes = np.stack([one for one, _ in found]), np.stack([one for _, one in found])
    relations = triples[:, 1]
    return CoverageReport(
        graph=graph.name,
        split=split,
        target_coverage=coverage,
        overall=Coverage.of(covered, sizes),
        by_direction={side: Coverage.of(covered[row], sizes[row]) for row, side in enumerate(SIDES)},
        by_relation={
            graph.relations[id]: Coverage.of(
                covered[:, relations == id],
                sizes[:, relations == id],
                relation_specific=prediction_sets.has_own_threshold(id, coverage=coverage),
            )
            for id in np.unique(relations).tolist()
        },
    )


def _sets_of(
    prediction_sets: PredictionSets, model: Model, triples: Ids, side: Side, known: KnownAnswers, coverage: float
) -> tuple[npt.NDArray[np.bool_], Ids]:
    """Whether the set of each triple's question has the answer, and how many entities it has."""
    present, places = np.unique(triples[:, 1], return_inverse=True)
    most = [prediction_sets.threshold(relation, side, coverage=coverage) for relation in present.tolist()]
    least = -torch.tensor(most, device=model.device)[torch.from_numpy(places).to(model.device)]
    covered, sizes, done = [], [], 0
    for log_probabilities, answers in without_others(model, triples, side, known):
        limit = least[done : done + len(answers), None]
        done += len(answers)
        inside = (log_probabilities >= limit) & torch.isfinite(log_probabilities)
        covered.append(inside.gather(1, answers[:, None])[:, 0].cpu().numpy())
        sizes.append(inside.sum(1).cpu().numpy())
    return np.concatenate(covered), np.concatenate(sizes)


NUM_BINS = 10
LIKELY = 0.01  # nearly all candidates are less probable, and would hide the others in a mean over all


@dataclass(frozen=True)
class ReliabilityBin:
    """Candidates of about the same probability: what was said of them, and what was found."""

    predicted: float
    observed: float
    num_candidates: float
    num_true: int
    noise: float  # how far apart the two would be on average if each probability were right


@dataclass(frozen=True)
class Reliability:
    """Expected calibration error, what chance alone would leave of it, and the Brier score, over bins of equal mass."""

    ece: float
    noise: float
    brier: float
    num_candidates: float
    num_true: int
    bins: tuple[ReliabilityBin, ...]

    @classmethod
    def of(
        cls, probabilities: Floats, true: npt.NDArray[np.bool_], weights: Floats, *, num_bins: int = NUM_BINS
    ) -> Reliability:
        """Candidates `(n,)`, each counted by its weight; the error is Σ mass · |predicted − found| over the bins."""
        total = float(weights.sum())
        if not total:
            nan = float("nan")
            return cls(nan, nan, nan, num_candidates=0.0, num_true=0, bins=())
        order = np.argsort(probabilities, kind="stable")
        probabilities, true, weights = probabilities[order], true[order], weights[order]
        middles = np.cumsum(weights) - weights / 2
        places = np.minimum((middles / total * num_bins).astype(np.int64), num_bins - 1)
        found = tuple(
            _bin(probabilities[places == place], true[places == place], weights[places == place])
            for place in np.unique(places)
        )
        return cls(
            ece=sum(one.num_candidates * abs(one.predicted - one.observed) for one in found) / total,
            noise=sum(one.num_candidates * one.noise for one in found) / total,
            brier=float((weights * (probabilities - true) ** 2).sum() / total),
            num_candidates=total,
            num_true=int(true.sum()),
            bins=found,
        )

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, which has no NaN: no candidates give no numbers."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def _bin(probabilities: Floats, true: npt.NDArray[np.bool_], weights: Floats) -> ReliabilityBin:
    total = float(weights.sum())
    # A true triple is asked about from both its ends, so twice as much is left to chance as if each stood alone.
    variance = 2 * float((weights * probabilities * (1 - probabilities)).sum())
    return ReliabilityBin(
        predicted=float((weights * probabilities).sum()) / total,
        observed=float((weights * true).sum()) / total,
        num_candidates=total,
        num_true=int(true.sum()),
        noise=math.sqrt(2 / math.pi * variance) / total,  # the mean of |x| for a normal x
    )


@dataclass(frozen=True)
class RelationCounts:
    """Of one relation: how many true candidates its probabilities add up to, and how many there were."""

    expected: float
    num_true: int
    relation_specific: bool


@dataclass(frozen=True)
class CalibrationReport:
    """How a calibration held on a split: over all candidates, over those with p ≥ .01, and by relation."""

    graph: str
    split: str
    overall: Reliability
    likely: Reliability
    by_relation: dict[str, RelationCounts]

    def as_dict(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "split": self.split,
            "protocol": f"candidates of both directions that no other split knows; {NUM_BINS} bins of equal mass",
            "overall": self.overall.as_dict(),
            "likely": {"least_probability": LIKELY, **self.likely.as_dict()},
            "by_relation": {name: asdict(tally) for name, tally in self.by_relation.items()},
        }


def evaluate_calibration(
    calibration: Calibration, model: Model, graph: Graph, *, split: Split = "test", seed: int = 0
) -> CalibrationReport:
    """Hold probabilities against a split that they were not fitted on; `seed` draws the false candidates."""
    drawn = sample_candidates(model, graph, split, seed=seed)
    log_probability = triple_log_probabilities(model, drawn.triples).double().cpu()
    relations, patterns = (torch.from_numpy(ids) for ids in (drawn.relations, DomainRange.of(graph)(drawn.triples)))
    found = calibration.probability(log_probability, relations, patterns).numpy()
    likely = found >= LIKELY
    by_relation = {}
    for id in np.unique(drawn.relations).tolist():
        its = drawn.relations == id
        expected = float((found * drawn.weights)[its].sum())
        by_relation[graph.relations[id]] = RelationCounts(
            expected, int(drawn.true[its].sum()), bool(calibration.relation_specific[id])
        )
    return CalibrationReport(
        graph=graph.name,
        split=split,
        overall=Reliability.of(found, drawn.true, drawn.weights),
        likely=Reliability.of(found[likely], drawn.true[likely], drawn.weights[likely]),
        by_relation=by_relation,
    )

"""Paired comparison of two runs on the same queries, with bootstrap intervals and p-values.

The bootstrap resamples triples, each with both directions, since the two queries of a triple are
not independent.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.data.inspection import cardinalities
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import Ranks
from dualkg.evaluation.report import COLUMNS, metric_values
from dualkg.models.base import SIDES

Floats = npt.NDArray[np.float64]

MIN_SAMPLES = 100
MIN_TRIPLES = 10  # the differences of fewer often all have one sign, and so does every sample
ROUNDING = 1e-12  # of sums
BLOCK_ELEMENTS = 250_000  # triples drawn at a time by a thread: 10 MB


@dataclass(frozen=True)
class Difference:
    """A metric of both runs, `a` − `b`, its 95 % interval and two-sided p-value (NaN below
    `MIN_TRIPLES` triples).
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    p_value: float

    @property
    def within_noise(self) -> bool:
        """Whether the interval includes 0, or is NaN."""
        return not (self.low > 0 or self.high < 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with None for NaN."""
        numbers = {
            name: None if math.isnan(value) else value for name, value in asdict(self).items()
        }
        return {**numbers, "within_noise": self.within_noise}


@dataclass(frozen=True)
class Comparison:
    """The difference of two runs in each metric, and the fractions of triples where `a` is better,
    worse or equal.
    """

    mrr: Difference
    hits_at_1: Difference
    hits_at_3: Difference
    hits_at_10: Difference
    better: float
    worse: float
    equal: float
    num_triples: int
    samples: int

    @property
    def within_noise(self) -> bool:
        """Whether the difference in MRR is within noise."""
        return self.mrr.within_noise

    @property
    def differences(self) -> dict[str, Difference]:
        """By the column titles of tables."""
        return {title: getattr(self, name) for title, name in COLUMNS.items()}

    def sentence(self, a: str = "A", b: str = "B") -> str:
        """A summary in one sentence, with the names of the two runs."""
        low = self.mrr.low
        high = self.mrr.high
        difference = short_decimal(self.mrr.difference)
        if math.isnan(low):
            count = (
                f"{self.num_triples:,} {'triple is' if self.num_triples == 1 else 'triples are'}"
            )
            return f"{count} too few to tell the difference of {difference} MRR from noise."
        ahead, least, most = (b, -high, -low) if high < 0 else (a, low, high)
        interval = f"(95 %: {short_decimal(least)} to {short_decimal(most)})."
        if self.within_noise:
            return f"The difference of {difference} is within noise {interval}"
        return f"{ahead} is better by {short_decimal(abs(self.mrr.difference))} MRR {interval}"

    def as_dict(self) -> dict[str, Any]:
        metrics = {name: getattr(self, name).as_dict() for name in COLUMNS.values()}
        others = ("better", "worse", "equal", "num_triples", "samples")
        return {
            **metrics,
            "within_noise": self.within_noise,
            **{name: getattr(self, name) for name in others},
        }


def compare_ranks(a: Floats, b: Floats, *, samples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare mean ranks of the same queries, `(num_seeds, 2, num_triples)` each; metrics are
    averaged over seeds.
    """
    a = _checked(a, "A")
    b = _checked(b, "B")
    if a.shape[1:] != b.shape[1:]:
        raise RequestError(
            f"A has ranks of {a.shape[1]} × {a.shape[2]:,} queries and B of {b.shape[1]} × "
            f"{b.shape[2]:,}: only ranks of the same split can be compared."
        )
    if samples < MIN_SAMPLES:
        raise RequestError(
            f"A 95 % interval needs at least {MIN_SAMPLES} samples; {samples} were given."
        )
    if seed < 0:
        raise RequestError(f"A seed is at least 0; {seed} was given.")
    values_a, values_b = (
        metric_values(ranks).mean(axis=(1, 2)) for ranks in (a, b)
    )  # (num_metrics, num_triples)
    differences = values_a - values_b
    differences[np.isclose(values_a, values_b, rtol=ROUNDING, atol=0)] = (
        0  # a mean over seeds depends on their order
    )
    means = _bootstrap(np.ascontiguousarray(differences.T), samples, seed)
    whole = differences.mean(axis=1)
    mrr, at_1, at_3, at_10 = (
        Difference(float(of_a.mean()), float(of_b.mean()), float(between), *_spread(drawn))
        for of_a, of_b, between, drawn in zip(values_a, values_b, whole, means.T, strict=True)
    )
    better, worse, equal = (float((np.sign(differences[0]) == sign).mean()) for sign in (1, -1, 0))
    return Comparison(
        mrr,
        at_1,
        at_3,
        at_10,
        better,
        worse,
        equal,
        num_triples=differences.shape[1],
        samples=samples,
    )


def check_comparable(one: tuple[str, Graph, Triples], other: tuple[str, Graph, Triples]) -> None:
    """Refuse two runs (name, graph, ranked triples) that were not ranked on the same triples of the
    same graph.
    """
    (a, graph, triples), (b, other_graph, other_triples) = one, other
    same_names = graph.entities == other_graph.entities and graph.relations == other_graph.relations
    same_splits = all(
        np.array_equal(graph.split(split), other_graph.split(split)) for split in SPLITS
    )
    if same_names and same_splits and np.array_equal(triples, other_triples):
        return
    if graph.name != other_graph.name:
        raise RequestError(
            f"{a} is of {graph.name} and {b} of {other_graph.name}; only runs of the same graph "
            "can be compared."
        )
    raise RequestError(
        f"{a} and {b} are both of {graph.name}, but the data were not the same: other triples, "
        "another split, or another order. Train both on the same files."
    )


@dataclass(frozen=True)
class GroupComparison:
    """The comparison of one group, with the p-value of its MRR corrected for the number of
    groups.
    """

    comparison: Comparison
    p_corrected: float

    def as_dict(self) -> dict[str, Any]:
        corrected = None if math.isnan(self.p_corrected) else self.p_corrected
        return {**self.comparison.as_dict(), "p_corrected": corrected}


def compare_by(
    a: Floats,
    b: Floats,
    triples: Triples,
    graph: Graph,
    *,
    view: str,
    samples: int = 10_000,
    seed: int = 0,
) -> dict[str, GroupComparison]:
    """Compare by direction, relation or cardinality; groups with most triples first."""
    if view == "direction":
        indices: dict[str, Any] = {name: np.s_[:, row : row + 1] for row, name in enumerate(SIDES)}
    else:
        kinds = (
            graph.relations.names.to_pylist()
            if view == "relation"
            else cardinalities(graph.train, graph.shape)
        )
        of_triples = np.array(kinds, dtype=object)[triples[:, 1]]
        indices = {
            name: np.s_[:, :, of_triples == name] for name in dict.fromkeys(of_triples.tolist())
        }
    found = {
        name: compare_ranks(a[part], b[part], samples=samples, seed=seed)
        for name, part in indices.items()
    }
    corrected = holm([one.mrr.p_value for one in found.values()])
    groups = {
        name: GroupComparison(one, p)
        for (name, one), p in zip(found.items(), corrected, strict=True)
    }
    return dict(sorted(groups.items(), key=lambda item: -item[1].comparison.num_triples))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple testing (Holm, 1979); NaN stays NaN and does not count as a
    test.
    """
    corrected = list(p_values)
    highest = 0.0
    order = sorted(
        (i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i]
    )
    for done, i in enumerate(order):
        highest = max(highest, min(1.0, p_values[i] * (len(order) - done)))
        corrected[i] = highest
    return corrected


@dataclass(frozen=True)
class QueryDifference:
    """A query that two runs rank differently: the ids of its triple, the predicted side, and the
    rank in each run.

    With several seeds a rank is the harmonic mean, so that `difference` is 1/`rank_a` − 1/`rank_b`.
    """

    head: int
    relation: int
    tail: int
    direction: str
    rank_a: float
    rank_b: float
    difference: float


def largest_differences(
    a: Floats, b: Floats, triples: Triples, *, most: int
) -> list[QueryDifference]:
    """The `most` queries with the largest differences in reciprocal rank, largest first."""
    inverse_a, inverse_b = (
        metric_values(_checked(*one))[0].mean(axis=0) for one in ((a, "A"), (b, "B"))
    )
    differences = (inverse_a - inverse_b).reshape(-1)
    order = np.argsort(-np.abs(differences), kind="stable")[:most]
    found = []
    for query in order[~np.isclose(differences[order], 0, atol=ROUNDING)].tolist():
        direction, row = divmod(query, len(triples))
        of_a, of_b = (float(1 / inverse[direction, row]) for inverse in (inverse_a, inverse_b))
        head, relation, tail = triples[row].tolist()
        difference = float(differences[query])
        found.append(
            QueryDifference(head, relation, tail, SIDES[direction], of_a, of_b, difference)
        )
    return found


def stack_mean_ranks(ranks: Sequence[Ranks]) -> Floats:
    """The mean ranks of runs that differ only in their seed, `(num_seeds, 2, num_triples)`."""
    first, *others = ranks
    if any(not np.array_equal(first.triples, other.triples) for other in others):
        raise RequestError(
            "The runs do not rank the same triples in the same order, so their ranks have no mean."
        )
    return np.stack([one.mean for one in ranks])


def short_decimal(number: float) -> str:
    """`.0123`, `−.0011`: four decimal places without a leading 0."""
    digits = f"{abs(number):.4f}"
    sign = "−" if number < 0 and float(digits) else ""
    return sign + digits.removeprefix("0")


def _bootstrap(differences: Floats, samples: int, seed: int) -> Floats:
    """Means of resampled rows, `(samples, num_metrics)`; they do not depend on the number of
    threads.
    """
    num_triples = len(differences)
    if num_triples < MIN_TRIPLES:
        return np.full((samples, differences.shape[1]), np.nan)
    size = max(1, BLOCK_ELEMENTS // num_triples)
    sizes = [min(size, samples - start) for start in range(0, samples, size)]
    ones = np.ones(num_triples)

    def draw(size: int, source: np.random.SeedSequence) -> Floats:
        rows = np.random.default_rng(source).integers(0, num_triples, (size, num_triples))
        means: Floats = ones @ differences.take(rows, axis=0) / num_triples
        means[np.abs(means) < ROUNDING] = 0  # positive and negative differences that cancel
        return means

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return np.concatenate(
            list(threads.map(draw, sizes, np.random.SeedSequence(seed).spawn(len(sizes))))
        )


def _spread(means: Floats) -> tuple[float, float, float]:
    """The ends of the 95 % interval, and twice the fraction of samples on the rarer side of 0."""
    if np.isnan(means[0]):
        return math.nan, math.nan, math.nan
    low, high = np.quantile(means, (0.025, 0.975))
    rarer = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return float(low), float(high), min(1.0, 2 * (rarer + 1) / (len(means) + 1))


def _checked(ranks: Floats, run: str) -> Floats:
    ranks = np.asarray(ranks, dtype=np.float64)
    if ranks.ndim != 3 or not ranks.size:
        raise RequestError(
            f"Ranks to compare are of the shape (num_seeds, 2, num_triples); those of {run} are "
            f"{ranks.shape}."
        )
    if not (np.isfinite(ranks).all() and ranks.min() >= 1):
        raise RequestError(f"Ranks are numbers from 1 on; {run} has others.")
    return ranks

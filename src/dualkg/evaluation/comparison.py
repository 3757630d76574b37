"""Paired comparison of two runs on the same queries, with bootstrap intervals and p-values.

The bootstrap resamples triples, each with both directions, since the two queries of a triple are
not independent.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.data.inspection import cardinalities
from dualkg.errors import InvalidValue, RequestError
from dualkg.evaluation.metrics import METRICS
from dualkg.evaluation.ranking import Ranks
from dualkg.models.base import SIDES

Floats = npt.NDArray[np.float64]

MIN_SAMPLES = 100  # the ends of a 95 % interval need some samples beyond them
MIN_TRIPLES = 10  # the differences of fewer often all have one sign, and so does every sample
ROUNDING = 1e-12  # relative error of sums over seeds, whose order must not matter
BLOCK_ELEMENTS = 250_000  # triples that a thread draws at a time: 10 MB


@dataclass(frozen=True)
class Difference:
    """A metric of both runs, `a` − `b`, its 95 % interval and two-sided p-value.

    Interval and p-value are NaN below `MIN_TRIPLES` triples.
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
        values: dict[str, Any] = {}
        for name, number in asdict(self).items():
            values[name] = None if math.isnan(number) else number
        return {**values, "within_noise": self.within_noise}


@dataclass(frozen=True)
class Comparison:
    """The difference of two runs in each metric, by its name.

    `better`, `worse` and `equal` are fractions of triples by the reciprocal ranks of `a`.

    Attributes:
        metrics: Difference in each metric, with its interval.
        better: Fraction of triples that `a` ranks better.
        worse: Fraction that `a` ranks worse.
        equal: Fraction that both rank the same.
        num_triples: Number of triples.
        samples: Number of bootstrap samples.

    Examples:
        >>> ranks = kg.rank(run.model, graph).mean[None]
        >>> comparison = kg.compare_ranks(ranks, ranks + 1, samples=100)
        >>> comparison.mrr.low > 0
        True
    """

    metrics: Mapping[str, Difference]
    better: float
    worse: float
    equal: float
    num_triples: int
    samples: int

    @property
    def mrr(self) -> Difference:
        """The difference in MRR."""
        return self.metrics["mrr"]

    @property
    def hits_at_1(self) -> Difference:
        """The difference in Hits@1."""
        return self.metrics["hits_at_1"]

    @property
    def hits_at_3(self) -> Difference:
        """The difference in Hits@3."""
        return self.metrics["hits_at_3"]

    @property
    def hits_at_10(self) -> Difference:
        """The difference in Hits@10."""
        return self.metrics["hits_at_10"]

    @property
    def within_noise(self) -> bool:
        """Whether the difference in MRR is within noise."""
        return self.mrr.within_noise

    @property
    def differences(self) -> dict[str, Difference]:
        """By the column titles of tables."""
        return {METRICS[name].title: difference for name, difference in self.metrics.items()}

    def sentence(self, a: str = "A", b: str = "B") -> str:
        """A summary in one sentence, with the names of the two runs."""
        difference = short_decimal(self.mrr.difference)
        low = self.mrr.low
        high = self.mrr.high
        if math.isnan(low):
            triples = "triple is" if self.num_triples == 1 else "triples are"
            return (
                f"{self.num_triples:,} {triples} too few to tell the difference of {difference} "
                "MRR from noise."
            )
        ahead = a
        if high < 0:
            ahead = b
            low, high = -high, -low
        interval = f"(95 %: {short_decimal(low)} to {short_decimal(high)})."
        if self.within_noise:
            return f"The difference of {difference} is within noise {interval}"
        return f"{ahead} is better by {short_decimal(abs(self.mrr.difference))} MRR {interval}"

    def as_dict(self) -> dict[str, Any]:
        """All differences and numbers of triples, for JSON."""
        values: dict[str, Any] = {}
        for name, difference in self.metrics.items():
            values[name] = difference.as_dict()
        values["within_noise"] = self.within_noise
        for name in ("better", "worse", "equal", "num_triples", "samples"):
            values[name] = getattr(self, name)
        return values


def compare_ranks(a: Floats, b: Floats, *, samples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare mean ranks of the same queries, `(num_seeds, 2, num_triples)` each.

    Metrics are averaged over seeds.

    Args:
        a: Mean ranks of the first model.
        b: Mean ranks of the second model, of the same queries.
        samples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        Differences with 95 % intervals and p-values.

    Examples:
        >>> ranks = kg.rank(run.model, graph).mean[None]
        >>> kg.compare_ranks(ranks, ranks, samples=100).within_noise
        True
    """
    a = _checked(a, "A")
    b = _checked(b, "B")
    if a.shape[1:] != b.shape[1:]:
        raise RequestError(
            f"A has ranks of {a.shape[1]} × {a.shape[2]:,} queries and B of {b.shape[1]} × "
            f"{b.shape[2]:,}: only ranks of the same split can be compared.",
        )
    if samples < MIN_SAMPLES:
        raise InvalidValue("samples", expected=f"at least {MIN_SAMPLES}", found=samples)
    if seed < 0:
        raise InvalidValue("seed", expected="at least 0", found=seed)

    values_a = _values_of_triples(a)
    values_b = _values_of_triples(b)
    differences = values_a - values_b
    # A mean over seeds depends on their order.
    differences[np.isclose(values_a, values_b, rtol=ROUNDING, atol=0)] = 0
    means = _bootstrap(np.ascontiguousarray(differences.T), samples, seed)

    metrics = {}
    for row, name in enumerate(METRICS.compared()):
        metrics[name] = Difference(
            float(values_a[row].mean()),
            float(values_b[row].mean()),
            float(differences[row].mean()),
            *_spread(means.T[row]),
        )
    reciprocal_ranks = differences[list(metrics).index("mrr")]
    signs = np.sign(reciprocal_ranks)
    return Comparison(
        metrics,
        better=float((signs == 1).mean()),
        worse=float((signs == -1).mean()),
        equal=float((signs == 0).mean()),
        num_triples=differences.shape[1],
        samples=samples,
    )


def _values_of_triples(ranks: Floats) -> Floats:
    """The mean of each metric over the seeds and directions of a triple.

    Shape `(num_metrics, num_triples)`.
    """
    values = []
    for metric in METRICS.compared().values():
        if metric.per_query is not None:
            values.append(metric.per_query(ranks))
    means: Floats = np.stack(values).astype(np.float64, copy=False).mean(axis=(1, 2))
    return means


RankedRun = tuple[str, Graph, Triples]  # name, graph, and the triples that were ranked


def check_comparable(first: RankedRun, second: RankedRun) -> None:
    """Refuse two runs that were not ranked on the same triples of the same graph."""
    a, graph_a, triples_a = first
    b, graph_b, triples_b = second
    same_entities = graph_a.entities == graph_b.entities
    same_relations = graph_a.relations == graph_b.relations
    same_splits = all(
        np.array_equal(graph_a.split(split), graph_b.split(split)) for split in SPLITS
    )
    if same_entities and same_relations and same_splits and np.array_equal(triples_a, triples_b):
        return
    if graph_a.name != graph_b.name:
        raise RequestError(
            f"{a} is of {graph_a.name} and {b} of {graph_b.name}; only runs of the same graph can "
            "be compared.",
        )
    raise RequestError(
        f"{a} and {b} are both of {graph_a.name}, but the data were not the same: other triples, "
        "another split, or another order. Train both on the same files.",
    )


@dataclass(frozen=True)
class GroupComparison:
    """The comparison of one group.

    The p-value of its MRR is corrected for the number of groups.
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
    comparisons = {}
    for name, part in _groups(triples, graph, view).items():
        comparisons[name] = compare_ranks(a[part], b[part], samples=samples, seed=seed)
    corrected = holm([comparison.mrr.p_value for comparison in comparisons.values()])

    groups = {}
    for (name, comparison), p_value in zip(comparisons.items(), corrected, strict=True):
        groups[name] = GroupComparison(comparison, p_value)
    return dict(sorted(groups.items(), key=lambda item: -item[1].comparison.num_triples))


def _groups(triples: Triples, graph: Graph, view: str) -> dict[str, Any]:
    """The indices of each group in ranks of shape `(num_seeds, 2, num_triples)`."""
    if view == "direction":
        return {side: np.s_[:, row : row + 1] for row, side in enumerate(SIDES)}
    if view == "relation":
        groups = graph.relations.names.to_pylist()
    else:
        groups = cardinalities(graph.train, graph.shape)
    group_of_triple = np.array(groups, dtype=object)[triples[:, 1]]
    names = dict.fromkeys(group_of_triple.tolist())
    return {name: np.s_[:, :, group_of_triple == name] for name in names}


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple testing (Holm, 1979).

    NaN stays NaN and does not count as a test.
    """
    corrected = list(p_values)
    tests = [index for index, p_value in enumerate(p_values) if not math.isnan(p_value)]
    tests.sort(key=lambda index: p_values[index])
    highest = 0.0
    for num_done, index in enumerate(tests):
        highest = max(highest, min(1.0, p_values[index] * (len(tests) - num_done)))
        corrected[index] = highest
    return corrected


@dataclass(frozen=True)
class QueryDifference:
    """A query that two runs rank differently.

    It has the ids of its triple, the predicted side, and the rank in each run.
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
    # The mean over seeds of reciprocal ranks, (2, num_triples).
    reciprocal_a = (1 / _checked(a, "A")).mean(axis=0)
    reciprocal_b = (1 / _checked(b, "B")).mean(axis=0)
    differences = (reciprocal_a - reciprocal_b).reshape(-1)
    order = np.argsort(-np.abs(differences), kind="stable")[:most]
    different = order[~np.isclose(differences[order], 0, atol=ROUNDING)]

    queries = []
    for query in different.tolist():
        direction, row = divmod(query, len(triples))
        head, relation, tail = triples[row].tolist()
        queries.append(
            QueryDifference(
                head,
                relation,
                tail,
                direction=SIDES[direction],
                rank_a=float(1 / reciprocal_a[direction, row]),
                rank_b=float(1 / reciprocal_b[direction, row]),
                difference=float(differences[query]),
            )
        )
    return queries


def stack_mean_ranks(ranks: Sequence[Ranks]) -> Floats:
    """The mean ranks of runs that differ only in their seed, `(num_seeds, 2, num_triples)`."""
    triples = ranks[0].triples
    if any(not np.array_equal(triples, of_seed.triples) for of_seed in ranks):
        raise RequestError(
            "The runs do not rank the same triples in the same order, so their ranks have no mean.",
        )
    return np.stack([of_seed.mean for of_seed in ranks])


def short_decimal(number: float) -> str:
    """`.0123`, `−.0011`: four decimal places without a leading 0."""
    digits = f"{abs(number):.4f}"
    sign = "−" if number < 0 and float(digits) else ""
    return sign + digits.removeprefix("0")


def _bootstrap(differences: Floats, samples: int, seed: int) -> Floats:
    """Means of resampled rows, `(samples, num_metrics)`.

    They do not depend on the number of threads.
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

    sources = np.random.SeedSequence(seed).spawn(len(sizes))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return np.concatenate(list(threads.map(draw, sizes, sources)))


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
        expected = "of the shape (num_seeds, 2, num_triples)"
        raise RequestError(f"Ranks to compare are {expected}; those of {run} are {ranks.shape}.")
    if not (np.isfinite(ranks).all() and ranks.min() >= 1):
        raise RequestError(f"Ranks are numbers from 1 on; {run} has others.")
    return ranks

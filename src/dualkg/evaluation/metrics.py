"""Metrics of ranks. A metric registers itself; reports, comparisons and pages take what is there.

A metric is a function of ranks. Most are means over queries:

    @METRICS.mean(label="Inverse log rank", title="ILR")
    def inverse_log_rank(ranks):
        return 1 / (1 + np.log(ranks))

Other packages add metrics by entry points of the group `dualkg.metrics`, which name a `Metric`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualkg.errors import InvalidValue, RequestError
from dualkg.registry import Registry

Numbers = npt.NDArray[np.number]
Floats = npt.NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])
HITS = (1, 3, 10)


@dataclass(frozen=True)
class Metric:
    """A metric of ranks.

    `name` is its key in JSON, `label` its name in text, and `title` its name in a table. The metric
    is the mean of `per_query`, which maps ranks to the value of each query. A metric that is no
    mean has `of_all`, a function of all ranks `(num_queries,)` and of their numbers of candidates,
    or None where these are not known. Two runs are compared by the means that are `compared`.
    Tables always show `headline` metrics, and others on request, with `decimals` decimal places.
    """

    name: str
    label: str
    title: str
    higher_is_better: bool = True
    per_query: Callable[[Floats], npt.NDArray[Any]] | None = None
    of_all: Callable[[Floats, Numbers | None], float | None] | None = None
    compared: bool = True
    headline: bool = True
    decimals: int = 4

    def __call__(self, ranks: Floats, num_candidates: Numbers | None = None) -> float | None:
        if self.per_query is not None:
            return float(self.per_query(ranks).mean())
        if self.of_all is not None:
            return self.of_all(ranks, num_candidates)
        return None

    def text(self, value: float | None) -> str:
        """The value as tables show it."""
        return "–" if value is None else f"{value:,.{self.decimals}f}"


class MetricRegistry(Registry[Metric]):
    """The registered metrics, in the order of tables."""

    def mean(
        self, *, label: str, name: str = "", title: str = "", **settings: Any
    ) -> Callable[[F], F]:
        """A decorator for a function of ranks that returns the value of each query."""
        return self._decorator("per_query", label, name=name, title=title, **settings)

    def of_all(
        self, *, label: str, name: str = "", title: str = "", **settings: Any
    ) -> Callable[[F], F]:
        """A decorator for a function of all ranks and of their numbers of candidates."""
        return self._decorator("of_all", label, name=name, title=title, **settings)

    def _decorator(
        self, kind: str, label: str, *, name: str, title: str, **settings: Any
    ) -> Callable[[F], F]:
        def register(function: F) -> F:
            key = name or function.__name__
            settings[kind] = function
            self.add(key, Metric(name=key, label=label, title=title or label, **settings))
            return function

        return register

    def compared(self) -> dict[str, Metric]:
        """The metrics in which two runs are compared, by name."""
        return {
            name: metric
            for name, metric in self.items()
            if metric.compared and metric.per_query is not None
        }

    def headlines(self) -> dict[str, Metric]:
        """The metrics that tables and pages always show, by name."""
        return {name: metric for name, metric in self.items() if metric.headline}


METRICS = MetricRegistry("metric", group="dualkg.metrics")


@METRICS.mean(name="mrr", label="MRR")
def reciprocal_rank(ranks: Floats) -> Floats:
    return 1 / ranks


def _register_hits(k: int) -> None:
    @METRICS.mean(name=f"hits_at_{k}", label=f"Hits@{k}", title=f"H@{k}")
    def hit(ranks: Floats) -> npt.NDArray[np.bool_]:
        return ranks <= k


for _k in HITS:
    _register_hits(_k)


@METRICS.mean(
    name="mr", label="Mean rank", title="MR", higher_is_better=False, compared=False, decimals=1
)
def rank(ranks: Floats) -> Floats:
    return ranks


@METRICS.of_all(
    name="amr", label="Adjusted mean rank", title="AMR", higher_is_better=False, headline=False
)
def adjusted_mean_rank(ranks: Floats, num_candidates: Numbers | None) -> float | None:
    """The mean rank divided by its expectation for random scores."""
    if num_candidates is None:
        return None
    return float(ranks.mean()) / _expected_rank(num_candidates)


@METRICS.of_all(name="amri", label="Adjusted mean rank index", title="AMRI", headline=False)
def adjusted_mean_rank_index(ranks: Floats, num_candidates: Numbers | None) -> float | None:
    """1 − (MR − 1) / (expectation − 1): 1 is perfect, 0 random."""
    if num_candidates is None:
        return None
    expected = _expected_rank(num_candidates)
    if expected <= 1:
        return None
    return 1 - (float(ranks.mean()) - 1) / (expected - 1)


def _expected_rank(num_candidates: Numbers) -> float:
    """The expectation of the mean rank for random scores."""
    return (float(np.mean(num_candidates)) + 1) / 2


def columns() -> dict[str, str]:
    """The names of the metrics of a short table by their titles, such as `{"MRR": "mrr"}`."""
    return {metric.title: name for name, metric in METRICS.compared().items()}


def check_hits(hits: Iterable[int] | int) -> tuple[int, ...]:
    """The distinct k of Hits@k in their order; each is a whole number of at least 1."""
    given = hits if isinstance(hits, Iterable) else [hits]
    distinct = tuple(dict.fromkeys(given))
    for k in distinct:
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise InvalidValue("hits", expected="whole numbers of at least 1", found=k)
    return distinct


@dataclass(frozen=True)
class Metrics:
    """Mean reciprocal rank, mean rank, Hits@1, 3 and 10, the adjusted mean rank, and others.

    AMR and AMRI are None where the number of candidates is not known. `more_hits` has Hits@k for
    other k, and `others` the metrics that are registered besides these.

    Attributes:
        mrr: Mean reciprocal rank.
        mr: Mean rank.
        hits_at_1: Fraction of queries whose answer is first.
        hits_at_3: Fraction among the first 3.
        hits_at_10: Fraction among the first 10.
        num_queries: Number of queries, two for each triple.
        amr: Mean rank divided by that of a random ranking; None where the number of candidates is
            not known.
        amri: 1 is perfect, 0 is a random ranking; None where the number of candidates is not known.
        more_hits: Hits@k for other k.
        others: Metrics that are registered beside these.

    Examples:
        >>> metrics = run.report.metrics
        >>> metrics.hits_at_1 <= metrics.hits_at_10
        True
    """

    mrr: float
    mr: float
    hits_at_1: float
    hits_at_3: float
    hits_at_10: float
    num_queries: int
    amr: float | None = None
    amri: float | None = None
    more_hits: Mapping[int, float] = field(default_factory=dict)
    others: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ranks: Numbers, num_candidates: Numbers | None = None, *, hits: Iterable[int] = ()
    ) -> Metrics:
        """From ranks of any shape, with the number of candidates of each.

        Realistic ranks may be fractions.
        """
        ranks = np.asarray(ranks, dtype=np.float64).reshape(-1)
        more_k = [k for k in check_hits(hits) if k not in HITS]
        if len(ranks):
            values = {name: metric(ranks, num_candidates) for name, metric in METRICS.items()}
            more_hits = {k: float((ranks <= k).mean()) for k in more_k}
        else:
            values = {name: _value_of_nothing(metric) for name, metric in METRICS.items()}
            more_hits = dict.fromkeys(more_k, float("nan"))

        own: dict[str, Any] = {}
        others: dict[str, float | None] = {}
        names = {column.name for column in fields(cls)}
        for name, value in values.items():
            target = own if name in names else others
            target[name] = value
        return cls(**own, num_queries=len(ranks), more_hits=more_hits, others=others)

    def __getitem__(self, name: str) -> float | None:
        """The value of a registered metric, None if it was not computed."""
        if name in METRICS and hasattr(self, name):
            value: float | None = getattr(self, name)
            return value
        return self.others.get(name)

    def hits(self, k: int) -> float:
        """Hits@k, if it was computed; `Report.hits` has it for any k."""
        computed = {k: float(getattr(self, f"hits_at_{k}")) for k in HITS}
        computed |= self.more_hits
        if k not in computed:
            known = ", ".join(str(number) for number in computed)
            raise RequestError(
                f"Hits@{k} was not computed, only k = {known}. Evaluate with {k} among the `hits`."
            )
        return float(computed[k])

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, with None for NaN, the metrics of no queries."""
        own = {
            "mrr": self.mrr,
            "mr": self.mr,
            "hits_at_1": self.hits_at_1,
            "hits_at_3": self.hits_at_3,
            "hits_at_10": self.hits_at_10,
            "num_queries": self.num_queries,
            "amr": self.amr,
            "amri": self.amri,
        }
        values: dict[str, float | None] = {**own, **self.others}
        for k, share in self.more_hits.items():
            values[f"hits_at_{k}"] = share
        if self.num_queries:
            return values
        return {**dict.fromkeys(values), "num_queries": 0}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        """What `as_dict` returned, also of an earlier version; missing metrics are NaN or None."""
        nan = float("nan")
        own: dict[str, Any] = {}
        more_hits: dict[int, float] = {}
        others: dict[str, float | None] = {}
        names = {column.name for column in fields(cls)}
        for name, value in values.items():
            k = name.removeprefix("hits_at_")
            if name in names:
                own[name] = nan if value is None and name not in ("amr", "amri") else value
            elif k != name and k.isdigit():
                more_hits[int(k)] = nan if value is None else value
            else:
                others[name] = value
        for name in ("mrr", "mr", *(f"hits_at_{k}" for k in HITS)):
            own.setdefault(name, nan)
        own.setdefault("num_queries", 0)
        return cls(**own, more_hits=more_hits, others=others)

    @staticmethod
    def titles(*, hits: Sequence[int] = HITS, adjusted: bool = False) -> list[str]:
        """The column titles of `row`."""
        names = _row_names(adjusted=adjusted)
        of_hits = [f"H@{k}" for k in hits]
        first, *rest = (METRICS[name].title for name in names)
        return [first, *of_hits, *rest, "queries"]

    def row(self, *, hits: Sequence[int] = HITS, adjusted: bool = False) -> list[str]:
        """The cells of a table row: MRR, Hits@k, mean rank, other metrics, number of queries.

        With `adjusted` they include those that are no headlines: AMR and AMRI.
        """
        names = _row_names(adjusted=adjusted)
        if not self.num_queries:
            return ["–"] * (len(names) + len(hits)) + ["0"]
        of_hits = [f"{self.hits(k):.4f}" for k in hits]
        first, *rest = (METRICS[name].text(self[name]) for name in names)
        return [first, *of_hits, *rest, f"{self.num_queries:,}"]


def _value_of_nothing(metric: Metric) -> float | None:
    """The mean over no queries is NaN; other metrics are not defined."""
    return float("nan") if metric.per_query is not None else None


def _row_names(*, adjusted: bool) -> list[str]:
    """The metrics of a table row without Hits@k, which follow the first of them."""
    names = []
    for name, metric in METRICS.items():
        is_hits = name in {f"hits_at_{k}" for k in HITS}
        if not is_hits and (metric.headline or adjusted):
            names.append(name)
    return names

"""Metrics, the evaluation report, relation prediction, and saved ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.archives import read_parquet
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.data.inspection import CARDINALITIES, cardinalities
from dualkg.errors import RequestError
from dualkg.evaluation.candidates import CandidateLists, GivenCandidates
from dualkg.evaluation.ranking import Progress, Ranks, count_candidates, rank, rank_relations
from dualkg.files import atomic_write
from dualkg.models.base import SIDES, Model

Numbers = npt.NDArray[np.number]
HITS = (1, 3, 10)
COLUMNS = {
    "MRR": "mrr",
    "H@1": "hits_at_1",
    "H@3": "hits_at_3",
    "H@10": "hits_at_10",
}  # metrics by titles of tables
VIEWS = ("direction", "relation", "cardinality")
PROTOCOL = "filtered by train, valid and test; both directions; ties at their mean"


def metric_values(ranks: Numbers) -> npt.NDArray[np.float64]:
    """The value of each rank in each metric of `COLUMNS`, `(4, …)`: 1/rank, and whether it is at
    most 1, 3, 10.
    """
    return np.stack([1 / ranks, *(ranks <= k for k in HITS)])


def check_hits(hits: Iterable[int] | int) -> tuple[int, ...]:
    """The distinct k of Hits@k in their order; each is a whole number of at least 1."""
    found = tuple(dict.fromkeys(hits if isinstance(hits, Iterable) else [hits]))
    for k in found:
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise RequestError(f"The k of Hits@k is a whole number of at least 1; got {k!r}.")
    return found


@dataclass(frozen=True)
class Metrics:
    """Mean reciprocal rank, mean rank, Hits@1, 3 and 10, and the adjusted mean rank.

    AMR is the mean rank divided by its expectation for random scores, AMRI = 1 − (MR − 1) /
    (expectation − 1): 1 is perfect, 0 random. They are None where the number of candidates is not
    known. `more_hits` has Hits@k for other k.
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

    @classmethod
    def of(
        cls, ranks: Numbers, num_candidates: Numbers | None = None, *, hits: Iterable[int] = ()
    ) -> Metrics:
        """From ranks of any shape, with the number of candidates of each; realistic ranks may be
        fractions.
        """
        ranks = np.asarray(ranks, dtype=np.float64).reshape(-1)
        more = [k for k in check_hits(hits) if k not in HITS]
        if not len(ranks):
            nan = float("nan")
            return cls(nan, nan, nan, nan, nan, num_queries=0, more_hits=dict.fromkeys(more, nan))
        mrr, at_1, at_3, at_10 = (float(values.mean()) for values in metric_values(ranks))
        mr = float(ranks.mean())
        amr = None
        amri = None
        if num_candidates is not None:
            expected = (float(np.mean(num_candidates)) + 1) / 2
            amr = mr / expected
            amri = 1 - (mr - 1) / (expected - 1) if expected > 1 else None
        more_hits = {k: float((ranks <= k).mean()) for k in more}
        return cls(mrr, mr, at_1, at_3, at_10, len(ranks), amr, amri, more_hits)

    def hits(self, k: int) -> float:
        """Hits@k, of those that were computed; `Report.hits` has it for any k."""
        computed = {**{k: getattr(self, f"hits_at_{k}") for k in HITS}, **self.more_hits}
        if k not in computed:
            known = ", ".join(map(str, computed))
            raise RequestError(
                f"Hits@{k} was not computed, only k = {known}. Evaluate with hits=({k},)."
            )
        return float(computed[k])

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, with None for NaN, the metrics of no queries."""
        values = asdict(self)
        values |= {f"hits_at_{k}": value for k, value in values.pop("more_hits").items()}
        return {
            name: value if self.num_queries or name == "num_queries" else None
            for name, value in values.items()
        }

    def row(self, *, hits: Sequence[int] = HITS, adjusted: bool = False) -> list[str]:
        """The cells of a table row: MRR, Hits@k, the mean rank, AMR and AMRI if `adjusted`, the
        number of queries.
        """
        if not self.num_queries:
            return ["–"] * (2 + len(hits) + 2 * adjusted) + ["0"]
        shares = [f"{value:.4f}" for value in (self.mrr, *map(self.hits, hits))]
        adjusted_ranks = [
            "–" if value is None else f"{value:.4f}" for value in (self.amr, self.amri)
        ] * adjusted
        return [*shares, f"{self.mr:,.1f}", *adjusted_ranks, f"{self.num_queries:,}"]


def evaluate_relations(
    model: Model, graph: Graph, *, split: Split = "test", hits: Iterable[int] = HITS
) -> Metrics:
    """Rank the relation of every triple of a split, filtered, among the relations without their
    reciprocals.
    """
    ranks, num_candidates = rank_relations(model, graph, graph.split(split))
    return Metrics.of(ranks, num_candidates, hits=hits)


@dataclass(frozen=True)
class Report:
    """Filtered link prediction on one split in both directions: realistic ranks, with both
    bounds.
    """

    graph: str
    split: str
    metrics: Metrics
    optimistic: Metrics = field(repr=False)
    pessimistic: Metrics = field(repr=False)
    without_unseen: Metrics = field(repr=False)
    num_unseen_triples: int = field(repr=False)
    by_direction: dict[str, Metrics] = field(repr=False)
    by_relation: dict[str, Metrics] = field(repr=False)
    by_cardinality: dict[str, Metrics] = field(repr=False)
    ranks: Ranks = field(repr=False, compare=False)
    candidates: str = "all entities"

    @property
    def mrr(self) -> float:
        return self.metrics.mrr

    def hits(self, k: int) -> float:
        """Hits@k for any k: the fraction of realistic ranks that are at most k."""
        return Metrics.of(self.ranks.mean, hits=(k,)).hits(k)

    def by(self, view: str) -> dict[str, Metrics]:
        """The metrics by direction, relation or cardinality."""
        return dict(getattr(self, f"by_{view}"))

    def as_dict(self) -> dict[str, Any]:
        """Everything but the ranks, for JSON."""
        single = ("metrics", "optimistic", "pessimistic", "without_unseen")
        return {
            "graph": self.graph,
            "split": self.split,
            "protocol": PROTOCOL,
            "candidates": self.candidates,
            **{name: getattr(self, name).as_dict() for name in single},
            "num_unseen_triples": self.num_unseen_triples,
            **{
                f"by_{view}": {key: m.as_dict() for key, m in self.by(view).items()}
                for view in VIEWS
            },
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)


def evaluate(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    known: KnownAnswers | None = None,
    hits: Iterable[int] = HITS,
    type_constrained: bool = False,
    candidates: GivenCandidates | None = None,
    progress: Progress | None = None,
) -> Report:
    """Rank a split and report on it, with Hits@k for each k of `hits` besides 1, 3 and 10.

    With `type_constrained`, candidates are the entities that train has on the same side of the
    relation. `candidates` are lists, the file of them, or a mapping of their columns; see
    `read_candidates`. The answer is always a candidate.
    """
    if not (hasattr(model, "check_shape") and isinstance(graph, Graph)):
        given = f"{type(model).__name__} and {type(graph).__name__}"
        raise RequestError(
            "evaluate takes a model and its graph, as in kg.evaluate(run.model, run.graph); "
            f"{given} were given."
        )
    hits = check_hits(hits)
    known = known or KnownAnswers.of(graph, queries=graph.split(split))
    lists = None if candidates is None else CandidateLists.of(candidates, graph, split)
    restricted = (
        "given lists"
        if lists
        else "domain or range of the relation in train"
        if type_constrained
        else None
    )
    ranks = rank(
        model,
        graph,
        split=split,
        known=known,
        type_constrained=type_constrained,
        candidates=lists,
        progress=progress,
    )
    return build_report(
        ranks, graph, split=split, known=known, hits=hits, candidates=restricted or "all entities"
    )


def build_report(
    ranks: Ranks,
    graph: Graph,
    *,
    split: Split,
    known: KnownAnswers | None = None,
    hits: Iterable[int] = HITS,
    candidates: str = "all entities",
) -> Report:
    """Metrics of all ranks, of their bounds, and by direction, relation and cardinality."""
    number = ranks.num_candidates
    if number is None:
        number = count_candidates(
            ranks.triples, known or KnownAnswers.of(graph, queries=ranks.triples)
        )
    mean = ranks.mean
    relation = ranks.triples[:, 1]
    every = np.s_[:]

    def of(part: Any, values: Numbers = mean) -> Metrics:
        return Metrics.of(values[part], number[part], hits=hits)

    kinds = np.array(cardinalities(graph.train, graph.shape), dtype=object)[relation]
    seen = np.isin(ranks.triples[:, [0, 2]], graph.train[:, [0, 2]]).all(
        axis=1
    )  # both entities occur in train
    return Report(
        graph=graph.name,
        split=split,
        metrics=of(every),
        optimistic=of(every, ranks.optimistic),
        pessimistic=of(every, ranks.pessimistic),
        without_unseen=of(np.s_[:, seen]),
        num_unseen_triples=int((~seen).sum()),
        by_direction={name: of(row) for row, name in enumerate(SIDES)},
        by_relation={
            graph.relations[id]: of(np.s_[:, relation == id]) for id in np.unique(relation).tolist()
        },
        by_cardinality={
            kind: of(np.s_[:, kinds == kind]) for kind in CARDINALITIES if (kinds == kind).any()
        },
        ranks=ranks,
        candidates=candidates,
    )


def save_ranks(ranks: Ranks, path: Path) -> None:
    """Write one row per query: the triple, the direction, both ranks, and the number of candidates
    if restricted.
    """
    columns = {
        name: np.tile(ranks.triples[:, i], 2) for i, name in enumerate(("head", "relation", "tail"))
    }
    directions = pa.array(np.repeat([0, 1], len(ranks.triples)), pa.int8())
    columns["direction"] = pa.DictionaryArray.from_arrays(directions, pa.array(SIDES))
    columns["optimistic"] = ranks.optimistic.reshape(-1).astype(np.int32)
    columns["pessimistic"] = ranks.pessimistic.reshape(-1).astype(np.int32)
    if ranks.num_candidates is not None:
        columns["num_candidates"] = ranks.num_candidates.reshape(-1).astype(np.int32)
    with atomic_write(path) as fresh:
        pq.write_table(pa.table(columns), fresh, compression="zstd")


def load_ranks(path: Path) -> Ranks:
    """Read what `save_ranks` wrote; a damaged file is refused."""
    try:
        table = read_parquet(path)
        half = table.num_rows // 2
        column = {
            name: table[name].to_numpy() for name in table.column_names if name != "direction"
        }
        triples = np.stack([column[name][:half] for name in ("head", "relation", "tail")], axis=1)
        counts = {
            name: column[name].astype(np.int64).reshape(2, -1)
            for name in ("optimistic", "pessimistic", "num_candidates")
            if name in column
        }
        ranks = Ranks(triples.astype(np.int32), **counts)
        ordered = (ranks.optimistic >= 1) & (ranks.optimistic <= ranks.pessimistic)
        if table.num_rows % 2 or not ordered.all():
            raise ValueError("two queries of each triple, with ranks from 1, were expected")
        return ranks
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(
            f"{path} is damaged: {reason}. Evaluate the run again, or remove the file."
        ) from None

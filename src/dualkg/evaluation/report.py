"""Metrics, the evaluation report, relation prediction, and saved ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, Split, Triples, distinct_triples
from dualkg.data.inspection import CARDINALITIES, cardinalities
from dualkg.evaluation.ranking import Ranks, check_finite, choose_counter, eval_mode, full_precision, rank
from dualkg.files import atomic_write
from dualkg.kernels.scores import RankTargets
from dualkg.models.base import Model

HITS = (1, 3, 10)
COLUMNS = {"MRR": "mrr", "H@1": "hits_at_1", "H@3": "hits_at_3", "H@10": "hits_at_10"}
"""Metrics by the column titles of tables."""


def metric_values(ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The value of each rank in each metric of `COLUMNS`, `(4, …)`: 1/rank, and whether it is at most 1, 3, 10."""
    return np.stack([1 / ranks, *(ranks <= k for k in HITS)])


@dataclass(frozen=True)
class Metrics:
    """Mean reciprocal rank, mean rank, and Hits@1, 3 and 10."""

    mrr: float
    mr: float
    hits_at_1: float
    hits_at_3: float
    hits_at_10: float
    num_queries: int

    @classmethod
    def of(cls, ranks: npt.NDArray[np.number]) -> Metrics:
        """From ranks of any shape; realistic ranks may be fractions."""
        ranks = np.asarray(ranks, dtype=np.float64).reshape(-1)
        if not len(ranks):
            nan = float("nan")
            return cls(nan, nan, nan, nan, nan, num_queries=0)
        mrr, at_1, at_3, at_10 = (float(values.mean()) for values in metric_values(ranks))
        return cls(mrr, float(ranks.mean()), at_1, at_3, at_10, num_queries=len(ranks))

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, with None for NaN, the metrics of no queries."""
        return {
            name: value if self.num_queries or name == "num_queries" else None for name, value in asdict(self).items()
        }

    def row(self) -> list[str]:
        """The cells of a table row: `COLUMNS`, the mean rank and the number of queries."""
        if not self.num_queries:
            return ["–"] * 5 + ["0"]
        shares = [f"{getattr(self, name):.4f}" for name in COLUMNS.values()]
        return [*shares, f"{self.mr:,.1f}", f"{self.num_queries:,}"]


BLOCK = 1024  # queries scored at a time


@torch.no_grad()
def evaluate_relations(model: Model, graph: Graph, *, split: Split = "test") -> Metrics:
    """Relation prediction: rank the relation of every triple of a split, filtered, by realistic ranks.

    Candidates are the relations of the graph, without their reciprocals.
    """
    model.check_shape(graph.shape)
    num_relations, triples, device = graph.shape.num_relations, graph.split(split), model.device
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    known, first, last = (found.to(device) for found in _known_relations(triples, graph))
    count = choose_counter(device.type, len(triples) * num_relations)
    counts = torch.empty(len(triples), 2, dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for start in range(0, len(triples), BLOCK):
            block = slice(start, start + BLOCK)
            scores = model.score_relations(heads[block], tails[block])[:, :num_relations]
            rows = torch.arange(len(scores), device=device)
            counts[block] = count(scores, known, RankTargets(rows, relations[block], first[block], last[block]))
    found = counts.cpu().numpy().astype(np.int64)
    check_finite(found, lambda row: f"({triples[row, 0]}, ?, {triples[row, 2]})")
    better, tied = found.T
    return Metrics.of(better + 1 + tied / 2)


def _known_relations(queries: Triples, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """The known relations sorted by entity pair, and the start and end of those of each triple's pair."""
    known = distinct_triples(np.concatenate([graph.split(name) for name in SPLITS]), graph.shape)
    num_entities = graph.shape.num_entities
    pairs, wanted = (triples[:, 0].astype(np.int64) * num_entities + triples[:, 2] for triples in (known, queries))
    order = np.argsort(pairs, kind="stable")
    first, last = (np.searchsorted(pairs[order], wanted, side=side) for side in ("left", "right"))
    return torch.from_numpy(known[order, 1]), torch.from_numpy(first), torch.from_numpy(last)


DIRECTIONS = ("tail", "head")
VIEWS = ("direction", "relation", "cardinality")


@dataclass(frozen=True)
class Report:
    """Filtered link prediction on one split in both directions: realistic ranks, with both bounds."""

    graph: str
    split: str
    metrics: Metrics
    optimistic: Metrics
    pessimistic: Metrics
    without_unseen: Metrics
    num_unseen_triples: int
    by_direction: dict[str, Metrics]
    by_relation: dict[str, Metrics]
    by_cardinality: dict[str, Metrics]
    ranks: Ranks = field(repr=False, compare=False)

    @property
    def mrr(self) -> float:
        return self.metrics.mrr

    def by(self, view: str) -> dict[str, Metrics]:
        """The metrics by direction, relation or cardinality."""
        views: dict[str, Metrics] = getattr(self, f"by_{view}")
        return views

    def as_dict(self) -> dict[str, Any]:
        """Everything but the ranks, for JSON."""
        single = ("metrics", "optimistic", "pessimistic", "without_unseen")
        return {
            "graph": self.graph,
            "split": self.split,
            "protocol": "filtered by train, valid and test; both directions; ties at their mean",
            **{name: getattr(self, name).as_dict() for name in single},
            "num_unseen_triples": self.num_unseen_triples,
            **{f"by_{view}": {key: m.as_dict() for key, m in self.by(view).items()} for view in VIEWS},
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)


def evaluate(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    known: KnownAnswers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Rank a split and report on it."""
    return build_report(rank(model, graph, split=split, known=known, progress=progress), graph, split=split)


def build_report(ranks: Ranks, graph: Graph, *, split: Split) -> Report:
    """Metrics of all ranks, of their bounds, and by direction, relation and cardinality."""
    mean = ranks.mean
    relation = ranks.triples[:, 1]
    kinds = np.array(cardinalities(graph.train, graph.shape), dtype=object)[relation]
    seen = _seen_in_train(ranks, graph)
    return Report(
        graph=graph.name,
        split=split,
        metrics=Metrics.of(mean),
        optimistic=Metrics.of(ranks.optimistic),
        pessimistic=Metrics.of(ranks.pessimistic),
        without_unseen=Metrics.of(mean[:, seen]),
        num_unseen_triples=int((~seen).sum()),
        by_direction={name: Metrics.of(mean[row]) for row, name in enumerate(DIRECTIONS)},
        by_relation={graph.relations[id]: Metrics.of(mean[:, relation == id]) for id in np.unique(relation).tolist()},
        by_cardinality={kind: Metrics.of(mean[:, kinds == kind]) for kind in CARDINALITIES if (kinds == kind).any()},
        ranks=ranks,
    )


def _seen_in_train(ranks: Ranks, graph: Graph) -> np.ndarray:
    """Whether both entities of each triple occur in train, `(num_triples,)`."""
    seen = np.zeros(graph.shape.num_entities, dtype=bool)
    seen[graph.train[:, [0, 2]].reshape(-1)] = True
    return np.asarray(seen[ranks.triples[:, 0]] & seen[ranks.triples[:, 2]])


def save_ranks(ranks: Ranks, path: Path) -> None:
    """Write one row per query: the triple, the direction, the optimistic and the pessimistic rank."""
    columns = {name: np.tile(ranks.triples[:, i], 2) for i, name in enumerate(("head", "relation", "tail"))}
    directions = pa.array(np.repeat([0, 1], len(ranks.triples)), pa.int8())
    columns["direction"] = pa.DictionaryArray.from_arrays(directions, pa.array(DIRECTIONS))
    columns["optimistic"] = ranks.optimistic.reshape(-1).astype(np.int32)
    columns["pessimistic"] = ranks.pessimistic.reshape(-1).astype(np.int32)
    with atomic_write(path) as fresh:
        pq.write_table(pa.table(columns), fresh, compression="zstd")


def load_ranks(path: Path) -> Ranks:
    table = pq.read_table(path)
    half = table.num_rows // 2
    column = {name: table[name].to_numpy() for name in table.column_names if name != "direction"}
    triples = np.stack([column[name][:half] for name in ("head", "relation", "tail")], axis=1)
    optimistic, pessimistic = (column[name].astype(np.int64).reshape(2, -1) for name in ("optimistic", "pessimistic"))
    return Ranks(triples.astype(np.int32), optimistic, pessimistic)

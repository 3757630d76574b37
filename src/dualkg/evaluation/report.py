"""The report of an evaluation: one set of ranks, looked at from all sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.graph import Graph, Split
from dualkg.data.known import KnownAnswers
from dualkg.evaluation.cardinality import CARDINALITIES, cardinalities
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import Ranks, rank
from dualkg.files import replacing
from dualkg.models.base import Model

DIRECTIONS = ("tail", "head")
VIEWS = ("direction", "relation", "cardinality")


@dataclass(frozen=True)
class Report:
    """Filtered link prediction on one split, both directions; ties at their mean, both bounds beside it."""

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
        """Everything but the ranks, ready for JSON."""
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
    return report_on(rank(model, graph, split=split, known=known, progress=progress), graph, split=split)


def report_on(ranks: Ranks, graph: Graph, *, split: Split) -> Report:
    """Look at ranks as a whole, at their bounds, and by direction, relation and cardinality."""
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
    """Which triples have both their entities in train."""
    seen = np.zeros(graph.shape.num_entities, dtype=bool)
    seen[graph.train[:, [0, 2]].reshape(-1)] = True
    return np.asarray(seen[ranks.triples[:, 0]] & seen[ranks.triples[:, 2]])


def save_ranks(ranks: Ranks, path: Path) -> None:
    """One row a query: the triple, the direction, the rank at its best and at its worst."""
    columns = {name: np.tile(ranks.triples[:, i], 2) for i, name in enumerate(("head", "relation", "tail"))}
    directions = pa.array(np.repeat([0, 1], len(ranks.triples)), pa.int8())
    columns["direction"] = pa.DictionaryArray.from_arrays(directions, pa.array(DIRECTIONS))
    columns["optimistic"] = ranks.optimistic.reshape(-1).astype(np.int32)
    columns["pessimistic"] = ranks.pessimistic.reshape(-1).astype(np.int32)
    with replacing(path) as fresh:
        pq.write_table(pa.table(columns), fresh, compression="zstd")


def load_ranks(path: Path) -> Ranks:
    table = pq.read_table(path)
    half = table.num_rows // 2
    column = {name: table[name].to_numpy() for name in table.column_names if name != "direction"}
    triples = np.stack([column[name][:half] for name in ("head", "relation", "tail")], axis=1)
    optimistic, pessimistic = (column[name].astype(np.int64).reshape(2, -1) for name in ("optimistic", "pessimistic"))
    return Ranks(triples.astype(np.int32), optimistic, pessimistic)

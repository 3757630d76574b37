"""How a model ranks as more and more of its entity entries are set to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dualkg.analysis.sparsity import entity_tables, share_of_zeros, sparsified
from dualkg.analysis.storage import Storage, storage_of
from dualkg.analysis.thresholds import find_thresholds
from dualkg.data.graph import Graph, Split
from dualkg.data.known import KnownAnswers
from dualkg.errors import RequestError
from dualkg.evaluation import Metrics, evaluate
from dualkg.models.base import Model

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class CurvePoint:
    """One share: the one wanted, the share of zeros there is, its threshold, what the model takes and how it ranks."""

    wanted_share: float
    share: float
    threshold: float
    storage: Storage
    metrics: Metrics

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": self.metrics.as_dict()}


def sparsity_curve(
    model: Model,
    graph: Graph,
    *,
    shares: Sequence[float] = SHARES,
    split: Split = "test",
) -> list[CurvePoint]:
    """MRR against sparsity: one point a share, in the order given; the model stays as it is."""
    if not len(graph.split(split)):
        raise RequestError(f"{graph.name} has no {split} triples to rank.")
    known = KnownAnswers.of(graph)
    points = []
    for share, threshold in zip(shares, find_thresholds(entity_tables(model).values(), shares), strict=True):
        sparse = sparsified(model, threshold)
        report = evaluate(sparse, graph, split=split, known=known)
        points.append(CurvePoint(share, share_of_zeros(sparse), threshold, storage_of(sparse), report.metrics))
    return points

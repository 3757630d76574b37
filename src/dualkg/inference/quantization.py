"""Quantization: metrics of a model whose entity tables are stored in fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dualkg.analysis.sparsity import entity_tables, find_thresholds, sparsified
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.errors import RequestError
from dualkg.evaluation.report import Metrics, evaluate
from dualkg.inference.index import StorageFormat, StoredTable
from dualkg.models.base import Model

DENSE: tuple[StorageFormat, ...] = ("float32", "bf16", "int8")
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class StoragePoint:
    """The bytes of the entity tables in a storage format, and the metrics of the model with them.

    `share` is the target share of zeros of a sparse format. Relations stay float32 and are not counted.
    """

    storage: StorageFormat
    share: float
    bytes: int
    metrics: Metrics

    @property
    def name(self) -> str:
        return f"sparse {self.share:.0%}" if self.storage == "sparse" else self.storage

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name, "metrics": self.metrics.as_dict()}


def measure_storage_formats(
    model: Model,
    graph: Graph,
    *,
    formats: Sequence[StorageFormat] = DENSE,
    shares: Sequence[float] = SHARES,
    split: Split = "test",
) -> list[StoragePoint]:
    """Evaluate a model in dense formats, then in sparse ones with each share of zeros; the model is not changed.

    Queries and candidates are both read from the stored tables, as by an exact index in the same format.
    """
    if not len(graph.split(split)):
        raise RequestError(f"{graph.name} has no {split} triples to rank.")
    known = KnownAnswers.of(graph)
    thresholds = find_thresholds(entity_tables(model).values(), shares) if shares else []
    points = []
    for storage, share, threshold in [
        *((storage, 0.0, None) for storage in formats),
        *(("sparse", share, threshold) for share, threshold in zip(shares, thresholds, strict=True)),
    ]:
        stored, num_bytes = quantized(model if threshold is None else sparsified(model, threshold), storage)
        metrics = evaluate(stored, graph, split=split, known=known).metrics
        points.append(StoragePoint(storage, share, num_bytes, metrics))
    return points


@torch.no_grad()
def quantized(model: Model, storage: StorageFormat) -> tuple[Model, int]:
    """A copy of a model with its entity tables rounded to a storage format, and the bytes of the stored tables."""
    copy, num_bytes = deepcopy(model), 0
    for table in entity_tables(copy).values():
        stored = StoredTable.of(table, storage)
        table.copy_(stored.whole())
        num_bytes += stored.num_bytes
    return copy, num_bytes

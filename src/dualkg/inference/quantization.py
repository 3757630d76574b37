"""How a model ranks when its entities are kept in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """One form: the bytes of the entity tables in it, and how the model ranks by what they keep.

    `share` is that of the zeros that were wanted of a sparse one; relations stay float32 and are not counted.
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
    progress: Callable[[int, int], None] | None = None,
) -> list[StoragePoint]:
    """MRR and bytes of the dense formats, then of sparse tables with each share of zeros; the model is not changed.

    Questions and candidates both are read from the form, as an exact index in that form compares them.
    """
    if not len(graph.split(split)):
        raise RequestError(f"{graph.name} has no {split} triples to rank.")
    known = KnownAnswers.of(graph)
    points: list[StoragePoint] = []
    for storage, share, source in _forms(model, formats, shares):
        kept, num_bytes = as_kept(source, storage)
        points.append(StoragePoint(storage, share, num_bytes, evaluate(kept, graph, split=split, known=known).metrics))
        if progress:
            progress(len(points), len(formats) + len(shares))
    return points


def _forms(
    model: Model, formats: Sequence[StorageFormat], shares: Sequence[float]
) -> Iterator[tuple[StorageFormat, float, Model]]:
    """Each form, the share of zeros in it, and the model that is brought into it."""
    thresholds = find_thresholds(entity_tables(model).values(), shares) if shares else []
    for storage in formats:
        yield storage, 0.0, model
    for share, threshold in zip(shares, thresholds, strict=True):
        yield "sparse", share, sparsified(model, threshold)


@torch.no_grad()
def as_kept(model: Model, storage: StorageFormat) -> tuple[Model, int]:
    """The model with the numbers that a form keeps of its entities, and the bytes of the form."""
    copy, num_bytes = deepcopy(model), 0
    for table in entity_tables(copy).values():
        stored = StoredTable.of(table, storage)
        table.copy_(stored.whole())
        num_bytes += stored.num_bytes
    return copy, num_bytes

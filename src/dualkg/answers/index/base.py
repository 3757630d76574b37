"""What every index offers: the rows of a table that score best for a query."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dualkg.errors import DivergedError, RequestError

Metric = Literal["inner product", "euclidean"]
ROWS = 2**16  # of a table, looked at in one go
METRICS: tuple[Metric, ...] = ("inner product", "euclidean")


class Found(NamedTuple):
    """Scores and rows, `(num_queries, k)` each, best first; where too little was found, −∞ and −1."""

    scores: Tensor
    ids: Tensor


class Index(ABC):
    """The rows of a table `(num_rows, width)`, kept so that the best ones for a query are found.

    The score of a row x for a query q is ⟨q, x⟩ by the metric "inner product", and −‖q − x‖² by "euclidean".
    """

    kind: str

    def __init__(self, metric: Metric, shape: tuple[int, int]) -> None:
        if metric not in METRICS:
            raise RequestError(f"An index has the metric {' or '.join(map(repr, METRICS))}; '{metric}' was asked for.")
        self.metric: Metric = metric
        self.shape = shape

    @abstractmethod
    def _search(self, queries: Tensor, k: int) -> Found:
        """The best `k` of at least as many rows, for queries that are known to fit."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the index into a folder that is there."""

    @property
    @abstractmethod
    def choices(self) -> dict[str, Any]:
        """What `load` must know beside the files of `save`."""

    def search(self, queries: Tensor, k: int) -> Found:
        """Queries `(num_queries, width)` → the best `k` rows of each, or all where there are fewer."""
        if k < 1:
            raise RequestError(f"At least one row must be asked for; k is {k}.")
        if queries.dim() != 2 or queries.shape[1] != self.shape[1]:
            came = " × ".join(map(str, queries.shape))
            raise RequestError(f"Queries of {self.shape[1]} numbers each were expected; an array of {came} came.")
        queries = queries.detach().to("cpu", torch.float32).contiguous()
        if not math.isfinite(float(queries.sum())):
            raise DivergedError("A query holds NaN or infinity, so nothing is best for it. Its training has diverged.")
        return self._search(queries, min(k, self.shape[0]))


def check_table(table: Tensor) -> Tensor:
    """A table that can be searched, as it is: rows and columns of finite numbers, on a CPU."""
    if table.dim() != 2 or not table.numel():
        came = " × ".join(map(str, table.shape))
        raise RequestError(f"An index is made of a table with rows and columns; an array of {came} came.")
    table = table.detach().cpu()
    if not all(torch.isfinite(block).all() for block in blocks_of(table)):
        raise DivergedError("The table holds NaN or infinity, so it cannot be searched. Its training has diverged.")
    return table


def blocks_of(table: Tensor) -> Iterator[Tensor]:
    """Rows that are looked at in one go: never a copy of the whole."""
    yield from table.split(ROWS)  # type: ignore[no-untyped-call]

"""Indexes that look at few rows: FAISS's, behind the interface of the exact one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.answers.index.base import Found, Index, Metric, blocks_of, check_table
from dualkg.errors import RequestError

Vectors = npt.NDArray[np.float32]
FaissKind = Literal["ivf", "hnsw", "sq8"]
KINDS: tuple[FaissKind, ...] = get_args(FaissKind)
FILE = "index.faiss"
SAMPLE = 40  # rows that a list is learned from
LINKS = 32  # of a row to its neighbours
BUILD_EFFORT = 80  # neighbours that are looked at for each link
MOST_EFFORT = 4096  # of a search along links
USUAL_K = 10  # the number of answers that the effort is meant for; more answers take more


class FaissIndex(Index):
    """Finds most of the best rows by looking at few: those of the nearest lists (ivf, sq8), or along links (hnsw).

    `effort` says at how many: lists, or rows that are followed at once. sq8 keeps a number in one byte. A table that is
    `reduced` is searched for inner products by distances: a row x gets the coordinate √(M² − ‖x‖²), with M the
    greatest ‖x‖, and a query 0. Then all rows have length M, and the nearest is the one with the largest product.
    """

    def __init__(
        self,
        index: Any,
        metric: Metric,
        shape: tuple[int, int],
        *,
        kind: FaissKind,
        effort: int = 16,
        longest: float | None = None,
    ) -> None:
        super().__init__(metric, shape)
        self.kind = kind
        self.effort = effort
        self.longest = longest
        self._index = index

    @classmethod
    def build(
        cls, table: Tensor, metric: Metric = "inner product", *, kind: FaissKind = "ivf", reduced: bool = False
    ) -> FaissIndex:
        """Sort a table into lists, or link its rows; a block of rows is copied at a time."""
        if kind not in KINDS:
            raise RequestError(f"FAISS has the indexes {', '.join(KINDS)}; '{kind}' was asked for.")
        table = check_table(table)
        longest = max(float(block.float().norm(dim=1).max()) for block in blocks_of(table)) if reduced else None
        shape = (table.shape[0], table.shape[1])
        index = cls(None, metric, shape, kind=kind, longest=longest)
        with threads(torch.get_num_threads()):
            index._index = index._filled(table)
        return index

    @property
    def choices(self) -> dict[str, Any]:
        return {"kind": self.kind, "effort": self.effort, "longest": self.longest}

    @property
    def most_effort(self) -> int:
        return min(MOST_EFFORT, self.shape[0]) if self.kind == "hnsw" else num_lists(self.shape[0])

    def save(self, folder: Path) -> None:
        faiss().write_index(self._index, str(folder / FILE))

    @classmethod
    def load(cls, folder: Path, metric: Metric, shape: tuple[int, int], **choices: Any) -> FaissIndex:
        """Read what `save` wrote."""
        module = faiss()
        try:
            index = module.read_index(str(folder / FILE))
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None
        loaded = cls(index, metric, shape, **choices)
        if (index.ntotal, index.d) != (shape[0], shape[1] + (loaded.longest is not None)):
            raise ValueError(f"its {index.ntotal:,} rows of {index.d:,} numbers are not of {shape[0]:,} × {shape[1]:,}")
        return loaded

    def _search(self, queries: Tensor, k: int) -> Found:
        # By NumPy: for a single query, a few small operations of PyTorch take longer than the search.
        vectors = self._lifted(queries.numpy())
        scores, ids = self._index.search(vectors, k, params=self._parameters(k))
        if self.longest is not None:
            scores = (np.square(vectors).sum(1, keepdims=True) + self.longest**2 - scores) / 2
        elif self.metric == "euclidean":
            scores = -scores
        scores[ids < 0] = -np.inf
        return Found(torch.from_numpy(scores), torch.from_numpy(ids))

    def _parameters(self, k: int) -> Any:
        """For how many lists, or rows, are looked at; more where more than the usual number is asked for."""
        effort = math.ceil(self.effort * max(1.0, k / USUAL_K))
        if self.kind == "hnsw":
            return faiss().SearchParametersHNSW(efSearch=min(effort, max(self.most_effort, k)))
        return faiss().SearchParametersIVF(nprobe=min(effort, self.most_effort))

    def _lifted(self, vectors: Vectors, *, rows: bool = False) -> Vectors:
        """Vectors with the coordinate that makes rows equally long, where the table is reduced."""
        if self.longest is None:
            return vectors
        lifted = np.zeros((len(vectors), vectors.shape[1] + 1), dtype=np.float32)
        lifted[:, :-1] = vectors
        if rows:
            lifted[:, -1] = np.sqrt(np.maximum(self.longest**2 - np.square(vectors).sum(1), 0))
        return lifted

    def _filled(self, table: Tensor) -> Any:
        module, width = faiss(), self.shape[1] + (self.longest is not None)
        by_product = self.metric == "inner product" and self.longest is None
        metric = module.METRIC_INNER_PRODUCT if by_product else module.METRIC_L2
        if self.kind == "hnsw":
            index = module.IndexHNSWFlat(width, LINKS, metric)
            index.hnsw.efConstruction = BUILD_EFFORT
        else:
            lists = num_lists(len(table))
            index = module.index_factory(width, f"IVF{lists},{'SQ8' if self.kind == 'sq8' else 'Flat'}", metric)
            index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, SAMPLE
            chosen = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[: SAMPLE * lists]
            index.train(self._lifted(table[chosen].float().numpy(), rows=True))
        for block in blocks_of(table):
            index.add(self._lifted(block.float().contiguous().numpy(), rows=True))
        return index


def num_lists(num_rows: int) -> int:
    """Into how many lists rows are sorted: 4 √n, but not so many that they are empty."""
    return max(1, min(round(4 * math.sqrt(num_rows)), num_rows // 8))


def faiss() -> Any:
    """The package, or how to install it."""
    try:
        import faiss as module
    except ImportError:
        raise RequestError(
            "An index of the kinds ivf, hnsw and sq8 needs faiss. Install it: pip install 'dualkg[index]'"
        ) from None
    return module


@contextmanager
def threads(num: int) -> Iterator[None]:
    """PyTorch and FAISS, where it is there, with so many threads for a while."""
    try:
        module = faiss()
    except RequestError:
        module = None
    before = torch.get_num_threads(), module.omp_get_max_threads() if module else 1
    try:
        torch.set_num_threads(num)
        if module:
            module.omp_set_num_threads(num)
        yield
    finally:
        torch.set_num_threads(before[0])
        if module:
            module.omp_set_num_threads(before[1])

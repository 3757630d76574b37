"""Exact search for the entities that score best, in tables of several storage formats
(quantization).

The formats are not those of FAISS: they need no extra package, are searched in memory-mapped files,
and answer batches of 200 queries 2 to 9 times faster. FAISS answers single float16 and bf16 queries
faster (`benchmarks/search.py --storage`).
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualkg.analysis.sparsity import entity_tables, find_thresholds, sparsified
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.errors import DivergedError, RequestError
from dualkg.evaluation.ranking import full_precision
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.report import evaluate
from dualkg.files import writing
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel, Dual
from dualkg.models.distance import NormModel
from dualkg.training.checkpoint import all_finite, compress, expand

Shape = tuple[int, int]  # rows and width of a table
Metric = Literal[
    "inner product", "euclidean"
]  # the best rows x for a query q have the largest ⟨q, x⟩ or −‖q − x‖²
StorageFormat = Literal["float32", "float16", "bf16", "int8", "sparse"]
STORAGE_FORMATS: tuple[StorageFormat, ...] = get_args(StorageFormat)
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}
ROWS = 2**16  # of a table, converted at once: the whole table is never copied
BLOCK_ELEMENTS = 2**22  # scores, and decoded numbers of rows, held at once: 16 MB of each
FILE = "table.safetensors"
DENSE: tuple[StorageFormat, ...] = ("float32", "bf16", "int8")
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of zeros, in sparse tables


# -- tables ------------------------------------------------------------------


def check_table(table: Tensor) -> Tensor:
    """Return a table on the CPU, not copied if it is there; refuse one that is not finite."""
    table = table.detach().cpu()
    if not all_finite(table):
        raise DivergedError(
            "The table holds NaN or infinity, so it cannot be searched. Its training has diverged."
        )
    return table


# -- indexes -----------------------------------------------------------------


class SearchResult(NamedTuple):
    """Scores and rows, `(num_queries, k)` each, best first; −∞ and −1 where too few rows were
    found.
    """

    scores: Tensor
    ids: Tensor


def check_queries(queries: Tensor) -> Tensor:
    """Return queries `(num_queries, width)` as float32 on the CPU; refuse those that are not
    finite.
    """
    queries = queries.detach().to("cpu", torch.float32).contiguous()
    if not all_finite(queries):
        raise DivergedError(
            "A query holds NaN or infinity, so it has no best rows. Its training has diverged."
        )
    return queries


@dataclass(eq=False)
class ExactIndex:
    """Compares a query with every row of a table in a storage format, read back as float32 in
    blocks of rows.

    int8 has `codes` from −127 to 127 and a scale for each row, its largest magnitude / 127. sparse
    is the CSR form of run folders: `values`, their `columns`, and where each row `starts`. Rows of
    equal score are in the order of their numbers.
    """

    parts: dict[str, Tensor]
    metric: Metric
    shape: Shape
    _: KW_ONLY
    storage: StorageFormat
    kind: ClassVar[str] = "exact"

    @classmethod
    def build(
        cls, table: Tensor, metric: Metric = "inner product", *, storage: StorageFormat = "float32"
    ) -> Self:
        """Store a table; one of float32 is not copied, so it may be memory-mapped. NaN and infinity
        are refused.
        """
        if storage not in STORAGE_FORMATS:
            raise RequestError(
                f"The storage format must be one of {', '.join(STORAGE_FORMATS)}; got '{storage}'."
            )
        table = check_table(table)
        if storage == "int8":
            parts = {
                "codes": torch.empty(table.shape, dtype=torch.int8),
                "scales": torch.empty(len(table)),
            }
            blocks = (torch.split(one, ROWS) for one in (table, *parts.values()))
            for block, codes, scales in zip(*blocks, strict=True):
                largest = block.float().abs().amax(1)
                scales[:] = largest / 127
                codes[:] = (
                    block.float() * torch.where(largest > 0, 127 / largest, 0.0)[:, None]
                ).round()
        else:
            parts = (
                compress(table) if storage == "sparse" else {"values": table.to(FLOATS[storage])}
            )
        return cls(parts, metric, (table.shape[0], table.shape[1]), storage=storage)

    @property
    def config(self) -> dict[str, Any]:
        """The keywords that `load` needs beside the file of `save`."""
        return {"storage": self.storage}

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def save(self, folder: Path) -> None:
        with writing(folder / FILE, SafetensorError):
            save_file({name: part.contiguous() for name, part in self.parts.items()}, folder / FILE)

    @classmethod
    def load(
        cls,
        folder: Path,
        metric: Metric,
        shape: Shape,
        *,
        storage: StorageFormat,
        in_memory: bool = True,
    ) -> Self:
        """Read what `save` wrote. Unless `in_memory`, the file is memory-mapped and only blocks are
        held.
        """
        if storage not in STORAGE_FORMATS:
            raise ValueError(f"its storage format is '{storage}'")
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        parts = {name: part.clone() for name, part in parts.items()} if in_memory else parts
        found = {name: tuple(part.shape) for name, part in parts.items()}
        expected: dict[str, Any] = {"values": shape}
        if storage == "int8":
            expected = {"codes": shape, "scales": shape[:1]}
        elif storage == "sparse":
            expected = {
                "starts": (shape[0] + 1,),
                "columns": found.get("values"),
                "values": found.get("values"),
            }
        if found != expected:
            raise ValueError(
                f"its arrays {found} are no {storage} table of {shape[0]:,} × {shape[1]:,}"
            )
        return cls(parts, metric, shape, storage=storage)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows as float32, `(stop − start, width)`; a view if the table is float32."""
        parts = self.parts
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        if self.storage == "float16":  # NumPy converts it several times faster than PyTorch
            return torch.from_numpy(parts["values"][start:stop].numpy().astype(np.float32))
        if self.storage in FLOATS:
            return parts["values"][start:stop].float()
        if self.storage == "int8":
            return parts["codes"][start:stop].float() * parts["scales"][start:stop, None]
        starts = parts["starts"][start : stop + 1].long()
        first = int(starts[0])
        last = int(starts[-1])
        nonzero = parts["values"][first:last], parts["columns"][first:last]
        return expand(*nonzero, starts - first, shape=(stop - start, self.shape[1]))

    @cached_property
    def _norms(self) -> Tensor:
        """‖x‖² of every row."""
        num_rows = self.shape[0]
        size = max(1, BLOCK_ELEMENTS // self.shape[1])
        return torch.cat(
            [self.rows(start, start + size).square().sum(1) for start in range(0, num_rows, size)]
        )

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> SearchResult:
        """Find the best `k` rows for each of the queries `(num_queries, width)`, or all if there
        are fewer.
        """
        queries = check_queries(queries)
        k = min(k, self.shape[0])
        best = SearchResult(
            queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        )
        size = max(
            1,
            BLOCK_ELEMENTS // max(len(queries), 1 if self.storage == "float32" else self.shape[1]),
        )
        with full_precision():
            for start in range(0, self.shape[0], size):
                scores = queries @ self.rows(start, start + size).T
                if self.metric == "euclidean":
                    scores = scores.mul_(2).sub_(self._norms[start : start + size])
                here = best_of(scores, k)
                # Stable, and earlier rows first, so that ties stay in the order of rows.
                scores = torch.cat([best.scores, here.scores], 1)
                ids = torch.cat([best.ids, here.ids + start], 1)
                order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
                best = SearchResult(scores.gather(1, order), ids.gather(1, order))
        if self.metric == "euclidean":
            best = best._replace(scores=best.scores - queries.square().sum(1, keepdim=True))
        return best


def best_of(scores: Tensor, k: int) -> SearchResult:
    """The best `k` columns of each row of scores, or all if there are fewer; ties in the order of
    columns.
    """
    k = min(k, scores.shape[1])
    values, places = scores.topk(k)
    least = values[:, -1:]
    ambiguous = (scores == least).sum(1) > (values == least).sum(
        1
    )  # topk takes any of those that tie with the last
    for row in ambiguous.nonzero()[:, 0].tolist():
        places[row] = scores[row].argsort(descending=True, stable=True)[:k]
    places = places.sort(1).values
    order = (values := scores.gather(1, places)).argsort(dim=1, descending=True, stable=True)
    return SearchResult(values.gather(1, order), places.gather(1, order))


# -- the cost of a storage format --------------------------------------------


@dataclass(frozen=True)
class StoragePoint:
    """The bytes of entity tables in a storage format, with a `share` of zeros if sparse, and the
    metrics with them.
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
    """Evaluate a model with entity tables in dense formats, then in sparse ones; the model is not
    changed.
    """
    if not len(graph.split(split)):
        raise RequestError(f"{graph.name} has no {split} triples to rank.")
    known = KnownAnswers.of(graph)
    points = []
    thresholds = find_thresholds(entity_tables(model).values(), shares) if shares else []
    sparse: list[StorageFormat] = ["sparse"] * len(shares)
    zeros = [(0.0, 0.0)] * len(formats) + list(zip(shares, thresholds, strict=True))
    for storage, (share, threshold) in zip([*formats, *sparse], zeros, strict=True):
        stored, num_bytes = quantized(sparsified(model, threshold) if threshold else model, storage)
        metrics = evaluate(stored, graph, split=split, known=known).metrics
        points.append(StoragePoint(storage, share, num_bytes, metrics))
    return points


@torch.no_grad()
def quantized(model: Model, storage: StorageFormat) -> tuple[Model, int]:
    """A copy of a model with its entity tables rounded to a storage format, and the bytes of the
    stored tables.
    """
    copy = deepcopy(model)
    num_bytes = 0
    for table in entity_tables(copy).values():
        stored = ExactIndex.build(table, storage=storage)
        table.copy_(stored.rows())
        num_bytes += stored.num_bytes
    return copy, num_bytes


# -- models ------------------------------------------------------------------


def query_vectors(model: Model, given: Tensor, relations: Tensor, side: Side) -> Tensor:
    """The vectors `(batch, width)` to search an index with for the missing `side` of queries.

    Heads are searched as tails of the inverse relation where there is one.
    """
    if side == "head" and model.reciprocal:
        side = "tail"
        relations = relations + model.shape.num_relations
    return model.queries(given, relations, side).query(side)


def metric_of(model: Model) -> Metric:
    """The metric by which an index finds what a model scores best; a model that has none is
    refused.
    """
    if isinstance(model, BilinearModel):
        return "inner product"
    name = type(model.embedding).__name__
    maps_heads = f"{name} without reciprocal relations compares with heads that each relation maps"
    if isinstance(model, Dual) and model.side == "head":
        obstacle = f"the dual of {name} on the side of the head compares with tails that each relation maps"
    elif isinstance(model, Dual) and not model.reciprocal:
        obstacle = f"the dual of {maps_heads}"
    elif isinstance(model, Dual):
        return "euclidean"
    elif not isinstance(model, NormModel) or model.maps_both_sides:
        obstacle = f"{name} scores in another way"
    elif model.norm == 1:
        obstacle = f"{name} with norm 1 adds absolute differences"
    elif not (model.reciprocal or model.isometric):
        obstacle = maps_heads
    else:
        return "euclidean"
    raise RequestError(
        "An index finds the largest inner products or the smallest Euclidean distances in one "
        f"table, but {obstacle}. Predict without an index."
    )


def tables_of(model: Model) -> dict[Side, Tensor]:
    """The tables to search: for tails, and for heads if they are in another table."""
    embedding = model.embedding
    tables: dict[Side, Tensor] = {"tail": embedding.tail_table.detach().cpu()}
    if not model.reciprocal and embedding.head_table is not embedding.tail_table:
        tables["head"] = embedding.head_table.detach().cpu()
    return tables

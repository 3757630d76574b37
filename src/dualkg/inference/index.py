"""What every index offers: the rows of a table that score best for a query."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, RequestError
from dualkg.evaluation.ranking import full_precision
from dualkg.models.base import Factors, Model, Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.distance import NormModel
from dualkg.models.dual import Dual
from dualkg.training.checkpoint import compress, expand

Metric = Literal["inner product", "euclidean"]
ROWS = 2**16  # of a table, looked at in one go
METRICS: tuple[Metric, ...] = ("inner product", "euclidean")


class SearchResult(NamedTuple):
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
    def _search(self, queries: Tensor, k: int) -> SearchResult:
        """The best `k` of at least as many rows, for queries that are known to fit."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the index into a folder that is there."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What `load` must know beside the files of `save`."""

    def search(self, queries: Tensor, k: int) -> SearchResult:
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


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """A batch of (head, relation, ?), or of (?, relation, tail), as vectors that an index is searched with.

    Heads are asked for as tails of the inverse relation where there is one, and else with the mapped tail.
    """

    model: Model
    factors: Factors
    side: Side

    @classmethod
    def for_tails(cls, model: Model, heads: Tensor, relations: Tensor) -> QueryBatch:
        return cls(model, model.factors(heads, relations, None), "tail")

    @classmethod
    def for_heads(cls, model: Model, relations: Tensor, tails: Tensor) -> QueryBatch:
        if model.reciprocal:
            return cls.for_tails(model, tails, relations + model.shape.num_relations)
        return cls(model, model.factors(None, relations, tails), "head")

    @property
    def vectors(self) -> Tensor:
        """`(batch, width)`: what the rows of the table are compared with."""
        return self.factors.mapped_head if self.side == "tail" else self.factors.mapped_tail

    def scores(self, ids: Tensor) -> Tensor:
        """The model's own scores of some entities for each question, `(batch, n)`."""
        return self.model.candidate_scores(self.factors, ids, self.side)


def metric_of(model: Model) -> Metric:
    """How an index finds what scores best: by inner products for a bilinear model, by distances for its dual.

    A model is refused where both directions cannot be asked so.
    """
    both_ways = model.reciprocal
    if isinstance(model, BilinearModel):
        return "inner product"
    if isinstance(model, Dual) and model.side == "tail" and both_ways:
        return "euclidean"
    if (
        isinstance(model, NormModel)
        and model.norm != 1
        and not model.maps_both_sides
        and (both_ways or model.isometric)
    ):
        return "euclidean"
    raise RequestError(
        f"An index finds the largest inner products, or the smallest Euclidean distances from one table; "
        f"{_why_not(model)}. Ask it without an index."
    )


def _why_not(model: Model) -> str:
    name = type(model.embedding).__name__
    if isinstance(model, Dual):
        if model.side == "head":
            return f"the dual of {name} on the side of the head measures to where each relation takes the tails"
        return f"the dual of {name} without reciprocal relations measures to where each relation takes the heads"
    if isinstance(model, NormModel) and model.norm == 1:
        return f"{name} with norm 1 adds up absolute differences"
    if isinstance(model, NormModel) and not model.maps_both_sides:
        return f"{name} without reciprocal relations measures to where each relation takes the heads"
    return f"{name} scores otherwise"


def tables_of(model: Model) -> dict[Side, Tensor]:
    """The tables to be searched: for tails, and for heads where those are asked for of another one."""
    embedding = model.embedding
    tables: dict[Side, Tensor] = {"tail": embedding.tail_table.detach().cpu()}
    if not model.reciprocal and embedding.head_table is not embedding.tail_table:
        tables["head"] = embedding.head_table.detach().cpu()
    return tables


def fingerprint(table: Tensor) -> str:
    """What tells a table from another: a hash of its shape and of a thousand of its rows."""
    rows = table[:: max(1, len(table) // 1000)].float().contiguous()
    return sha256(str(tuple(table.shape)).encode() + rows.numpy().tobytes()).hexdigest()


def sample_queries(model: Model, graph: Graph, asked: Side, *, num: int, seed: int) -> QueryBatch:
    """Some distinct questions for tails, or for heads, that training triples answer."""
    if not len(graph.train):
        raise RequestError(f"{graph.name} has no training triples, and an index is measured with their questions.")
    pairs = np.unique(graph.train[:, :2] if asked == "tail" else graph.train[:, 1:], axis=0)
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:num]
    first, second = torch.from_numpy(pairs[chosen].astype(np.int64)).to(model.device).unbind(1)
    ask = QueryBatch.for_tails if asked == "tail" else QueryBatch.for_heads
    return ask(model, first, second)


@torch.no_grad()
def check_agreement(questions: QueryBatch, found: Tensor) -> None:
    """Refuse a model of one's own that does not score as its kind does.

    `found` are the rows that are best by the metric, `(batch,)`; the model must know none that is better.
    """
    model, f = questions.model, questions.factors
    scores = model.tail_scores(f) if questions.side == "tail" else model.head_scores(f)
    ours = scores.gather(1, found[:, None].to(scores.device))[:, 0]
    if (scores.amax(1) - ours > 1e-3 * scores.abs().amax(1)).any():
        raise RequestError(
            f"What is best by the maps of {type(model.embedding).__name__} is not what it scores best, so an index "
            f"would not find its answers. Ask it without an index."
        )


StorageFormat = Literal["float32", "float16", "bf16", "int8", "sparse"]
STORAGE_FORMATS: tuple[StorageFormat, ...] = get_args(StorageFormat)
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table `(num_rows, width)` in one form: the arrays that keep it, and its rows as float32, block by block.

    int8 has `codes` from −127 to 127 and a scale for every row, its greatest magnitude / 127. sparse has the CSR that
    runs are kept as: `values`, their `columns`, and where each row `starts`.
    """

    storage: StorageFormat
    shape: tuple[int, int]
    parts: dict[str, Tensor]

    @classmethod
    def of(cls, table: Tensor, storage: StorageFormat = "float32") -> StoredTable:
        """Bring a table into a form; float32 is not copied. NaN and infinity are refused."""
        if storage not in STORAGE_FORMATS:
            raise RequestError(f"A table is kept as {', '.join(STORAGE_FORMATS)}; '{storage}' was asked for.")
        table = check_table(table)
        shape = (table.shape[0], table.shape[1])
        if storage in FLOATS:
            return cls(storage, shape, {"values": table.to(FLOATS[storage])})
        return cls(storage, shape, _as_int8(table) if storage == "int8" else compress(table))

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def block(self, start: int, stop: int) -> Tensor:
        """Some rows as float32, `(stop − start, width)`; of a float32 table the rows themselves."""
        parts = self.parts
        if self.storage in FLOATS:
            return parts["values"][start:stop].float()
        if self.storage == "int8":
            return parts["codes"][start:stop].float() * parts["scales"][start:stop, None]
        starts = parts["starts"][start : stop + 1].long()
        first, last = int(starts[0]), int(starts[-1])
        held = parts["values"][first:last], parts["columns"][first:last]
        return expand(*held, starts - first, shape=(stop - start, self.shape[1]))

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """All rows in blocks, each with the number of its first row."""
        for start in range(0, self.shape[0], size):
            yield start, self.block(start, min(start + size, self.shape[0]))

    def whole(self) -> Tensor:
        """All rows as float32."""
        return self.block(0, self.shape[0])

    def check(self) -> None:
        """Refuse arrays that are not a table of this form and shape, as a damaged file would bring."""
        rows, width = self.shape
        if self.storage == "sparse":
            expected = {"starts": (rows + 1,), "columns": (num := self.parts["values"].shape), "values": num}
        else:
            expected = (
                {"codes": (rows, width), "scales": (rows,)} if self.storage == "int8" else {"values": (rows, width)}
            )
        found = {name: tuple(part.shape) for name, part in self.parts.items()}
        if found != {name: tuple(shape) for name, shape in expected.items()}:
            raise ValueError(f"its arrays {found} are no {self.storage} table of {rows:,} × {width:,}")


def _as_int8(table: Tensor) -> dict[str, Tensor]:
    codes = torch.empty(table.shape, dtype=torch.int8)
    scales = torch.empty(len(table))
    for start in range(0, len(table), ROWS):
        block = table[start : start + ROWS].float()
        largest = block.abs().amax(1)
        scales[start : start + ROWS] = largest / 127
        steps = torch.where(largest > 0, 127 / largest, 0.0)
        codes[start : start + ROWS] = (block * steps[:, None]).round().to(torch.int8)
    return {"codes": codes, "scales": scales}


BLOCK_ELEMENTS = 2**22  # scores, and numbers of rows that are decoded, held at once: 16 MB of each
FILE = "table.safetensors"


class ExactIndex(Index):
    """Compares a query with every row of a table, which is searched in the storage in which it is kept.

    Equal scores stand in the order of rows, whatever the blocks.
    """

    kind = "exact"

    def __init__(self, table: StoredTable, metric: Metric = "inner product") -> None:
        super().__init__(metric, table.shape)
        self.table = table

    @classmethod
    def build(
        cls, table: Tensor, metric: Metric = "inner product", *, storage: StorageFormat = "float32"
    ) -> ExactIndex:
        """Keep a table in a form; one of float32 is not copied, so it may be a memory-mapped one."""
        return cls(StoredTable.of(table, storage), metric)

    @property
    def config(self) -> dict[str, Any]:
        return {"storage": self.table.storage}

    def save(self, folder: Path) -> None:
        save_file({name: part.contiguous() for name, part in self.table.parts.items()}, folder / FILE)

    @classmethod
    def load(
        cls, folder: Path, metric: Metric, shape: tuple[int, int], *, storage: StorageFormat, in_memory: bool = True
    ) -> ExactIndex:
        """Read what `save` wrote. Unless `in_memory`, the file is memory-mapped: of it, only blocks are ever held."""
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        table = StoredTable(
            storage, shape, {name: part.clone() for name, part in parts.items()} if in_memory else parts
        )
        table.check()
        return cls(table, metric)

    @cached_property
    def _norms(self) -> Tensor:
        """‖x‖² of every row."""
        size = max(1, BLOCK_ELEMENTS // self.shape[1])
        return torch.cat([block.square().sum(1) for _, block in self.table.blocks(size)])

    @torch.no_grad()
    def _search(self, queries: Tensor, k: int) -> SearchResult:
        best = SearchResult(queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64))
        decoded = 1 if self.table.storage == "float32" else self.shape[1]
        size = max(1, BLOCK_ELEMENTS // max(len(queries), decoded))
        with full_precision():
            for start, block in self.table.blocks(size):
                scores = queries @ block.T
                if self.metric == "euclidean":
                    scores = scores.mul_(2).sub_(self._norms[start : start + len(block)])
                here = best_of(scores, k)
                best = _merged(best, SearchResult(here.scores, here.ids + start), k)
        if self.metric == "euclidean":
            best = best._replace(scores=best.scores - queries.square().sum(1, keepdim=True))
        return best


def best_of(scores: Tensor, k: int) -> SearchResult:
    """The best `k` of each row of scores, or all where there are fewer; of equal ones, those that stand first."""
    k = min(k, scores.shape[1])
    values, places = scores.topk(k)
    least = values[:, -1:]
    left_out = (scores == least).sum(1) > (values == least).sum(1)  # of those that tie with the last, topk takes any
    for row in left_out.nonzero()[:, 0].tolist():
        places[row] = scores[row].argsort(descending=True, stable=True)[:k]
    places = places.sort(1).values
    order = (values := scores.gather(1, places)).argsort(dim=1, descending=True, stable=True)
    return SearchResult(values.gather(1, order), places.gather(1, order))


def _merged(one: SearchResult, other: SearchResult, k: int) -> SearchResult:
    """The best `k` of two findings; rows of the first stand before those of the second."""
    scores, ids = torch.cat([one.scores, other.scores], 1), torch.cat([one.ids, other.ids], 1)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return SearchResult(scores.gather(1, order), ids.gather(1, order))

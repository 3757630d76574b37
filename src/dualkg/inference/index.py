"""Exact search for the entities that score best, in tables of several storage formats.

The index is not an `IndexFlat` or `IndexScalarQuantizer` of FAISS: it needs no extra package, has
sparse tables, and answers batches of queries several times faster. FAISS answers single queries
faster. `benchmarks/exact_search.py` measures both.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from dualkg.errors import PYTHON, DivergedError, InvalidValue, Unsupported, Words
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import full_precision
from dualkg.evaluation.report import evaluate
from dualkg.files import regular_file, writing
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel, Dual
from dualkg.models.distance import NormModel
from dualkg.tables.lookup import Side
from dualkg.training.checkpoint import all_finite, compress, expand

Shape = tuple[int, int]  # rows and width of a table
# The best rows x for a query q have the largest ⟨q, x⟩ or the largest −‖q − x‖².
Metric = Literal["inner product", "euclidean"]
StorageFormat = Literal["float32", "float16", "bf16", "int8", "sparse"]
STORAGE_FORMATS: tuple[StorageFormat, ...] = get_args(StorageFormat)
ENCODED_ROWS = 2**16  # rows that are converted at once: the whole table is never copied
BLOCK_ELEMENTS = 2**22  # scores, and decoded numbers of rows, held at once: 16 MB of each
FILE = "table.safetensors"
DENSE: tuple[StorageFormat, ...] = ("float32", "bf16", "int8")
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of zeros, in sparse tables


class NotFinite(DivergedError):
    """Vectors that should be searched hold NaN or infinity; `what` is "The table" or "A query"."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.what} holds NaN or infinity, so there are no best rows. Its training has "
            "diverged."
        )


def check_table(table: Tensor) -> Tensor:
    """Return a table on the CPU, not copied if it is there; refuse one that is not finite."""
    table = table.detach().cpu()
    if not all_finite(table):
        raise NotFinite("The table")
    return table


def check_queries(queries: Tensor) -> Tensor:
    """Return queries `(num_queries, width)` as float32 on the CPU; refuse NaN and infinity."""
    queries = queries.detach().to("cpu", torch.float32).contiguous()
    if not all_finite(queries):
        raise NotFinite("A query")
    return queries


# -- storage formats ---------------------------------------------------------


class TableCodec(ABC):
    """How a storage format keeps a table: as named arrays, its parts."""

    @abstractmethod
    def encode(self, table: Tensor) -> dict[str, Tensor]:
        """The parts of a table `(rows, width)`."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], rows: slice, *, width: int) -> Tensor:
        """Some rows as float32."""

    @abstractmethod
    def part_shapes(self, parts: Mapping[str, Tensor], shape: Shape) -> dict[str, tuple[int, ...]]:
        """The shapes that the parts of a table of this shape should have."""


class FloatCodec(TableCodec):
    """Numbers of a floating-point type. A float32 table is not copied, neither in nor out."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, table: Tensor) -> dict[str, Tensor]:
        return {"values": table.to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor], rows: slice, *, width: int) -> Tensor:
        values = parts["values"][rows]
        if self.dtype == torch.float16:
            # NumPy converts float16 several times faster than PyTorch.
            return torch.from_numpy(values.numpy().astype(np.float32))
        return values.float()

    def part_shapes(self, parts: Mapping[str, Tensor], shape: Shape) -> dict[str, tuple[int, ...]]:
        return {"values": shape}


class Int8Codec(TableCodec):
    """Codes from −127 to 127, and a scale for each row: its largest magnitude / 127."""

    def encode(self, table: Tensor) -> dict[str, Tensor]:
        codes = torch.empty(table.shape, dtype=torch.int8)
        scales = torch.empty(len(table))
        for start in range(0, len(table), ENCODED_ROWS):
            rows = slice(start, start + ENCODED_ROWS)
            block = table[rows].float()
            largest = block.abs().amax(1)
            scales[rows] = largest / 127
            codes_per_unit = torch.where(largest > 0, 127 / largest, 0.0)
            codes[rows] = (block * codes_per_unit[:, None]).round()
        return {"codes": codes, "scales": scales}

    def decode(self, parts: Mapping[str, Tensor], rows: slice, *, width: int) -> Tensor:
        return parts["codes"][rows].float() * parts["scales"][rows, None]

    def part_shapes(self, parts: Mapping[str, Tensor], shape: Shape) -> dict[str, tuple[int, ...]]:
        return {"codes": shape, "scales": shape[:1]}


class SparseCodec(TableCodec):
    """The CSR form of run folders: `values`, their `columns`, and where each row `starts`."""

    def encode(self, table: Tensor) -> dict[str, Tensor]:
        return compress(table)

    def decode(self, parts: Mapping[str, Tensor], rows: slice, *, width: int) -> Tensor:
        starts = parts["starts"][rows.start : rows.stop + 1].long()
        first = int(starts[0])
        last = int(starts[-1])
        return expand(
            parts["values"][first:last],
            parts["columns"][first:last],
            starts - first,
            shape=(rows.stop - rows.start, width),
        )

    def part_shapes(self, parts: Mapping[str, Tensor], shape: Shape) -> dict[str, tuple[int, ...]]:
        nonzero = tuple(parts["values"].shape) if "values" in parts else (0,)
        return {"starts": (shape[0] + 1,), "columns": nonzero, "values": nonzero}


CODECS: dict[StorageFormat, TableCodec] = {
    "float32": FloatCodec(torch.float32),
    "float16": FloatCodec(torch.float16),
    "bf16": FloatCodec(torch.bfloat16),
    "int8": Int8Codec(),
    "sparse": SparseCodec(),
}


# -- the index ---------------------------------------------------------------


class SearchResult(NamedTuple):
    """Scores and rows, `(num_queries, k)` each, best first.

    Where too few rows were found, the score is −∞ and the row −1.
    """

    scores: Tensor
    ids: Tensor


@dataclass(eq=False)
class ExactIndex:
    """Compares a query with every row of a stored table, decoded to float32 in blocks of rows.

    Rows of equal score are in the order of their numbers, whatever the size of the blocks.
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
        """Store a table; one of float32 is not copied, so it may be memory-mapped."""
        if storage not in STORAGE_FORMATS:
            expected = f"one of {', '.join(STORAGE_FORMATS)}"
            raise InvalidValue("storage", expected=expected, found=storage)
        table = check_table(table)
        shape = (table.shape[0], table.shape[1])
        return cls(CODECS[storage].encode(table), metric, shape, storage=storage)

    @property
    def config(self) -> dict[str, Any]:
        """The keywords that `load` needs besides the file of `save`."""
        return {"storage": self.storage}

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def save(self, folder: Path) -> None:
        parts = {name: part.contiguous() for name, part in self.parts.items()}
        with writing(folder / FILE, SafetensorError):
            save_file(parts, folder / FILE)

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
        """Read what `save` wrote; a file that does not fit raises ValueError.

        Unless `in_memory`, the file is memory-mapped and only blocks are held.
        """
        if storage not in STORAGE_FORMATS:
            raise ValueError(f"its storage format is '{storage}'")
        try:
            with safe_open(regular_file(folder / FILE), framework="pt") as file:
                names = file.keys()
                parts = {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(str(error)) from None

        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        if shapes != CODECS[storage].part_shapes(parts, shape):
            raise ValueError(
                f"its arrays {shapes} are no {storage} table of {shape[0]:,} × {shape[1]:,}"
            )
        if in_memory:
            parts = {name: part.clone() for name, part in parts.items()}
        return cls(parts, metric, shape, storage=storage)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows as float32, `(stop − start, width)`; a view if the table is float32."""
        num_rows, width = self.shape
        stop = num_rows if stop is None else min(stop, num_rows)
        return CODECS[self.storage].decode(self.parts, slice(start, stop), width=width)

    def _blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of at most `size` decoded rows, each with the number of its first row."""
        for start in range(0, self.shape[0], size):
            yield start, self.rows(start, start + size)

    @cached_property
    def _squared_norms(self) -> Tensor:
        """‖x‖² of every row, `(num_rows,)`."""
        size = max(1, BLOCK_ELEMENTS // self.shape[1])
        return torch.cat([rows.square().sum(1) for _, rows in self._blocks(size)])

    @torch.no_grad()
    def search(
        self, queries: Tensor, k: int, *, block_elements: int = BLOCK_ELEMENTS
    ) -> SearchResult:
        """Find the best `k` rows for each of the queries `(num_queries, width)`.

        All rows are returned if there are fewer than `k`.
        """
        queries = check_queries(queries)
        num_queries = len(queries)
        k = min(k, self.shape[0])

        # Rows of float32 are views, so that only scores take memory.
        decoded_width = 1 if self.storage == "float32" else self.shape[1]
        size = max(1, block_elements // max(num_queries, decoded_width))

        best = SearchResult(
            queries.new_empty(num_queries, 0), torch.empty(num_queries, 0, dtype=torch.int64)
        )
        with full_precision():
            for start, rows in self._blocks(size):
                scores = queries @ rows.T
                if self.metric == "euclidean":
                    scores = scores.mul_(2).sub_(self._squared_norms[start : start + size])
                in_block = best_of(scores, k)

                # The sort is stable and earlier rows come first: ties stay in the order of rows.
                scores = torch.cat([best.scores, in_block.scores], 1)
                ids = torch.cat([best.ids, in_block.ids + start], 1)
                order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
                best = SearchResult(scores.gather(1, order), ids.gather(1, order))

        if self.metric == "euclidean":
            distances = best.scores - queries.square().sum(1, keepdim=True)
            best = SearchResult(distances, best.ids)
        return best


def best_of(scores: Tensor, k: int) -> SearchResult:
    """The best `k` columns of each row of scores, ties in the order of columns.

    All columns are returned if there are fewer than `k`.
    """
    k = min(k, scores.shape[1])
    values, columns = scores.topk(k)

    # Of the columns that tie with the last one, `topk` takes any.
    last = values[:, -1:]
    is_ambiguous = (scores == last).sum(1) > (values == last).sum(1)
    for row in is_ambiguous.nonzero()[:, 0].tolist():
        columns[row] = scores[row].argsort(descending=True, stable=True)[:k]

    columns = columns.sort(1).values
    values = scores.gather(1, columns)
    order = values.argsort(dim=1, descending=True, stable=True)
    return SearchResult(values.gather(1, order), columns.gather(1, order))


# -- the cost of a storage format --------------------------------------------


@dataclass(frozen=True)
class StoragePoint:
    """The bytes of entity tables in a storage format, and the metrics with them.

    `share` is the share of zeros of a sparse table.
    """

    storage: StorageFormat
    share: float
    bytes: int
    metrics: Metrics

    @property
    def name(self) -> str:
        if self.storage == "sparse":
            return f"sparse {self.share:.0%}"
        return self.storage

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
    """Evaluate a model with its entity tables in dense formats, then in sparse ones.

    `shares` are the shares of zeros of the sparse tables. The model is not changed.
    """
    if not len(graph.split(split)):
        raise Unsupported(graph.name, f"has no {split} triples to rank")
    thresholds: Sequence[float] = []
    if shares:
        thresholds = find_thresholds(entity_tables(model).values(), shares)
    known = KnownAnswers.of(graph)

    def point(pruned: Model, storage: StorageFormat, share: float) -> StoragePoint:
        stored, num_bytes = quantized(pruned, storage)
        metrics = evaluate(stored, graph, split=split, known=known).metrics
        return StoragePoint(storage, share, num_bytes, metrics)

    points = [point(model, storage, 0.0) for storage in formats]
    for share, threshold in zip(shares, thresholds, strict=True):
        pruned = sparsified(model, threshold) if threshold else model
        points.append(point(pruned, "sparse", share))
    return points


@torch.no_grad()
def quantized(model: Model, storage: StorageFormat) -> tuple[Model, int]:
    """A copy of a model with its entity tables rounded to a storage format, and their bytes."""
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
    """The metric by which an index finds what a model scores best; refuse a model without one."""
    model = model.whole
    if isinstance(model, BilinearModel):
        return "inner product"
    obstacle = _obstacle(model)
    if obstacle is not None:
        raise Unsupported(
            "An index",
            "finds the largest inner products or the smallest Euclidean distances in one table, "
            f"but {obstacle}",
            advice="Predict without an index.",
        )
    return "euclidean"


def _obstacle(model: Model) -> str | None:
    """Why the score of a model that is not bilinear is no Euclidean distance, or None."""
    name = type(model.embedding).__name__
    maps_heads = f"{name} without reciprocal relations compares with heads that each relation maps"
    if isinstance(model, Dual):
        if model.side == "head":
            return (
                f"the dual of {name} on the side of the head compares with tails that each "
                "relation maps"
            )
        return None if model.reciprocal else f"the dual of {maps_heads}"

    if not isinstance(model, NormModel) or model.maps_both_sides:
        return f"{name} scores in another way"
    if model.norm == 1:
        return f"{name} with norm 1 adds absolute differences"
    return None if model.reciprocal or model.isometric else maps_heads


def tables_of(model: Model) -> dict[Side, Tensor]:
    """The tables to search: for tails, and for heads if they are in another table."""
    embedding = model.embedding
    tables: dict[Side, Tensor] = {"tail": embedding.tail_table.detach().cpu()}
    if not model.reciprocal and embedding.head_table is not embedding.tail_table:
        tables["head"] = embedding.head_table.detach().cpu()
    return tables

"""Approximate indexes by FAISS, and the indexes of a model: building, tuning, measuring, saving and
loading.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.archives import cache_folder
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import eval_mode
from dualkg.extras import optional_import
from dualkg.files import (
    atomic_folder,
    check_new_folder,
    file_damage,
    file_record,
    locks,
    read_json,
    recover,
    write_json,
    writing,
)
from dualkg.inference.index import (
    ROWS,
    ExactIndex,
    Metric,
    SearchResult,
    Shape,
    StorageFormat,
    check_queries,
    check_table,
    metric_of,
    query_vectors,
    tables_of,
)
from dualkg.logs import ProgressLog
from dualkg.models.base import Model, Side

Vectors = npt.NDArray[np.float32]
FaissKind = Literal["ivf", "hnsw", "sq8"]
FAISS_KINDS: tuple[FaissKind, ...] = get_args(FaissKind)
IndexKind = Literal["exact", "ivf", "hnsw", "sq8"]
INDEX_KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
FILE = "index.faiss"
ABOUT = "index.json"
SIDES: tuple[Side, Side] = ("tail", "head")  # a second table is for heads
ROWS_PER_LIST = 40  # training rows for each list of an inverted file
LINKS = 32  # of a row of an HNSW graph to its neighbours
BUILD_EFFORT = 80  # efConstruction of HNSW
MAX_HNSW_EFFORT = 4096
USUAL_K = 10  # the k that `effort` is meant for; a larger k gets more
DEPTHS = (1, 10, 100)  # k of the reported recall@k
TUNED_DEPTHS = (
    10,
    100,
)  # k at which recall must be reached: known answers are searched for too, and omitted later
# Of the misses that recall allows; effort is tuned on some queries and must be enough for others.
MARGIN = 0.2
SECONDS = 1.0  # duration of a speed measurement
PILOT_ROWS = 50_000  # rows that decide whether inner products are searched by distances
NUM_QUERIES = 1000  # half for tuning, half for measuring


@dataclass(eq=False)
class FaissIndex:
    """Approximate search by FAISS: inverted lists (ivf; sq8 with 8-bit scalar quantization) or a
    graph (hnsw).

    `effort` is nprobe or efSearch. With `max_norm` M, inner products are searched by distances:
    rows x get the coordinate √(M² − ‖x‖²) and queries 0, so that all rows have length M and the
    nearest has the largest product.
    """

    index: Any
    metric: Metric
    shape: Shape
    _: KW_ONLY
    kind: FaissKind
    effort: int = 16
    max_norm: float | None = None

    @classmethod
    def build(
        cls,
        table: Tensor,
        metric: Metric = "inner product",
        *,
        kind: FaissKind = "ivf",
        by_distance: bool = False,
    ) -> Self:
        """Build an index; `by_distance` searches inner products by distances. Only blocks of rows
        are copied.
        """
        table = check_table(table)
        module = faiss()
        max_norm = float(table.float().norm(dim=1).max()) if by_distance else None
        built = cls(None, metric, (table.shape[0], table.shape[1]), kind=kind, max_norm=max_norm)
        by_product = metric == "inner product" and not by_distance
        lists = num_lists(len(table))
        code = {"hnsw": f"HNSW{LINKS}", "ivf": f"IVF{lists},Flat", "sq8": f"IVF{lists},SQ8"}[kind]
        index = built.index = module.index_factory(
            table.shape[1] + by_distance,
            code,
            module.METRIC_INNER_PRODUCT if by_product else module.METRIC_L2,
        )
        with threads(torch.get_num_threads()):
            if kind == "hnsw":
                index.hnsw.efConstruction = BUILD_EFFORT
            else:
                index.cp.min_points_per_centroid = 1
                index.cp.max_points_per_centroid = ROWS_PER_LIST
                rows = table[_sample(len(table), ROWS_PER_LIST * lists)].float().numpy()
                index.train(built._augmented(rows, rows=True))
            for block in torch.split(table, ROWS):
                index.add(built._augmented(block.float().contiguous().numpy(), rows=True))
        return built

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "effort": self.effort, "max_norm": self.max_norm}

    @property
    def max_effort(self) -> int:
        return (
            min(MAX_HNSW_EFFORT, self.shape[0]) if self.kind == "hnsw" else num_lists(self.shape[0])
        )

    def save(self, folder: Path) -> None:
        with writing(folder / FILE, RuntimeError):
            faiss().write_index(self.index, str(folder / FILE))

    @classmethod
    def load(cls, folder: Path, metric: Metric, shape: Shape, **config: Any) -> Self:
        """Read what `save` wrote."""
        try:
            index = faiss().read_index(str(folder / FILE))
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None
        loaded = cls(index, metric, shape, **config)
        numbers = (loaded.effort, 0 if loaded.max_norm is None else loaded.max_norm)
        if (
            not all(isinstance(one, (int, float)) and math.isfinite(one) for one in numbers)
            or loaded.effort < 1
        ):
            raise ValueError(
                f"its effort {loaded.effort} or its max_norm {loaded.max_norm} is no number above 0"
            )
        if hasattr(index, "hnsw") != (loaded.kind == "hnsw"):
            raise ValueError(f"its file is not of the kind '{loaded.kind}'")
        if (index.ntotal, index.d) != (shape[0], shape[1] + (loaded.max_norm is not None)):
            raise ValueError(
                f"its {index.ntotal:,} rows of {index.d:,} numbers are not of {shape[0]:,} × "
                f"{shape[1]:,}"
            )
        return loaded

    def search(self, queries: Tensor, k: int) -> SearchResult:
        """Find the best `k` rows for each of the queries `(num_queries, width)`, or all if there
        are fewer.
        """
        queries = check_queries(queries)
        k = min(k, self.shape[0])
        # In NumPy: for a single query, a few small operations of PyTorch take longer than the
        # search.
        vectors = self._augmented(queries.numpy())
        effort = math.ceil(self.effort * max(1.0, k / USUAL_K))
        if self.kind == "hnsw":
            parameters = faiss().SearchParametersHNSW(efSearch=min(effort, max(self.max_effort, k)))
        else:
            parameters = faiss().SearchParametersIVF(nprobe=min(effort, self.max_effort))
        scores, ids = self.index.search(vectors, k, params=parameters)
        if self.max_norm is not None:
            scores = (np.square(vectors).sum(1, keepdims=True) + self.max_norm**2 - scores) / 2
        elif self.metric == "euclidean":
            scores = -scores
        scores[ids < 0] = -np.inf
        return SearchResult(torch.from_numpy(scores), torch.from_numpy(ids))

    def _augmented(self, vectors: Vectors, *, rows: bool = False) -> Vectors:
        """Vectors with the coordinate that makes rows equally long, if the index searches by
        distance.
        """
        if self.max_norm is None:
            return vectors
        augmented = np.zeros((len(vectors), vectors.shape[1] + 1), dtype=np.float32)
        augmented[:, :-1] = vectors
        if rows:
            augmented[:, -1] = np.sqrt(np.maximum(self.max_norm**2 - np.square(vectors).sum(1), 0))
        return augmented


Index = ExactIndex | FaissIndex


def _sample(num_rows: int, size: int) -> Tensor:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[:size]


def num_lists(num_rows: int) -> int:
    """The number of inverted lists: 4 √n, but at most one for 8 rows."""
    return max(1, min(round(4 * math.sqrt(num_rows)), num_rows // 8))


def faiss() -> Any:
    """Import FAISS, or raise how to install it."""
    with optional_import("faiss", purpose="An index of the kinds ivf, hnsw and sq8"):
        import faiss as module
    return module


@contextmanager
def threads(num: int) -> Iterator[None]:
    """Set the number of threads of PyTorch, and of FAISS if it is installed, for a block."""
    pools: list[tuple[Callable[[int], None], int]] = [
        (torch.set_num_threads, torch.get_num_threads())
    ]
    if find_spec("faiss"):
        pools.append((faiss().omp_set_num_threads, faiss().omp_get_max_threads()))
    try:
        for set_threads, _ in pools:
            set_threads(num)
        yield
    finally:
        for set_threads, before in pools:
            set_threads(before)


# -- measuring and tuning ----------------------------------------------------


def recalls(
    index: Index, queries: Tensor, best: Tensor, depths: Sequence[int] = DEPTHS
) -> dict[int, float]:
    """Recall@k for each k: the share of the best k rows among the k that an index returns; `best`
    is sorted.
    """
    found = {k: index.search(queries, k).ids[:, None, :] for k in depths}
    return {k: float((best[:, :k, None] == ids).any(-1).float().mean()) for k, ids in found.items()}


def queries_per_second(
    index: Index, queries: Tensor, *, k: int = 10, seconds: float | None = None
) -> float:
    """Queries per second, one at a time on one thread; the first is not counted."""
    done = 0
    seconds = SECONDS if seconds is None else seconds
    with threads(1):
        index.search(queries[:1], k)
        started = time.perf_counter()
        while done < 3 or time.perf_counter() - started < seconds:
            row = done % len(queries)
            index.search(queries[row : row + 1], k)
            done += 1
        return done / (time.perf_counter() - started)


def least_effort(index: FaissIndex, queries: Tensor, best: Tensor, *, recall: float) -> int | None:
    """The least effort that reaches a recall, or None: doubled until it does, then found by
    bisection.
    """
    wanted = recall + MARGIN * (1 - recall)

    def enough(effort: int) -> bool:
        index.effort = effort
        return min(recalls(index, queries, best, TUNED_DEPTHS).values()) >= wanted

    low = 0
    high = 1
    while not enough(high):
        if high == index.max_effort:
            return None
        low = high
        high = min(2 * high, index.max_effort)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def tuned(
    table: Tensor, metric: Metric, *, kind: FaissKind, queries: Tensor, best: Tensor, recall: float
) -> FaissIndex:
    """A FAISS index with the least effort that reaches a recall, by products or distances,
    whichever takes less.
    """
    if not 0 < recall < 1:
        raise RequestError(f"The recall must be above 0 and below 1, such as 0.95; got {recall:g}.")
    by_distance = metric == "inner product" and _less_effort_by_distance(
        table, kind, queries, recall
    )
    index = FaissIndex.build(table, metric, kind=kind, by_distance=by_distance)
    effort = least_effort(index, queries, best, recall=recall)
    if effort is None:
        reached = min(recalls(index, queries, best, TUNED_DEPTHS).values())
        raise RequestError(
            f"The index {kind} reaches a recall of {reached:.3f} with all its effort, which is "
            f"too little for {recall:g}. Ask for a lower recall or another kind."
        )
    index.effort = effort
    return index


def _less_effort_by_distance(
    table: Tensor, kind: FaissKind, queries: Tensor, recall: float
) -> bool:
    rows = table[_sample(len(table), PILOT_ROWS)]
    best = ExactIndex.build(rows).search(queries, max(TUNED_DEPTHS)).ids
    indexes = (
        FaissIndex.build(rows, kind=kind, by_distance=by_distance) for by_distance in (False, True)
    )
    by_product, by_distance = (
        least_effort(index, queries, best, recall=recall) or math.inf for index in indexes
    )
    return by_distance < by_product


# -- the index of a model ----------------------------------------------------


def fingerprint(table: Tensor) -> str:
    """A hash of the shape of a table and of about a thousand of its rows."""
    rows = table[:: max(1, len(table) // 1000)].float().contiguous()
    return sha256(str(tuple(table.shape)).encode() + rows.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class IndexStats:
    """Recall@k on queries that were not used for tuning, and speed with single queries on one
    thread.
    """

    recall: dict[int, float]
    queries_per_second: float
    exact_queries_per_second: float
    build_seconds: float
    num_queries: int
    bytes: int | None = None  # of the saved files


@dataclass(frozen=True, eq=False)
class ModelIndex:
    """The indexes of a model: for tails, and for heads if they are in another table."""

    model: str
    metric: Metric
    indexes: dict[Side, Index]
    stats: dict[Side, IndexStats]
    fingerprints: dict[Side, str]  # of the tables

    @property
    def kind(self) -> str:
        return self.indexes["tail"].kind

    def for_side(self, side: Side) -> Index:
        return self.indexes.get(side, self.indexes["tail"])

    def check_model(self, model: Model) -> None:
        """Refuse a model other than the one that was indexed."""
        found = {side: fingerprint(table) for side, table in tables_of(model).items()}
        if found != self.fingerprints or metric_of(model) != self.metric:
            raise RequestError(
                f"The index was made of another model, {self.model} by {self.metric}: its rows "
                f"are not the entities of this {type(model.embedding).__name__}. Build it again: "
                "dualkg index RUN"
            )


# -- building ----------------------------------------------------------------


def build_index(
    model: Model,
    graph: Graph,
    *,
    kind: IndexKind = "ivf",
    recall: float = 0.95,
    storage: StorageFormat = "float32",
    seed: int = 0,
) -> ModelIndex:
    """Index the entities of a model and measure the result.

    `recall` is the target of the FAISS kinds, `storage` the format of the exact one. Queries of
    training triples, drawn by `seed`, are used half for tuning and half for measuring.
    """
    if kind not in INDEX_KINDS:
        raise RequestError(
            f"The kind of an index must be one of {', '.join(INDEX_KINDS)}; got '{kind}'."
        )
    if kind in FAISS_KINDS:
        if storage != "float32":
            raise RequestError(
                f"Only the exact index can use the storage format {storage}; got the kind {kind}."
            )
        faiss()
    metric = metric_of(model)
    model.check_shape(graph.shape)
    built = ModelIndex(
        type(model.embedding).__name__, metric, indexes={}, stats={}, fingerprints={}
    )
    log = ProgressLog(f"Index {kind} of {graph.name}")
    for side, table in tables_of(model).items():
        log(lambda table=table: f"building, {len(table):,} entities", last=True)  # type: ignore[misc]
        exact = ExactIndex.build(table, metric)
        with eval_mode(model):
            queries, held_out = tuning_queries(model, graph, side, exact, seed=seed)
        started = time.perf_counter()
        if kind == "exact":
            index: Index = ExactIndex.build(table, metric, storage=storage)
        else:
            best = exact.search(queries, max(DEPTHS)).ids
            index = tuned(
                exact.rows(), metric, kind=kind, queries=queries, best=best, recall=recall
            )
        build_seconds = time.perf_counter() - started
        log(lambda seconds=build_seconds: f"built in {seconds:.1f} s, now measured", last=True)  # type: ignore[misc]
        built.indexes[side], built.fingerprints[side] = index, fingerprint(table)
        built.stats[side] = IndexStats(
            recall=recalls(index, held_out, exact.search(held_out, max(DEPTHS)).ids),
            queries_per_second=queries_per_second(index, held_out),
            exact_queries_per_second=queries_per_second(exact, held_out),
            build_seconds=build_seconds,
            num_queries=len(held_out),
        )
    return built


@torch.no_grad()
def tuning_queries(
    model: Model, graph: Graph, side: Side, exact: ExactIndex, *, seed: int
) -> tuple[Tensor, Tensor]:
    """The vectors of queries that one table answers, in two halves; a model that scores otherwise
    is refused.
    """
    sides: list[Side] = [side] if len(tables_of(model)) > 1 else ["tail", "head"]
    halves = []
    for missing in sides:
        given, relations = sample_queries(
            model, graph, missing, num=NUM_QUERIES // len(sides), seed=seed
        )
        vectors = query_vectors(model, given, relations, missing).cpu()
        check_agreement(
            model, given[:4], relations[:4], side=missing, best=exact.search(vectors[:4], 1).ids
        )
        half = -(-len(vectors) // 2)
        halves.append((vectors[:half], vectors[half:] if len(vectors) > 1 else vectors))
    first, second = map(torch.cat, zip(*halves, strict=True))
    return first, second


def sample_queries(
    model: Model, graph: Graph, side: Side, *, num: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw distinct queries for tails, or for heads, from the training triples: given entities, and
    relations.
    """
    if not len(graph.train):
        raise RequestError(f"{graph.name} has no training triples to measure an index with.")
    pairs = np.unique(graph.train[:, :2] if side == "tail" else graph.train[:, 1:], axis=0)
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:num]
    first, second = torch.from_numpy(pairs[chosen].astype(np.int64)).to(model.device).unbind(1)
    return (first, second) if side == "tail" else (second, first)


@torch.no_grad()
def check_agreement(
    model: Model, given: Tensor, relations: Tensor, *, side: Side, best: Tensor
) -> None:
    """Refuse a custom model whose best entities are not the rows `best` `(batch, 1)` that are best
    by the metric.
    """
    scores = (
        model.predict_tails(given, relations)
        if side == "tail"
        else model.predict_heads(relations, given)
    )
    ours = scores.gather(1, best.to(scores.device))[:, 0]
    if (scores.amax(1) - ours > 1e-3 * scores.abs().amax(1)).any():
        raise RequestError(
            f"The entities that {type(model.embedding).__name__} scores best are not the best by "
            "its maps, so an index would not find them. Predict without an index."
        )


# -- files -------------------------------------------------------------------


@locks("folder")
def save_index(index: ModelIndex, folder: str | Path) -> ModelIndex:
    """Write an index atomically; return it with the number of bytes of its files."""
    folder = Path(folder)
    check_new_folder(folder)
    with atomic_folder(folder, last=ABOUT) as fresh:
        for side, one in index.indexes.items():
            (fresh / side).mkdir()
            one.save(fresh / side)
        files = {
            side: {one.name: file_record(one) for one in (fresh / side).iterdir()}
            for side in index.indexes
        }
        sizes = {
            side: sum(record["bytes"] for record in records.values())
            for side, records in files.items()
        }
        saved = replace(
            index,
            stats={side: replace(stats, bytes=sizes[side]) for side, stats in index.stats.items()},
        )
        write_json(fresh / ABOUT, {**describe_index(saved), "files": files})
    return saved


def describe_index(index: ModelIndex) -> dict[str, Any]:
    """Everything about an index except its rows, for JSON."""
    tables = {
        side: {
            "shape": list(one.shape),
            "config": one.config,
            "fingerprint": index.fingerprints[side],
            "stats": asdict(index.stats[side]),
        }
        for side, one in index.indexes.items()
    }
    return {"kind": index.kind, "model": index.model, "metric": index.metric, "tables": tables}


def load_index(folder: str | Path, *, in_memory: bool = True) -> ModelIndex:
    """Read an index. Unless `in_memory`, an exact one is searched in its memory-mapped file."""
    folder = Path(folder)
    recover(folder)
    if not (folder / ABOUT).exists():
        raise RequestError(
            f"{folder} holds no index (there is no {ABOUT}). Build one with: dualkg index RUN"
        )
    saved = read_json(folder / ABOUT, checksum=True)
    try:
        for side, records in saved["files"].items():  # FAISS may crash on a damaged file
            for name, record in records.items():
                if damage := file_damage(
                    folder / side / name, record, memory=cache_folder() / "verified"
                ):
                    raise ValueError(f"{side}/{name}: {damage}")
        loaded = ModelIndex(saved["model"], saved["metric"], indexes={}, stats={}, fingerprints={})
        for side in SIDES[: len(saved["tables"])]:
            table = saved["tables"][side]
            rows, width = map(int, table["shape"])
            place = folder / side, loaded.metric, (rows, width)
            if saved["kind"] == "exact":
                loaded.indexes[side] = ExactIndex.load(
                    *place, in_memory=in_memory, **table["config"]
                )
            elif saved["kind"] in FAISS_KINDS:
                loaded.indexes[side] = FaissIndex.load(*place, **table["config"])
            else:
                raise ValueError(f"its kind is '{saved['kind']}'")
            recall = {int(k): share for k, share in table["stats"]["recall"].items()}
            loaded.stats[side] = IndexStats(**{**table["stats"], "recall": recall})
            loaded.fingerprints[side] = table["fingerprint"]
        return loaded
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(
            f"The index {folder} is damaged: {reason}. Build it again: dualkg index RUN"
        ) from None

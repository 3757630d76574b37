"""The index of a model: FAISS or exact; building, tuning, measuring, saving and loading."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
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
from dualkg.errors import PYTHON, InvalidValue, RequestError, Unsupported, Words
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
    regular_file,
    write_json,
    writing,
)
from dualkg.inference.index import (
    ENCODED_ROWS,
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
from dualkg.models.base import Model
from dualkg.tables.lookup import Side

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
# Values of k at which a recall must be reached. Known answers are searched for too, and omitted
# later, so that a search for 10 predictions may be one for 100 rows.
TUNED_DEPTHS = (10, 100)
# The share of the allowed misses that tuning leaves: the effort must be enough for other queries.
MARGIN = 0.2
SECONDS = 1.0  # duration of a speed measurement
PILOT_ROWS = 50_000  # rows that decide whether inner products are searched by distances
NUM_QUERIES = 1000  # half for tuning, half for measuring


# -- errors ------------------------------------------------------------------


class IndexNotFound(RequestError):
    """A folder holds no index."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.folder} holds no index (there is no {ABOUT}). Build one with: "
            f"{words.call('index', 'RUN')}"
        )


class DamagedIndex(RequestError):
    """The files of an index cannot be used; `reason` completes "is damaged:"."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__()
        self.folder = folder
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"The index {self.folder} is damaged: {self.reason}. Build it again: "
            f"{words.call('index', 'RUN')}"
        )


class OtherModelIndexed(RequestError):
    """An index was built of the model `model` by `metric`, not of the model that was `given`."""

    def __init__(self, model: str, metric: Metric, *, given: str) -> None:
        super().__init__()
        self.model = model
        self.metric = metric
        self.given = given

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"The index was made of another model, {self.model} by {self.metric}: its rows are not "
            f"the entities of this {self.given}. Build it again: {words.call('index', 'RUN')}"
        )


class RecallNotReached(RequestError):
    """An index of a kind cannot reach the recall that was wanted."""

    def __init__(self, kind: FaissKind, *, wanted: float, reached: float) -> None:
        super().__init__()
        self.kind = kind
        self.wanted = wanted
        self.reached = reached

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"The index {self.kind} reaches a recall of {self.reached:.3f} with all its effort, "
            f"which is too little for {self.wanted:g}. Choose a lower {words.option('recall')} or "
            f"another {words.option('kind')}."
        )


# -- FAISS -------------------------------------------------------------------


@dataclass(eq=False)
class FaissIndex:
    """Approximate search by FAISS.

    The kinds are inverted lists (ivf; sq8 with 8-bit scalar quantization) and a graph (hnsw).
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
        """Build an index; `by_distance` searches inner products by distances.

        Only blocks of rows are copied.
        """
        table = check_table(table)
        max_norm = float(table.float().norm(dim=1).max()) if by_distance else None
        num_rows, width = table.shape
        lists = num_lists(num_rows)
        codes = {"hnsw": f"HNSW{LINKS}", "ivf": f"IVF{lists},Flat", "sq8": f"IVF{lists},SQ8"}
        by_product = metric == "inner product" and not by_distance

        module = faiss()
        index = module.index_factory(
            width + by_distance,
            codes[kind],
            module.METRIC_INNER_PRODUCT if by_product else module.METRIC_L2,
        )
        with threads(torch.get_num_threads()):
            if kind == "hnsw":
                index.hnsw.efConstruction = BUILD_EFFORT
            else:
                index.cp.min_points_per_centroid = 1
                index.cp.max_points_per_centroid = ROWS_PER_LIST
                sample = table[_sample(num_rows, ROWS_PER_LIST * lists)]
                index.train(_row_vectors(sample, max_norm))
            for block in torch.split(table, ENCODED_ROWS):
                index.add(_row_vectors(block, max_norm))
        return cls(index, metric, (num_rows, width), kind=kind, max_norm=max_norm)

    @property
    def config(self) -> dict[str, Any]:
        """The keywords that `load` needs besides the file of `save`."""
        return {"kind": self.kind, "effort": self.effort, "max_norm": self.max_norm}

    @property
    def max_effort(self) -> int:
        if self.kind == "hnsw":
            return min(MAX_HNSW_EFFORT, self.shape[0])
        return num_lists(self.shape[0])

    def save(self, folder: Path) -> None:
        with writing(folder / FILE, RuntimeError):
            faiss().write_index(self.index, str(folder / FILE))

    @classmethod
    def load(cls, folder: Path, metric: Metric, shape: Shape, **config: Any) -> Self:
        """Read what `save` wrote; a file that does not fit raises ValueError."""
        try:
            index = faiss().read_index(str(regular_file(folder / FILE)))
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None

        loaded = cls(index, metric, shape, **config)
        loaded._check_settings()
        if hasattr(index, "hnsw") != (loaded.kind == "hnsw"):
            raise ValueError(f"its file is not of the kind '{loaded.kind}'")
        by_distance = loaded.max_norm is not None
        if (index.ntotal, index.d) != (shape[0], shape[1] + by_distance):
            raise ValueError(
                f"its {index.ntotal:,} rows of {index.d:,} numbers are not of {shape[0]:,} × "
                f"{shape[1]:,}"
            )
        return loaded

    def _check_settings(self) -> None:
        """Refuse an effort or a norm that was read from a damaged file."""
        max_norm = 0.0 if self.max_norm is None else self.max_norm
        for number in (self.effort, max_norm):
            is_number = isinstance(number, int | float) and math.isfinite(number)
            if not is_number or self.effort < 1:
                raise ValueError(
                    f"its effort {self.effort} or its max_norm {self.max_norm} is no number above 0"
                )

    def search(self, queries: Tensor, k: int) -> SearchResult:
        """Find the best `k` rows for each of the queries `(num_queries, width)`.

        All rows are returned if there are fewer than `k`.
        """
        # NumPy is used, since for a single query a few small operations of PyTorch take longer
        # than the search.
        vectors: Vectors = check_queries(queries).numpy()
        if self.max_norm is not None:
            vectors = _with_coordinate(vectors, 0.0)

        k = min(k, self.shape[0])
        effort = math.ceil(self.effort * max(1.0, k / USUAL_K))
        if self.kind == "hnsw":
            effort = min(effort, max(self.max_effort, k))
            parameters = faiss().SearchParametersHNSW(efSearch=effort)
        else:
            effort = min(effort, self.max_effort)
            parameters = faiss().SearchParametersIVF(nprobe=effort)
        scores, ids = self.index.search(vectors, k, params=parameters)

        if self.max_norm is not None:
            scores = (np.square(vectors).sum(1, keepdims=True) + self.max_norm**2 - scores) / 2
        elif self.metric == "euclidean":
            scores = -scores
        scores[ids < 0] = -np.inf
        return SearchResult(torch.from_numpy(scores), torch.from_numpy(ids))


def _row_vectors(rows: Tensor, max_norm: float | None) -> Vectors:
    """Rows for FAISS, with the coordinate that makes them all `max_norm` long if it is given."""
    vectors: Vectors = rows.float().contiguous().numpy()
    if max_norm is None:
        return vectors
    squared = np.maximum(max_norm**2 - np.square(vectors).sum(1), 0)
    return _with_coordinate(vectors, np.sqrt(squared))


def _with_coordinate(vectors: Vectors, coordinate: Vectors | float) -> Vectors:
    """Vectors `(num_vectors, width)` with one more coordinate."""
    longer = np.empty((len(vectors), vectors.shape[1] + 1), dtype=np.float32)
    longer[:, :-1] = vectors
    longer[:, -1] = coordinate
    return longer


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
    """Recall@k for each k: the share of the best k rows among the k that an index returns.

    `best` `(num_queries, depth)` are the best rows of each query, best first.
    """
    by_depth = {}
    for k in depths:
        ids = index.search(queries, k).ids
        is_found = (best[:, :k, None] == ids[:, None, :]).any(-1)
        by_depth[k] = float(is_found.float().mean())
    return by_depth


def queries_per_second(
    index: Index, queries: Tensor, *, k: int = 10, seconds: float | None = None
) -> float:
    """Queries per second, one at a time on one thread; the first is not counted."""
    seconds = SECONDS if seconds is None else seconds
    num_done = 0
    with threads(1):
        index.search(queries[:1], k)
        started = time.perf_counter()
        while num_done < 3 or time.perf_counter() - started < seconds:
            row = num_done % len(queries)
            index.search(queries[row : row + 1], k)
            num_done += 1
        return num_done / (time.perf_counter() - started)


def least_effort(index: FaissIndex, queries: Tensor, best: Tensor, *, recall: float) -> int | None:
    """The least effort that reaches a recall, or None.

    The effort is doubled until it is enough, and then found by bisection.
    """
    wanted = recall + MARGIN * (1 - recall)

    def is_enough(effort: int) -> bool:
        tried = replace(index, effort=effort)
        return min(recalls(tried, queries, best, TUNED_DEPTHS).values()) >= wanted

    low = 0
    high = 1
    while not is_enough(high):
        if high == index.max_effort:
            return None
        low = high
        high = min(2 * high, index.max_effort)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def tuned(
    table: Tensor, metric: Metric, *, kind: FaissKind, queries: Tensor, best: Tensor, recall: float
) -> FaissIndex:
    """A FAISS index with the least effort that reaches a recall.

    Inner products are searched by products or by distances, whichever takes less effort.
    """
    if not 0 < recall < 1:
        raise InvalidValue("recall", expected="above 0 and below 1, such as 0.95", found=recall)
    by_distance = metric == "inner product" and _less_effort_by_distance(
        table, kind, queries, recall
    )
    index = FaissIndex.build(table, metric, kind=kind, by_distance=by_distance)
    effort = least_effort(index, queries, best, recall=recall)
    if effort is None:
        most = replace(index, effort=index.max_effort)
        reached = min(recalls(most, queries, best, TUNED_DEPTHS).values())
        raise RecallNotReached(kind, wanted=recall, reached=reached)
    return replace(index, effort=effort)


def _less_effort_by_distance(
    table: Tensor, kind: FaissKind, queries: Tensor, recall: float
) -> bool:
    """Whether distances need less effort than products, by a trial with some of the rows."""
    rows = table[_sample(len(table), PILOT_ROWS)]
    best = ExactIndex.build(rows).search(queries, max(TUNED_DEPTHS)).ids

    def effort(by_distance: bool) -> float:
        index = FaissIndex.build(rows, kind=kind, by_distance=by_distance)
        return least_effort(index, queries, best, recall=recall) or math.inf

    by_product = effort(by_distance=False)
    return effort(by_distance=True) < by_product


# -- the index of a model ----------------------------------------------------


def fingerprint(table: Tensor) -> str:
    """A hash of the shape of a table and of about a thousand of its rows."""
    rows = table[:: max(1, len(table) // 1000)].float().contiguous()
    return sha256(str(tuple(table.shape)).encode() + rows.numpy().tobytes()).hexdigest()


def checksum(table: Tensor) -> str:
    """A hash of all rows of a table."""
    digest = sha256(str(tuple(table.shape)).encode())
    for rows in torch.split(table.detach().cpu(), ENCODED_ROWS):
        digest.update(rows.float().contiguous().numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class IndexStats:
    """Recall@k on queries that were not used for tuning, and speed.

    Speeds are of single queries on one thread. `bytes` is the size of the saved files.
    """

    recall: dict[int, float]
    queries_per_second: float
    exact_queries_per_second: float
    build_seconds: float
    num_queries: int
    bytes: int | None = None


@dataclass(frozen=True, eq=False)
class ModelIndex:
    """The indexes of a model: for tails, and for heads if they are in another table.

    `fingerprints` are those of the tables, of some of their rows, and `checksums` of all.
    `made_from` is the identity of the run, if it was made from a saved one.
    """

    model: str
    metric: Metric
    indexes: dict[Side, Index]
    stats: dict[Side, IndexStats]
    fingerprints: dict[Side, str]
    checksums: dict[Side, str] = field(default_factory=dict)
    made_from: str | None = None

    @property
    def kind(self) -> str:
        return self.indexes["tail"].kind

    def for_side(self, side: Side) -> Index:
        return self.indexes.get(side, self.indexes["tail"])

    def check_model(self, model: Model, *, identity: str | None = None) -> None:
        """Refuse a model other than the one that was indexed.

        That of a run with the same identity has the same rows. Otherwise all are compared, unless
        an earlier version has built the index.
        """
        tables = tables_of(model)
        is_same = metric_of(model) == self.metric
        is_same &= self.fingerprints == {side: fingerprint(tables[side]) for side in tables}
        is_same_run = identity is not None and identity == self.made_from
        if is_same and self.checksums and not is_same_run:
            is_same = self.checksums == {side: checksum(tables[side]) for side in tables}
        if not is_same:
            given = type(model.embedding).__name__
            raise OtherModelIndexed(self.model, self.metric, given=given)


# -- building ----------------------------------------------------------------


def build_index(
    model: Model,
    graph: Graph,
    *,
    kind: IndexKind = "ivf",
    recall: float = 0.95,
    storage: StorageFormat = "float32",
    num_queries: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    made_from: str | None = None,
) -> ModelIndex:
    """Index the entities of a model and measure the result.

    `recall` is the target of the FAISS kinds, `storage` the format of the exact one. `num_queries`
    (default: 1,000) queries of training triples, drawn by `seed`, are used half for tuning and half
    for measuring. Each speed is measured for `seconds` (default: 1). `made_from` is the identity of
    a saved run, by which its model is known again without a comparison of all rows.
    """
    _check_kind(kind, storage)
    metric = metric_of(model)
    model.check_shape(graph.shape)
    num_queries = NUM_QUERIES if num_queries is None else num_queries

    indexes: dict[Side, Index] = {}
    stats: dict[Side, IndexStats] = {}
    fingerprints: dict[Side, str] = {}
    checksums: dict[Side, str] = {}
    log = ProgressLog(f"Index {kind} of {graph.name}")
    for side, table in tables_of(model).items():
        exact = ExactIndex.build(table, metric)
        with eval_mode(model):
            queries = tuning_queries(model, graph, side, exact, num=num_queries, seed=seed)
        indexes[side], stats[side] = _build_measured(
            exact, queries, kind=kind, recall=recall, storage=storage, seconds=seconds, log=log
        )
        fingerprints[side] = fingerprint(table)
        checksums[side] = checksum(table)
    name = type(model.embedding).__name__
    return ModelIndex(name, metric, indexes, stats, fingerprints, checksums, made_from)


def _build_measured(
    exact: ExactIndex,
    queries: tuple[Tensor, Tensor],
    *,
    kind: IndexKind,
    recall: float,
    storage: StorageFormat,
    seconds: float | None,
    log: ProgressLog,
) -> tuple[Index, IndexStats]:
    """An index of the rows of an exact one, tuned by some queries and measured by others."""
    tuning, held_out = queries
    rows = exact.rows()
    log(lambda: f"building, {len(rows):,} entities", last=True)
    started = time.perf_counter()
    if kind == "exact":
        index: Index = ExactIndex.build(rows, exact.metric, storage=storage)
    else:
        best = exact.search(tuning, max(DEPTHS)).ids
        index = tuned(rows, exact.metric, kind=kind, queries=tuning, best=best, recall=recall)
    build_seconds = time.perf_counter() - started

    log(lambda: f"built in {build_seconds:.1f} s, now measured", last=True)
    stats = IndexStats(
        recall=recalls(index, held_out, exact.search(held_out, max(DEPTHS)).ids),
        queries_per_second=queries_per_second(index, held_out, seconds=seconds),
        exact_queries_per_second=queries_per_second(exact, held_out, seconds=seconds),
        build_seconds=build_seconds,
        num_queries=len(held_out),
    )
    return index, stats


def _check_kind(kind: IndexKind, storage: StorageFormat) -> None:
    """Refuse a kind that does not exist, is not installed, or has no such storage format."""
    if kind not in INDEX_KINDS:
        raise InvalidValue("kind", expected=f"one of {', '.join(INDEX_KINDS)}", found=kind)
    if kind == "exact":
        return
    if storage != "float32":
        raise InvalidValue(
            "storage",
            expected=f"float32 for the kind {kind}",
            found=storage,
            advice="Other storage formats are for the exact index.",
        )
    faiss()


@torch.no_grad()
def tuning_queries(
    model: Model,
    graph: Graph,
    side: Side,
    exact: ExactIndex,
    *,
    num: int = NUM_QUERIES,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """The vectors of queries that one table answers, in two halves.

    A model that does not score by these vectors is refused.
    """
    sides: list[Side] = [side]
    if len(tables_of(model)) == 1:
        sides = ["tail", "head"]

    first_halves = []
    second_halves = []
    for missing in sides:
        given, relations = sample_queries(model, graph, missing, num=num // len(sides), seed=seed)
        vectors = query_vectors(model, given, relations, missing).cpu()
        best = exact.search(vectors[:4], 1).ids
        check_agreement(model, given[:4], relations[:4], side=missing, best=best)

        half = math.ceil(len(vectors) / 2)
        first_halves.append(vectors[:half])
        # A single query is used for both purposes.
        second_halves.append(vectors[half:] if len(vectors) > 1 else vectors)
    return torch.cat(first_halves), torch.cat(second_halves)


def sample_queries(
    model: Model, graph: Graph, side: Side, *, num: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw distinct queries from the training triples: their given entities, and relations.

    `side` is the missing part.
    """
    if not len(graph.train):
        raise Unsupported(graph.name, "has no training triples to measure an index with")
    columns = graph.train[:, :2] if side == "tail" else graph.train[:, 1:]
    pairs = np.unique(columns, axis=0)
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:num]
    first, second = torch.from_numpy(pairs[chosen].astype(np.int64)).to(model.device).unbind(1)
    return (first, second) if side == "tail" else (second, first)


@torch.no_grad()
def check_agreement(
    model: Model, given: Tensor, relations: Tensor, *, side: Side, best: Tensor
) -> None:
    """Refuse a custom model that scores other entities best than its maps do.

    `best` `(batch, 1)` are the rows that are best by the metric of the index.
    """
    if side == "tail":
        scores = model.predict_tails(given, relations)
    else:
        scores = model.predict_heads(relations, given)
    scores_of_best = scores.gather(1, best.to(scores.device))[:, 0]
    shortfall = scores.amax(1) - scores_of_best
    if (shortfall > 1e-3 * scores.abs().amax(1)).any():
        raise Unsupported(
            f"{type(model.embedding).__name__}",
            "does not score by its maps alone, so an index would not find the entities that it "
            "scores best",
            advice="Predict without an index.",
        )


# -- files -------------------------------------------------------------------


@locks("folder")
def save_index(index: ModelIndex, folder: str | Path) -> ModelIndex:
    """Write an index atomically; return it with the number of bytes of its files."""
    folder = Path(folder)
    check_new_folder(folder)
    with atomic_folder(folder, last=ABOUT) as fresh:
        files: dict[Side, dict[str, Any]] = {}
        stats: dict[Side, IndexStats] = {}
        for side, table_index in index.indexes.items():
            side_folder = fresh / side
            side_folder.mkdir()
            table_index.save(side_folder)
            files[side] = {path.name: file_record(path) for path in side_folder.iterdir()}
            num_bytes = sum(record["bytes"] for record in files[side].values())
            stats[side] = replace(index.stats[side], bytes=num_bytes)

        saved = replace(index, stats=stats)
        write_json(fresh / ABOUT, {**describe_index(saved), "files": files})
    return saved


def describe_index(index: ModelIndex) -> dict[str, Any]:
    """Everything about an index except its rows, for JSON."""
    tables = {}
    for side, table_index in index.indexes.items():
        tables[side] = {
            "shape": list(table_index.shape),
            "config": table_index.config,
            "fingerprint": index.fingerprints[side],
            "sha256": index.checksums.get(side),
            "stats": asdict(index.stats[side]),
        }
    return {
        "kind": index.kind,
        "model": index.model,
        "metric": index.metric,
        "made_from": index.made_from,
        "tables": tables,
    }


def load_index(folder: str | Path, *, in_memory: bool = True) -> ModelIndex:
    """Read an index. Unless `in_memory`, an exact one is searched in its memory-mapped file."""
    folder = Path(folder)
    recover(folder)
    if not (folder / ABOUT).exists():
        raise IndexNotFound(folder)
    saved = read_json(folder / ABOUT, checksum=True)
    try:
        _check_files(folder, saved["files"])
        return _load_tables(folder, saved, in_memory=in_memory)
    except KeyError as error:
        raise DamagedIndex(folder, f"{error} is missing") from None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedIndex(folder, str(error)) from None


def _check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if a file has changed: FAISS may crash on a damaged one."""
    for side, records in files.items():
        for name, record in records.items():
            path = folder / side / name
            damage = file_damage(path, record, memory=cache_folder() / "verified")
            if damage:
                raise ValueError(f"{side}/{name}: {damage}")


def _load_tables(folder: Path, saved: dict[str, Any], *, in_memory: bool) -> ModelIndex:
    """The index that a description and its files make; what does not fit raises."""
    kind = saved["kind"]
    metric = saved["metric"]
    indexes: dict[Side, Index] = {}
    stats: dict[Side, IndexStats] = {}
    fingerprints: dict[Side, str] = {}
    checksums: dict[Side, str] = {}
    for side in SIDES[: len(saved["tables"])]:
        table = saved["tables"][side]
        rows, width = map(int, table["shape"])
        if kind == "exact":
            indexes[side] = ExactIndex.load(
                folder / side, metric, (rows, width), in_memory=in_memory, **table["config"]
            )
        elif kind in FAISS_KINDS:
            indexes[side] = FaissIndex.load(folder / side, metric, (rows, width), **table["config"])
        else:
            raise ValueError(f"its kind is '{kind}'")

        # JSON has strings as keys.
        recall = {int(k): share for k, share in table["stats"]["recall"].items()}
        stats[side] = IndexStats(**{**table["stats"], "recall": recall})
        fingerprints[side] = table["fingerprint"]
        if table.get("sha256"):  # earlier versions have none
            checksums[side] = table["sha256"]
    made_from = saved.get("made_from")
    return ModelIndex(saved["model"], metric, indexes, stats, fingerprints, checksums, made_from)

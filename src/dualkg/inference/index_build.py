"""Indexes that look at few rows: FAISS's, behind the interface of the exact one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import eval_mode
from dualkg.files import atomic_folder, read_json, write_text
from dualkg.inference.index import (
    ExactIndex,
    Index,
    Metric,
    QueryBatch,
    SearchResult,
    StorageFormat,
    best_of,
    blocks_of,
    check_agreement,
    check_table,
    fingerprint,
    metric_of,
    sample_queries,
    tables_of,
)
from dualkg.inference.predictor import Known, Name, Prediction, Predictor
from dualkg.models.base import Model, Side

Vectors = npt.NDArray[np.float32]
FaissKind = Literal["ivf", "hnsw", "sq8"]
FAISS_KINDS: tuple[FaissKind, ...] = get_args(FaissKind)
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
        max_norm: float | None = None,
    ) -> None:
        super().__init__(metric, shape)
        self.kind = kind
        self.effort = effort
        self.max_norm = max_norm
        self._index = index

    @classmethod
    def build(
        cls, table: Tensor, metric: Metric = "inner product", *, kind: FaissKind = "ivf", reduced: bool = False
    ) -> FaissIndex:
        """Sort a table into lists, or link its rows; a block of rows is copied at a time."""
        if kind not in FAISS_KINDS:
            raise RequestError(f"FAISS has the indexes {', '.join(FAISS_KINDS)}; '{kind}' was asked for.")
        table = check_table(table)
        max_norm = max(float(block.float().norm(dim=1).max()) for block in blocks_of(table)) if reduced else None
        shape = (table.shape[0], table.shape[1])
        index = cls(None, metric, shape, kind=kind, max_norm=max_norm)
        with threads(torch.get_num_threads()):
            index._index = index._filled(table)
        return index

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "effort": self.effort, "max_norm": self.max_norm}

    @property
    def most_effort(self) -> int:
        return min(MOST_EFFORT, self.shape[0]) if self.kind == "hnsw" else num_lists(self.shape[0])

    def save(self, folder: Path) -> None:
        faiss().write_index(self._index, str(folder / FILE))

    @classmethod
    def load(cls, folder: Path, metric: Metric, shape: tuple[int, int], **config: Any) -> FaissIndex:
        """Read what `save` wrote."""
        module = faiss()
        try:
            index = module.read_index(str(folder / FILE))
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None
        loaded = cls(index, metric, shape, **config)
        if (index.ntotal, index.d) != (shape[0], shape[1] + (loaded.max_norm is not None)):
            raise ValueError(f"its {index.ntotal:,} rows of {index.d:,} numbers are not of {shape[0]:,} × {shape[1]:,}")
        return loaded

    def _search(self, queries: Tensor, k: int) -> SearchResult:
        # By NumPy: for a single query, a few small operations of PyTorch take longer than the search.
        vectors = self._lifted(queries.numpy())
        scores, ids = self._index.search(vectors, k, params=self._parameters(k))
        if self.max_norm is not None:
            scores = (np.square(vectors).sum(1, keepdims=True) + self.max_norm**2 - scores) / 2
        elif self.metric == "euclidean":
            scores = -scores
        scores[ids < 0] = -np.inf
        return SearchResult(torch.from_numpy(scores), torch.from_numpy(ids))

    def _parameters(self, k: int) -> Any:
        """For how many lists, or rows, are looked at; more where more than the usual number is asked for."""
        effort = math.ceil(self.effort * max(1.0, k / USUAL_K))
        if self.kind == "hnsw":
            return faiss().SearchParametersHNSW(efSearch=min(effort, max(self.most_effort, k)))
        return faiss().SearchParametersIVF(nprobe=min(effort, self.most_effort))

    def _lifted(self, vectors: Vectors, *, rows: bool = False) -> Vectors:
        """Vectors with the coordinate that makes rows equally long, where the table is reduced."""
        if self.max_norm is None:
            return vectors
        lifted = np.zeros((len(vectors), vectors.shape[1] + 1), dtype=np.float32)
        lifted[:, :-1] = vectors
        if rows:
            lifted[:, -1] = np.sqrt(np.maximum(self.max_norm**2 - np.square(vectors).sum(1), 0))
        return lifted

    def _filled(self, table: Tensor) -> Any:
        module, width = faiss(), self.shape[1] + (self.max_norm is not None)
        by_product = self.metric == "inner product" and self.max_norm is None
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


DEPTHS = (1, 10, 100)  # how many answers recall is measured at
TUNED = (10, 100)  # at these it must be enough: known answers are asked for too, and left out afterwards
MARGIN = 0.2  # of what recall may miss; effort is found on some questions, and must be enough for others
SECONDS = 1.0  # that a speed is measured for
PILOT = 50_000  # rows that tell whether products are better searched by distances


def recalls(index: Index, queries: Tensor, best: Tensor, depths: Sequence[int] = DEPTHS) -> dict[int, float]:
    """For each k, the share of the best k rows that an index has among its own k; `best` are ids, best first."""
    found = {}
    for k in depths:
        true = best[:, :k]
        ours = index.search(queries, k).ids
        found[k] = float((true[:, :, None] == ours[:, None, :]).any(-1).float().mean())
    return found


def queries_per_second(index: Index, queries: Tensor, *, k: int = 10, seconds: float | None = None) -> float:
    """QueryBatch answered a second, one at a time and by one thread; the first one is not counted."""
    done, seconds = 0, SECONDS if seconds is None else seconds
    with threads(1):
        index.search(queries[:1], k)
        started = time.perf_counter()
        while done < 3 or time.perf_counter() - started < seconds:
            place = done % len(queries)
            index.search(queries[place : place + 1], k)
            done += 1
        return done / (time.perf_counter() - started)


def least_effort(index: FaissIndex, queries: Tensor, best: Tensor, *, recall: float) -> int | None:
    """The least effort that finds enough, or none: doubled until it does, then halved in between."""
    wanted = recall + MARGIN * (1 - recall)

    def enough(effort: int) -> bool:
        index.effort = effort
        return min(recalls(index, queries, best, TUNED).values()) >= wanted

    low, high = 0, 1
    while not enough(high):
        if high == index.most_effort:
            return None
        low, high = high, min(2 * high, index.most_effort)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def tuned(
    table: Tensor, metric: Metric, *, kind: FaissKind, queries: Tensor, best: Tensor, recall: float
) -> FaissIndex:
    """A FAISS index with the least effort that finds enough of the best of these queries.

    For inner products, FAISS searches for them, or for distances in the reduced table: whichever takes less effort
    for some of the rows.
    """
    if not 0 < recall < 1:
        raise RequestError(f"A recall is above 0 and below 1; {recall:g} was asked for. For 95 %, say 0.95.")
    if kind not in FAISS_KINDS:
        raise RequestError(f"FAISS has the indexes {', '.join(FAISS_KINDS)}; '{kind}' was asked for.")
    reduced = metric == "inner product" and _better_reduced(table, kind, queries, recall)
    index = FaissIndex.build(table, metric, kind=kind, reduced=reduced)
    effort = least_effort(index, queries, best, recall=recall)
    if effort is None:
        reached = min(recalls(index, queries, best, TUNED).values())
        raise RequestError(
            f"A recall of {recall:g} with some room was asked for; the index {kind} reaches {reached:.3f} with all its "
            f"effort. Ask for less, or for another kind."
        )
    index.effort = effort
    return index


def _better_reduced(table: Tensor, kind: FaissKind, queries: Tensor, recall: float) -> bool:
    chosen = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:PILOT]
    rows = table[chosen]
    best = ExactIndex.build(rows).search(queries, max(TUNED)).ids
    efforts = [
        least_effort(FaissIndex.build(rows, kind=kind, reduced=reduced), queries, best, recall=recall)
        for reduced in (False, True)
    ]
    plain, reduced = (float("inf") if effort is None else effort for effort in efforts)
    return reduced < plain


IndexKind = Literal["exact", "ivf", "hnsw", "sq8"]
INDEX_KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
NUM_QUERIES = 1000  # half to find the effort with, half to measure with


@dataclass(frozen=True)
class IndexStats:
    """What an index reaches on questions that it was not tuned with: recall at several k, against the exact one.

    A second's questions are asked one at a time, of one thread. `bytes` are those of its files, where it is saved.
    """

    recall: dict[int, float]
    queries_per_second: float
    exact_queries_per_second: float
    build_seconds: float
    num_queries: int
    bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class ModelIndex:
    """An index for tails, one for heads where those are asked for of another table, and what was measured of each.

    `fingerprints` are of the tables that they were made of.
    """

    model: str
    metric: Metric
    indexes: dict[Side, Index]
    stats: dict[Side, IndexStats]
    fingerprints: dict[Side, str]

    @property
    def kind(self) -> str:
        return self.indexes["tail"].kind

    def for_side(self, side: Side) -> Index:
        return self.indexes.get(side, self.indexes["tail"])

    def check_model(self, model: Model) -> None:
        """Refuse a model that the index was not made of: it would find another model's answers."""
        found = {side: fingerprint(table) for side, table in tables_of(model).items()}
        if found != self.fingerprints or metric_of(model) != self.metric:
            raise RequestError(
                f"The index was made of another model, {self.model} by {self.metric}: its rows are not the entities of "
                f"this {type(model.embedding).__name__}. Make it again: dualkg index RUN"
            )


def build_index(
    model: Model,
    graph: Graph,
    *,
    kind: IndexKind = "ivf",
    recall: float = 0.95,
    storage: StorageFormat = "float32",
    seed: int = 0,
) -> ModelIndex:
    """Index the entities of a model. `recall` is asked of FAISS's kinds; `form` is how the exact one keeps its table.

    QueryBatch that training triples answer, half of them to find the effort and half to measure, are drawn by `seed`.
    """
    if kind not in INDEX_KINDS:
        raise RequestError(f"An index is {', '.join(INDEX_KINDS)}; '{kind}' was asked for.")
    if kind in FAISS_KINDS and storage != "float32":
        raise RequestError(f"Only the exact index keeps its table as {storage}; the index {kind} was asked for.")
    if kind in FAISS_KINDS:
        faiss()
    metric = metric_of(model)
    model.check_shape(graph.shape)
    indexes: dict[Side, Index] = {}
    stats: dict[Side, IndexStats] = {}
    tables = tables_of(model)
    for side, table in tables.items():
        exact = ExactIndex.build(table, metric)
        with eval_mode(model):
            queries, held_out = _vectors(model, graph, side, exact, seed=seed)
        started = time.perf_counter()
        index = _built(exact, queries, kind=kind, recall=recall, storage=storage)
        seconds = time.perf_counter() - started
        indexes[side], stats[side] = index, measure(index, exact, held_out, build_seconds=seconds)
    return ModelIndex(
        type(model.embedding).__name__, metric, indexes, stats, {side: fingerprint(one) for side, one in tables.items()}
    )


def measure(index: Index, exact: ExactIndex, queries: Tensor, *, build_seconds: float) -> IndexStats:
    """Recall against the exact index of the table in float32, and the speed of both."""
    return IndexStats(
        recall=recalls(index, queries, exact.search(queries, max(DEPTHS)).ids),
        queries_per_second=queries_per_second(index, queries),
        exact_queries_per_second=queries_per_second(exact, queries),
        build_seconds=build_seconds,
        num_queries=len(queries),
    )


def _built(exact: ExactIndex, queries: Tensor, *, kind: IndexKind, recall: float, storage: StorageFormat) -> Index:
    table, metric = exact.table.whole(), exact.metric
    if kind == "exact":
        return ExactIndex.build(table, metric, storage=storage)
    best = exact.search(queries, max(DEPTHS)).ids
    return tuned(table, metric, kind=kind, queries=queries, best=best, recall=recall)


@torch.no_grad()
def _vectors(model: Model, graph: Graph, side: Side, exact: ExactIndex, *, seed: int) -> tuple[Tensor, Tensor]:
    """The vectors of questions that one table answers, in two halves; first it is seen that they suit the model."""
    sides: list[Side] = [side] if len(tables_of(model)) > 1 else ["tail", "head"]
    halves: list[list[Tensor]] = [[], []]
    for asked in sides:
        few = sample_queries(model, graph, asked, num=4, seed=seed)
        check_agreement(few, exact.search(few.vectors, 1).ids[:, 0])
        vectors = sample_queries(model, graph, asked, num=NUM_QUERIES // len(sides), seed=seed).vectors.cpu()
        half = -(-len(vectors) // 2)
        halves[0].append(vectors[:half])
        halves[1].append(vectors[half:] if len(vectors) > 1 else vectors)
    first, second = (torch.cat(parts) for parts in halves)
    return first, second


class IndexedPredictor:
    """Answers as a `Predictor` does, but looks for tails and heads in an index; other questions are the predictor's.

    What the index finds, the model scores itself. So that known answers may be left out, as many more are looked for
    as the question has. Where the index finds too few, every entity is scored.
    """

    def __init__(self, predictor: Predictor, index: ModelIndex) -> None:
        index.check_model(predictor.model)
        self.predictor = predictor
        self.graph = predictor.graph
        self.index = index

    @torch.no_grad()
    def tails(self, head: Name, relation: Name, *, k: int = 10, known: Known = "mark") -> list[Prediction]:
        """Answer (head, relation, ?), best first."""
        plain, graph = self.predictor, self.graph
        h, r = graph.entities.id(head), graph.relations.id(relation)
        questions = QueryBatch.for_tails(plain.model, plain._ids(h), plain._ids(r))
        found = self._best(questions, plain.splits_of(h, r), k=k, known=known)
        if found is None:
            return plain.tails(h, r, k=k, known=known)
        return plain._with_probabilities(found, lambda id: (h, r, id))

    @torch.no_grad()
    def heads(self, relation: Name, tail: Name, *, k: int = 10, known: Known = "mark") -> list[Prediction]:
        """Answer (?, relation, tail), best first."""
        plain, graph = self.predictor, self.graph
        r, t = graph.relations.id(relation), graph.entities.id(tail)
        questions = QueryBatch.for_heads(plain.model, plain._ids(r), plain._ids(t))
        found = self._best(questions, plain.splits_of(t, r + graph.shape.num_relations), k=k, known=known)
        if found is None:
            return plain.heads(r, t, k=k, known=known)
        return plain._with_probabilities(found, lambda id: (id, r, t))

    def _best(self, questions: QueryBatch, splits: dict[int, str], *, k: int, known: Known) -> list[Prediction] | None:
        """The best answers, or none where the index found too few or the request is one to be refused."""
        names = self.graph.entities
        omitted = set(splits) if known == "omit" else set()
        index = self.index.for_side(questions.side)
        wanted = min(k, index.shape[0] - len(omitted))
        if wanted < 1 or known not in ("mark", "omit"):
            return None
        ids = index.search(questions.vectors, k + len(omitted)).ids[0]
        kept = torch.tensor([id for id in ids.tolist() if id >= 0 and id not in omitted], dtype=torch.int64)
        if len(kept) < wanted:
            return None
        kept = kept.sort().values
        scores = questions.scores(kept[None].to(self.predictor.model.device)).cpu()
        best = best_of(scores, wanted)
        return [
            Prediction(names[id], names.label(id), id, score, splits.get(id))
            for score, id in zip(best.scores[0].tolist(), kept[best.ids[0]].tolist(), strict=True)
        ]


ABOUT = "index.json"


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything, before an index is built for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} exists already. Name a new folder with --out.")


def save_index(index: ModelIndex, folder: str | Path) -> ModelIndex:
    """Write an index, whole or not at all; what comes back knows how many bytes its files have."""
    folder = Path(folder)
    check_free(folder)
    with atomic_folder(folder, last=ABOUT) as fresh:
        for side, one in index.indexes.items():
            (fresh / side).mkdir()
            one.save(fresh / side)
        sizes = {side: sum(path.stat().st_size for path in (fresh / side).iterdir()) for side in index.indexes}
        saved = replace(index, stats={side: replace(stats, bytes=sizes[side]) for side, stats in index.stats.items()})
        write_text(fresh / ABOUT, json.dumps(describe_index(saved), indent=1))
    return saved


def describe_index(index: ModelIndex) -> dict[str, Any]:
    """All that is known of an index but for its rows."""
    return {
        "kind": index.kind,
        "model": index.model,
        "metric": index.metric,
        "tables": {
            side: {
                "shape": list(one.shape),
                "config": one.config,
                "fingerprint": index.fingerprints[side],
                "stats": index.stats[side].as_dict(),
            }
            for side, one in index.indexes.items()
        },
    }


def load_index(folder: str | Path, *, in_memory: bool = True) -> ModelIndex:
    """Read an index. Unless `in_memory`, an exact one is searched in its file, however large that is."""
    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise RequestError(f"{folder} holds no index (there is no {ABOUT}). Make one with: dualkg index RUN")
    saved = read_json(folder / ABOUT)
    indexes: dict[Side, Index] = {}
    stats: dict[Side, IndexStats] = {}
    try:
        for side, table in saved["tables"].items():
            indexes[cast(Side, side)] = _load(folder / side, saved, table, in_memory=in_memory)
            numbers = table["stats"]
            stats[cast(Side, side)] = IndexStats(
                **{**numbers, "recall": {int(k): r for k, r in numbers["recall"].items()}}
            )
        made = {cast(Side, side): table["fingerprint"] for side, table in saved["tables"].items()}
        return ModelIndex(saved["model"], saved["metric"], {"tail": indexes["tail"], **indexes}, stats, made)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"The index {folder} is damaged: {told}. Make it again: dualkg index RUN") from None


def _load(folder: Path, saved: dict[str, Any], table: dict[str, Any], *, in_memory: bool) -> Index:
    rows, width = map(int, table["shape"])
    config, kind = dict(table["config"]), saved["kind"]
    if kind == "exact":
        return ExactIndex.load(folder, saved["metric"], (rows, width), in_memory=in_memory, **config)
    if kind not in FAISS_KINDS:
        raise ValueError(f"its kind is '{kind}'")
    return FaissIndex.load(folder, saved["metric"], (rows, width), **config)

"""Approximate search for the entities that a model scores best, by a graph of FAISS (HNSW).

A query of a bilinear model is a vector whose inner products with the rows of the entity table are
the scores. HNSW finds near rows, so each row x gets the coordinate √(M² − ‖x‖²), where M is the
largest norm, and a query gets 0: then all rows are M long, and the nearest row has the largest
product. Exact search needs no index; it is what a predictor does without one.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.errors import DamagedFile, DivergedError, DualkgError, InvalidValue, RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.extras import optional_import
from dualkg.files import (
    atomic_folder,
    check_new_folder,
    file_damage,
    file_record,
    locked,
    read_json,
    regular_file,
    write_json,
)
from dualkg.logs import ProgressLog
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel, Dual
from dualkg.models.distance import NormModel
from dualkg.tables.base import Side

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
# The best rows x for a query q have the largest ⟨q, x⟩ or the largest −‖q − x‖².
Metric = Literal["inner product", "euclidean"]
ABOUT = "index.json"
FILE = "index.faiss"
LINKS = 32  # of a row to its neighbours
BUILD_EFFORT = 80  # efConstruction
FIRST_EFFORT = 16  # the first efSearch that is tried; it is doubled until it is enough
MAX_EFFORT = 4096
BLOCK_ROWS = 2**16  # rows that are converted at once: the whole table is never copied
BLOCK_QUERIES = 64  # queries whose scores are held at once
DEPTHS = (1, 10, 100)  # k of the reported recall@k
# Values of k at which the recall must be reached. Known answers are searched for too, and omitted
# later, so that a search for 10 predictions may be one for 100 rows.
CHOSEN_DEPTHS = (10, 100)
NUM_QUERIES = 1000  # half for choosing the effort, half for measuring
SECONDS = 1.0  # duration of a speed measurement
BUILD_AGAIN = "Build it again with: dualkg index RUN"


@dataclass(frozen=True)
class IndexStats:
    """Recall@k on queries that did not choose the effort, and speed.

    Speeds are of single queries: of the index, and of scoring all entities. `bytes` is the size of
    the file, once it is saved.
    """

    recall: dict[int, float]
    queries_per_second: float
    exact_queries_per_second: float
    build_seconds: float
    bytes: int | None = None


@dataclass(frozen=True, eq=False)
class ModelIndex:
    """The index of a model's entities: a graph of FAISS, searched with `effort` (efSearch).

    `shape` is (rows, width) of the table, and `checksum` the hash of all rows. `made_from` is
    the identity of the run, if the model is of a saved one.
    """

    index: Any
    model: str
    metric: Metric
    shape: tuple[int, int]
    checksum: str
    effort: int = FIRST_EFFORT
    made_from: str | None = None
    stats: IndexStats | None = None

    def search(self, model: Model, given: Tensor, relations: Tensor, side: Side, *, k: int) -> Ids:
        """The best `k` entities for the missing `side` of queries, `(batch, k)`, best first.

        Where the index finds fewer, the id is −1.
        """
        return self.nearest(query_vectors(model, given, relations, side), k)

    def nearest(self, queries: Vectors, k: int) -> Ids:
        """The best `k` rows for vectors `(num_queries, width)`."""
        if self.metric == "inner product":
            queries = _with_coordinate(queries, 0.0)
        effort = math.ceil(self.effort * max(1.0, k / max(CHOSEN_DEPTHS)))
        parameters = faiss().SearchParametersHNSW(efSearch=effort)
        _, ids = self.index.search(queries, min(k, self.shape[0]), params=parameters)
        found: Ids = ids
        return found

    def check_model(self, model: Model, *, identity: str | None = None) -> None:
        """Refuse a model other than the one that was indexed.

        The model of a run with the same identity has the same rows. Otherwise all are compared.
        """
        is_same = metric_of(model) == self.metric
        if identity is None or identity != self.made_from:
            is_same = is_same and table_checksum(_table_of(model)) == self.checksum
        if not is_same:
            raise RequestError(
                f"The index was made of another model, {self.model} by {self.metric}: its rows are "
                f"not the entities of this {type(model.embedding).__name__}. {BUILD_AGAIN}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Everything about an index except its rows, for JSON."""
        about = {field: value for field, value in vars(self).items() if field != "index"}
        return {"kind": "hnsw", **about, "stats": self.stats and asdict(self.stats)}


# -- the vectors of a model --------------------------------------------------


@torch.no_grad()
def query_vectors(model: Model, given: Tensor, relations: Tensor, side: Side) -> Vectors:
    """The vectors `(batch, width)` to search an index with for the missing `side` of queries.

    Heads are searched as tails of the inverse relation where there is one.
    """
    if side == "head" and model.reciprocal:
        side = "tail"
        relations = relations + model.shape.num_relations
    vectors = model.queries(given, relations, side).query(side)
    return _finite(vectors.to("cpu", torch.float32).contiguous().numpy(), "A query")


def metric_of(model: Model) -> Metric:
    """The metric by which an index finds what a model scores best; refuse a model without one."""
    model = model.whole
    obstacle = _obstacle(model)
    if obstacle is not None:
        raise RequestError(
            "An index finds the largest inner products or the smallest Euclidean distances in one "
            f"table, but {obstacle}. Predict without an index."
        )
    return "inner product" if isinstance(model, BilinearModel) else "euclidean"


def _obstacle(model: Model) -> str | None:
    """Why the score of a model is no product with, or distance to, the rows of one table."""
    name = type(model.embedding).__name__
    if isinstance(model, BilinearModel):
        has_two = model.head_table is not model.tail_table and not model.reciprocal
        return f"{name} without reciprocal relations has two tables" if has_two else None
    if isinstance(model, Dual):
        if model.side == "head":
            return f"the dual of {name} on the side of the head maps the tails by each relation"
        maps_heads = not model.reciprocal
    elif isinstance(model, NormModel) and not model.maps_both_sides:
        if model.norm == 1:
            return f"{name} with norm 1 adds absolute differences"
        maps_heads = not model.reciprocal and not model.isometric
    else:
        return f"{name} scores in another way"
    if maps_heads:
        return f"{name} without reciprocal relations maps the heads by each relation"
    return None


def _table_of(model: Model) -> Tensor:
    return model.embedding.tail_table.detach().cpu()


def table_checksum(table: Tensor) -> str:
    """A hash of the shape and of all rows of a table."""
    digest = sha256(str(tuple(table.shape)).encode())
    for rows in torch.split(table, BLOCK_ROWS):
        digest.update(rows.float().contiguous().numpy().data)
    return digest.hexdigest()


def _finite(vectors: Vectors, what: str) -> Vectors:
    if not np.isfinite(vectors).all():
        raise DivergedError(
            f"{what} holds NaN or infinity, so there are no best rows. Its training has diverged."
        )
    return vectors


# -- building ----------------------------------------------------------------


def build_index(
    model: Model,
    graph: Graph,
    *,
    recall: float = 0.95,
    num_queries: int = NUM_QUERIES,
    seconds: float | None = None,
    seed: int = 0,
    made_from: str | None = None,
) -> ModelIndex:
    """Index the entities of a model, with an effort that reaches a recall@10 and recall@100.

    Half of `num_queries` queries of training triples, drawn by `seed`, choose the effort, and the
    others measure the result; each speed is measured for `seconds` (default: 1). `made_from` is the
    identity of a saved run, by which its model is known again without a comparison of all rows.
    """
    if not 0 < recall < 1:
        raise InvalidValue("recall", expected="above 0 and below 1, such as 0.95", found=recall)
    metric = metric_of(model)
    model.check_shape(graph.shape)
    if not len(graph.train):
        raise RequestError(f"{graph.name} has no training triples to measure an index with.")
    seconds = SECONDS if seconds is None else seconds
    log = ProgressLog(f"Index of {graph.name}")
    log(lambda: f"building, {graph.shape.num_entities:,} entities", last=True)
    started = time.perf_counter()
    table = _table_of(model)
    index = ModelIndex(
        index=_hnsw(table, metric),
        model=type(model.embedding).__name__,
        metric=metric,
        shape=(table.shape[0], table.shape[1]),
        checksum=table_checksum(table),
        made_from=made_from,
    )
    with eval_mode(model), full_precision():
        sides: tuple[Side, Side] = ("tail", "head")
        samples = [
            _sample(model, graph, side, num=max(1, num_queries // 2), seed=seed) for side in sides
        ]
        vectors = np.concatenate([query_vectors(model, *sample) for sample in samples])
        best = np.concatenate([_best_entities(model, *sample) for sample in samples])
        index = _with_effort(index, vectors[::2], best[::2], recall=recall)
        build_seconds = time.perf_counter() - started
        log(lambda: f"built in {build_seconds:.1f} s, now measured", last=True)
        given, relations, side = samples[0]
        one = (model, given[:1], relations[:1], side)
        stats = IndexStats(
            recall=recalls(index, vectors[1::2], best[1::2]),
            queries_per_second=_rate(lambda: index.search(*one, k=10), seconds),
            exact_queries_per_second=_rate(lambda: _best_entities(*one, k=10), seconds),
            build_seconds=build_seconds,
        )
    return replace(index, stats=stats)


def _hnsw(table: Tensor, metric: Metric) -> Any:
    """The graph of FAISS; only blocks of rows are copied."""
    blocks = torch.split(table, BLOCK_ROWS)
    by_product = metric == "inner product"
    index = faiss().IndexHNSWFlat(table.shape[1] + by_product, LINKS)
    index.hnsw.efConstruction = BUILD_EFFORT
    max_norm = max(float(rows.float().norm(dim=1).max()) for rows in blocks)
    for rows in blocks:
        vectors = _finite(rows.float().contiguous().numpy(), "The table")
        if by_product:
            squared = np.maximum(max_norm**2 - np.square(vectors).sum(1), 0)
            vectors = _with_coordinate(vectors, np.sqrt(squared))
        index.add(vectors)
    return index


def _with_coordinate(vectors: Vectors, coordinate: Vectors | float) -> Vectors:
    """Vectors `(num_vectors, width)` with one more coordinate."""
    longer = np.empty((len(vectors), vectors.shape[1] + 1), dtype=np.float32)
    longer[:, :-1] = vectors
    longer[:, -1] = coordinate
    return longer


def faiss() -> Any:
    """Import FAISS, or raise how to install it."""
    with optional_import("faiss", purpose="An index"):
        import faiss as module
    return module


def _sample(
    model: Model, graph: Graph, side: Side, *, num: int, seed: int
) -> tuple[Tensor, Tensor, Side]:
    """Distinct queries of training triples for a missing side: given entities, and relations."""
    columns = graph.train[:, :2] if side == "tail" else graph.train[:, [2, 1]]
    pairs = np.unique(columns, axis=0)
    chosen = pairs[np.random.default_rng(seed).permutation(len(pairs))[:num]]
    given, relations = torch.from_numpy(chosen.astype(np.int64)).to(model.device).unbind(1)
    return given, relations, side


@torch.no_grad()
def _best_entities(
    model: Model, given: Tensor, relations: Tensor, side: Side, k: int = max(DEPTHS)
) -> Ids:
    """The `k` entities that the model scores best, best first."""
    best = []
    for entities, of_entities in zip(
        torch.split(given, BLOCK_QUERIES), torch.split(relations, BLOCK_QUERIES), strict=True
    ):
        if side == "tail":
            scores = model.predict_tails(entities, of_entities)
        else:
            scores = model.predict_heads(of_entities, entities)
        best.append(scores.topk(min(k, scores.shape[1])).indices.cpu().numpy())
    return np.concatenate(best)


def _with_effort(index: ModelIndex, vectors: Vectors, best: Ids, *, recall: float) -> ModelIndex:
    """The index with the first effort that reaches a recall: 16, 32, 64 and so on."""
    while True:
        reached = min(recalls(index, vectors, best, CHOSEN_DEPTHS).values())
        if reached >= recall:
            return index
        if index.effort >= min(MAX_EFFORT, index.shape[0]):
            raise RequestError(
                f"The index reaches a recall of {reached:.3f} with all its effort, which is too "
                f"little for {recall:g}. Choose a lower `recall`, or predict without an index."
            )
        index = replace(index, effort=2 * index.effort)


def recalls(
    index: ModelIndex, vectors: Vectors, best: Ids, depths: Sequence[int] = DEPTHS
) -> dict[int, float]:
    """Recall@k for each k: the share of the best k entities among the k that the index finds."""
    by_depth = {}
    for k in depths:
        ids = index.nearest(vectors, k)
        is_found = (best[:, :k, None] == ids[:, None, :]).any(-1)
        by_depth[k] = float(is_found.mean())
    return by_depth


def _rate(query: Callable[[], object], seconds: float) -> float:
    """How often a query is answered in a second; the first time is not counted."""
    query()
    num_done = 0
    started = time.perf_counter()
    while num_done < 3 or time.perf_counter() - started < seconds:
        query()
        num_done += 1
    return num_done / (time.perf_counter() - started)


# -- files -------------------------------------------------------------------


def save_index(index: ModelIndex, folder: str | Path) -> ModelIndex:
    """Write a new folder with the file of FAISS and its description; return it with its size."""
    folder = Path(folder)
    with locked(folder):
        check_new_folder(folder)
        with atomic_folder(folder) as fresh:
            try:
                faiss().write_index(index.index, str(fresh / FILE))
            except RuntimeError as error:
                raise DualkgError(f"{folder / FILE} cannot be written ({error}).") from None
            record = file_record(fresh / FILE)
            stats = index.stats and replace(index.stats, bytes=record["bytes"])
            saved = replace(index, stats=stats)
            write_json(fresh / ABOUT, {**saved.as_dict(), "file": record})
    return saved


def load_index(folder: str | Path) -> ModelIndex:
    """Read an index. A file that has changed is refused, since FAISS may crash on a damaged one."""
    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise RequestError(
            f"{folder} holds no index (there is no {ABOUT}). Build one with: dualkg index RUN"
        )
    about = read_json(folder / ABOUT, dict[str, Any], checksum=True)
    about.pop("kind", None)
    if "file" not in about:  # version 0.2.0.dev had several kinds, and a file for each table
        raise RequestError(f"The index {folder} is of an earlier version. {BUILD_AGAIN}")
    damage = file_damage(folder / FILE, about.pop("file"))
    if damage:
        raise DamagedFile(folder / FILE, damage, advice=BUILD_AGAIN)
    stats = about.pop("stats")
    recall = {int(k): share for k, share in stats["recall"].items()}  # JSON has strings as keys
    return ModelIndex(
        faiss().read_index(str(regular_file(folder / FILE))),
        **{**about, "shape": tuple(about["shape"])},
        stats=IndexStats(**{**stats, "recall": recall}),
    )

"""All entities of a run in the plane, laid out once by t-SNE and kept with the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from dualkg.analysis.tsne import Vectors, check_numbers, place, usual_perplexity
from dualkg.data.filters import Ids, KnownAnswers
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.files import atomic_write
from dualkg.models.base import Model
from dualkg.training.run import Run, RunFolder

Metric = Literal["euclidean", "cosine"]
METRICS: tuple[Metric, ...] = ("euclidean", "cosine")
SHARED = -1  # the group of an entity that answers two or more of the queries


@dataclass(frozen=True, eq=False)
class Query:
    """(head, relation, ?) by ids, what people call it, and the tails that answer it, in order of id."""

    head: int
    relation: int
    name: str
    answers: Ids


@dataclass(frozen=True)
class Silhouette:
    """How much nearer a vector is to its own group than to the next: 1 is far apart, 0 is not at all, below 0 wrong.

    `mean` is over all vectors that have a group, `by_group` over those of each.
    """

    mean: float
    by_group: dict[int, float]


@dataclass(frozen=True, eq=False)
class Projection:
    """The answers to some queries: each entity once, its query by number or SHARED, and its place in the plane."""

    queries: tuple[Query, ...]
    entities: Ids
    groups: Ids
    positions: Vectors
    perplexity: float
    silhouettes: dict[Metric, Silhouette]

    @property
    def num_shared(self) -> int:
        return int((self.groups == SHARED).sum())

    def as_dict(self) -> dict[str, Any]:
        """For programs: the silhouettes, and of every query its ids, how many answers, and its silhouettes."""
        by_query = [
            {
                **{key: value for key, value in asdict(query).items() if key != "answers"},
                "num_answers": len(query.answers),
                "silhouettes": {metric: one.by_group.get(number) for metric, one in self.silhouettes.items()},
            }
            for number, query in enumerate(self.queries)
        ]
        return {
            "num_entities": len(self.entities),
            "num_shared": self.num_shared,
            "perplexity": self.perplexity,
            "silhouettes": {metric: one.mean for metric, one in self.silhouettes.items()},
            "queries": by_query,
        }


# -- the queries ------------------------------------------------------------------------------------------


def find_queries(graph: Graph, asked: Iterable[Sequence[str]], *, splits: Iterable[str] = SPLITS) -> list[Query]:
    """Queries given as (head, relation), the head by its label or its name, with the answers that some splits give.

    A label that several entities have means the one with answers; where several have some, the one with the most.
    """
    splits = tuple(splits)
    known = KnownAnswers.of(graph, splits)
    return [_find_query(graph, known, *pair, splits=splits) for pair in asked]


def _find_query(graph: Graph, known: KnownAnswers, head: str, relation: str, *, splits: Sequence[str]) -> Query:
    relation_id = graph.relations.id(relation)
    called = _ids_called(graph, head)
    candidate, answers = known(called, np.full(len(called), relation_id))
    counts = np.bincount(candidate, minlength=len(called))
    best = np.flatnonzero(counts == counts.max())
    if not counts.any():
        context = f"'{head}' has" if len(called) == 1 else f"None of the {len(called)} entities called '{head}' has"
        no = "no answer" if len(called) == 1 else "an answer"
        raise RequestError(
            f"{context} {no} to '{relation}' in {' or '.join(splits)} of {graph.name}. Ask another query."
        )
    if len(best) > 1:
        answers_each = "answer each" if counts.max() == 1 else "answers each"
        options = ", ".join(f"'{graph.entities[int(called[place])]}'" for place in best[:5])
        raise RequestError(
            f"'{head}' stands for {len(best)} entities of {graph.name} with {counts.max():,} {answers_each} to "
            f"'{relation}': {options}. Ask by one of these names."
        )
    name = f"{head} · {short_relation(graph.relations.label(relation_id))}"
    return Query(int(called[best[0]]), relation_id, name, answers[candidate == best[0]])


def _ids_called(graph: Graph, head: str) -> Ids:
    """All entities of a name or a label; where there are none, what the vocabulary says of the name."""
    entities: Vocabulary = graph.entities
    columns = (entities.names, entities.labels)
    same = [pc.equal(column, head).fill_null(False) for column in columns if column is not None]
    ids: Ids = np.flatnonzero(np.any([column.to_numpy(zero_copy_only=False) for column in same], axis=0))
    if len(ids):
        return ids
    try:
        return np.array([entities.id(head)])
    except RequestError as error:
        unlabelled = f" {graph.name} was read without labels; load_graph(…, labels=…) takes a file of them."
        raise RequestError(f"{error}{unlabelled if entities.labels is None else ''}") from None


def short_relation(name: str) -> str:
    """The last part of a relation's path in words: /location/location/contains → contains."""
    return name.rstrip("/").rpartition("/")[2].replace("_", " ").strip() or name


def group_answers(queries: Sequence[Query]) -> tuple[Ids, Ids]:
    """Each answering entity once, in order of id, and the number of the query it answers, or SHARED."""
    joined = np.concatenate([query.answers for query in queries])
    owners = np.repeat(np.arange(len(queries)), [len(query.answers) for query in queries])
    entities, first, counts = np.unique(joined, return_index=True, return_counts=True)
    return entities, np.where(counts > 1, SHARED, owners[first])


# -- their answers ----------------------------------------------------------------------------------------


def project(model: Model, queries: Sequence[Query], *, perplexity: float | None = None, seed: int = 0) -> Projection:
    """The answers to queries in the plane, and the silhouettes of their queries where they really are."""
    if not queries:
        raise RequestError("A projection shows the answers to queries, and none came. Name at least two.")
    entities, groups = group_answers(queries)
    vectors = tail_embeddings(model, entities)
    perplexity = usual_perplexity(len(entities)) if perplexity is None else perplexity
    silhouettes: dict[Metric, Silhouette] = {metric: silhouette(vectors, groups, metric=metric) for metric in METRICS}
    positions = tsne(vectors, perplexity=perplexity, seed=seed)
    return Projection(tuple(queries), entities, groups, positions, perplexity, silhouettes)


def tail_embeddings(model: Model, entities: npt.ArrayLike) -> Vectors:
    """Rows of the table that a model looks tails up in, `(num_entities, width)`: CP has one for tails alone."""
    table = model.embedding.tail_table.detach()
    chosen = table[torch.as_tensor(np.asarray(entities, dtype=np.int64), device=table.device)]
    return chosen.double().cpu().numpy()


def tsne(vectors: Vectors, *, perplexity: float | None = None, seed: int = 0) -> Vectors:
    """Vectors `(num_points, width)` → places in the plane, `(num_points, 2)`; the same for the same seed.

    It begins at the two principal components, so that what is far apart at large begins far apart.
    """
    with optional_import("scikit-learn", purpose="t-SNE"):
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits
    if len(vectors) < 3 or vectors.shape[1] < 2:
        raise RequestError(
            f"t-SNE begins at two principal components, so it needs 3 vectors of 2 numbers or more; "
            f"{len(vectors):,} of {vectors.shape[1]:,} came."
        )
    perplexity = usual_perplexity(len(vectors)) if perplexity is None else perplexity
    if not 0 < perplexity < len(vectors):
        raise RequestError(
            f"A perplexity is above 0 and below the number of points, {len(vectors):,}; {perplexity:g} came."
        )
    method = TSNE(n_components=2, init="pca", learning_rate="auto", perplexity=perplexity, random_state=seed)
    with threadpool_limits(1):  # sums over threads come in another order each time, and t-SNE makes much of little
        return np.asarray(method.fit_transform(vectors), dtype=np.float64)


def silhouette(vectors: Vectors, groups: Ids, *, metric: Metric = "euclidean") -> Silhouette:
    """How well groups part; the vectors of SHARED have no single group and are left out."""
    with optional_import("scikit-learn", purpose="A silhouette"):
        from sklearn.metrics import silhouette_samples
    own = groups != SHARED
    vectors, groups = vectors[own], groups[own]
    present = np.unique(groups)
    if not 1 < len(present) < len(groups):
        raise RequestError(
            f"A silhouette compares groups: it needs two or more, and more vectors than groups. There are "
            f"{len(present):,} with {len(groups):,} vectors of their own."
        )
    values = silhouette_samples(vectors, groups, metric=metric)
    by_group = {int(group): float(values[groups == group].mean()) for group in present}
    return Silhouette(float(values.mean()), by_group)


MOST_AXES = 50  # principal components that t-SNE is given; neighbours are then found in a fraction of the time


def entity_map(run: Run) -> Vectors:
    """Places `(num_entities, 2)`, each axis from −1 to 1: those kept with the run, or new ones, which are then kept."""
    kept = RunFolder(run.folder).map if run.folder else None
    if kept and kept.exists():
        return load_map(kept, len(run.graph.entities))
    places = lay_out(run.model)
    if kept:
        save_map(places, kept)
    return places


def lay_out(model: Model, *, seed: int = 0) -> Vectors:
    """t-SNE of the vectors that entities have as tails; the same for the same seed."""
    vectors = tail_embeddings(model, np.arange(model.shape.num_entities))
    check_numbers(vectors)
    device = model.embedding.tail_table.device
    places = place(principal(vectors, axes=MOST_AXES), seed=seed, device=device)
    places = places - (places.max(0) + places.min(0)) / 2
    scaled: Vectors = np.round(places / max(float(np.abs(places).max()), 1e-12), 5)
    return scaled


def principal(vectors: Vectors, *, axes: int) -> Vectors:
    """Vectors `(n, width)` along their first principal axes, `(n, axes)`; few enough are left as they are."""
    if vectors.shape[1] <= axes:
        return vectors
    centred = torch.from_numpy(vectors - vectors.mean(0))
    _, directions = torch.linalg.eigh(centred.T @ centred)
    found: Vectors = (centred @ directions[:, -axes:].flip(1)).numpy()
    return found


def save_map(places: Vectors, path: Path) -> None:
    with atomic_write(path) as fresh:
        columns = {name: pa.array(places[:, axis].astype(np.float32)) for axis, name in enumerate(("x", "y"))}
        pq.write_table(pa.table(columns), fresh, compression="zstd")


def load_map(path: Path, num_entities: int) -> Vectors:
    """Places that `save_map` wrote; what cannot be such is told in a sentence."""
    try:
        table = pq.ParquetFile(path).read()
        places = np.stack([table[name].to_numpy() for name in ("x", "y")], axis=1).astype(np.float64)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise RequestError(f"{path} is damaged ({error}). Remove it, and the map is made again.") from None
    if len(places) != num_entities:
        raise RequestError(
            f"{path} has {len(places):,} places and the graph {num_entities:,} entities. Remove it, and the map is "
            f"made again."
        )
    return places

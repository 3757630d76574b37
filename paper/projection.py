"""Answers of queries in the plane: t-SNE of ten queries (Figure 2), and one query in a model of dim 2 (Figure 1)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from dualkg.analysis.projection import Vectors, default_perplexity, tail_embeddings, tsne
from dualkg.data.filters import Ids, KnownAnswers
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.models.base import Model
from dualkg.models.diagonal import RealDiagonalModel

METRICS = ("euclidean", "cosine")
SHARED = -1  # the group of an entity that answers several of the queries
TAILS = (5, 20)  # fewest and most tails of a query for Figure 1


@dataclass(frozen=True, eq=False)
class NamedQuery:
    """(head, relation, ?) by ids, its name for figures, and the tails that answer it, ordered by id."""

    head: int
    relation: int
    name: str
    answers: Ids


@dataclass(frozen=True)
class Silhouette:
    """The silhouette coefficient: its mean over all vectors with a group, and over those of each group."""

    mean: float
    by_group: dict[int, float]


@dataclass(frozen=True, eq=False)
class Projection:
    """The answers of some queries: each entity once, the number of its query or SHARED, and its position."""

    queries: tuple[NamedQuery, ...]
    entities: Ids
    groups: Ids
    positions: Vectors
    perplexity: float
    silhouettes: dict[str, Silhouette]

    @property
    def num_shared(self) -> int:
        return int((self.groups == SHARED).sum())

    def as_dict(self) -> dict[str, Any]:
        queries = [
            {"head": query.head, "relation": query.relation, "name": query.name, "num_answers": len(query.answers)}
            | {"silhouettes": {metric: one.by_group.get(number) for metric, one in self.silhouettes.items()}}
            for number, query in enumerate(self.queries)
        ]
        means = {metric: one.mean for metric, one in self.silhouettes.items()}
        about = {"num_entities": len(self.entities), "num_shared": self.num_shared, "perplexity": self.perplexity}
        return {**about, "silhouettes": means, "queries": queries}


# -- Figure 2 ---------------------------------------------------------------------------------------------


def find_queries(graph: Graph, pairs: Iterable[Sequence[str]]) -> list[NamedQuery]:
    """Look up queries given as (head, relation), the head by its label or name, and their answers in all splits.

    A label of several entities stands for the one with the most answers.
    """
    known, found = KnownAnswers.of(graph), []
    for head, relation in pairs:
        relation_id = graph.relations.id(relation)
        heads = _entities_called(graph, head)
        owners, answers = known(heads, np.full(len(heads), relation_id))
        counts = np.bincount(owners, minlength=len(heads))
        best = np.flatnonzero(counts == counts.max())
        if not counts.any():
            subject = (
                f"'{head}' has no" if len(heads) == 1 else f"None of the {len(heads)} entities called '{head}' has an"
            )
            raise RequestError(f"{subject} answer to '{relation}' in {graph.name}.")
        if len(best) > 1:
            names = ", ".join(f"'{graph.entities[int(heads[index])]}'" for index in best[:5])
            raise RequestError(
                f"'{head}' matches {len(best)} entities of {graph.name} with {counts.max():,} answers each to "
                f"'{relation}': {names}. Use one of these names."
            )
        name = f"{head} · {short_relation(graph.relations.label(relation_id))}"
        found.append(NamedQuery(int(heads[best[0]]), relation_id, name, answers[owners == best[0]]))
    return found


def _entities_called(graph: Graph, head: str) -> Ids:
    """All entities with this name or label."""
    entities = graph.entities
    columns = [column for column in (entities.names, entities.labels) if column is not None]
    ids = np.unique(np.concatenate([pc.indices_nonzero(pc.equal(column, head)).to_numpy() for column in columns]))
    try:
        return ids.astype(np.int64) if len(ids) else np.array([entities.id(head)])
    except RequestError as error:
        hint = f" {graph.name} was read without labels; load_graph(…, labels=…) reads a file of them."
        raise RequestError(f"{error}{hint if entities.labels is None else ''}") from None


def short_relation(name: str) -> str:
    """The last part of a relation's path in words: /location/location/contains → contains."""
    return name.rstrip("/").rpartition("/")[2].replace("_", " ").strip() or name


def group_answers(queries: Sequence[NamedQuery]) -> tuple[Ids, Ids]:
    """Each answer once, ordered by id, and the number of the query it answers, or SHARED."""
    joined = np.concatenate([query.answers for query in queries])
    owners = np.repeat(np.arange(len(queries)), [len(query.answers) for query in queries])
    entities, first, counts = np.unique(joined, return_index=True, return_counts=True)
    return entities, np.where(counts > 1, SHARED, owners[first])


def project(model: Model, queries: Sequence[NamedQuery]) -> Projection:
    """t-SNE of the answers of queries, and the silhouettes of the queries in the embedding space."""
    entities, groups = group_answers(queries)
    vectors = tail_embeddings(model, entities)
    perplexity = default_perplexity(len(entities))
    silhouettes = {metric: silhouette(vectors, groups, metric=metric) for metric in METRICS}
    return Projection(tuple(queries), entities, groups, tsne(vectors, perplexity=perplexity), perplexity, silhouettes)


def silhouette(vectors: Vectors, groups: Ids, *, metric: str = "euclidean") -> Silhouette:
    """How well groups are separated; vectors of SHARED have no single group and are left out."""
    with optional_import("scikit-learn", purpose="A silhouette"):
        from sklearn.metrics import silhouette_samples
    own = groups != SHARED
    vectors, groups = vectors[own], groups[own]
    present = np.unique(groups)
    if not 1 < len(present) < len(groups):
        raise RequestError(
            f"A silhouette needs at least two groups, and more vectors than groups; there are {len(present):,} groups "
            f"with {len(groups):,} vectors."
        )
    values = silhouette_samples(vectors, groups, metric=metric)
    by_group = {int(group): float(values[groups == group].mean()) for group in present}
    return Silhouette(float(values.mean()), by_group)


# -- Figure 1 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plane:
    """One query in a model of dim 2, in units of the mean distance of all entities from their centroid."""

    query: NamedQuery
    mapped_head: Vectors
    tails: Vectors
    others: Vectors
    distances: dict[str, float]  # the means of the tails from their "centroid" and from "hR"
    medians: dict[str, float]  # of the same over all queries of train with 5 to 20 tails
    num_queries: int

    def as_dict(self) -> dict[str, Any]:
        measured = {"distances": self.distances, "medians": self.medians, "num_queries": self.num_queries}
        return {"query": self.query.name, "num_tails": len(self.tails), **measured}


@torch.no_grad()
def compute_plane(model: Model, graph: Graph, query: NamedQuery) -> Plane:
    """The mapped head, the tails of a query and all other entities in a model of dim 2."""
    model.check_shape(graph.shape)
    bilinear = model.embedding
    if not isinstance(bilinear, RealDiagonalModel) or bilinear.dim != 2:
        raise RequestError(
            f"Figure 1 needs a CP or DistMult model with dim 2; this is {type(bilinear).__name__} with dim "
            f"{bilinear.dim:,}. Train one: CP(graph.shape, dim=2)."
        )
    entities = tail_embeddings(model, np.arange(len(graph.entities)))
    spread = float(np.linalg.norm(entities - entities.mean(0), axis=1).mean())
    if not spread > 0:
        raise RequestError("All entities are at one point, so distances have no unit. Train the model first.")
    entities = entities / spread
    heads, relations, answers = zip(*_queries_for_figure(graph), strict=True)
    ids = torch.tensor([(query.head, *heads), (query.relation, *relations)], device=bilinear.device)
    mapped = bilinear.factors(*ids, None).mapped_head.double().cpu().numpy() / spread
    all_distances = [_distances(entities[tails], head) for tails, head in zip(answers, mapped[1:], strict=True)]
    medians = {key: float(np.median([one[key] for one in all_distances])) for key in ("centroid", "hR")}
    tails, others = entities[query.answers], np.delete(entities, query.answers, axis=0)
    return Plane(query, mapped[0], tails, others, _distances(tails, mapped[0]), medians, len(all_distances))


def pick_query(graph: Graph) -> NamedQuery:
    """The query with 5 to 20 tails in train whose tails share the most other queries, before any model is trained.

    For every query that any of the tails answers, count how many of the tails answer it; the mean count is largest.
    """
    known = KnownAnswers.of(graph, ["train"])
    keys = np.repeat(known.queries, np.diff(known.offsets))[np.argsort(known.answers, kind="stable")]
    ends = np.cumsum(np.bincount(known.answers, minlength=len(graph.entities)))
    answered = np.split(keys, ends[:-1])  # the queries that an entity answers

    def overlap(query: tuple[int, int, Ids]) -> float:
        queries = np.concatenate([answered[tail] for tail in query[2]])
        return len(queries) / len(np.unique(queries))

    head, relation, answers = max(_queries_for_figure(graph), key=overlap)
    name = f"{graph.entities.label(head)} · {short_relation(graph.relations.label(relation))}"
    return NamedQuery(head, relation, name, answers)


def _queries_for_figure(graph: Graph) -> Iterator[tuple[int, int, Ids]]:
    """Head, relation and tails of every query with 5 to 20 tails in train."""
    known = KnownAnswers.of(graph, ["train"])
    heads, relations = np.divmod(known.queries, 2 * graph.shape.num_relations)
    counts = np.diff(known.offsets)
    chosen = (relations < graph.shape.num_relations) & (counts >= TAILS[0]) & (counts <= TAILS[1])
    if not chosen.any():
        raise RequestError(
            f"Figure 1 needs a query with {'{} to {}'.format(*TAILS)} tails, and {graph.name} has none in train."
        )
    for index in np.flatnonzero(chosen).tolist():
        tails = known.answers[known.offsets[index] : known.offsets[index + 1]]
        yield int(heads[index]), int(relations[index]), tails.astype(np.int64)


def _distances(tails: Vectors, mapped_head: Vectors) -> dict[str, float]:
    centres = {"centroid": tails.mean(0), "hR": mapped_head}
    return {name: float(np.linalg.norm(tails - centre, axis=1).mean()) for name, centre in centres.items()}

"""Figure 1 of the paper, of models that were trained: at dim 2 the embeddings are the picture.

The paper draws the tails of one query: without DURA anywhere on a line across h R, where scores are equal, with DURA
in a small region near h R. Two lengths say how far this is so, both in units of the spread of all entities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dualkg.analysis.projection import Query, short_relation, tail_embeddings
from dualkg.analysis.tsne import Vectors
from dualkg.data.filters import Ids, KnownAnswers
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import RealDiagonalModel

FEWEST, MOST = 5, 20  # tails of a query that make a picture


@dataclass(frozen=True)
class Lengths:
    """Of the tails of one query: how far they are on average from their centroid, and from h R."""

    scatter: float
    gap: float

    def as_dict(self) -> dict[str, float]:
        return {"scatter": self.scatter, "gap": self.gap}


@dataclass(frozen=True, eq=False)
class Plane:
    """One query in the plane of a model of dim 2; all in units of the spread of all entities as tails.

    The spread is their mean distance from their centroid. `typical` is the median over all queries of train with 5 to
    20 tails, of which there are `num_queries`, so that one query cannot say what it likes.
    """

    query: Query
    mapped_head: Vectors
    tails: Vectors
    others: Vectors
    lengths: Lengths
    typical: Lengths
    num_queries: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "query": self.query.name,
            "num_tails": len(self.tails),
            **self.lengths.as_dict(),
            "typical": {**self.typical.as_dict(), "num_queries": self.num_queries},
        }


def plane_of(model: Model, graph: Graph, query: Query) -> Plane:
    """Where a model of dim 2 has the mapped head, the true tails and all other entities."""
    bilinear = _check(model, graph)
    entities = tail_embeddings(model, np.arange(len(graph.entities)))
    spread = float(np.linalg.norm(entities - entities.mean(0), axis=1).mean())
    if not spread > 0:
        raise RequestError("All entities are at one point, so there is no spread to measure by. Train the model first.")
    entities = entities / spread
    heads, relations, answers = zip(*_queries_of_a_size(graph), strict=True)
    mapped = _mapped_heads(bilinear, [query.head, *heads], [query.relation, *relations]) / spread
    typical = [_lengths(entities[tails], head) for tails, head in zip(answers, mapped[1:], strict=True)]
    others = np.setdiff1d(np.arange(len(entities)), query.answers)
    return Plane(
        query=query,
        mapped_head=mapped[0],
        tails=entities[query.answers],
        others=entities[others],
        lengths=_lengths(entities[query.answers], mapped[0]),
        typical=Lengths(*(float(np.median([getattr(one, key) for one in typical])) for key in ("scatter", "gap"))),
        num_queries=len(typical),
    )


def pick_query(graph: Graph) -> Query:
    """The query of 5 to 20 tails in train whose tails have most in common, before any model is trained.

    Of every query, to tails or to heads, that any of its tails answers, count how many of them answer it: the mean of
    these is the largest. So the tails are many and of one kind, as `tigers` and `lions` in the paper.
    """
    answered: dict[int, list[int]] = defaultdict(list)
    known = KnownAnswers.of(graph, ["train"])
    keys = np.repeat(known.queries, np.diff(known.offsets))
    for key, answer in zip(keys.tolist(), known.answers.tolist(), strict=True):
        answered[answer].append(key)

    def in_common(found: tuple[int, int, Ids]) -> float:
        counts = [len(answered[tail]) for tail in found[2].tolist()]
        return sum(counts) / len(set().union(*(answered[tail] for tail in found[2].tolist())))

    head, relation, answers = max(_queries_of_a_size(graph), key=in_common)
    name = f"{graph.entities.label(head)} · {short_relation(graph.relations.label(relation))}"
    return Query(head, relation, name, answers)


def _queries_of_a_size(graph: Graph) -> Iterator[tuple[int, int, Ids]]:
    """Head, relation and tails of every query that has as many tails in train as make a picture."""
    known = KnownAnswers.of(graph, ["train"])
    heads, relations = np.divmod(known.queries, 2 * graph.shape.num_relations)
    counts = np.diff(known.offsets)
    fitting = np.flatnonzero((relations < graph.shape.num_relations) & (counts >= FEWEST) & (counts <= MOST))
    if not len(fitting):
        raise RequestError(
            f"The picture is of a query with {FEWEST} to {MOST} tails, and {graph.name} has none in train. "
            f"Take another graph."
        )
    for place in fitting.tolist():
        tails = known.answers[known.offsets[place] : known.offsets[place + 1]]
        yield int(heads[place]), int(relations[place]), tails.astype(np.int64)


@torch.no_grad()
def _mapped_heads(model: BilinearModel, heads: list[int], relations: list[int]) -> Vectors:
    """h R of each query, `(batch, 2)`."""
    device = model.device
    factors = model.factors(torch.tensor(heads, device=device), torch.tensor(relations, device=device), None)
    return factors.mapped_head.double().cpu().numpy()


def _lengths(tails: Vectors, mapped_head: Vectors) -> Lengths:
    centres = (tails.mean(0), mapped_head)
    return Lengths(*(float(np.linalg.norm(tails - centre, axis=1).mean()) for centre in centres))


def _check(model: Model, graph: Graph) -> BilinearModel:
    model.check_shape(graph.shape)
    bilinear = model.embedding
    if not isinstance(bilinear, RealDiagonalModel) or bilinear.dim != 2:
        raise RequestError(
            f"The plane is that of a CP or DistMult model with dim 2; this is {type(bilinear).__name__} with dim "
            f"{bilinear.dim:,}. Train one: CP(graph.shape, dim=2)."
        )
    return bilinear

"""Inductive entities compared with retraining: some entities are withheld, then embedded by a few of their triples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import rank
from dualkg.evaluation.report import Metrics
from dualkg.inference.extension import extend_by_ids, with_rows
from dualkg.inference.inductive import FrozenContext, with_adjoint
from dualkg.models.base import Model
from dualkg.training.api import train_recipe
from dualkg.training.recipe import Recipe

COUNTS: tuple[int | None, ...] = (1, 3, 10, None)


VIEWS = ("inductive", "as_query", "as_answer", "known")


@dataclass(frozen=True)
class InductiveResult:
    """Ranking metrics of the held-out triples of inductive entities, and of test triples of known entities only."""

    method: str  # embedded, retrained, mean or random
    seed: int
    triples_per_entity: int | None  # None: all
    num_entities: int  # inductive ones
    num_triples: int  # of all inductive entities
    inductive: Metrics
    as_query: Metrics  # the inductive entity is given in the query
    as_answer: Metrics  # it is the answer
    known: Metrics
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), **{view: getattr(self, view).as_dict() for view in VIEWS}}


def study(
    graph: Graph,
    recipe: Recipe,
    *,
    share: float = 0.05,
    counts: Sequence[int | None] = COUNTS,
    seeds: Sequence[int] = (0,),
    device: str | torch.device | None = None,
) -> list[InductiveResult]:
    """Withhold a share of the entities; embed them by some triples of each, or retrain with those triples.

    The mean of all rows, and random rows, are the baselines.
    """
    if not 0 < share < 1:
        raise RequestError(f"The share of entities to withhold lies between 0 and 1; it is {share}.")
    results: list[InductiveResult] = []
    for seed in seeds:
        cut = Cut.of(graph, share, seed=seed)
        one = recipe.with_changes({"training.seed": seed})
        model = with_adjoint(train_recipe(one, graph=cut.known, device=device).model)
        context = FrozenContext.of(model, cut.known, recipe=one)
        for count in counts:
            triples = cut.triples(count)
            started = time.perf_counter()
            embedded = extend_by_ids(context, cut.known, cut.names, triples).model
            between = time.perf_counter()
            retrained = train_recipe(one, graph=cut.with_triples(triples), device=device).model
            seconds = between - started, time.perf_counter() - between
            results.append(cut.evaluate(embedded, "embedded", count, len(triples), seconds[0]))
            results.append(cut.evaluate(retrained, "retrained", count, len(triples), seconds[1]))
        for method, rows in _baselines(context, len(cut.names), seed=seed):
            results.append(cut.evaluate(with_rows(model, rows), method, 0))
    return results


def count_text(results: Sequence[InductiveResult]) -> str:
    """The number of inductive entities; seeds may differ in it."""
    numbers = [result.num_entities for result in results]
    low, high = min(numbers), max(numbers)
    return f"{high:,} entities" if low == high else f"{low:,} to {high:,} entities"


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph whose last entities are the inductive ones, and the graph without them."""

    whole: Graph
    known: Graph
    seed: int

    @classmethod
    def of(cls, graph: Graph, share: float, *, seed: int) -> Cut:
        """Withhold random entities, except those that train connects only to other withheld ones."""
        random = np.random.default_rng(seed)
        num_entities = len(graph.entities)
        drawn = np.zeros(num_entities, dtype=bool)
        drawn[random.permutation(num_entities)[: max(1, round(share * num_entities))]] = True
        heads, tails = graph.train[:, 0], graph.train[:, 2]
        joined = np.zeros(num_entities, dtype=bool)
        joined[heads[~drawn[tails]]] = joined[tails[~drawn[heads]]] = True
        drawn &= joined
        if not drawn.any():
            raise RequestError(f"{graph.name} has too few entities for {share:g} of them to be withheld.")
        order = np.argsort(drawn, kind="stable")
        whole = _in_order(graph, order)
        num_known = int((~drawn).sum())
        entities = Vocabulary(whole.entities.names.slice(0, num_known))
        train, valid, test = (_among(whole.split(name), num_known) for name in SPLITS)
        return cls(whole, replace(whole, entities=entities, train=train, valid=valid, test=test), seed)

    @property
    def names(self) -> list[str]:
        names: list[str] = self.whole.entities.names.slice(len(self.known.entities)).to_pylist()
        return names

    def triples(self, count: int | None) -> Triples:
        """`count` training triples of each inductive entity, those with known entities first; None: all."""
        num_known = len(self.known.entities)
        ends = self.whole.train[:, [0, 2]]
        new = ends >= num_known
        order = np.random.default_rng(self.seed).permutation(len(ends))
        order = order[np.argsort(new[order].all(1), kind="stable")]
        chosen = np.zeros(len(ends), dtype=bool)
        for entity in range(num_known, len(self.whole.entities)):
            mine = order[(ends[order] == entity).any(1)]
            chosen[mine[:count]] = True
        triples: Triples = self.whole.train[chosen]
        return triples

    def with_triples(self, triples: Triples) -> Graph:
        """The whole graph with only these training triples of inductive entities."""
        return replace(self.whole, train=np.concatenate([self.known.train, triples]))

    def evaluate(
        self, model: Model, method: str, count: int | None, num_triples: int = 0, seconds: float = 0.0
    ) -> InductiveResult:
        """Rank the valid and test triples of inductive entities, and the test triples of known entities."""
        num_known = len(self.known.entities)
        held = np.concatenate([self.whole.valid, self.whole.test])
        held = held[(held[:, [0, 2]] >= num_known).any(1)]
        filtered = KnownAnswers.of(self.whole)
        ranks = rank(model, replace(self.whole, test=held), known=filtered).mean
        known = rank(model, replace(self.whole, test=self.known.test), known=filtered).mean
        as_head, as_tail = held[:, 0] >= num_known, held[:, 2] >= num_known
        return InductiveResult(
            method=method,
            seed=self.seed,
            triples_per_entity=count,
            num_entities=len(self.names),
            num_triples=num_triples,
            inductive=Metrics.of(ranks),
            as_query=Metrics.of(np.concatenate([ranks[0][as_head], ranks[1][as_tail]])),
            as_answer=Metrics.of(np.concatenate([ranks[0][as_tail], ranks[1][as_head]])),
            known=Metrics.of(known),
            seconds=seconds,
        )


def _in_order(graph: Graph, order: npt.NDArray[np.int64]) -> Graph:
    """The same graph with its entities in another order: `order` gives the old ids."""
    new_id = np.empty(len(order), dtype=np.int32)
    new_id[order] = np.arange(len(order), dtype=np.int32)
    train, valid, test = (
        np.stack([new_id[triples[:, 0]], triples[:, 1], new_id[triples[:, 2]]], axis=1)
        for triples in (graph.split(name) for name in SPLITS)
    )
    return replace(graph, entities=Vocabulary(graph.entities.names.take(order)), train=train, valid=valid, test=test)


def _among(triples: Triples, num_known: int) -> Triples:
    return triples[(triples[:, [0, 2]] < num_known).all(1)]


def _baselines(context: FrozenContext, num_new: int, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    tables = (context.model.head_table, context.model.tail_table)[: context.new_rows.shape[1]]
    mean, spread = (torch.stack(rows).detach() for rows in zip(*((t.mean(0), t.std(0)) for t in tables), strict=True))
    yield "mean", mean.expand(num_new, -1, -1)
    noise = torch.randn(num_new, *mean.shape, generator=torch.Generator().manual_seed(seed))
    yield "random", mean + spread * noise.to(mean)

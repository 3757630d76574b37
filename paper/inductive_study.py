"""InductiveEntities against training again: some entities withheld, and placed again by a few of their triples."""

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


@dataclass(frozen=True)
class Measured:
    """How the held-out triples of the inductive_entities rank, by both questions and by each; and those of the others."""

    way: str  # retrained, extended, mean or random
    seed: int
    given: int | None  # triples of each inductive_entity; None is all
    num_new: int
    num_given: int
    inductive_entities: Metrics
    asking: Metrics  # (inductive_entity, relation, ?)
    asked_for: Metrics  # the inductive_entity is the answer
    others: Metrics
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        views = ("inductive_entities", "asking", "asked_for", "others")
        return {**asdict(self), **{view: getattr(self, view).as_dict() for view in views}}


def study(
    graph: Graph,
    recipe: Recipe,
    *,
    share: float = 0.05,
    counts: Sequence[int | None] = COUNTS,
    seeds: Sequence[int] = (0,),
    device: str | torch.device | None = None,
) -> list[Measured]:
    """Withhold a share of the entities; place them by so many triples of each, or train again with those triples.

    InductiveEntities at the mean of all rows, and at rows drawn at random, are what any way has to be better than.
    """
    if not 0 < share < 1:
        raise RequestError(f"The share of entities to withhold lies between 0 and 1; it is {share}.")
    found: list[Measured] = []
    for seed in seeds:
        cut = Cut.of(graph, share, seed=seed)
        one = recipe.with_changes({"training.seed": seed})
        model = with_adjoint(train_recipe(one, graph=cut.known, device=device).model)
        context = FrozenContext.of(model, cut.known, recipe=one)
        for given in counts:
            triples = cut.given(given)
            started = time.perf_counter()
            larger = extend_by_ids(context, cut.known, cut.names, triples).model
            between = time.perf_counter()
            again = train_recipe(one, graph=cut.with_some(triples), device=device).model
            ways = {"extended": (larger, between - started), "retrained": (again, time.perf_counter() - between)}
            for way, (placed, seconds) in ways.items():
                found.append(cut.measured(placed, way, given=given, num_given=len(triples), seconds=seconds))
        for way, rows in _baselines(context, len(cut.names), seed=seed):
            found.append(cut.measured(with_rows(model, rows), way, given=0))
    return found


def counted(found: Sequence[Measured]) -> str:
    """How many inductive_entities there were, in words: with several seeds they need not be as many each time."""
    numbers = [one.num_new for one in found]
    least, most = min(numbers), max(numbers)
    return f"{most:,} entities" if least == most else f"{least:,} to {most:,} entities"


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph whose last entities are the inductive_entities, and what is left of it without them."""

    whole: Graph
    known: Graph
    seed: int

    @classmethod
    def of(cls, graph: Graph, share: float, *, seed: int) -> Cut:
        """Withhold entities drawn at random; those that train joins to others of them alone are given back."""
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
        found: list[str] = self.whole.entities.names.slice(len(self.known.entities)).to_pylist()
        return found

    def given(self, count: int | None) -> Triples:
        """So many training triples of each inductive_entity, first those with known entities; all where it is None."""
        num_known = len(self.known.entities)
        ends = self.whole.train[:, [0, 2]]
        new = ends >= num_known
        order = np.random.default_rng(self.seed).permutation(len(ends))
        order = order[np.argsort(new[order].all(1), kind="stable")]
        chosen = np.zeros(len(ends), dtype=bool)
        for inductive_entity in range(num_known, len(self.whole.entities)):
            mine = order[(ends[order] == inductive_entity).any(1)]
            chosen[mine[:count]] = True
        triples: Triples = self.whole.train[chosen]
        return triples

    def with_some(self, triples: Triples) -> Graph:
        """The whole graph with these training triples of the inductive_entities alone."""
        return replace(self.whole, train=np.concatenate([self.known.train, triples]))

    def measured(
        self, model: Model, way: str, *, given: int | None, num_given: int = 0, seconds: float = 0.0
    ) -> Measured:
        """Rank the held-out triples of inductive_entities, of valid and test, and of test those of the others."""
        num_known = len(self.known.entities)
        held = np.concatenate([self.whole.valid, self.whole.test])
        held = held[(held[:, [0, 2]] >= num_known).any(1)]
        filtered = KnownAnswers.of(self.whole)
        ranks = rank(model, replace(self.whole, test=held), known=filtered).mean
        others = rank(model, replace(self.whole, test=self.known.test), known=filtered).mean
        as_head, as_tail = held[:, 0] >= num_known, held[:, 2] >= num_known
        return Measured(
            way=way,
            seed=self.seed,
            given=given,
            num_new=len(self.names),
            num_given=num_given,
            inductive_entities=Metrics.of(ranks),
            asking=Metrics.of(np.concatenate([ranks[0][as_head], ranks[1][as_tail]])),
            asked_for=Metrics.of(np.concatenate([ranks[0][as_tail], ranks[1][as_head]])),
            others=Metrics.of(others),
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

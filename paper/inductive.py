"""Inductive entities against training again: some entities are held out, then embedded from a few of their triples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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

COUNTS: tuple[int | None, ...] = (1, 3, 10, None)  # triples given per entity; None is all


def study_inductive(
    graph: Graph,
    recipe: Recipe,
    *,
    share: float = 0.05,
    counts: Sequence[int | None] = COUNTS,
    seeds: Sequence[int] = (0,),
    device: str | torch.device | None = None,
) -> list[dict[str, Any]]:
    """Metrics of held-out triples by method: embedded from some triples, or trained again with these triples.

    The baselines are the mean embedding and random embeddings.
    """
    if not 0 < share < 1:
        raise RequestError(f"The share of entities to hold out must be between 0 and 1; it is {share}.")
    results: list[dict[str, Any]] = []
    for seed in seeds:
        split = InductiveSplit.of(graph, share, seed=seed)
        seeded = recipe.with_changes({"training.seed": seed})
        model = with_adjoint(train_recipe(seeded, graph=split.known, device=device).model)
        context = FrozenContext.of(model, split.known, recipe=seeded)
        for count in counts:
            triples = split.given(count)
            about: dict[str, Any] = {"triples_given": count, "num_triples": len(triples)}
            started = time.perf_counter()
            embedded = extend_by_ids(context, split.names, triples).model
            seconds = time.perf_counter() - started
            results.append(split.evaluate(embedded, "embedded", seconds=seconds, **about))
            started = time.perf_counter()
            retrained = train_recipe(seeded, graph=split.with_triples(triples), device=device).model
            seconds = time.perf_counter() - started
            results.append(split.evaluate(retrained, "retrained", seconds=seconds, **about))
        for method, rows in _baselines(context, len(split.names), seed=seed):
            about = {"triples_given": 0, "num_triples": 0, "seconds": 0.0}
            results.append(split.evaluate(with_rows(model, rows), method, **about))
    return results


@dataclass(frozen=True, eq=False)
class InductiveSplit:
    """A graph whose last entities are held out, and the graph of its known entities alone."""

    whole: Graph
    known: Graph
    seed: int

    @classmethod
    def of(cls, graph: Graph, share: float, *, seed: int) -> InductiveSplit:
        """Hold out random entities, except those that train joins to other held-out entities only."""
        num_entities = len(graph.entities)
        held_out = np.zeros(num_entities, dtype=bool)
        drawn = np.random.default_rng(seed).permutation(num_entities)[: max(1, round(share * num_entities))]
        held_out[drawn] = True
        heads, tails = graph.train[:, 0], graph.train[:, 2]
        joined = np.zeros(num_entities, dtype=bool)
        joined[heads[~held_out[tails]]] = joined[tails[~held_out[heads]]] = True
        held_out &= joined
        if not held_out.any():
            raise RequestError(f"{graph.name} has too few entities to hold out a share of {share:g}.")
        whole = _reordered(graph, np.argsort(held_out, kind="stable"))
        num_known = int((~held_out).sum())
        entities = Vocabulary(whole.entities.names.slice(0, num_known))
        splits = (whole.split(name) for name in SPLITS)
        train, valid, test = (triples[(triples[:, [0, 2]] < num_known).all(1)] for triples in splits)
        return cls(whole, replace(whole, entities=entities, train=train, valid=valid, test=test), seed)

    @property
    def names(self) -> list[str]:
        names: list[str] = self.whole.entities.names.slice(len(self.known.entities)).to_pylist()
        return names

    def given(self, count: int | None) -> Triples:
        """At most `count` training triples per held-out entity, first those with known entities; None is all."""
        num_known = len(self.known.entities)
        ends = self.whole.train[:, [0, 2]]
        order = np.random.default_rng(self.seed).permutation(len(ends))
        order = order[np.argsort((ends >= num_known)[order].all(1), kind="stable")]
        chosen = np.zeros(len(ends), dtype=bool)
        for entity in range(num_known, len(self.whole.entities)):
            chosen[order[(ends[order] == entity).any(1)][:count]] = True
        triples: Triples = self.whole.train[chosen]
        return triples

    def with_triples(self, triples: Triples) -> Graph:
        """The whole graph with only these training triples of the held-out entities."""
        return replace(self.whole, train=np.concatenate([self.known.train, triples]))

    def evaluate(self, model: Model, method: str, **about: Any) -> dict[str, Any]:
        """Metrics of the valid and test triples of held-out entities, and of the test triples of known entities."""
        num_known = len(self.known.entities)
        held_out = np.concatenate([self.whole.valid, self.whole.test])
        held_out = held_out[(held_out[:, [0, 2]] >= num_known).any(1)]
        filtered = KnownAnswers.of(self.whole)
        tails, heads = rank(model, replace(self.whole, test=held_out), known=filtered).mean
        known = rank(model, replace(self.whole, test=self.known.test), known=filtered).mean
        new_head, new_tail = held_out[:, 0] >= num_known, held_out[:, 2] >= num_known
        ranks = {
            "all_queries": np.stack([tails, heads]),
            "as_query": np.concatenate([tails[new_head], heads[new_tail]]),
            "as_answer": np.concatenate([tails[new_tail], heads[new_head]]),
            "known_entities": known,
        }
        metrics = {kind: Metrics.of(values).as_dict() for kind, values in ranks.items()}
        return {"method": method, "seed": self.seed, "num_entities": len(self.names), **about, **metrics}


def _reordered(graph: Graph, order: npt.NDArray[np.int64]) -> Graph:
    """The graph with its entities in another order, given by their old ids."""
    new_id = np.empty(len(order), dtype=np.int32)
    new_id[order] = np.arange(len(order), dtype=np.int32)
    train, valid, test = (
        np.stack([new_id[triples[:, 0]], triples[:, 1], new_id[triples[:, 2]]], axis=1)
        for triples in (graph.split(name) for name in SPLITS)
    )
    return replace(graph, entities=Vocabulary(graph.entities.names.take(order)), train=train, valid=valid, test=test)


def _baselines(context: FrozenContext, num_entities: int, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    tables = (context.model.head_table, context.model.tail_table)[: context.new_rows.shape[1]]
    mean, spread = (torch.stack(rows).detach() for rows in zip(*((t.mean(0), t.std(0)) for t in tables), strict=True))
    yield "mean", mean.expand(num_entities, -1, -1)
    noise = torch.randn(num_entities, *mean.shape, generator=torch.Generator().manual_seed(seed))
    yield "random", mean + spread * noise.to(mean)

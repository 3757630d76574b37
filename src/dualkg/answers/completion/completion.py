"""Completing a graph: the most plausible triples that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.prospects import Prospects
from dualkg.answers.completion.kept import Keeper, choices_of
from dualkg.answers.completion.listing import Completion
from dualkg.answers.completion.narrowing import Names, Narrowing
from dualkg.answers.completion.pool import Pool
from dualkg.answers.completion.search import Search, State
from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import evaluating, full_precision
from dualkg.models.base import Model

Watch = Callable[[int, int], None]


@torch.no_grad()
def complete(
    model: Model,
    graph: Graph,
    *,
    top: int = 10_000,
    calibration: Calibration | None = None,
    relations: Names | None = None,
    heads: Names | None = None,
    min_probability: float = 0.0,
    types: bool = False,
    loops: bool = False,
    known: Sequence[str] = SPLITS,
    watch: Watch | None = None,
    part: str | Path | None = None,
) -> Completion:
    """The `top` most plausible triples that no split of `known` has, best first.

    They are ordered by their probability (see `Prospects`), or without a calibration by their evidence. Probabilities
    are among all entities, however the search is narrowed. Triples of an entity with itself are left out, unless they
    are common among those of the relation in train, or `loops` are asked for. `watch` is told how many queries of how
    many are done. `part` is a file to keep the search in while it lasts: called again after a kill, it goes on from
    there.
    """
    model.check_shape(graph.shape)
    _check(top, min_probability, calibration, graph)
    narrowing = Narrowing.of(graph, relations=relations, heads=heads, types=types, loops=loops, known=known)
    prospects = Prospects.of(calibration, graph) if calibration is not None else None
    search = Search(model, narrowing, prospects)
    state = State(Pool(top, prospects, min_probability))
    keeper = Keeper(Path(part), choices_of(model, narrowing, state.pool)) if part is not None else None
    state = keeper.load(state) if keeper else state
    with full_precision(), evaluating(model):
        state = _run(search, state, keeper, watch)
    if keeper:
        keeper.remove()
    return Completion.of(graph, state.pool)


def _run(search: Search, state: State, keeper: Keeper | None, watch: Watch | None) -> State:
    """The search to its end; where it is stopped, what was done is kept."""
    try:
        for after in search.run(state):
            state = after
            if keeper:
                keeper.keep(state)
            if watch:
                watch(state.num_done, search.num_queries)
    except KeyboardInterrupt:
        if keeper:
            keeper.save(state)
        raise
    return state


def _check(top: int, min_probability: float, calibration: Calibration | None, graph: Graph) -> None:
    if top < 1:
        raise RequestError(f"At least one triple must be asked for; top is {top:,}.")
    if not 0 <= min_probability <= 1:
        raise RequestError(f"A probability is between 0 and 1; min_probability is {min_probability}.")
    if calibration is None and min_probability > 0:
        raise RequestError("min_probability needs a calibration: without one there are no probabilities.")
    if calibration is not None and len(calibration.slopes) != graph.shape.num_relations:
        raise RequestError(
            f"The calibration is of {len(calibration.slopes):,} relations; the graph has {graph.shape.num_relations:,}."
        )

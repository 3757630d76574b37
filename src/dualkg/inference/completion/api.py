"""The function that completes a graph."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import InvalidValue, Unsupported
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.inference.calibration import Calibration, PriorCorrection
from dualkg.inference.completion.candidates import CandidateFilter, Names
from dualkg.inference.completion.checkpoint import SearchCheckpoint
from dualkg.inference.completion.first_look import best_of, first_look, is_worth_it
from dualkg.inference.completion.plan import plan_search
from dualkg.inference.completion.result import Completion
from dualkg.inference.completion.search import CompletionSettings, SearchState, run_search
from dualkg.logs import ProgressLog
from dualkg.models.base import Model

DEFAULT_SETTINGS = CompletionSettings()


@torch.no_grad()
def complete(
    model: Model,
    graph: Graph,
    *,
    top: int = 10_000,
    calibration: Calibration | None = None,
    prior_correction: PriorCorrection | None = None,
    relations: Names | None = None,
    heads: Names | None = None,
    min_probability: float = 0.0,
    types: bool = False,
    loops: bool = False,
    known: Sequence[str] = SPLITS,
    on_progress: Callable[[int, int], None] | None = None,
    on_best: Callable[[Completion], None] | None = None,
    checkpoint: str | Path | None = None,
    settings: CompletionSettings | None = None,
) -> Completion:
    """Find the `top` most probable triples that no split of `known` has.

    They are ordered by prior-corrected probability, or without a calibration by log-probability;
    both are among all entities, whatever the filters, which are those of `CandidateFilter`.
    `on_progress` is called with the number of queries that are done, and of all (0 of 0 during a
    first look at a large graph), and what it raises ends the search. `on_best` is called now and
    then with the best triples so far. `prior_correction` is that of the calibration, if it has been
    computed before. `checkpoint` is a file during the search: after a kill, the same call resumes.
    """
    model.check_shape(graph.shape)
    _check_request(top, min_probability, calibration, graph=graph)
    settings = settings or DEFAULT_SETTINGS

    if calibration is not None and prior_correction is None:
        prior_correction = PriorCorrection.of(calibration, graph)
    candidates = CandidateFilter(
        graph,
        relations=relations,
        heads=heads,
        types=types,
        loops=loops,
        known=known,
        query_classes=prior_correction.query_classes if prior_correction else None,
    )
    state = SearchState(top, prior_correction, min_probability)
    saved_search = None
    if checkpoint is not None:
        saved_search = SearchCheckpoint(checkpoint, model, candidates, start=state)
        state = saved_search.load()

    progress = ProgressLog(f"Completing {graph.name}")
    saved_at = time.monotonic()
    reports = BestReports(graph, on_best, after=settings.best_after)
    with full_precision(), eval_mode(model):
        look = state
        if not state.num_done and is_worth_it(candidates, settings.look_scores):
            start = state
            for look in first_look(model, candidates, start=start, max_scores=settings.look_scores):
                if on_progress:
                    on_progress(0, 0)
                reports.report(look)
            state = replace(start, least_sort_key=look.last_sort_key)
        parts = plan_search(candidates, prior_correction)
        num_queries = sum(part.num_queries for part in parts)

        reported_at = time.monotonic()

        def on_work() -> None:
            if on_progress and time.monotonic() >= reported_at + settings.report_interval:
                on_progress(state.num_done, num_queries)

        try:
            states = run_search(
                model, candidates, parts, start=state, settings=settings, on_work=on_work
            )
            for state in states:
                if saved_search and time.monotonic() >= saved_at + settings.save_interval:
                    saved_search.save(state)
                    saved_at = time.monotonic()
                progress.count(state.num_done, num_queries, "queries")
                if on_progress:
                    on_progress(state.num_done, num_queries)
                    reported_at = time.monotonic()
                if state.num_done < num_queries:
                    reports.report(state, look)
        except KeyboardInterrupt:
            if saved_search:
                saved_search.save(state)
            raise
    if saved_search:
        saved_search.remove()
    return Completion.of(graph, state)


class BestReports:
    """Reports of the best triples so far: after some seconds, and again after twice the time."""

    def __init__(
        self, graph: Graph, on_best: Callable[[Completion], None] | None, *, after: float
    ) -> None:
        self._graph = graph
        self._on_best = on_best
        self._started_at = time.monotonic()
        self._after = after

    def report(self, state: SearchState, look: SearchState | None = None) -> None:
        """Report the triples of a state and of a first look, if it is time."""
        seconds = time.monotonic() - self._started_at
        if self._on_best is None or seconds < self._after:
            return
        best = state if look is None else best_of(look, state)
        if len(best.triples):
            self._on_best(Completion.of(self._graph, best))
            self._after = 2 * max(seconds, self._after)


def _check_request(
    top: int, min_probability: float, calibration: Calibration | None, *, graph: Graph
) -> None:
    if not isinstance(top, (int, np.integer)) or top < 1:
        raise InvalidValue("top", expected="a whole number of at least 1", found=top)
    if not 0 <= min_probability <= 1:
        raise InvalidValue("min_probability", expected="between 0 and 1", found=min_probability)
    if calibration is None:
        if min_probability > 0:
            raise Unsupported(
                "min_probability", "needs a calibration: without one there are no probabilities"
            )
        return
    num_calibrated = len(calibration.slopes)
    num_relations = graph.shape.num_relations
    if num_calibrated != num_relations:
        raise Unsupported(
            f"The calibration of {num_calibrated:,} relations",
            f"does not fit the graph {graph.name}, which has {num_relations:,}",
            advice="Calibrate the model on this graph.",
        )

"""The plan of a search: how much work it may do, and how long its trials are.

It follows from the graph, the starting recipe and the kind of device. A clock has no part in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dualkg.data.graph import Graph
from dualkg.training.costs import WorkEstimate
from dualkg.training.recipe import Recipe
from dualkg.tuning.starts import is_small

SHORT = 0  # the rung of the short trials
LONG = 1  # the rung of the long ones
MIN_BUDGET = 120.0  # work of a search; small graphs are trained in a few seconds
BUDGETS = {"cpu": 3.0, "cuda": 3.0}  # work of a search, as a multiple of the final training
# Length of the trials of each rung, as a fraction of the final epochs.
RUNGS = {"cpu": (1 / 4, 1 / 2), "cuda": (1 / 9, 1 / 3)}
SMALL_RUNGS = (1 / 3, 1.0)  # of small graphs, whose final training takes seconds
MAX_VALIDATION_TRIPLES = {"cpu": 2_500, "cuda": 10_000}  # that a trial ranks


@dataclass(frozen=True)
class SearchPlan:
    """The budget of a search in work, and what its trials are.

    `rungs` are the lengths of short and long trials as fractions of the final training.
    `max_trials` are the most trials that are made up to the end of each rung.
    """

    budget: float = math.inf
    rungs: tuple[float, float] = RUNGS["cuda"]
    num_validation_triples: int = MAX_VALIDATION_TRIPLES["cuda"]
    max_trials: tuple[int, int] | None = None

    @classmethod
    def of_saved(cls, saved: dict[str, Any] | None) -> SearchPlan | None:
        """The plan of a saved search; earlier versions did not save one."""
        if saved is None:
            return None
        pairs = {key: tuple(value) for key, value in saved.items() if isinstance(value, list)}
        return cls(**{**saved, **pairs})

    @classmethod
    def of(
        cls, start: Recipe, graph: Graph, work: WorkEstimate, *, seconds: float | None = None
    ) -> SearchPlan:
        """The plan of a search from `start`; `seconds` is the time that its user gives it."""
        if seconds is None:
            of_training = start.training.epochs * work.epoch(start)
            budget = max(BUDGETS[work.device] * of_training, MIN_BUDGET)
        else:
            budget = seconds
        rungs = SMALL_RUNGS if is_small(graph) else RUNGS[work.device]
        return cls(budget, rungs, MAX_VALIDATION_TRIPLES[work.device])

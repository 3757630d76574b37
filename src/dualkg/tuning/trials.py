"""The trials of automatic tuning: what is trained, and what comes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, RequestError, out_of_memory
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import OnProgress, ProgressEvent, Trainer
from dualkg.tuning.starting_recipe import EPOCHS, Params

STOPPED_HALF_WAY = "stopped half-way"


@dataclass(frozen=True)
class AutomaticTrial:
    """A training with some hyperparameters, and its MRR on the validation split.

    `mrr` is measured at the end, and `half_way` after half of the epochs.
    """

    params: Params
    rung: int
    epochs: int
    mrr: float | None
    half_way: float | None
    seconds: float
    seconds_per_epoch: float
    error: str = ""
    work: float = 0.0

    def is_better_than(self, best: AutomaticTrial) -> bool:
        return self.mrr is not None and (best.mrr is None or self.mrr > best.mrr)


@dataclass(frozen=True)
class TrialPlan:
    """A training to make: `params` change the starting recipe to `recipe`.

    It stops half-way if its MRR is below `hopeless` then.
    """

    params: Params
    rung: int
    epochs: int
    recipe: Recipe
    hopeless: float
    on_progress: OnProgress


@dataclass(frozen=True)
class TrialOutcome:
    """What came of a training; `half_way` is the MRR after half of its epochs."""

    mrr: float | None
    half_way: float | None
    seconds: float
    seconds_per_epoch: float
    error: str = ""


RunTrial = Callable[[TrialPlan], TrialOutcome]


@dataclass(frozen=True)
class TrialTrainer:
    """Trains the recipe of a trial; what goes wrong becomes the error of the trial."""

    graph: Graph
    device: torch.device

    def __call__(self, plan: TrialPlan) -> TrialOutcome:
        started = time.perf_counter()
        history: list[dict[str, Any]] = []
        mrr = None
        error = ""
        try:
            trainer = self._trainer(plan)
            history = trainer.progress.history
            trainer.on_progress = _stopping_half_way(plan, history)
            trainer.run()
            mrr = history[-1].get("valid_mrr")
        except _HopelessTrialError:
            mrr = history[-1]["valid_mrr"]
            error = STOPPED_HALF_WAY
        except (RequestError, DivergedError) as problem:
            if not plan.params and isinstance(problem, RequestError):
                raise  # the request itself is wrong, not what the search tried
            error = str(problem)
        except (MemoryError, RuntimeError) as problem:
            if out_of_memory(problem) is None:
                raise
            error = f"{self.device} is out of memory"
        mrrs = [epoch["valid_mrr"] for epoch in history if "valid_mrr" in epoch]
        seconds_of_epochs = [epoch["seconds"] for epoch in history]
        return TrialOutcome(
            mrr=mrr,
            half_way=mrrs[0] if mrrs else None,
            seconds=round(time.perf_counter() - started, 3),
            seconds_per_epoch=float(np.median(seconds_of_epochs)) if history else 0.0,
            error=error,
        )

    def _trainer(self, plan: TrialPlan) -> Trainer:
        changes = {
            EPOCHS: plan.epochs,
            "validation.every": (plan.epochs + 1) // 2,
            "validation.patience": 0,
        }
        recipe = plan.recipe.with_changes(changes)
        return Trainer.of_recipe(recipe, self.graph, device=self.device)


class _HopelessTrialError(Exception):
    """A trial is far behind the best half-way."""


def _stopping_half_way(plan: TrialPlan, history: list[dict[str, Any]]) -> OnProgress:
    """Report the progress of a trial, and stop it half-way if it is far behind the best."""

    def on_progress(event: ProgressEvent) -> None:
        mrr = math.inf
        if 0 < len(history) < plan.epochs:
            mrr = history[-1].get("valid_mrr", math.inf)
        if mrr < plan.hopeless:
            raise _HopelessTrialError
        plan.on_progress(event)

    return on_progress


def trial_graph(graph: Graph, *, seed: int, num_validation_triples: int) -> Graph:
    """A graph without test triples, and with no more validation triples than trials rank."""
    valid = graph.valid
    if len(valid) > num_validation_triples:
        random = np.random.default_rng(seed)
        sample = random.choice(len(valid), num_validation_triples, replace=False)
        valid = valid[np.sort(sample)]
    return replace(graph, valid=valid, test=graph.test[:0])

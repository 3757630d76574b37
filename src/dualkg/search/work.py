"""Doing the trials of a study."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.search.space import Range, Space, Value
from dualkg.search.study import WHY, Ledger, Standing, beating, outcome
from dualkg.training.choices import build_model, build_regularizer
from dualkg.training.loop import InterruptedRunError, Moment, Trainer

Tell = Callable[[Standing, Moment | None], None]


class FailedTrialError(DualkgError):
    """A trial came to no result; why is written down with it, and the search goes on."""


class SpareTrialError(DualkgError):
    """Another process does what this trial was made for."""


class Point(BaseSampler):
    """Chooses one point of a grid."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Value:
        return self.values[param_name]


def sampler_for(space: Space, slot: int) -> BaseSampler:
    """Drawn by seed and slot alone, so that neither processes nor interruptions draw the same twice over."""
    if space.choice.method == "grid":
        return Point(space.point(slot))
    seed = int(np.random.SeedSequence([space.choice.seed, slot]).generate_state(1)[0])
    if space.choice.method == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=True)


def suggest(trial: Trial, name: str, choices: tuple[Value, ...] | Range) -> Value:
    if isinstance(choices, tuple):
        return choices[choices.index(trial.suggest_categorical(name, choices))]
    if isinstance(choices.low, float) or isinstance(choices.step, float):
        return trial.suggest_float(name, choices.low, choices.high, step=choices.step, log=choices.log)
    return trial.suggest_int(name, choices.low, int(choices.high), step=int(choices.step or 1), log=choices.log)


class Worker:
    """Takes trials of a study until none is left."""

    def __init__(self, study: optuna.Study, space: Space, graph: Graph, device: str, tell: Tell) -> None:
        self.study = study
        self.space = space
        self.graph = graph
        self.device = device
        self.tell = tell
        self.ledger = Ledger(study, space.num_trials)
        self.standing = self.ledger.standing()

    def work(self) -> None:
        """Do what is open; wait for what others are at, in case they are killed."""
        while True:
            self._end_with_parent()
            self.ledger.bury_the_dead()
            self.standing = self.ledger.standing()
            self.tell(self.standing, None)
            match self.standing.work:
                case "open":
                    self._one_trial()
                case "busy":
                    time.sleep(1)
                case _:
                    return

    def _end_with_parent(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise InterruptedRunError("The search that started this process has ended.")

    def _one_trial(self) -> None:
        trial = self.study.ask()
        value, state = None, TrialState.FAIL
        try:
            with beating(trial):
                value, state = self._objective(trial), TrialState.COMPLETE
        except TrialPruned:
            state = TrialState.PRUNED
        except (FailedTrialError, SpareTrialError, UpdateFinishedTrialError):
            pass  # why is written down; or others do it, having taken this process for dead
        finally:
            with suppress(UpdateFinishedTrialError):
                self.study.tell(trial, value, state, skip_if_finished=True)
        if self.device != "cpu":
            torch.cuda.empty_cache()  # others may share this GPU

    def _objective(self, trial: Trial) -> float:
        rows = self.ledger.rows()
        slot = next((slot for slot, row in rows.items() if row.number == trial.number), None)
        if slot is None:
            raise SpareTrialError("Another process came first.")
        self.study.sampler = sampler_for(self.space, slot)
        values = {name: suggest(trial, name, choices) for name, choices in self.space.dimensions.items()}
        for other in rows.values():
            if other.params == values and outcome(other) == "finished" and other.value is not None:
                return other.value  # drawn twice, trained once
        try:
            return self._train(trial, values)
        except (RequestError, DivergedError) as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = f"{self.device} ran out of memory. Search smaller dims and batches, or use fewer --jobs."
        trial.set_user_attr(WHY, why)
        raise FailedTrialError(why)

    def _train(self, trial: Trial, values: Mapping[str, Value]) -> float:
        """The MRR on the validation split, told to Optuna while it grows."""
        recipe = self.space.trial_recipe(values)
        model = build_model(recipe.model, self.graph.shape, seed=recipe.training.seed).to(torch.device(self.device))
        trainer = Trainer(model, self.graph, recipe, build_regularizer(recipe.regularizer))
        told = 0

        def look(moment: Moment) -> None:
            nonlocal told
            history = trainer.progress.history
            if len(history) > told:
                told = len(history)
                if "valid_mrr" in history[-1]:
                    trial.report(history[-1]["valid_mrr"], step=told)
                    if trial.should_prune():
                        raise TrialPruned
            self.tell(self.standing, moment)  # as it was: asking the storage takes longer than a step

        trainer.watch = look
        trainer.run()
        if recipe.validation.keep == "best":
            return trainer.progress.best_mrr
        return float(trainer.progress.history[-1]["valid_mrr"])


def without_test(graph: Graph) -> Graph:
    """The graph as a search may see it: nothing of the test split, not even to filter by."""
    return dataclasses.replace(graph, test=np.empty((0, 3), dtype=np.int32))

"""The worker of a search: it takes trials of the study, trains them, and saves their MRR."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, RequestError, out_of_memory
from dualkg.training.errors import InterruptedRunError
from dualkg.training.trainer import ProgressEvent, Trainer
from dualkg.tuning.launch import LaunchFailed, launch_trial, parent_has_ended, remove_trial
from dualkg.tuning.results import TuningProgress, TuningResult
from dualkg.tuning.space import Range, SearchSpace, Value
from dualkg.tuning.storage import open_storage
from dualkg.tuning.study import ERROR, Heartbeats, SearchStudy, state_of

WAIT_SECONDS = 1.0  # between two looks at the trials of other processes


class _FailedTrial(Exception):
    """A trial failed for a reason that is saved with it; the search continues."""


@dataclass
class Worker:
    """Runs trials of a study until none is left."""

    graph: Graph
    _: KW_ONLY
    space: SearchSpace
    url: str
    device: str
    where: str = "The storage"
    launcher: Sequence[str] = ()
    folder: Path = Path()
    heartbeats: Heartbeats | None = None
    on_progress: Callable[[TuningProgress], None] = lambda progress: None

    def __post_init__(self) -> None:
        self.study = SearchStudy(
            self.space,
            open_storage(self.url),
            data=self.graph.fingerprint,
            where=self.where,
            heartbeats=self.heartbeats,
        )
        self.progress = TuningProgress(0, self.space.num_trials, None)

    def run(self) -> None:
        """Run trials; at the end wait for those of other processes, in case one is killed."""
        while True:
            if parent_has_ended():
                raise InterruptedRunError("The process that started this one has ended.")
            # Lost trials are repeated first, because what is sampled later depends on them.
            self.study.retry_lost_trials()
            self.report_progress()
            states = self.study.states()
            if len(states) < self.space.num_trials or "waiting" in states:
                self._run_trial()
            elif "running" in states:
                time.sleep(WAIT_SECONDS)
            else:
                return

    def result(self) -> TuningResult:
        return self.study.result(self.graph.name)

    def report_progress(self) -> None:
        """Report the progress of all processes."""
        self.progress = self.study.progress()
        self.on_progress(self.progress)

    def _run_trial(self) -> None:
        trial, slot = self.study.take_trial()
        if slot is None:
            self.study.tell(trial, state=TrialState.FAIL)
            return
        try:
            with self.study.heartbeat(trial):
                mrr = self._objective(trial, slot)
        except TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        except (_FailedTrial, UpdateFinishedTrialError):
            self.study.tell(trial, state=TrialState.FAIL)
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            self.study.tell(trial, mrr)
        if self.device != "cpu":
            torch.cuda.empty_cache()  # other processes may share this GPU

    def _objective(self, trial: Trial, slot: int) -> float:
        """The validation MRR of a trial."""
        params = self._sample(trial, slot)
        for finished in self.study.trials().values():
            is_same = finished.params == params and state_of(finished) == "finished"
            if is_same and finished.value is not None:
                return finished.value  # sampled twice, trained once
        try:
            if self.launcher:
                return self._launch(params, slot, trial.number)
            return self._train(params, trial)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error) is None:
                raise
            reason = (
                f"{self.device} is out of memory. Search smaller dimensions and batches, or train "
                "fewer trials in parallel."
            )
        except (RequestError, DivergedError, LaunchFailed) as error:
            reason = str(error.__cause__ or error)
        trial.set_user_attr(ERROR, reason)
        raise _FailedTrial

    def _sample(self, trial: Trial, slot: int) -> dict[str, Value]:
        self.study.optuna_study.sampler = sampler_for(self.space, slot)
        params = {}
        for name, choices in self.space.dimensions.items():
            params[name] = suggest(trial, name, choices)
        return params

    def _train(self, params: Mapping[str, Value], trial: Trial) -> float:
        """Train a recipe in this process, and stop if the trial is pruned."""
        recipe = self.space.trial_recipe(params)
        trainer = Trainer.of_recipe(recipe, self.graph, device=torch.device(self.device))
        history = trainer.progress.history
        reported_epochs = set[int]()

        def on_progress(event: ProgressEvent) -> None:
            epoch = len(history)
            if history and epoch not in reported_epochs and "valid_mrr" in history[-1]:
                reported_epochs.add(epoch)
                trial.report(history[-1]["valid_mrr"], step=epoch)
                if trial.should_prune():
                    raise TrialPruned
            # The counts are those before this trial: reading the storage takes longer than a
            # training step.
            self.on_progress(replace(self.progress, training=event))

        trainer.on_progress = on_progress
        trainer.run()
        if recipe.validation.keep == "best":
            return float(trainer.progress.best_mrr)
        return float(history[-1]["valid_mrr"])

    def _launch(self, params: Mapping[str, Value], slot: int, number: int) -> float:
        """Train a recipe by the launcher."""
        runs = self.folder / "trials"
        for retried in self.study.numbers_in_slot(slot):
            if retried < number:
                # The process of that trial was killed, and left its run.
                remove_trial(runs / str(retried))
        return launch_trial(
            self.space.trial_recipe(params),
            self.graph,
            runs / str(number),
            launcher=self.launcher,
            device=self.device,
            on_wait=lambda: self.on_progress(self.progress),
        )


def sampler_for(space: SearchSpace, slot: int) -> BaseSampler:
    """A sampler seeded by the slot of a trial.

    Neither the number of processes nor an interruption changes what is sampled.
    """
    seed = int(np.random.SeedSequence([space.settings.seed, slot]).generate_state(1)[0])
    if space.settings.method == "random":
        return RandomSampler(seed)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        if space.settings.method == "grid":
            # Optuna's GridSampler may give one point to two processes.
            return PartialFixedSampler(space.point(slot), RandomSampler(seed))
        return TPESampler(seed=seed, constant_liar=True)


def suggest(trial: Trial, name: str, choices: tuple[Value, ...] | Range) -> Value:
    """Sample the value of a hyperparameter, of the type that the recipe has."""
    if isinstance(choices, tuple):
        sampled = trial.suggest_categorical(name, choices)
        return choices[choices.index(sampled)]
    if isinstance(choices.low, float) or isinstance(choices.step, float):
        return trial.suggest_float(
            name, choices.low, choices.high, step=choices.step, log=choices.log
        )
    return trial.suggest_int(
        name, choices.low, int(choices.high), step=int(choices.step or 1), log=choices.log
    )

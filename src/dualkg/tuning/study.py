"""The Optuna study of a search: the trials that processes train, and what they resulted in."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy
import torch
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, Trial, TrialState

from dualkg.data.graph import Graph
from dualkg.errors import (
    DivergedError,
    InvalidValue,
    MissingExtra,
    RequestError,
    out_of_memory,
)
from dualkg.files import atomic_write, locked
from dualkg.training.trainer import ProgressEvent, Trainer
from dualkg.tuning.results import DONE, OnProgress, TrialResult, TuningProgress, TuningResult
from dualkg.tuning.space import Range, SearchSpace, Value

optuna.logging.set_verbosity(optuna.logging.ERROR)  # dualkg reports progress and failures itself

MIN_TRIALS_FOR_IMPORTANCE = 8  # PED-ANOVA compares the best tenth of the trials with all
NUM_UNPRUNED_TRIALS = 5  # Optuna's default: the median of fewer trials says little
HEARTBEAT_SECONDS = 5
# A busy machine may be late with some heartbeats, and a trial taken for lost is trained twice.
GRACE_SECONDS = 40
SQLITE_TIMEOUT_SECONDS = 60  # how long a process waits for another one that writes
OPENING_ATTEMPTS = 5
OPENING_PAUSE_SECONDS = 0.3
WAIT_SECONDS = 1.0  # between two looks at the trials of other processes
SETUP = "dualkg"  # attribute of a study: what it searches
# Attributes of trials: why one failed, and the number of the lost trial that it repeats.
ERROR = "error"
RETRY_OF = "retry_of"


# -- the storage ---


def create_database(path: Path) -> str:
    """Create an SQLite file with all tables of a study, unless it exists; return its URL."""
    with locked(path, wait=True):
        if not path.exists():
            with atomic_write(path) as fresh:
                RDBStorage(_sqlite_url(fresh), {"poolclass": sqlalchemy.NullPool})
    return _sqlite_url(path)


def _sqlite_url(path: Path) -> str:
    """The URL of an SQLite file, in which special characters of its name are quoted."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def open_study(space: SearchSpace, url: str, *, data: str, where: str) -> optuna.Study:
    """Open the study of a search, or create it; refuse a study that searches something else.

    `data` is the fingerprint of the graph, and `where` names the storage in errors.
    """
    study = optuna.create_study(
        storage=_open_storage(url),
        study_name=space.name,
        direction="maximize",
        pruner=_pruner_of(space),
        load_if_exists=True,
    )
    setup = {**space.as_dict(), "data": data}
    if SETUP not in study.user_attrs:
        study.set_user_attr(SETUP, setup)
    saved = study.user_attrs[SETUP]
    different = [key for key, value in setup.items() if value != saved.get(key)]
    if different:
        names = ["the data" if key == "data" else f"[{key}]" for key in different]
        verb = "differs" if len(names) == 1 else "differ"
        raise RequestError(
            f"{where} holds a search named '{space.name}' with a different setup: "
            f"{' and '.join(names)} {verb}. Use another `out`, or another name in [search]."
        )
    return study


def _open_storage(url: str) -> RDBStorage:
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        # Without a pool, each transaction closes its connection, and none is left for the end.
        options["poolclass"] = sqlalchemy.NullPool
        options["connect_args"] = {"timeout": SQLITE_TIMEOUT_SECONDS}
    try:
        database = sqlalchemy.make_url(url)
    except sqlalchemy.exc.ArgumentError:
        raise InvalidValue(
            "storage",
            expected="the URL of a database, such as postgresql://user@server/searches",
            found=url,
        ) from None
    attempt = 1
    while True:
        try:
            with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                return RDBStorage(
                    url,
                    options,
                    heartbeat_interval=HEARTBEAT_SECONDS,
                    grace_period=GRACE_SECONDS,
                )
        except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
            if database.drivername == "postgresql":
                purpose = "A storage in PostgreSQL"
                raise MissingExtra("psycopg", "postgresql", purpose=purpose) from None
            driver = error.__cause__ or error
            raise RequestError(
                f"The storage cannot be opened: its database driver is not installed: {driver}."
            ) from None
        except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
            # Several processes may be creating the tables of a new database at the same time.
            if attempt == OPENING_ATTEMPTS:
                reason = getattr(error, "orig", None) or error
                raise RequestError(f"The storage cannot be opened: {reason}.") from None
            attempt += 1
            time.sleep(OPENING_PAUSE_SECONDS)


def _pruner_of(space: SearchSpace) -> optuna.pruners.BasePruner:
    if not space.settings.prune:
        return optuna.pruners.NopPruner()
    warmup_epochs = space.settings.prune_after or max(1, space.base.training.epochs // 4)
    return optuna.pruners.MedianPruner(
        n_startup_trials=NUM_UNPRUNED_TRIALS, n_warmup_steps=warmup_epochs
    )


# -- the trials ---


class _FailedTrial(Exception):
    """A trial has no result; the search continues."""


@dataclass
class SearchStudy:
    """A search in a study that several processes may share.

    A slot is the position of a trial in the search: with `num_trials` of 10 there are the slots 0
    to 9. A trial whose process ended before it did is lost, and a retry takes its slot.
    """

    study: optuna.Study
    space: SearchSpace
    graph: Graph
    _: KW_ONLY
    device: torch.device
    on_progress: OnProgress = lambda progress: None

    def run(self) -> None:
        """Train trials until none is left; then wait for the trials of other processes."""
        while True:
            self._retry_lost_trials()
            self.report_progress()
            states = [state_of(trial) for trial in self.trials().values()]
            if len(states) < self.space.num_trials or "waiting" in states:
                # A machine that was suspended wakes up with a trial that another process took for
                # lost: its result is left out.
                with suppress(UpdateFinishedTrialError):
                    self.study.optimize(self._objective, n_trials=1, catch=_FailedTrial)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # other processes may share this GPU
            elif "running" in states:
                time.sleep(WAIT_SECONDS)
            else:
                return

    def trials(self) -> dict[int, FrozenTrial]:
        """The trial that counts for each slot of the search."""
        by_slot = trials_by_slot(self.study.get_trials(deepcopy=False))
        # At the end of a search, two processes may have made one trial too many.
        return {slot: trial for slot, trial in by_slot.items() if slot < self.space.num_trials}

    def report_progress(self) -> None:
        """Report the progress of all processes."""
        trials = self.trials().values()
        num_done = sum(state_of(trial) in DONE for trial in trials)
        mrrs = [trial.value for trial in trials if state_of(trial) == "finished" and trial.value]
        best = max(mrrs, default=None)
        self.progress = TuningProgress(num_done, self.space.num_trials, best)
        self.on_progress(self.progress)

    def _retry_lost_trials(self) -> None:
        """Fail trials without a recent heartbeat, and queue lost trials again."""
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            fail_stale_trials(self.study)
        for trial in self.trials().values():
            if state_of(trial) == "lost":
                number = trial.user_attrs.get(RETRY_OF, trial.number)
                # It is queued without values: the seed of its slot samples the same ones again.
                self.study.enqueue_trial({}, user_attrs={RETRY_OF: number})

    def _objective(self, trial: Trial) -> float:
        """The validation MRR of a trial."""
        slots = {counted.number: slot for slot, counted in self.trials().items()}
        if trial.number not in slots:
            raise _FailedTrial  # the search has enough trials, or another retry was faster
        self.study.sampler = sampler_for(self.space, slots[trial.number])
        params = {}
        for name, choices in self.space.dimensions.items():
            params[name] = suggest(trial, name, choices)
        for earlier in self.trials().values():
            is_same = earlier.params == params and state_of(earlier) == "finished"
            if is_same and earlier.value is not None:
                return earlier.value  # sampled twice, trained once
        try:
            return self._train(params, trial)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error) is None:
                raise
            reason = f"{self.device} is out of memory. Search smaller dimensions and batches."
        except (RequestError, DivergedError) as error:
            reason = str(error.__cause__ or error)
        trial.set_user_attr(ERROR, reason)
        raise _FailedTrial

    def _train(self, params: Mapping[str, Value], trial: Trial) -> float:
        """Train the recipe of a trial, and stop if the trial is pruned."""
        recipe = self.space.trial_recipe(params)
        trainer = Trainer.of_recipe(recipe, self.graph, device=self.device)
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

    # -- results ---

    def result(self) -> TuningResult:
        """The results of all processes, whatever was killed in between."""
        results = []
        for slot, trial in sorted(self.trials().items()):
            result = TrialResult(
                number=slot,
                state=state_of(trial),
                mrr=trial.value if trial.values else None,
                seconds=round(trial.duration.total_seconds(), 3) if trial.duration else None,
                params=trial.params,
                error=trial.user_attrs.get(ERROR, ""),
            )
            results.append(result)
        return TuningResult(self.space, self.graph.name, tuple(results), self._importance(results))

    def _importance(self, trials: Sequence[TrialResult]) -> dict[str, float] | None:
        """PED-ANOVA importance of the hyperparameters that differ; the sum is 1."""
        finished = [trial.params for trial in trials if trial.state == "finished"]
        if len(finished) < MIN_TRIALS_FOR_IMPORTANCE:
            return None
        names = []
        for name in finished[0]:
            if len({params[name] for params in finished}) > 1:
                names.append(name)
        if not names:
            return None

        # Imported here, because it imports scikit-learn, which takes long.
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        # Optuna warns of few trials, and the command line says so itself.
        with warnings.catch_warnings(action="ignore"):
            importance = get_param_importances(
                self.study, evaluator=PedAnovaImportanceEvaluator(), params=names
            )
        return {name: round(share, 4) for name, share in importance.items()}


def state_of(trial: FrozenTrial) -> str:
    """finished, pruned, failed, running or waiting; lost if its process ended before it did."""
    if trial.state == TrialState.COMPLETE:
        return "finished"
    if trial.state == TrialState.FAIL:
        return "failed" if ERROR in trial.user_attrs else "lost"
    return trial.state.name.lower()


def trials_by_slot(trials: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The trial that counts for each slot: the first that is not lost, or else the last.

    The n-th trial that is not a retry has slot n, and a retry has the slot of the trial that it
    repeats. All processes agree on this without a lock, because neither ever changes.
    """
    slots: dict[int, int] = {}
    num_slots = 0
    counted: dict[int, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        original = trial.user_attrs.get(RETRY_OF)
        if original is None:
            slot = num_slots
            num_slots += 1
        else:
            slot = slots[original]
        slots[trial.number] = slot
        if slot not in counted or state_of(counted[slot]) == "lost":
            counted[slot] = trial
    return counted


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

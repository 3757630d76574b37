"""The Optuna study of a search: which trials count, which are lost, and what they resulted in."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from dualkg.errors import PYTHON, RequestError, Words
from dualkg.tuning.results import DONE, TrialResult, TuningProgress, TuningResult
from dualkg.tuning.space import SearchSpace
from dualkg.tuning.storage import StudyStorage

optuna.logging.set_verbosity(optuna.logging.ERROR)  # dualkg reports progress and failures itself

MIN_TRIALS_FOR_IMPORTANCE = 8
NUM_UNPRUNED_TRIALS = 5
SETUP = "dualkg"  # attribute of a study: what it searches
# Attributes of trials: why one failed, the time of the last sign of life of its process, and the
# number of the lost trial that it repeats.
ERROR = "error"
HEARTBEAT = "heartbeat"
RETRY_OF = "retry_of"


@dataclass(frozen=True)
class Heartbeats:
    """How often a running trial gives a sign of life, and after how many seconds it is lost.

    A trial is lost if its heartbeat has not changed for `grace` seconds by the clock of the process
    that watches it, so that the clocks of several machines need not agree. One that is older than
    `abandoned` seconds was lost before this process began.
    """

    interval: float = 5.0
    grace: float = 40.0
    abandoned: float = 600.0


HEARTBEATS = Heartbeats()


class DifferentSearch(RequestError):
    """The storage holds a search of the same name in another space or on other data."""

    def __init__(self, where: str, name: str, differences: Sequence[str]) -> None:
        super().__init__()
        self.where = where
        self.name = name
        self.differences = list(differences)

    def message(self, words: Words = PYTHON) -> str:
        verb = "differs" if len(self.differences) == 1 else "differ"
        return (
            f"{self.where} holds a search named '{self.name}' with a different setup: "
            f"{' and '.join(self.differences)} {verb}. Use another {words.option('out')}, or "
            "another name in [search]."
        )


class SearchStudy:
    """The trials of a search in a storage that several processes may share.

    A slot is the position of a trial in the search: with `num_trials` of 10 there are the slots 0
    to 9. A trial whose process ended before it did is lost, and a retry takes its slot.
    """

    def __init__(
        self,
        space: SearchSpace,
        storage: StudyStorage,
        *,
        data: str,
        where: str = "The storage",
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self.space = space
        self.storage = storage
        self.heartbeats = heartbeats or HEARTBEATS
        self.optuna_study = optuna.create_study(
            storage=storage.backend,
            study_name=space.name,
            direction="maximize",
            pruner=_pruner_of(space),
            load_if_exists=True,
        )
        self._check_setup({**space.as_dict(), "data": data}, where)
        # The last heartbeat of each running trial, and when this process saw it first.
        self._seen: dict[int, tuple[float, float]] = {}

    def _check_setup(self, setup: dict[str, Any], where: str) -> None:
        """Save what the study searches; refuse a study that searches something else."""
        if SETUP not in self.optuna_study.user_attrs:
            self.optuna_study.set_user_attr(SETUP, setup)
        saved = self.optuna_study.user_attrs[SETUP]
        differences = []
        for key, value in setup.items():
            if value != saved.get(key):
                differences.append("the data" if key == "data" else f"[{key}]")
        if differences:
            raise DifferentSearch(where, self.space.name, differences)

    # -- trials ---

    def trials(self) -> dict[int, FrozenTrial]:
        """The trial that counts for each slot of the search."""
        by_slot = trials_by_slot(self.optuna_study.get_trials(deepcopy=False))
        # At the end of a search, two processes may have made one trial too many.
        return {slot: trial for slot, trial in by_slot.items() if slot < self.space.num_trials}

    def numbers_in_slot(self, slot: int) -> list[int]:
        """The numbers of all trials in a slot: the first one and its retries."""
        slots = slots_of(self.optuna_study.get_trials(deepcopy=False))
        return [number for number, its_slot in slots.items() if its_slot == slot]

    def states(self) -> list[str]:
        return [state_of(trial) for trial in self.trials().values()]

    def progress(self) -> TuningProgress:
        trials = self.trials().values()
        num_done = sum(state_of(trial) in DONE for trial in trials)
        mrrs = [trial.value for trial in trials if state_of(trial) == "finished" and trial.value]
        return TuningProgress(num_done, self.space.num_trials, max(mrrs, default=None))

    def result(self, graph: str) -> TuningResult:
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
        return TuningResult(self.space, graph, tuple(results), self._importance(results))

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
                self.optuna_study, evaluator=PedAnovaImportanceEvaluator(), params=names
            )
        return {name: round(share, 4) for name, share in importance.items()}

    # -- running trials ---

    def take_trial(self) -> tuple[Trial, int | None]:
        """A waiting trial, or else a new one, and its slot.

        The slot is None if another process has a trial for it, or if the search has enough.
        """
        with self.storage.taking_trial():
            trial = self.optuna_study.ask()
        for slot, counted in self.trials().items():
            if counted.number == trial.number:
                return trial, slot
        return trial, None

    def tell(
        self, trial: Trial | int, mrr: float | None = None, *, state: TrialState | None = None
    ) -> None:
        """Save the end of a trial, unless another process took it for lost and ended it."""
        with suppress(UpdateFinishedTrialError):
            self.optuna_study.tell(trial, mrr, state=state, skip_if_finished=True)

    @contextmanager
    def heartbeat(self, trial: Trial) -> Iterator[None]:
        """Give signs of life of a trial from a thread, for the duration of a block."""
        ended = threading.Event()

        def beat() -> None:
            while True:
                try:
                    trial.set_user_attr(HEARTBEAT, time.time())
                except UpdateFinishedTrialError:
                    return  # another process took the trial for lost
                except StorageInternalError:
                    pass  # the connection may be back
                if ended.wait(self.heartbeats.interval):
                    return

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def retry_lost_trials(self) -> None:
        """Fail trials without a recent heartbeat, and queue trials again that are lost."""
        for trial in self.optuna_study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_stale(trial):
                self.tell(trial.number, state=TrialState.FAIL)
        for trial in self.trials().values():
            if state_of(trial) == "lost":
                original = retried_number(trial)
                number = trial.number if original is None else original
                # It is queued without values: the seed of its slot samples the same ones again.
                self.optuna_study.enqueue_trial({}, user_attrs={RETRY_OF: number})

    def _is_stale(self, trial: FrozenTrial) -> bool:
        started = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        heartbeat = trial.user_attrs.get(HEARTBEAT, started)
        if time.time() - heartbeat > self.heartbeats.abandoned:
            return True

        now = time.monotonic()
        last_heartbeat, first_seen = self._seen.get(trial.number, (None, now))
        if heartbeat != last_heartbeat:
            first_seen = now
        self._seen[trial.number] = (heartbeat, first_seen)
        return now - first_seen > self.heartbeats.grace


def _pruner_of(space: SearchSpace) -> optuna.pruners.BasePruner:
    if not space.settings.prune:
        return optuna.pruners.NopPruner()
    warmup_epochs = space.settings.prune_after or max(1, space.base.training.epochs // 4)
    return optuna.pruners.MedianPruner(
        n_startup_trials=NUM_UNPRUNED_TRIALS, n_warmup_steps=warmup_epochs
    )


def state_of(trial: FrozenTrial) -> str:
    """finished, pruned, failed, running or waiting; lost if its process ended before it did."""
    if trial.state == TrialState.COMPLETE:
        return "finished"
    if trial.state == TrialState.FAIL:
        return "failed" if ERROR in trial.user_attrs else "lost"
    return trial.state.name.lower()


def retried_number(trial: FrozenTrial) -> int | None:
    """The number of the first trial that a retry repeats; None if the trial is no retry."""
    # dualkg 0.2 let Optuna queue retries, which sets the system attribute.
    number = trial.user_attrs.get(RETRY_OF, trial.system_attrs.get("failed_trial"))
    return None if number is None else int(number)


def slots_of(trials: Iterable[FrozenTrial]) -> dict[int, int]:
    """The slot of each trial, by its number.

    The n-th trial that is not a retry has slot n, and a retry has the slot of the trial that it
    repeats. All processes agree on this without a lock, because neither ever changes.
    """
    slots: dict[int, int] = {}
    num_slots = 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        original = retried_number(trial)
        if original is None:
            slots[trial.number] = num_slots
            num_slots += 1
        else:
            slots[trial.number] = slots[original]
    return slots


def trials_by_slot(trials: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The trial that counts for each slot: the first that is not lost, or else the last.

    When two processes retry one trial, the first retry counts.
    """
    trials = sorted(trials, key=lambda trial: trial.number)
    slots = slots_of(trials)
    counted: dict[int, FrozenTrial] = {}
    for trial in trials:
        slot = slots[trial.number]
        if slot not in counted or state_of(counted[slot]) == "lost":
            counted[slot] = trial
    return counted

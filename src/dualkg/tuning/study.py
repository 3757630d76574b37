"""The Optuna study of a search: its database, the trials that count, and the worker that runs
them.
"""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy
import torch
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages._rdb.models import BaseModel
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import get_lock_file
from optuna.trial import FrozenTrial, Trial, TrialState

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.training.checkpoint import Progress, save_tensors
from dualkg.training.recipe import Recipe
from dualkg.training.run import RunFolder
from dualkg.training.trainer import GracefulShutdown, InterruptedRunError, ProgressEvent, Trainer
from dualkg.tuning.space import (
    DONE,
    Range,
    SearchSpace,
    TrialResult,
    TuningProgress,
    TuningResult,
    Value,
)

optuna.logging.set_verbosity(optuna.logging.ERROR)  # progress and failures are reported by dualkg
experimental = partial(warnings.catch_warnings, action="ignore", category=ExperimentalWarning)

HEARTBEAT_SECONDS = 5
GRACE_SECONDS = 40  # a running trial without a heartbeat for this long is failed and retried
MIN_TRIALS_FOR_IMPORTANCE = 8
ERROR = "error"  # user attribute: why a trial failed
# Linux ends a command with the process that starts it, also if that is killed: PR_SET_PDEATHSIG is
# 1.
END_WITH_PARENT = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])"""


def _importance(study: optuna.Study, trials: list[TrialResult]) -> dict[str, float] | None:
    """PED-ANOVA importance of each hyperparameter that differs between finished trials; they sum to
    1.
    """
    finished = [trial.params for trial in trials if trial.state == "finished"]
    names = [
        name
        for name in (finished[0] if finished else {})
        if len({params[name] for params in finished}) > 1
    ]
    if len(finished) < MIN_TRIALS_FOR_IMPORTANCE or not names:
        return None
    from optuna.importance import (
        PedAnovaImportanceEvaluator,
        get_param_importances,
    )  # slow: it imports scikit-learn

    with warnings.catch_warnings(
        action="ignore"
    ):  # of few trials, which the command line says itself
        importance = get_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator(), params=names
        )
    return {name: round(share, 4) for name, share in importance.items()}


def state_of(trial: FrozenTrial) -> str:
    """finished, pruned, failed, running, waiting; or lost, if its process ended before the trial
    did.
    """
    if trial.state == TrialState.FAIL:
        return "failed" if ERROR in trial.user_attrs else "lost"
    return {TrialState.COMPLETE: "finished"}.get(trial.state, trial.state.name.lower())


def trials_by_slot(trials: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The trial that counts for each slot: the first that is not lost, or else the last.

    The n-th trial that is not a retry has slot n, and a retry has the slot of the trial it repeats.
    All processes agree on this without a lock, as neither ever changes. When two processes retry
    one trial, the first retry counts.
    """
    slots: dict[int, int] = {}
    chosen: dict[int, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        slot = slots.setdefault(trial.system_attrs.get("failed_trial", trial.number), len(slots))
        if slot not in chosen or state_of(chosen[slot]) == "lost":
            chosen[slot] = trial
    return chosen


class JournalFile(JournalFileBackend):
    """Optuna's journal, which a killed process cannot damage: an incomplete last line is removed
    before the next.
    """

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with get_lock_file(self._lock), Path(self._file_path).open("r+b") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
            if file.read(1) not in (b"\n", b""):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(
                "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
            )
            file.flush()
            os.fsync(file.fileno())


class SharedJournal(JournalStorage, BaseHeartbeat):
    """A journal in a folder that machines share, with the heartbeats that Optuna's lacks: a file
    for each trial.

    Times are those of the file system, so that the clocks of the machines need not agree.
    """

    def __init__(self, path: Path) -> None:
        self._beats = path.with_name(f"{path.name}.heartbeats")
        self._now = self._beats / f"now-{uuid.uuid4()}"
        super().__init__(JournalFile(str(path)))
        self._beats.mkdir(exist_ok=True)

    def record_heartbeat(self, trial_id: int) -> None:
        (self._beats / str(trial_id)).touch()

    def get_heartbeat_interval(self) -> int:
        return HEARTBEAT_SECONDS

    def get_heartbeat_stale_trial_callback(self) -> None:
        return None

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        running = [
            trial._trial_id for trial in self.get_all_trials(study_id, False, (TrialState.RUNNING,))
        ]
        for trial_id in running:
            if not (
                self._beats / str(trial_id)
            ).exists():  # its process may have been killed before
                self.record_heartbeat(trial_id)
        self._now.touch()
        latest = self._touched(self._now) - GRACE_SECONDS
        self._now.unlink()
        return [
            trial_id for trial_id in running if self._touched(self._beats / str(trial_id)) < latest
        ]

    @staticmethod
    def _touched(path: Path) -> float:
        """The time of a file, which is opened because network file systems cache it otherwise."""
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime


def open_study(
    space: SearchSpace, storage: RDBStorage | SharedJournal, *, data: str, where: str
) -> optuna.Study:
    """Create or load the study of a space; refuse one of the same name that searches another space
    or other data.
    """
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if space.settings.prune:
        warmup_epochs = space.settings.prune_after or max(1, space.base.training.epochs // 4)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warmup_epochs)
    options: dict[str, Any] = {"storage": storage, "study_name": space.name, "pruner": pruner}
    study = optuna.create_study(direction="maximize", load_if_exists=True, **options)
    ours = {**space.as_dict(), "data": data}
    if "dualkg" not in study.user_attrs:
        study.set_user_attr("dualkg", ours)
    saved: dict[str, Any] = study.user_attrs["dualkg"]
    different = [
        "the data" if key == "data" else f"[{key}]" for key in ours if ours[key] != saved.get(key)
    ]
    if different:
        raise RequestError(
            f"{where} holds a search named '{space.name}' with a different setup: "
            f"{' and '.join(different)} {'differs' if len(different) == 1 else 'differ'}. Use "
            "another --out, or another name in [search]."
        )
    return study


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file; special characters in its name are quoted."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def open_storage(url: str) -> RDBStorage | SharedJournal:
    """Open a journal, or a database; retried, as several processes may be creating its tables at
    the same time.
    """
    if url.startswith("journal:") or url.endswith(".log"):
        path = Path(url.removeprefix("journal:"))
        try:
            return SharedJournal(path)
        except OSError as error:
            raise RequestError(f"The storage cannot be opened: {path}: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(
                f"The storage {path} is damaged, or not a journal of Optuna ({error})."
            ) from None
    url = re.sub(r"^postgres(?=[:+])", "postgresql", url)
    connect: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    problem: Exception | None = None
    for _ in range(5):
        try:
            with experimental():
                storage = RDBStorage(
                    url, connect, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS
                )
            if storage.engine.dialect.name == "sqlite":
                _prepare_sqlite(storage.engine)
            return storage
        except sqlalchemy.exc.ArgumentError:
            raise RequestError(
                "--storage should be the URL of a database, such as sqlite:///study.db, or a "
                f"journal in a shared folder, such as journal:/shared/study.log; got '{url}'."
            ) from None
        except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
            reason = str(error.__cause__ or error)
            install = (
                "pip install 'dualkg[postgresql]'" if url.startswith("postgresql:") else reason
            )
            raise RequestError(
                f"The storage needs a database driver that is not installed: {install}"
            ) from None
        except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
            problem = error
            time.sleep(0.3)
    raise RequestError(
        f"The storage cannot be opened: {getattr(problem, 'orig', None) or problem}."
    )


def _prepare_sqlite(engine: sqlalchemy.Engine) -> None:
    """Begin transactions with a lock: SQLite has no row locks, so two processes could take the same
    trial.
    """
    for table in BaseModel.metadata.sorted_tables:
        for index in (
            table.indexes
        ):  # a kill may have left a table without them, and names that are not unique
            index.create(engine, checkfirst=True)
    engine.dispose()

    @sqlalchemy.event.listens_for(engine, "connect")
    def connect(connection: Any, record: object) -> None:
        connection.isolation_level = (
            None  # otherwise Python begins transactions itself, without a lock
        )

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


class FailedTrialError(DualkgError):
    """A trial failed, for a reason that is saved with it, or another process runs it; the search
    continues.
    """


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
    on_progress: Callable[[TuningProgress], None] = lambda progress: None

    def __post_init__(self) -> None:
        self.storage = open_storage(self.url)
        self.study = open_study(
            self.space, self.storage, data=self.graph.fingerprint, where=self.where
        )
        self.progress = TuningProgress(0, self.space.num_trials, None)

    def run(self) -> None:
        """Run trials; at the end wait for those of other processes, in case one is killed."""
        while True:
            if _parent_has_ended():
                raise InterruptedRunError("The process that started this one has ended.")
            self._retry_lost_trials()  # first, since later samples depend on them
            states = self.report_progress()
            if len(states) < self.space.num_trials or "waiting" in states:
                self._run_trial()
            elif "running" in states:
                time.sleep(1)
            else:
                return

    def trials(self) -> dict[int, FrozenTrial]:
        """The trial that counts for each slot of the search; another process may have made one too
        many at the end.
        """
        found = trials_by_slot(self.study.get_trials(deepcopy=False))
        return {slot: trial for slot, trial in found.items() if slot < self.space.num_trials}

    def result(self) -> TuningResult:
        """The results of all processes, whatever was killed in between."""
        trials = []
        for slot, trial in sorted(self.trials().items()):
            value = trial.value if trial.values else None
            seconds = round(trial.duration.total_seconds(), 3) if trial.duration else None
            error = trial.user_attrs.get(ERROR, "")
            trials.append(TrialResult(slot, state_of(trial), value, seconds, trial.params, error))
        return TuningResult(
            self.space, self.graph.name, tuple(trials), _importance(self.study, trials)
        )

    def _retry_lost_trials(self) -> None:
        """Fail the trials without a recent heartbeat, and queue those again whose process was
        interrupted or killed.
        """
        if isinstance(
            self.storage, RDBStorage
        ):  # Optuna ignores a trial that was killed before its first heartbeat
            with self.storage.engine.connect() as connection:
                alive = set(
                    connection.execute(
                        sqlalchemy.text("SELECT trial_id FROM trial_heartbeats")
                    ).scalars()
                )
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if trial._trial_id not in alive:
                    self.storage.record_heartbeat(trial._trial_id)
        with experimental():
            optuna.storages.fail_stale_trials(self.study)
            retry = RetryHeartbeatStaleTrialCallback()
        for trial in self.trials().values():
            if state_of(trial) == "lost":  # each samples the same values by its seed
                lost = deepcopy(trial)
                lost.params = {}
                lost.distributions = {}  # not only those that it had sampled: their order matters
                retry(self.study, lost)

    def report_progress(self) -> list[str]:
        """Report the progress of all processes; return the states of the trials."""
        trials = self.trials().values()
        states = [state_of(trial) for trial in trials]
        best = max(
            (trial.value for trial in trials if state_of(trial) == "finished" and trial.value),
            default=None,
        )
        self.progress = TuningProgress(
            sum(state in DONE for state in states), self.space.num_trials, best
        )
        self.on_progress(self.progress)
        return states

    def _run_trial(self) -> None:
        try:
            self.study.optimize(self._objective, n_trials=1, catch=(FailedTrialError,))
        except (UpdateFinishedTrialError, ValueError) as error:
            # Without heartbeats for a while, as on a suspended machine, another process has failed
            # and retried it.
            if isinstance(error, ValueError) and "Cannot tell a" not in str(error):
                raise
        if self.device != "cpu":
            torch.cuda.empty_cache()  # other processes may share this GPU

    def _objective(self, trial: Trial) -> float:
        trials = self.trials()
        slot = next((slot for slot, one in trials.items() if one.number == trial.number), None)
        if slot is None:
            raise FailedTrialError("Another process runs this trial.")
        self.study.sampler = sampler_for(self.space, slot)
        params = {
            name: suggest(trial, name, choices) for name, choices in self.space.dimensions.items()
        }
        for other in trials.values():
            if other.params == params and state_of(other) == "finished" and other.value is not None:
                return other.value  # sampled twice, trained once
        try:
            return self._train(trial, params)
        except (RequestError, DivergedError, torch.OutOfMemoryError) as error:
            memory = f"{self.device} is out of memory. Search smaller dimensions and batches, or use fewer --jobs."
            reason = (
                memory
                if isinstance(error, torch.OutOfMemoryError)
                else str(error.__cause__ or error)
            )
            trial.set_user_attr(ERROR, reason)
            raise FailedTrialError(reason) from None

    def _train(self, trial: Trial, params: Mapping[str, Value]) -> float:
        """Train one recipe and return its validation MRR, reporting it to the pruner on the way."""
        recipe = self.space.trial_recipe(params)
        if self.launcher:
            before = self.study.get_trials(deepcopy=False)[trial.number].system_attrs.get(
                "retry_history", ()
            )
            for number in before:  # their processes were killed
                shutil.rmtree(self.folder / "trials" / str(number), ignore_errors=True)
                (self.folder / "trials" / f"{number}.log").unlink(missing_ok=True)
            return self._launch(recipe, self.folder / "trials" / str(trial.number))
        trainer = Trainer.of_recipe(recipe, self.graph, device=torch.device(self.device))
        reported = set[int]()
        history = trainer.progress.history

        def on_progress(event: ProgressEvent) -> None:
            if history and len(history) not in reported and "valid_mrr" in history[-1]:
                reported.add(len(history))
                trial.report(history[-1]["valid_mrr"], step=len(history))
                if trial.should_prune():
                    raise TrialPruned
            # The counts are those before this trial: reading the storage takes longer than a
            # training step.
            self.on_progress(replace(self.progress, training=event))

        trainer.on_progress = on_progress
        trainer.run()
        return float(
            trainer.progress.best_mrr
            if recipe.validation.keep == "best"
            else history[-1]["valid_mrr"]
        )

    def _launch(self, recipe: Recipe, path: Path) -> float:
        """Train one recipe by a command, in a run folder of its own, and return its validation
        MRR.
        """
        shutil.rmtree(path, ignore_errors=True)  # of a search that was deleted
        folder = RunFolder(path)
        begin = {
            "when": "start",
            "optimizer": recipe.optimizer.name,
            "progress": asdict(Progress()),
        }
        with folder.create(recipe, self.graph, torch.device(self.device)) as fresh:
            save_tensors({}, fresh.checkpoint, about=begin)
        words = [
            *self.launcher,
            "resume",
            str(path),
            *(["--device", "cpu"] if self.device == "cpu" else []),
        ]
        if recipe.own_classes:  # which are trusted here
            words.append("--trust-code")
        stop = GracefulShutdown()
        log = path.with_name(f"{path.name}.log")
        terminated = False
        null = subprocess.DEVNULL
        first = (
            [sys.executable, "-IS", "-c", END_WITH_PARENT, str(os.getpid())]
            if sys.platform == "linux"
            else []
        )
        with (
            stop.listening(),
            log.open("w", encoding="utf-8") as file,
            subprocess.Popen([*first, *words], stdin=null, stdout=null, stderr=file) as process,
        ):
            while process.poll() is None:
                if (stop.requested or _parent_has_ended()) and not terminated:
                    process.terminate()
                    terminated = True
                self.on_progress(self.progress)
                time.sleep(0.1)
        if terminated:
            raise InterruptedRunError("Stopped.")
        if process.returncode or not folder.finished:
            reason = _reason(log.read_text(encoding="utf-8", errors="replace").splitlines())
            raise RequestError(
                f"{' '.join(words)} ended with status {process.returncode}; see {log}: {reason}"
            )
        found = [
            entry["valid_mrr"]
            for entry in json.loads(folder.history.read_text())
            if "valid_mrr" in entry
        ]
        shutil.rmtree(path)  # the best recipe is trained again
        log.unlink()
        return float(max(found) if recipe.validation.keep == "best" else found[-1])


def _parent_has_ended() -> bool:
    """Whether this is a worker process, and the process that started it has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _reason(lines: list[str]) -> str:
    """Why a command failed: the last error of dualkg, as torchrun prints pages after it, or else
    the last words.
    """
    spoken = [line.strip()[:500] for line in lines if re.search(r"\w", line)] or [
        "it printed nothing"
    ]
    return next((line for line in reversed(spoken) if line.startswith("dualkg: ")), spoken[-1])


def sampler_for(space: SearchSpace, slot: int) -> BaseSampler:
    """A sampler seeded by the slot of a trial, so that processes and interruptions do not change
    what is sampled.
    """
    seed = int(np.random.SeedSequence([space.settings.seed, slot]).generate_state(1)[0])
    with experimental():
        if (
            space.settings.method == "grid"
        ):  # Optuna's GridSampler may give one point to two processes
            return PartialFixedSampler(space.point(slot), RandomSampler(seed))
        return (
            RandomSampler(seed)
            if space.settings.method == "random"
            else TPESampler(seed=seed, constant_liar=True)
        )


def suggest(trial: Trial, name: str, choices: tuple[Value, ...] | Range) -> Value:
    if isinstance(choices, tuple):
        return choices[choices.index(trial.suggest_categorical(name, choices))]
    if isinstance(choices.low, float) or isinstance(choices.step, float):
        return trial.suggest_float(
            name, choices.low, choices.high, step=choices.step, log=choices.log
        )
    return trial.suggest_int(
        name, choices.low, int(choices.high), step=int(choices.step or 1), log=choices.log
    )

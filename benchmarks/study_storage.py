"""What the storage of a search costs, and how soon the trial of a killed process is repeated.

Trials that train nothing, in one process and in two; then a process that is killed by SIGKILL while
it has a trial, after its first heartbeat and before it. Heartbeats of dualkg are attributes of
trials, which every storage of Optuna has. Heartbeats of Optuna's `RDBStorage` are measured beside
them. A heartbeat comes after a second here, and a trial is lost after three; where nobody is
killed, after an hour, so that no process takes another for dead on a busy machine.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import measurement

NUM_TRIALS = 200
NUM_HEARTBEATS = 100
INTERVAL_SECONDS = 1
GRACE_SECONDS = 3
PATIENT_SECONDS = 3600
LIMIT_SECONDS = 60  # a trial that was not repeated after this time never is
NEVER = "never"


@dataclass(frozen=True)
class Job:
    """A storage by its URL, and whose heartbeats show that a process lives."""

    storage: str
    url: str
    heartbeats: str

    @property
    def name(self) -> str:
        return f"{self.storage}, heartbeats of {self.heartbeats}"


JOBS = [
    Job("SQLite", "sqlite:///study.db", "dualkg"),
    Job("SQLite", "sqlite:///study.db", "Optuna"),
    Job("journal", "journal:study.log", "dualkg"),
]


# -- a process of a search, in the folder of its storage ----------------------


class DualkgSearch:
    """A search without trainings, as `dualkg.tuning` runs it."""

    def __init__(self, url: str, num_trials: int, grace_seconds: int) -> None:
        from dualkg.tuning.space import space_from
        from dualkg.tuning.storage import open_storage
        from dualkg.tuning.study import Heartbeats, SearchStudy

        tables_of_space = {
            "space": {"optimizer.learning_rate": {"low": 0.01, "high": 1.0}},
            "search": {"method": "random", "trials": num_trials},
        }
        self.space = space_from(tables_of_space, source="the benchmark", name="benchmark")
        self.study = SearchStudy(
            self.space,
            open_storage(url),
            data="none",
            heartbeats=Heartbeats(INTERVAL_SECONDS, grace_seconds),
        )

    def run(self) -> None:
        from dualkg.tuning.results import DONE
        from dualkg.tuning.worker import sampler_for, suggest

        while True:
            self.study.retry_lost_trials()
            states = self.study.states()
            if len(states) == self.space.num_trials and "waiting" not in states:
                if all(state in DONE for state in states):
                    return
                time.sleep(0.05)
                continue
            trial, slot = self.study.take_trial()
            if slot is None:
                continue
            with self.study.heartbeat(trial):
                self.study.optuna_study.sampler = sampler_for(self.space, slot)
                for name, choices in self.space.dimensions.items():
                    suggest(trial, name, choices)
            self.study.tell(trial, 0.5)

    def hang(self, *, with_heartbeat: bool) -> None:
        """Take a trial, say so, and never end it."""
        trial, _ = self.study.take_trial()
        if not with_heartbeat:
            _wait_for_the_kill()
        with self.study.heartbeat(trial):
            while "heartbeat" not in self.study.trials()[0].user_attrs:
                time.sleep(0.01)
            _wait_for_the_kill()


class OptunaSearch:
    """A search without trainings by `Study.optimize`, whose heartbeats `RDBStorage` stores."""

    def __init__(self, url: str, num_trials: int, grace_seconds: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.num_trials = num_trials
        with warnings.catch_warnings(action="ignore"):
            storage = optuna.storages.RDBStorage(
                url,
                {"connect_args": {"timeout": 60}},
                heartbeat_interval=INTERVAL_SECONDS,
                grace_period=grace_seconds,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
            )
        self.study = optuna.create_study(
            storage=storage,
            study_name="benchmark",
            sampler=optuna.samplers.RandomSampler(0),
            load_if_exists=True,
        )

    def run(self) -> None:
        import optuna

        def objective(trial: optuna.Trial) -> float:
            return trial.suggest_float("optimizer.learning_rate", 0.01, 1.0)

        while True:
            with warnings.catch_warnings(action="ignore"):
                optuna.storages.fail_stale_trials(self.study)
            names = [trial.state.name for trial in self.study.get_trials(deepcopy=False)]
            if names.count("COMPLETE") >= self.num_trials:
                return
            num_taken = len(names) - names.count("FAIL") - names.count("WAITING")
            if num_taken < self.num_trials:
                self.study.optimize(objective, n_trials=1)
            else:
                time.sleep(0.05)

    def hang(self, *, with_heartbeat: bool) -> None:
        if not with_heartbeat:
            with warnings.catch_warnings(action="ignore"):
                self.study.ask()
            _wait_for_the_kill()

        def objective(trial: object) -> float:
            time.sleep(2 * INTERVAL_SECONDS)
            _wait_for_the_kill()
            return 0.0

        self.study.optimize(objective, n_trials=1)


def _wait_for_the_kill() -> None:
    print("ready", flush=True)
    time.sleep(3600)


def open_search(
    url: str, heartbeats: str, num_trials: int, *, grace_seconds: int
) -> DualkgSearch | OptunaSearch:
    if heartbeats == "dualkg":
        return DualkgSearch(url, num_trials, grace_seconds)
    return OptunaSearch(url, num_trials, grace_seconds)


def run_process(url: str, heartbeats: str, num_trials: int, part: str) -> dict[str, Any]:
    """The task of one process: the whole search, or a trial in which it will be killed."""
    grace_seconds = PATIENT_SECONDS if part == "run" else GRACE_SECONDS
    search = open_search(url, heartbeats, num_trials, grace_seconds=grace_seconds)
    # What `run` imports is part of no measurement.
    import_module("dualkg.tuning.worker")
    if part == "watch":
        print("ready", flush=True)
    if part in ("run", "watch"):
        started = time.perf_counter()
        search.run()
        return {"seconds": time.perf_counter() - started}
    search.hang(with_heartbeat=part == "hang with a heartbeat")
    return {}


# -- what is measured ---------------------------------------------------------


def start(job: Job, folder: Path, *, num_trials: int, part: str) -> subprocess.Popen[str]:
    task = {
        "what": "process",
        "url": job.url,
        "heartbeats": job.heartbeats,
        "num_trials": num_trials,
        "part": part,
    }
    words = [sys.executable, str(Path(__file__).resolve()), "--task", json.dumps(task)]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True)


def measure_trials(job: Job, *, num_trials: int, processes: int) -> float:
    """Milliseconds per trial of a search in its slowest process, without the start of Python."""
    with tempfile.TemporaryDirectory() as folder:
        _create(job, Path(folder), num_trials)
        started = [
            start(job, Path(folder), num_trials=num_trials, part="run") for _ in range(processes)
        ]
        seconds: list[float] = []
        for process in started:
            output, _ = process.communicate()
            seconds.append(json.loads(output.splitlines()[-1])["seconds"])
    return round(1000 * max(seconds) / num_trials, 2)


def _create(job: Job, folder: Path, num_trials: int) -> None:
    """Create the storage, so that no process waits for another one to do so."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        open_search(job.url, job.heartbeats, num_trials, grace_seconds=PATIENT_SECONDS)
    finally:
        os.chdir(before)


def measure_recovery(job: Job, part: str) -> float | str:
    """Seconds from a kill to the end of a search that repeats the trial; or `never`.

    The process that repeats it has opened the storage before the kill.
    """
    with tempfile.TemporaryDirectory() as folder:
        hanging = start(job, Path(folder), num_trials=1, part=part)
        assert hanging.stdout is not None
        assert hanging.stdout.readline() == "ready\n"
        replacing = start(job, Path(folder), num_trials=1, part="watch")
        assert replacing.stdout is not None
        assert replacing.stdout.readline() == "ready\n"
        hanging.send_signal(signal.SIGKILL)
        hanging.communicate()
        killed = time.perf_counter()
        try:
            replacing.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            replacing.kill()
            replacing.communicate()
            return NEVER
        return round(time.perf_counter() - killed, 1)


def measure_heartbeat_bytes() -> float:
    """Bytes by which a journal grows with a heartbeat; a database replaces the last one."""
    from dualkg.tuning.study import HEARTBEAT

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.log"
        search = DualkgSearch(f"journal:{path}", 1, PATIENT_SECONDS)
        trial, _ = search.study.take_trial()
        before = path.stat().st_size
        for _ in range(NUM_HEARTBEATS):
            trial.set_user_attr(HEARTBEAT, time.time())
        return round((path.stat().st_size - before) / NUM_HEARTBEATS, 1)


def measure_job(job: Job, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    num_trials = 10 if quick else NUM_TRIALS
    measured: dict[str, Any] = {}
    for processes in (1, 2):
        key = f"ms_per_trial_{processes}"
        measured[key] = measure_trials(job, num_trials=num_trials, processes=processes)
    measured["recovery_seconds"] = measure_recovery(job, "hang with a heartbeat")
    measured["recovery_seconds_before_first_heartbeat"] = measure_recovery(job, "hang without")
    if job.storage == "journal":
        measured["bytes_per_heartbeat"] = measure_heartbeat_bytes()
    measurement.log(f"{job.name}: {json.dumps(measured)}")
    yield {"measured": measured, "num_trials": num_trials, "grace_seconds": GRACE_SECONDS}


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measurement.run(
        "study_storage",
        choices,
        jobs={"cpu": JOBS, "cuda": JOBS},
        tasks={"process": run_process},
        measure=partial(measure_job, quick=choices.quick),
    )


if __name__ == "__main__":
    main()

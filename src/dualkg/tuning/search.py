"""Search a space: run the trials of a study in one or several processes and return the best."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualkg.data.graph import Graph, load_saved_graph, save_graph
from dualkg.data.loading import load_graph
from dualkg.errors import (
    PYTHON,
    DamagedFile,
    DualkgError,
    InvalidValue,
    PathExists,
    Unsupported,
    Words,
)
from dualkg.extras import optional_import
from dualkg.files import locked
from dualkg.logs import ProgressLog, TimeLeft
from dualkg.training.api import choose_device, load_recipe_graph
from dualkg.training.errors import InterruptedRunError
from dualkg.training.run import RunFolder
from dualkg.training.shutdown import signal_handler
from dualkg.tuning.results import TuningProgress, TuningResult
from dualkg.tuning.space import SearchSpace, load_space, space_from

if TYPE_CHECKING:
    from dualkg.tuning.study import Heartbeats
    from dualkg.tuning.worker import Worker

PROGRESS_SECONDS = 0.5  # between two reports of what the worker processes have done
EXIT_INTERRUPTED = 130


class StorageFailed(DualkgError):
    """The storage of a study failed during the search."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__()
        self.where = where
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.where} failed: {self.reason}. Finished trials are saved in it."


class WorkersEnded(DualkgError):
    """Worker processes ended before the search did."""

    def __init__(self, num_ended: int, num_jobs: int) -> None:
        super().__init__()
        self.num_ended = num_ended
        self.num_jobs = num_jobs

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.num_ended} of {self.num_jobs} processes ended early; finished trials are saved."
        )


class SearchInterrupted(InterruptedRunError):
    """A search was stopped by its user."""

    def __init__(self, num_done: int, num_trials: int) -> None:
        super().__init__()
        self.num_done = num_done
        self.num_trials = num_trials

    def message(self, words: Words = PYTHON) -> str:
        return f"Stopped; {self.num_done} of {self.num_trials} trials are done and saved."


def search(
    space: SearchSpace | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    graph: Graph | str | None = None,
    device: str | torch.device | None = None,
    storage: str | None = None,
    jobs: int = 1,
    launcher: Sequence[str] = (),
    heartbeats: Heartbeats | None = None,
    on_progress: Callable[[TuningProgress], None] | None = None,
) -> TuningResult:
    """Search a space for the recipe with the best validation MRR; called again, it resumes.

    The test split is never used.

    Args:
        space: A `SearchSpace`, its file, or the tables of the file as a mapping.
        out: Folder of the search, which resumes there. Default: runs/tune-NAME.
        graph: Used in place of the graph that the space names.
        device: Default: a GPU if there is one.
        storage: URL of a database that several machines may share, or of a journal in a folder that
            they share, `journal:/shared/study.log`. Default: the file study.db in `out`.
        jobs: Number of processes that train at the same time.
        launcher: Command that starts each trial, of which none is pruned then, such as
            `["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "dualkg"]`.
        heartbeats: When the trial of another process counts as lost.
        on_progress: Called with progress events.

    Returns:
        The trials, and the best recipe.

    Examples:
        >>> space = {"training": {"epochs": 1}, "space": {"model.dim": [4, 8]}}
        >>> result = kg.search(space, graph=graph, out="runs/search")  # doctest: +SKIP
    """
    with optional_import("optuna", purpose="Tuning"):
        from optuna.exceptions import StorageInternalError

        from dualkg.tuning.storage import sqlite_url
        from dualkg.tuning.worker import Worker

    space = _as_space(space)
    graph = _training_graph(space, graph)
    out = Path(out or space.folder)
    _check_free(out)
    _check_launcher(launcher)
    out.mkdir(parents=True, exist_ok=True)
    where = "The storage" if storage else str(out)
    log = ProgressLog(f"Tuning {space.base.model.name} on {graph.name}")
    estimate = TimeLeft()

    def report(event: TuningProgress) -> None:
        seconds_left = estimate(event.num_parts_done, event.num_trials)
        event = replace(event, seconds_left=seconds_left)
        is_last = event.num_done >= event.num_trials
        if on_progress:
            on_progress(event)
        log(
            lambda: event.text if is_last else f"{event.text}  {event.time_left}".rstrip(),
            last=is_last,
        )

    options: dict[str, Any] = {
        "space": space,
        "url": storage or sqlite_url(out / "study.db"),
        "device": str(choose_device(device)),
        "launcher": launcher,
        "folder": out.resolve(),
        "heartbeats": heartbeats,
    }
    try:
        worker = Worker(graph, **options, where=where, on_progress=report)
        result, interrupted = _finish(worker, jobs, options)
    except (StorageInternalError, json.JSONDecodeError) as error:
        raise _storage_error(where, error) from None

    # Processes that share the study end at the same time, and may share the folder too.
    with locked(out, wait=True):
        result.write(out)
    if interrupted:
        raise SearchInterrupted(result.num_done, space.num_trials)
    return result


def _finish(worker: Worker, jobs: int, options: dict[str, Any]) -> tuple[TuningResult, bool]:
    """Try what is left of a search; return the result, and whether its user stopped it."""
    started = time.monotonic()
    num_done_before = worker.result().num_done
    interrupted = False
    try:
        if jobs == 1:
            worker.run()
        else:
            _run_processes(worker, jobs, options)
    except (KeyboardInterrupt, InterruptedRunError):
        interrupted = True

    result = worker.result()
    num_new = result.num_done - num_done_before
    if num_new > 0:
        minutes = (time.monotonic() - started) / 60
        result = replace(result, per_minute=round(num_new / minutes, 2))
    return result, interrupted


def _storage_error(where: str, error: Exception) -> DualkgError:
    """What a storage says of a failure, without the statement of SQL that failed."""
    reason = str(error.__cause__ or error).splitlines()[0]
    reason = re.sub(r"^\([\w.]+\) ", "", reason)
    if "malformed" in reason or isinstance(error, json.JSONDecodeError):
        return DamagedFile(where, reason, advice="Search in another folder.")
    return StorageFailed(where, reason)


def _as_space(space: SearchSpace | str | Path | Mapping[str, Any]) -> SearchSpace:
    if isinstance(space, SearchSpace):
        return space
    if isinstance(space, Mapping):
        return space_from(space, source="The search space")
    if isinstance(space, (str, Path)):
        return load_space(space)
    raise InvalidValue(
        "space",
        expected="a .toml file, a mapping of its tables, or a SearchSpace",
        found=space,
    )


def _training_graph(space: SearchSpace, graph: Graph | str | None) -> Graph:
    """The graph of a search without its test triples, which are not even used as a filter."""
    if isinstance(graph, str):
        graph = load_graph(graph)
    elif graph is None:
        graph = load_recipe_graph(space.base)
    if not len(graph.valid):
        raise Unsupported(graph.name, "has no validation triples, and tuning selects by their MRR")
    return replace(graph, test=np.empty((0, 3), dtype=np.int32))


def _check_free(out: Path) -> None:
    if RunFolder(out).recipe.exists():
        kind = "the folder of a run, and a search needs a folder of its own"
        raise PathExists(out, what=kind, overwritable=False)


def _check_launcher(launcher: Sequence[str]) -> None:
    if launcher and shutil.which(launcher[0]) is None:
        raise InvalidValue(
            "launcher",
            expected="a command that starts with an installed program",
            found=launcher[0],
        )


def _run_processes(worker: Worker, num_jobs: int, options: dict[str, Any]) -> None:
    """Run several worker processes and wait for them."""
    # They are spawned, because CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    num_threads = max(1, torch.get_num_threads() // num_jobs)
    with (
        tempfile.TemporaryDirectory() as folder,
        signal_handler(signal.default_int_handler, signal.SIGTERM),
    ):
        path = Path(folder) / "graph"
        save_graph(worker.graph, path)
        processes = []
        for _ in range(num_jobs):
            process = context.Process(target=_run_worker, args=(path, num_threads, options))
            processes.append(process)
        # They inherit that Ctrl-C is ignored: it reaches them through this process.
        with signal_handler(signal.SIG_IGN, signal.SIGINT):
            for process in processes:
                process.start()
        try:
            while any(process.is_alive() for process in processes):
                worker.report_progress()
                time.sleep(PROGRESS_SECONDS)
        finally:
            for process in processes:
                process.terminate()  # a training stops after its current step
                process.join()
    worker.report_progress()
    num_ended = sum(process.exitcode != 0 for process in processes)
    if num_ended and worker.progress.num_done < worker.space.num_trials:
        raise WorkersEnded(num_ended, num_jobs)


def _run_worker(path: Path, num_threads: int, options: dict[str, Any]) -> None:
    """The main function of a worker process."""
    from dualkg.tuning.worker import Worker

    torch.set_num_threads(num_threads)
    try:
        Worker(load_saved_graph(path), **options).run()
    except (InterruptedRunError, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except DualkgError as error:
        print(f"dualkg: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

"""Tune a recipe: run the trials of a study in one or several processes and return the best."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualkg.data.graph import Graph, load_saved_graph, save_graph
from dualkg.data.loading import load_graph
from dualkg.errors import DualkgError, RequestError
from dualkg.extras import optional_import
from dualkg.files import locked
from dualkg.logs import ProgressLog
from dualkg.training.api import choose_device, load_recipe_graph
from dualkg.training.run import RunFolder
from dualkg.training.trainer import InterruptedRunError, signal_handler
from dualkg.tuning.space import SearchSpace, TuningProgress, TuningResult, load_space, space_from

if TYPE_CHECKING:
    from dualkg.tuning.study import Worker


def tune(
    space: SearchSpace | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    graph: Graph | str | None = None,
    device: str | torch.device | None = None,
    storage: str | None = None,
    jobs: int = 1,
    launcher: Sequence[str] = (),
    on_progress: Callable[[TuningProgress], None] | None = None,
) -> TuningResult:
    """Search a space for the recipe with the best validation MRR; called again, it resumes.

    `space` is a file, a `SearchSpace`, or the tables of a file as a mapping. `out` is
    runs/tune-NAME by default. The study is stored in `out`/study.db, or in the database with the
    URL `storage`, which several machines may share, or in a journal in a folder that they share,
    `journal:/shared/study.log`. `jobs` processes train in parallel. With a `launcher`, such as
    `["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "dualkg"]`, it starts each trial,
    and none is pruned. The test split is never used.
    """
    with optional_import("optuna", purpose="Tuning"):
        from optuna.exceptions import StorageInternalError

        from dualkg.tuning.study import Worker, sqlite_url
    if isinstance(space, Mapping):
        space = space_from(space, source="The search space")
    elif isinstance(space, (str, Path)):
        space = load_space(space)
    elif not isinstance(space, SearchSpace):
        kind = type(space).__name__
        raise RequestError(
            "A search space is a .toml file, a mapping of its tables, or a SearchSpace; got "
            f"{kind}."
        )
    graph = load_graph(graph) if isinstance(graph, str) else graph or load_recipe_graph(space.base)
    if not len(graph.valid):
        raise RequestError(
            f"{graph.name} has no validation triples, and tuning selects by their MRR."
        )
    out = Path(out or space.folder)
    device = str(choose_device(device))
    if RunFolder(out).recipe.exists():
        raise RequestError(f"{out} contains a run; tuning needs a folder of its own: use --out.")
    if launcher and shutil.which(launcher[0]) is None:
        raise RequestError(
            "--launcher should start with a program that is installed; there is no "
            f"'{launcher[0]}'."
        )
    out.mkdir(parents=True, exist_ok=True)
    graph = dataclasses.replace(
        graph, test=np.empty((0, 3), dtype=np.int32)
    )  # not even to filter by
    url = storage or sqlite_url(out / "study.db")
    where = "The storage" if storage else str(out)
    log = ProgressLog(f"Tuning {space.base.model.name} on {graph.name}")

    def report(event: TuningProgress) -> None:
        if on_progress:
            on_progress(event)
        log(lambda: event.text, last=event.num_done >= event.num_trials)

    options: dict[str, Any] = {"space": space, "url": url, "device": device}
    options |= {"launcher": launcher, "folder": out.resolve()}
    worker = Worker(graph, **options, where=where, on_progress=report)
    started = time.monotonic()
    before = worker.result().num_done
    interrupted = False
    try:
        if jobs == 1:
            worker.run()
        else:
            _run_processes(worker, jobs, options)
    except (KeyboardInterrupt, InterruptedRunError):
        interrupted = True
    except (StorageInternalError, json.JSONDecodeError) as error:
        raise DualkgError(
            f"{where} failed: {error.__cause__ or error}. Finished trials are saved in it."
        ) from None
    result = worker.result()
    if result.num_done > before:
        minutes = (time.monotonic() - started) / 60
        result = dataclasses.replace(
            result, per_minute=round((result.num_done - before) / minutes, 2)
        )
    with locked(out, wait=True):  # processes that share the study end at the same time
        result.write(out)
    if interrupted:
        raise InterruptedRunError(
            f"Stopped; {result.num_done} of {space.num_trials} trials are done and saved."
        )
    return result


search = tune  # `kg.search`


def _run_processes(worker: Worker, num_jobs: int, options: dict[str, Any]) -> None:
    """Run several worker processes, spawned because CUDA does not survive a fork, and wait for
    them.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // num_jobs)
    with (
        tempfile.TemporaryDirectory() as folder,
        signal_handler(signal.default_int_handler, signal.SIGTERM),
    ):
        path = Path(folder) / "graph"
        save_graph(worker.graph, path)
        processes = [
            context.Process(target=_run_worker, args=(path, threads, options))
            for _ in range(num_jobs)
        ]
        with signal_handler(
            signal.SIG_IGN, signal.SIGINT
        ):  # Ctrl-C reaches them through this process
            for process in processes:
                process.start()
        try:
            while any(process.is_alive() for process in processes):
                worker.report_progress()
                time.sleep(0.5)
        finally:
            for process in processes:
                process.terminate()  # a training stops after its current step
                process.join()
    worker.report_progress()
    num_failed = sum(process.exitcode != 0 for process in processes)
    if num_failed and worker.progress.num_done < worker.space.num_trials:
        raise DualkgError(
            f"{num_failed} of {num_jobs} processes ended early; finished trials are saved."
        )


def _run_worker(path: Path, threads: int, options: dict[str, Any]) -> None:
    """The main function of a worker process."""
    from dualkg.tuning.study import Worker

    torch.set_num_threads(threads)
    try:
        Worker(load_saved_graph(path), **options).run()
    except (InterruptedRunError, KeyboardInterrupt):
        sys.exit(130)
    except DualkgError as error:
        print(f"dualkg: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

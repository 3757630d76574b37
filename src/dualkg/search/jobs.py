"""Several processes at one study."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch

from dualkg.data.graph import Graph
from dualkg.data.storage import load_saved_graph, save_graph
from dualkg.errors import DualkgError
from dualkg.search.space import Space
from dualkg.search.study import Ledger, open_study
from dualkg.search.work import Tell, Worker
from dualkg.training.loop import InterruptedRunError


@dataclass(frozen=True)
class Job:
    """What a process needs to take part in a search, but for the graph."""

    space: Space
    url: str
    where: str
    device: str

    def work(self, graph: Graph, tell: Tell) -> None:
        Worker(self.study(graph), self.space, graph, self.device, tell).work()

    def study(self, graph: Graph) -> optuna.Study:
        return open_study(self.space, self.url, data=graph.fingerprint, where=self.where)


def work_side_by_side(job: Job, graph: Graph, num_jobs: int, *, tell: Tell) -> None:
    """Let several processes share the study; they are started anew, as a GPU wants it."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // num_jobs)
    ledger = Ledger(job.study(graph), job.space.num_trials)
    with tempfile.TemporaryDirectory() as folder, _handling(signal.SIGTERM, signal.default_int_handler):
        path = Path(folder) / "graph"
        save_graph(graph, path)
        processes = [context.Process(target=_take_part, args=(job, path, threads)) for _ in range(num_jobs)]
        with _handling(signal.SIGINT, signal.SIG_IGN):  # they are stopped from here
            for process in processes:
                process.start()
        try:
            while any(process.is_alive() for process in processes):
                tell(ledger.standing(), None)
                time.sleep(0.5)
        finally:
            for process in processes:
                process.terminate()  # which stops a training after its step
                process.join()
    early = sum(process.exitcode != 0 for process in processes)
    if early and ledger.standing().work != "done":
        raise DualkgError(f"{early} of {num_jobs} processes ended early; what is done is kept.")


def _take_part(job: Job, path: Path, threads: int) -> None:
    """The life of one of several processes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(threads)
    try:
        job.work(load_saved_graph(path), lambda standing, moment: None)
    except (InterruptedRunError, KeyboardInterrupt):
        sys.exit(130)
    except DualkgError as error:
        print(f"dualkg: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def _handling(number: signal.Signals, handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """Answer a signal otherwise for a while; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)

"""Training and resuming in the processes that `torchrun` has started, with the same events.

This is the only module that calls the entry points of `dualkg.training.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dualkg.errors import InvalidValue
from dualkg.inference.api import open_run
from dualkg.models.base import Model
from dualkg.models.partial import PartialModel
from dualkg.training.api import TrainingOptions
from dualkg.training.callbacks import find_callbacks
from dualkg.training.distributed import (
    load_in_processes,
    processes,
    resume_in_processes,
    train_in_processes,
)
from dualkg.training.launcher import num_processes
from dualkg.training.run import Run, TrainedRun
from dualkg.training.run_folder import RunFolder
from dualkg.workflows.events import (
    Evaluated,
    Event,
    OnEvent,
    Saved,
    TrainingPlanned,
    TrainingStarted,
)
from dualkg.workflows.sources import TrainingSource

__all__ = ["in_first_process", "is_first_process", "num_processes", "opened", "resume_together"]
__all__ += ["train_together"]


def is_first_process() -> bool:
    """Whether this is the process that reports and writes: the only one, or that of index 0."""
    return num_processes() == 1 or os.environ["RANK"] == "0"


def train_together(
    read: Callable[[OnEvent], TrainingSource], options: TrainingOptions
) -> TrainedRun:
    """Train the recipe of a source in all processes, each of which calls this.

    The first process reads the source alone, so that what it refuses is reported once, and the
    others wait for it without a limit. It also gets all events.
    """
    folder = options.folder
    if folder is None:
        raise InvalidValue("out", expected="a run folder where several processes train", found=None)
    with processes(options.device) as group:
        report = options.on_event if group.first else _ignore
        source = group.in_turn(lambda: read(report))
        report(TrainingPlanned(source.recipe, source.graph))
        run = train_in_processes(
            source.recipe,
            source.graph,
            group,
            out=folder.path,
            overwrite=options.overwrite,
            resume_unfinished=options.resume_unfinished,
            on_progress=report,
            callbacks=find_callbacks(options.callbacks) if group.first else [],
            on_start=lambda expectation: report(_started(folder, expectation)),
        )
        _report_results(run, report)
        return run


@contextmanager
def opened(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    check: Callable[[], object] = lambda: None,
) -> Iterator[Run]:
    """A finished run; under `torchrun`, each process has a part of its model.

    All processes then have to do the same with it, until the end of the block. The first one calls
    `check` before, and all fail if it does.
    """
    if num_processes() == 1:
        check()
        yield open_run(path, device=device)
        return
    with processes(device) as group:
        group.on_first(check)
        yield load_in_processes(path, group)


def in_first_process(run: Run) -> Model | None:
    """The whole model of a run, for work that one process does; None in the others.

    Where several processes share a model, they send its rows to the first, which maps them in a
    file. The others have nothing more to do.
    """
    if isinstance(run.model, PartialModel):
        return run.model.mapped()
    return run.model if run.model.is_first else None


def resume_together(options: TrainingOptions) -> TrainedRun:
    """Resume a run of several processes in any number of processes, one included."""
    folder = options.folder
    assert folder is not None
    run = resume_in_processes(
        folder.path,
        device=options.device,
        on_progress=options.on_event,
        callbacks=options.callbacks,
        trust_code=options.trust_code,
        on_start=lambda expectation: options.on_event(_started(folder, expectation)),
    )
    if is_first_process():
        _report_results(run, options.on_event)
    return run


def _started(folder: RunFolder, expectation: str) -> TrainingStarted:
    engine = str(folder.saved_environment.get("engine") or "")
    return TrainingStarted(engine, folder.path, expectation)


def _report_results(run: TrainedRun, on_event: OnEvent) -> None:
    on_event(Evaluated(run.reports))
    if run.folder:
        on_event(Saved(run.folder))


def _ignore(event: Event) -> None:
    """Report nothing: the first process does."""

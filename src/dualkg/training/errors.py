"""Errors of runs, of their folders and of trainings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dualkg.errors import DualkgError, RequestError


class NotARun(RequestError):
    """A path is not the folder of a run; `nearby` are folders that are."""

    def __init__(self, path: Path, reason: str, *, nearby: Sequence[str] = ()) -> None:
        advice = "Make one with: dualkg train RECIPE"
        if nearby:
            advice = f"Runs nearby: {', '.join(nearby)}."
        super().__init__(f"{path} {reason}. {advice}")
        self.path = path


class RunNotFinished(RequestError):
    """A run was interrupted; `resumable` if it can be resumed, or else it is trained again.

    `wanted` is what could not be done: to use the run, to write its folder, or to resume it.
    """

    def __init__(
        self,
        path: Path,
        *,
        resumable: bool,
        wanted: Literal["use", "write", "resume"] = "use",
    ) -> None:
        state = "cannot be resumed" if wanted == "resume" else "is not finished"
        resume = f"dualkg resume {shlex.quote(str(path))}"
        if wanted == "write":
            advice = f"Resume it with: {resume}, or replace it with `overwrite=True`."
        elif resumable:
            advice = f"Resume it with: {resume}"
        else:
            recipe = shlex.quote(str(path / "recipe.toml"))
            again = f"dualkg train {recipe} --overwrite --out {shlex.quote(str(path))}"
            advice = f"It has no checkpoint; train it again: {again}"
        super().__init__(f"The run {path} {state}. {advice}")
        self.path = path
        self.resumable = resumable


class RunInTraining(RequestError):
    """A run has no results yet: another process, the `holder` of its lock, is at work on it."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"The run {path} is in training ({holder}). Its results come when that is done."
        )
        self.path = path


class DamagedRun(RequestError):
    """A file of a finished run is not what was saved."""

    def __init__(self, run: Path, file: str, reason: str) -> None:
        check = f"dualkg check {shlex.quote(str(run))}"
        super().__init__(f"{run / file} is damaged: {reason}. To see what can be saved: {check}")
        self.run = run
        self.file = file


class OtherSource(RequestError):
    """A file was derived from another run than the run that it is used with."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} was made from another run: the weights, the recipe or the graph are other "
            "ones here."
        )
        self.path = path


class InterruptedRunError(DualkgError):
    """Work was stopped by its user."""

    exit_code = 130

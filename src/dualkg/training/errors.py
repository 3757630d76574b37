"""Errors of runs, of their folders and of trainings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dualkg.errors import PYTHON, DivergedError, DualkgError, RequestError, Words


class NotARun(RequestError):
    """A path is not the folder of a run; `nearby` are folders that are."""

    def __init__(self, path: Path, reason: str, *, nearby: Sequence[str] = ()) -> None:
        super().__init__()
        self.path = path
        self.reason = reason
        self.nearby = list(nearby)

    def message(self, words: Words = PYTHON) -> str:
        if self.nearby:
            return f"{self.path} {self.reason}. Runs nearby: {', '.join(self.nearby)}."
        return f"{self.path} {self.reason}. Make one with: {words.call('train', 'RECIPE')}"


class ForeignFiles(RequestError):
    """A folder for a run has files that are not a run's, and is never replaced."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__()
        self.path = path
        self.names = list(names)

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.path} exists and is not a run: it has {', '.join(self.names)}. Name another "
            f"folder with {words.option('out')}."
        )


class DecisionsExist(RequestError):
    """A run that would be replaced has decisions on new facts."""

    def __init__(self, path: Path, file: str) -> None:
        super().__init__()
        self.path = path
        self.file = file

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.path} has decisions on new facts ({self.file}), which would be lost. Move that "
            f"file elsewhere first, or name another folder with {words.option('out')}."
        )


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
        super().__init__()
        self.path = path
        self.resumable = resumable
        self.wanted = wanted

    def message(self, words: Words = PYTHON) -> str:
        state = "cannot be resumed" if self.wanted == "resume" else "is not finished"
        resume = words.call("resume", self.path)
        if self.wanted == "write":
            overwrite = words.option("overwrite", True)
            advice = f"Resume it with: {resume}, or replace it with {overwrite}."
        elif self.resumable:
            advice = f"Resume it with: {resume}"
        else:
            recipe = self.path / "recipe.toml"
            again = words.call("train", recipe, overwrite=True, out=str(self.path))
            advice = f"It has no checkpoint; train it again: {again}"
        return f"The run {self.path} {state}. {advice}"


class RunInTraining(RequestError):
    """A run has no results yet: another process, the `holder` of its lock, is at work on it."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"The run {path} is in training ({holder}). Its results come when that is done."
        )
        self.path = path
        self.holder = holder


class RunFinished(RequestError):
    """A finished run was to be resumed."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"The run {path} is finished. To train longer, start a new run with more epochs."
        )
        self.path = path


class DamagedRun(RequestError):
    """A file of a finished run is not what was saved."""

    def __init__(self, run: Path, file: str, reason: str) -> None:
        super().__init__()
        self.run = run
        self.file = file
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        path = self.run / self.file
        check = words.call("check", self.run)
        return f"{path} is damaged: {self.reason}. To see what can be saved: {check}"


class OtherSource(RequestError):
    """A file was derived from another run than the one that it is used with."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.path} was made from another run: the weights, the recipe or the graph are "
            "other ones here."
        )


class InterruptedRunError(DualkgError):
    """Work was stopped by its user."""

    exit_code = 130


class TrainingInterrupted(InterruptedRunError):
    """Training was stopped by its user; with a checkpoint, the state is saved."""

    def __init__(self, epoch: int, epochs: int, checkpoint: Path | None) -> None:
        super().__init__()
        self.epoch = epoch
        self.epochs = epochs
        self.checkpoint = checkpoint

    def message(self, words: Words = PYTHON) -> str:
        stopped = f"Stopped in epoch {self.epoch} of {self.epochs}"
        if self.checkpoint is None:
            return f"{stopped}."
        resume = words.call("resume", self.checkpoint.parent)
        return f"{stopped}, all work saved. Resume with: {resume}"


class TrainingDiverged(DivergedError):
    """The loss or a weight became NaN or infinite."""

    def __init__(
        self,
        what: str,
        *,
        epoch: int,
        step: int,
        learning_rate: float,
        checkpoint: Path | None = None,
    ) -> None:
        super().__init__()
        self.what = what
        self.epoch = epoch
        self.step = step
        self.learning_rate = learning_rate
        self.checkpoint = checkpoint

    def message(self, words: Words = PYTHON) -> str:
        rate = self.learning_rate
        smaller = words.key("optimizer.learning_rate", f"{rate / 10:g}")
        saved = f" The last good state is in {self.checkpoint}." if self.checkpoint else ""
        return (
            f"Training diverged in epoch {self.epoch}, step {self.step}: {self.what}. Lower the "
            f"learning rate (now {rate:g}), for instance to {smaller}, or use a smaller "
            f"init_scale.{saved}"
        )


class NotACheckpoint(RequestError):
    """A file of weights says nothing about a training."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} holds weights alone, of a model that was not trained in this folder."
        )
        self.path = path


class OptimizerChanged(RequestError):
    """A checkpoint was written with another optimizer than the recipe names."""

    def __init__(self, path: Path, *, saved: object, expected: str) -> None:
        super().__init__(
            f"{path} was written with {saved}; the recipe says {expected}. The optimizer cannot "
            "change during a run: start a new run."
        )
        self.path = path
        self.saved = saved
        self.expected = expected


class RecipeChanged(RequestError):
    """A checkpoint was written with another recipe than the run has now."""

    def __init__(self, path: Path, checkpoint: Path) -> None:
        super().__init__(
            f"{path} is not the recipe that {checkpoint} was written with: one of them was damaged "
            "or changed, or is of another run. Restore it from a copy, or start a new run."
        )
        self.path = path
        self.checkpoint = checkpoint


class EmptySplit(RequestError):
    """A split that training needs is empty."""

    def __init__(self, graph: str, split: str) -> None:
        super().__init__()
        self.graph = graph
        self.split = split

    def message(self, words: Words = PYTHON) -> str:
        if self.split == "train":
            return f"{self.graph} has no training triples."
        every = words.key("validation.every")
        return f"{self.graph} has no {self.split} triples, so {every} should be 0."

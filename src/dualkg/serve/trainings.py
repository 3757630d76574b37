"""Trainings that a server shows: those it has started, and folders that others train.

A training that the server starts is a process of its own (`training_process`); one at a time.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from dualkg import files
from dualkg.data.graph import Graph
from dualkg.errors import DualkgError, RequestError
from dualkg.serve.errors import BusyError, Forbidden, NotFound, reason_of
from dualkg.training.run_folder import RunFolder

Stage = Literal[
    "reading", "tuning", "training", "calibrating", "loading", "finished", "stopped", "failed"
]
LAST_STAGES: tuple[Stage, ...] = ("finished", "stopped", "failed")
# Text formats; what expands while it is read is left to the command line.
SUFFIXES = (".tsv", ".txt", ".csv", ".nt", ".ttl", ".jsonl")
MAX_FILES = 20  # the oldest uploaded file is removed for another
MAX_POINTS = 500  # of a curve
MAX_NOTES = 20
MAX_REPORT = 1 << 20  # bytes of a line that the process prints
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
UPLOAD = re.compile(r"[0-9a-f]{12}/[A-Za-z0-9_-]{1,40}\.[a-z]+", re.ASCII)
PATIENCE = 10.0  # seconds in which a training that is stopped may save its checkpoint
# The process; its argument is JSON.
COMMAND = (sys.executable, "-m", "dualkg.serve.training_process")
Point = dict[str, float | None]


class SavedEpoch(BaseModel):
    """An epoch of the history in a checkpoint."""

    epoch: int
    loss: FiniteFloat | None = None
    valid_mrr: FiniteFloat | None = None


class SavedProgress(BaseModel):
    """The part of a checkpoint's progress that curves show."""

    history: list[SavedEpoch] = Field(default_factory=list)


@dataclass
class TrainingState:
    """A training, and what is known of it."""

    name: str
    folder: Path
    stage: Stage = "reading"
    text: str = ""
    share: float | None = None
    time_left: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    error: str | None = None
    can_be_stopped: bool = False

    @property
    def is_over(self) -> bool:
        return self.stage in LAST_STAGES

    def receive(self, line: Mapping[str, Any]) -> None:
        """Take over what a line of the process reports, unless it was stopped meanwhile."""
        if self.is_over:
            return
        match line["kind"]:
            case "stage":
                self.stage = line["stage"]
                self.text, self.share, self.time_left = "", None, ""
            case "notes":
                self.notes = [*self.notes, *line["notes"]][:MAX_NOTES]
                self.counts = line.get("counts") or self.counts
            case "progress":
                self.text = line["text"]
                self.share = line["share"]
                self.time_left = line["time_left"]
                if line.get("point"):
                    self._add(line["point"])
            case "error":
                self.error = line["error"]

    def _add(self, point: Point) -> None:
        """Add a point; it replaces a point within an epoch, whose loss is of the steps so far."""
        last = self.points[-1]["epoch"] if self.points else None
        if last is not None and last % 1:
            self.points.pop()
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            # The last one stays; the others become sparser.
            self.points = [*self.points[:-1:2], self.points[-1]]


class WatchedTraining(TrainingState):
    """A run that another process trains: what its last checkpoint says."""

    def has_just_finished(self) -> bool:
        """Read the checkpoint again, unless the training is known to be over."""
        if self.stage not in ("reading", "training", "stopped"):
            return False
        folder = RunFolder(self.folder)
        if folder.finished:
            self.stage = "finished"
            self.text, self.share = "", None
            return True
        history = self._history(folder)
        self.points = [epoch.model_dump() for epoch in history]
        epochs = self._num_epochs(folder)
        holder = files.lock_holder(self.folder, other=True)
        self.stage = "training" if holder else "stopped"
        done = len(history)
        self.text = f"{done:,} of {epochs:,} epochs" if epochs else f"{done:,} epochs"
        self.share = done / epochs if epochs else None
        return False

    def _history(self, folder: RunFolder) -> list[SavedEpoch]:
        """The epochs of the checkpoint; none if it has none, or is damaged."""
        from dualkg.training.checkpoint import read_about

        progress = read_about(folder.checkpoint).get("progress", {})
        try:
            return SavedProgress.model_validate(progress).history
        except ValidationError:
            return []

    def _num_epochs(self, folder: RunFolder) -> int | None:
        from dualkg.training.recipe import load_recipe

        try:
            return load_recipe(folder.recipe).training.epochs
        except (DualkgError, OSError):
            return None


@dataclass(frozen=True)
class Upload:
    """A file of triples that somebody has sent, and what it contains."""

    file: str
    graph: Graph
    notes: list[str]


class Trainings:
    """The trainings of a server, and the folder in which it makes runs; none if it makes none."""

    def __init__(
        self,
        folder: Path | None,
        *,
        on_finish: Callable[[Path], object],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.folder = folder
        self._command = command
        self.by_name: dict[str, TrainingState] = {}
        self._on_finish = on_finish
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_allowed(self) -> bool:
        return self.folder is not None

    def watch(self, folder: Path) -> None:
        """Show a run that another process trains."""
        name = folder.resolve().name
        self.by_name[name] = WatchedTraining(name, folder)

    def show(self, folder: Path) -> TrainingState:
        """Show a training of this process, which reports to the state that is returned."""
        name = folder.resolve().name
        training = TrainingState(name, folder)
        self.by_name[name] = training
        return training

    def get(self, name: str) -> TrainingState:
        if name not in self.by_name:
            raise NotFound(f"No training is named '{name}'.")
        training = self.by_name[name]
        if isinstance(training, WatchedTraining) and training.has_just_finished():
            self.load(training)
        return training

    def load(self, training: TrainingState) -> None:
        """Serve the run of a training that has ended."""
        training.stage = "loading"
        try:
            self._on_finish(training.folder)
            training.stage = "finished"
        except (DualkgError, OSError) as error:
            training.stage = "failed"
            training.error = reason_of(error)

    # -- files -------------------------------------------------------------

    def save_file(self, name: str, text: str) -> Upload:
        """Save a file of triples below the folder, and read it."""
        from dualkg.data.loading import load_graph
        from dualkg.workflows.sources import check_graph

        path = self._upload_path(name, text)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
        try:
            graph = load_graph(path)
        except DualkgError:
            path.unlink(missing_ok=True)
            raise
        except (ValueError, OSError) as error:
            path.unlink(missing_ok=True)
            raise _unreadable(name, str(error)) from None
        uploaded = sorted(self._uploads().iterdir(), key=lambda folder: folder.stat().st_mtime)
        for old in uploaded[:-MAX_FILES]:
            shutil.rmtree(old, ignore_errors=True)
        notes = [*graph.notes, *check_graph(graph)]
        return Upload(f"{path.parent.name}/{path.name}", graph, list(map(str, notes))[:MAX_NOTES])

    def _upload_path(self, name: str, text: str) -> Path:
        suffix = Path(name).suffix.lower()
        if suffix not in SUFFIXES:
            raise _unreadable(name, f"it ends in none of {', '.join(SUFFIXES)}")
        stem = re.sub(r"[^A-Za-z0-9_-]", "-", Path(name).stem)[:40].strip("-") or "triples"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._uploads() / digest / f"{stem}{suffix}"

    def _uploads(self) -> Path:
        return self._own_folder() / ".uploads"

    def _own_folder(self) -> Path:
        if self.folder is None:
            raise Forbidden(
                "This server does not train. Start it with --allow-training to train on files in "
                "the browser."
            )
        return self.folder

    def _uploaded(self, file: str) -> Path:
        path = self._uploads() / file
        if not UPLOAD.fullmatch(file) or not path.is_file():
            raise RequestError(f"No file {file} was sent. Send it again.")
        return path

    # -- trainings ---------------------------------------------------------

    async def start(
        self, file: str, *, name: str, changes: Mapping[str, Any], tune: bool, taken: list[str]
    ) -> TrainingState:
        """Start to train on an uploaded file; `taken` are names of runs that are served."""
        source = self._uploaded(file)
        if self._process is not None:
            raise BusyError(
                "Another training is running. Stop it, or try again when it has finished."
            )
        folder = self._own_folder() / name
        if not RUN_NAME.fullmatch(name) or name in taken or folder.exists():
            raise RequestError(
                f"'{name}' cannot be the name of the run: it must be new, and consist of letters, "
                "digits, points, hyphens and underscores."
            )
        arguments = {"source": str(source), "out": str(folder), "changes": changes, "tune": tune}
        # The token is not for other processes.
        environment = {key: value for key, value in os.environ.items() if key != "DUALKG_TOKEN"}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            json.dumps(arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the server, which then stops it
            limit=MAX_REPORT,
        )
        training = TrainingState(name, folder, can_be_stopped=True)
        self.by_name[name] = training
        self._task = asyncio.create_task(self._follow(self._process, training))
        return training

    async def _follow(self, process: asyncio.subprocess.Process, training: TrainingState) -> None:
        """Receive what a process reports until it ends."""
        assert process.stdout is not None
        is_finished = False
        async for line in process.stdout:
            try:
                report = json.loads(line)
            except ValueError:
                continue  # something that a library has printed
            is_finished = report.get("stage") == "finished"
            if not is_finished:
                training.receive(report)
        code = await process.wait()
        training.can_be_stopped = False
        self._process = None
        if is_finished and code == 0:
            await asyncio.to_thread(self.load, training)
        elif training.stage != "stopped":
            training.stage = "failed"
            training.error = training.error or "The training ended without a result."

    async def stop(self, name: str) -> TrainingState:
        """Stop the training that runs; its checkpoint can be resumed by the command line."""
        training = self.get(name)
        if training.can_be_stopped and not training.is_over:
            training.stage = "stopped"
            training.text = ""
            training.time_left = ""
            await self._end_process()
        return training

    async def close(self) -> None:
        await self._end_process()

    async def _end_process(self) -> None:
        process, task = self._process, self._task
        if process is None or task is None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(task), PATIENCE)
        except TimeoutError:
            process.kill()
            await task


def _unreadable(name: str, reason: str) -> RequestError:
    return RequestError(f"{Path(name).name} cannot be read as triples: {reason}.")

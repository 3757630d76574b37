"""Trials that a command trains in processes of its own, such as torchrun."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from dualkg.data.graph import Graph
from dualkg.errors import PYTHON, DualkgError, Words
from dualkg.files import read_text, remove
from dualkg.training.checkpoint import Progress, save_tensors
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import Recipe
from dualkg.training.run import RunFolder
from dualkg.training.shutdown import GracefulShutdown

POLL_SECONDS = 0.1
MAX_LINE = 500  # characters of a line that an error quotes
# Linux ends a command with the process that starts it, also if that is killed. The number of
# PR_SET_PDEATHSIG is 1.
END_WITH_PARENT = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])"""


class LaunchFailed(DualkgError):
    """The command of a trial failed; its output is in the file `log`."""

    def __init__(self, command: Sequence[str], status: int, *, log: Path, reason: str) -> None:
        super().__init__()
        self.command = list(command)
        self.status = status
        self.log = log
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        command = shlex.join(self.command)
        return f"{command} ended with status {self.status}; see {self.log}: {self.reason}"


def launch_trial(
    recipe: Recipe,
    graph: Graph,
    path: Path,
    *,
    launcher: Sequence[str],
    device: str,
    on_wait: Callable[[], None],
) -> float:
    """Train a recipe by a command in the run folder `path`, and return its validation MRR.

    `on_wait` is called again and again while the command runs. The folder is removed at the end;
    if the command failed, folder and log remain.
    """
    folder = _create_run(recipe, graph, path, device)
    command = [*launcher, "resume", str(path)]
    if device == "cpu":
        command += ["--device", "cpu"]
    if recipe.own_classes:
        # Their names are in the search space, which the user of this process trusts.
        command.append("--trust-code")

    log = log_of(path)
    status = _run(command, log=log, on_wait=on_wait)
    if status or not folder.finished:
        reason = _last_words(read_text(log, errors="replace"))
        raise LaunchFailed(command, status, log=log, reason=reason)

    history = folder.read(folder.history)
    mrrs = [epoch["valid_mrr"] for epoch in history if "valid_mrr" in epoch]
    remove_trial(path)
    return float(max(mrrs) if recipe.validation.keep == "best" else mrrs[-1])


def log_of(path: Path) -> Path:
    """The file with what the command of a trial printed."""
    return path.with_name(f"{path.name}.log")


def remove_trial(path: Path) -> None:
    """Remove run folder and log of a trial, if they exist."""
    remove(path)
    remove(log_of(path))


def parent_has_ended() -> bool:
    """Whether this is a worker process, and the process that started it has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _create_run(recipe: Recipe, graph: Graph, path: Path, device: str) -> RunFolder:
    """A run folder with a checkpoint before the first epoch, which `resume` continues."""
    remove(path)  # a search that was deleted may have left one
    folder = RunFolder(path)
    about = {
        "when": "start",
        "optimizer": recipe.optimizer.name,
        "progress": asdict(Progress()),
    }
    with folder.create(recipe, graph, torch.device(device)) as fresh:
        save_tensors({}, fresh.checkpoint, about=about)
    return folder


def _run(command: Sequence[str], *, log: Path, on_wait: Callable[[], None]) -> int:
    """Run a command and return its exit status; if this process is stopped, so is the command."""
    wrapped = list(command)
    if sys.platform == "linux":
        wrapped = [sys.executable, "-IS", "-c", END_WITH_PARENT, str(os.getpid()), *command]
    shutdown = GracefulShutdown()
    terminated = False
    remove(log)
    with (
        shutdown.listening(),
        log.open("wb") as file,
        subprocess.Popen(
            wrapped, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file
        ) as process,
    ):
        while process.poll() is None:
            if (shutdown.requested or parent_has_ended()) and not terminated:
                process.terminate()
                terminated = True
            on_wait()
            time.sleep(POLL_SECONDS)
    if terminated:
        raise InterruptedRunError("Stopped.")
    return process.returncode


def _last_words(output: str) -> str:
    """Why a command failed: the last error of dualkg in its output, or else the last line.

    torchrun prints pages after the error of the program that it runs.
    """
    lines = [line.strip()[:MAX_LINE] for line in output.splitlines() if re.search(r"\w", line)]
    if not lines:
        return "it printed nothing"
    errors = [line for line in lines if line.startswith("dualkg: ")]
    return errors[-1] if errors else lines[-1]

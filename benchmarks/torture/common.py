"""What the campaigns share: their time, the program under test, and a small graph to train on."""

import functools
import io
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
# Memory and times are those of one thread.
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT = {**os.environ, **ON_CPU, "PYTHONPATH": os.pathsep.join(PATHS)}
TRACEBACK = "Traceback (most recent call last)"
MAX_FAILURES = 20  # failures that are saved with all details
Words = tuple[object, ...]  # of a command
Status = int | str  # an exit status, or the place of an exception
SPACE = """
[data]
graph = "mine.tsv"
[model]
dim = 2
[training]
epochs = 1
batch_size = 100
[space]
"model.dim" = [2, 3]
"training.seed" = [0, 1]
[search]
prune = false
"""


def rounds(minutes: float, *, most: int | None = None) -> Iterator[int]:
    """Numbers from 0, for as long as there is time; at least one."""
    end = time.monotonic() + 60 * minutes
    number = 0
    while number == 0 or (time.monotonic() < end and (most is None or number < most)):
        yield number
        number += 1


def dualkg(*words: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command; its output is read by `communicate`."""
    line = [sys.executable, "-m", "dualkg", *map(str, words)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, cwd=cwd, env=ENVIRONMENT, text=True, **{**pipes, **options})


def write_triples(path: Path, *, num_entities: int = 40) -> Path:
    """A graph that trains in a second."""
    num_values = {"colour": 4, "shape": 5, "size": 3}
    lines = []
    for relation, count in num_values.items():
        for number in range(num_entities):
            lines.append(f"thing{number}\t{relation}\t{relation}{number % count}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_new_triples(path: Path) -> Path:
    """A triple of an entity that the graph does not have."""
    path.write_text("newcomer\tcolour\tcolour1\n", encoding="utf-8")
    return path


def training(*, seed: int, epochs: int, out: str = "run") -> Words:
    """The words of a training that is the same on every machine."""
    sizes = ("--dim", 4, "--epochs", epochs, "--batch-size", 50)
    by = ("--engine", "reference", "--device", "cpu")
    return ("train", "mine.tsv", "--no-tune", *sizes, *by, "--seed", seed, "--out", out)


def train_and_interrupt(recipe: Any, out: Path | str) -> None:
    """Train to the second epoch, and leave an unfinished run."""
    import dualkg as kg

    def stop(event: Any) -> None:
        if event.epoch == 2:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        kg.train_recipe(recipe, out=out, on_progress=stop, device="cpu")


def weights_of(path: Path) -> dict[str, bytes]:
    """The tables of a file of weights; what else is in it has times, which differ."""
    from safetensors.numpy import load_file

    return {name: table.tobytes() for name, table in sorted(load_file(path).items())}


def failure(campaign: str, **details: Any) -> dict[str, Any]:
    """One failure, with all that repeats it; long texts are cut."""
    return {"campaign": campaign, **{key: str(value)[-2000:] for key, value in details.items()}}


def load_program() -> None:
    """Import all that commands use, with one thread.

    After that, `fork_command` starts in milliseconds.
    """
    import torch
    import typer.main

    torch.set_num_threads(1)
    for name in (
        "cli.main",
        "training.api",
        "tuning.worker",
        "inference.api",
        "inference.extension",
        "inference.index_build",
        "inference.export",
        "inference.integrity",
    ):
        import_module(f"dualkg.{name}")
    # An optimizer imports it, which takes more time than a training of these campaigns.
    import_module("torch._dynamo")
    # Building the options of all commands takes as long as many a command.
    typer.main.get_command = functools.cache(typer.main.get_command)


def import_like(modules: list[str]) -> None:
    """Import what another process has imported, so that it takes no time in forked processes."""
    for module in modules:
        with suppress(Exception):
            import_module(module)


@dataclass
class Command:
    """A command in a forked process."""

    words: list[str]
    pid: int
    output: Path
    status: int | None = None

    def wait(self) -> str:
        """Wait for its end, and return what it printed on either stream.

        Its exit status is then known; it is negative after a signal.
        """
        if self.status is None:
            _, wait_status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(wait_status)
        return self.output.read_text(encoding="utf-8", errors="replace")


def fork_command(
    *words: object,
    cwd: Path,
    output: Path,
    delay: float = 0.0,
    gate: int | None = None,
    call: Callable[[list[str]], int] | None = None,
) -> Command:
    """Run a command of dualkg, or a function, in a fork of this process.

    This process has called `load_program`, and must not use torch before. `gate` is the reading
    end of a pipe: the command starts when it has read a byte, and `delay` seconds later.
    """
    line = [str(word) for word in words]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Command(line, pid, output)
    status = 70
    try:
        os.chdir(cwd)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if gate is not None:
            os.read(gate, 1)
        time.sleep(delay)
        status = in_process(line) if call is None else call(line)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def exit_status(call: Callable[[], object]) -> int:
    """The exit status of a program that is run in this process."""
    try:
        call()
    except SystemExit as end:
        if end.code is None:
            return 0
        return end.code if isinstance(end.code, int) else 1
    return 0


def in_process(words: list[str]) -> int:
    """The exit status of a command that is run in this process."""
    from dualkg.cli.main import main

    sys.argv = ["dualkg", *words]
    return exit_status(main)


def run_command(words: list[str]) -> tuple[Status, str]:
    """Run a command in this process; return its exit status and its output.

    After an exception, its place is returned instead of a status.
    """
    from dualkg.cli import common

    output = io.StringIO()
    common.stdout.file = output
    common.stderr.file = output
    try:
        with redirect_stdout(output), redirect_stderr(output):
            status: Status = in_process(words)
    except BaseException as error:
        # Such an error is what campaigns look for.
        place = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if "dualkg" in frame.filename:
                place = f"{Path(frame.filename).name}:{frame.lineno}"
        status = f"{type(error).__name__} at {place}: {str(error)[:200]}"
    return status, output.getvalue()

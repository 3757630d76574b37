"""Processes that tests start, signal and kill. Each is forked from one that has imported
PyTorch.
"""

import atexit
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = "from dualkg.cli import main; main()"
LIMIT = 240  # seconds that only a broken program needs, also on a busy machine
FORKS = multiprocessing.get_context("forkserver")
# No module of the package, so that a process may make some other module look missing. A process
# that reports what it imports unloads that first.
FORKS.set_forkserver_preload(
    [
        "pytest",
        "numpy",
        "pyarrow",
        "pydantic",
        "safetensors.torch",
        "torch",
        "sqlalchemy.orm",
        "alembic.command",
        # Most of the time of a process that trains was their import.
        "numba",
        "pandas",
        "torch._dynamo",
        "torch.distributed.checkpoint",
    ]
)


class Finished(NamedTuple):
    """The exit status of a process, and its output."""

    code: int
    out: str
    err: str


class Started:
    """Python code in a process of its own, with `words` as its arguments. Killed at the end of a
    `with` block.
    """

    def __init__(
        self,
        code: str,
        *words: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        theirs_in, ours_in = FORKS.Pipe(duplex=False)
        ours_out, theirs_out = FORKS.Pipe(duplex=False)
        self._err = tempfile.NamedTemporaryFile(mode="w+")  # noqa: SIM115
        state = {**os.environ, **(environment or {})}, str(cwd or Path.cwd()), self._err.name
        self._process = FORKS.Process(
            target=_run,
            args=(code, [str(word) for word in words], state, theirs_in, theirs_out),
            daemon=True,
        )
        self._process.start()
        theirs_in.close()
        theirs_out.close()
        self.stdin = os.fdopen(os.dup(ours_in.fileno()), "w")
        self.stdout = os.fdopen(os.dup(ours_out.fileno()))
        ours_in.close()
        ours_out.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def write(self, line: str) -> None:
        print(line, file=self.stdin, flush=True)

    def finish(self) -> Finished:
        """Wait for the end."""
        out = self.stdout.read()
        self._process.join(LIMIT)
        assert self._process.exitcode is not None, "the process does not end"
        return Finished(self._process.exitcode, out, Path(self._err.name).read_text("utf-8"))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *ignored: object) -> None:
        self.kill()
        for file in (self.stdin, self.stdout, self._err):
            file.close()


def run_python(code: str, *words: object, **choices: Any) -> Finished:
    """Run code to its end in a process of its own."""
    with Started(code, *words, **choices) as process:
        return process.finish()


def unload(prefixes: Iterable[str]) -> str:
    """Code that makes a process import modules again, if anything needs them."""
    return (
        "import sys\n"
        "for name in [*sys.modules]:\n"
        f"    if name.startswith({tuple(prefixes)!r}): del sys.modules[name]\n"
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def group_environment(count: int) -> dict[str, str]:
    """What a launcher tells all processes of a group on this machine; each needs its RANK, too."""
    return {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def until(condition: Callable[[], object], *, seconds: float = LIMIT) -> None:
    """Poll a condition; it fails after a time that only a broken program needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _run(
    code: str,
    words: list[str],
    state: tuple[dict[str, str], str, str],
    stdin: Connection,
    stdout: Connection,
) -> None:
    environment, folder, errors = state
    os.setsid()  # a group of its own, which ends with it
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode) for number, mode in enumerate(("r", "w", "w"))
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["dualkg", *words]
    try:
        exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # a forked process skips them

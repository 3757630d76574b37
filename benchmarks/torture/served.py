"""`dualkg serve` of a small run, in a process of its own, with priority over all others."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from benchmarks.torture.common import dualkg


@dataclass(frozen=True)
class Served:
    """A server that runs in a process of its own."""

    address: str
    pid: int
    log: Path
    paths: list[str]  # of ordinary requests

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0


@contextmanager
def started(folder: Path, *, runs: int = 1) -> Iterator[Served]:
    """`dualkg serve` of runs on the bundled graph; its stderr is a file in the folder."""
    paths = make_run(folder / "run")
    copies = [shutil.copytree(folder / "run", folder / f"run{number}") for number in range(1, runs)]
    log = folder / "stderr.txt"
    with log.open("wb") as errors:
        words = ["serve", folder / "run", *copies, "--port", 0, "--threads", 1]
        process = dualkg(
            *words, cwd=folder, stderr=errors, start_new_session=True, preexec_fn=in_front
        )
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')}")
        yield Served(address, process.pid, log, paths)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


def make_run(folder: Path) -> list[str]:
    """Train briefly on the bundled graph; the requests of ordinary clients."""
    import dualkg as kg
    from dualkg.inference.calibration import calibration_for

    graph = kg.load_graph("world")
    model = kg.ComplEx(graph.shape, dim=16)
    run = kg.train(model, graph, regularizer=kg.DURA(0.05), epochs=3, device="cpu")
    run.save(folder)
    calibration_for(kg.load_run(folder))
    queries = []
    for head, relation, _ in graph.test[:200]:
        queries.append((quote(graph.entities[head]), quote(graph.relations[relation])))
    paths = [f"/api/tails?head={head}&relation={relation}" for head, relation in queries]
    paths += [f"/api/entities?q={head[:4].replace('%', '')}" for head, _ in queries[:50]]
    paths += [f"/?head={head}&relation={relation}" for head, relation in queries[:20]]
    return [*paths, "/api/runs", "/api/decisions", "/static/style.css"]


# -- what a server uses ------------------------------------------------------


class LoopClock(NamedTuple):
    """Seconds that have passed, and in which an event loop has run and has waited for a core."""

    passed: float
    run: float
    waited: float

    def since(self, before: "LoopClock") -> "LoopClock":
        return LoopClock(
            self.passed - before.passed, self.run - before.run, self.waited - before.waited
        )


def loop_clock(pid: int) -> LoopClock:
    """The clock of a server now.

    The event loop runs in the main thread, and this file is of the main thread.
    """
    run, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return LoopClock(time.monotonic(), int(run) / 1e9, int(waited) / 1e9)


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    for line in status.splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    raise ProcessLookupError(f"process {pid} has ended")


# -- priorities --------------------------------------------------------------


def in_front() -> None:
    """Give a process priority over all others, where that is allowed."""
    _set_priority(-10, -20)


def behind() -> None:
    _set_priority(19, 19)


def _set_priority(process: int, session: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, process)
    # With autogroups, Linux compares only processes of one session by their own priority.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(session), encoding="ascii")

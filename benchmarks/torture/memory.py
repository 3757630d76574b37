"""Too little memory: commands, also in several processes, whose addresses are limited.

A command must end within `MAX_SECONDS`, with success or with a sentence. If one of two processes
has a limit, both must end, the second at the latest when it is asked to, as `torchrun` does when
the first has failed; and if they did not succeed, one has said why.
"""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.torture.common import (
    ENVIRONMENT,
    TRACEBACK,
    Words,
    failure,
    rounds,
    training,
    write_triples,
)

MAX_SECONDS = 240
GRACE = 60  # seconds in which the other processes end by themselves
CPU = ("--device", "cpu")
DIMS = (16, 2_000, 50_000, 200_000, 2_000_000)
LIMITS = (0.5, 8.0)  # GiB
GIB = 2**30
COMMANDS: dict[str, Words] = {
    "evaluate": ("evaluate", "run", *CPU),
    "calibrate": ("calibrate", "run", "--overwrite", *CPU),
    "predict": ("predict", "run", "--head", "thing1", "--relation", "colour", *CPU),
    "index": ("index", "run", "--kind", "ivf", "--recall", 0.1, "--out", "new"),
    "complete": ("complete", "run", "--top", 20, *CPU),
    "check": ("check", "run"),
}


def start(
    words: Words, home: Path, *, limit: float | None, variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command whose addresses are limited to so many GiB."""
    limited = None if limit is None else partial(_limit, int(limit * GIB))
    return subprocess.Popen(
        [sys.executable, "-m", "dualkg", *map(str, words)],
        cwd=home,
        env={**ENVIRONMENT, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limited,
    )


def _limit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def ended(process: "subprocess.Popen[str]") -> tuple[int | None, str]:
    """The status and the output of a process; no status if it had to be killed."""
    try:
        text = process.communicate(timeout=MAX_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[0]
    return process.returncode, text


def problem_of(status: int | None, text: str) -> str | None:
    if status is None:
        return f"longer than {MAX_SECONDS} seconds: {text[-800:]}"
    # A process that is ended by SIGTERM says nothing, or that it was stopped.
    if TRACEBACK in text or status not in (0, 1, 2, 130, 143, -signal.SIGTERM):
        return f"status {status}: {text[-1200:]}"
    return None


def train_words(draw: random.Random) -> Words:
    dim = draw.choice(DIMS)
    return (*training(seed=0, epochs=1, out="new"), "--dim", dim, "--overwrite", "--yes")


def alone(home: Path, draw: random.Random) -> tuple[str, list[tuple[int | None, str]]]:
    """One command with a limit."""
    name = draw.choice(["train", "train", *COMMANDS])
    words = train_words(draw) if name == "train" else COMMANDS[name]
    return name, [ended(start(words, home, limit=draw.uniform(*LIMITS)))]


def in_two_processes(home: Path, draw: random.Random) -> tuple[str, list[tuple[int | None, str]]]:
    """A training in two processes, one or both of which have a limit."""
    words = train_words(draw)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = [draw.choice([None, draw.uniform(*LIMITS)]), draw.uniform(*LIMITS)]
    draw.shuffle(limits)
    processes = []
    for rank, limit in enumerate(limits):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(start(words, home, limit=limit, variables=variables))
    return "train, two processes", ended_together(processes)


def ended_together(processes: list["subprocess.Popen[str]"]) -> list[tuple[int | None, str]]:
    """The statuses and outputs of processes; those that wait for one that failed are ended."""
    end = time.monotonic() + MAX_SECONDS
    while all(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.2)
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(GRACE if time.monotonic() < end else 0)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    return [ended(process) for process in processes]


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory(prefix="dualkg-memory-") as folder:
        home = Path(os.path.realpath(folder))
        write_triples(home / "mine.tsv")
        made = ended(start(training(seed=0, epochs=1), home, limit=None))
        if made[0]:
            raise RuntimeError(f"the run was not made: {made[1]}")
        for number in rounds(minutes):
            draw = random.Random(f"{seed}-{number}")
            case = in_two_processes if number % 3 == 2 else alone
            name, results = case(home, draw)
            counts[name] += 1
            problems = [problem_of(status, text) for status, text in results]
            has_failed = any(status for status, _ in results)
            if has_failed and not any("dualkg: " in text for _, text in results):
                problems.append("none has said why")
            outcomes[f"{name}: {'refused' if has_failed else 'done'}"] += 1
            wrong = [problem for problem in problems if problem]
            if wrong:
                details = {"command": name, "number": number, "seed": seed}
                failures.append(failure("memory", **details, problem=wrong))
    return {
        "commands": counts.total(),
        "by_command": dict(counts),
        "outcomes": dict(outcomes),
        "failures": failures,
    }

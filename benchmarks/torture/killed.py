"""Commands that are killed: what they are, and what runs in a forked process.

The file operations of all libraries are counted by the C shim of `faults`.
"""

import json
import os
import random
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.torture.common import (
    SPACE,
    Words,
    exit_status,
    fork_command,
    in_process,
    train_and_interrupt,
    write_triples,
)
from benchmarks.torture.faults import NAME, REMOVE, RENAME, SYNC, WRITE
from benchmarks.torture.fingerprints import fingerprints

EVENTS = {"fsync": SYNC, "rename": RENAME, "write": WRITE, "create": NAME, "remove": REMOVE}
STOP_SECONDS = 30  # torchrun waits so long between SIGTERM and SIGKILL
NUM_PROCESSES = 2
CPU = ("--device", "cpu", "--threads", 1)
SETTINGS = ("--dim", 2, "--epochs", 2, "--batch-size", 60, "--engine", "reference", *CPU)
SAVED = ("training.checkpoint_seconds=0", "validation.every=1", "validation.keep='best'")
TRAIN = ("train", "mine.tsv", "--no-tune", *SETTINGS, *(f"--set={setting}" for setting in SAVED))
INDEX = ("index", "run", "--out", "new", "--threads", 1)
SCENARIOS: dict[str, Words] = {
    "train": (*TRAIN, "--out", "new"),
    "train, empty folder": (*TRAIN, "--out", "empty"),
    "train, two seeds": (*TRAIN, "--seeds", 2, "--out", "new"),
    "train, overwrite": (*TRAIN, "--seed", 5, "--out", "run", "--overwrite"),
    "train, automatic tuning": ("train", "mine.tsv", *SETTINGS, "--out", "new"),
    "resume": ("resume", "stopped", "--device", "cpu"),
    "tune": ("tune", "space.toml", "--out", "new", *CPU),
    "tune, TPE": ("tune", "tpe.toml", "--out", "new", *CPU),
    "tune, two processes": ("tune", "space.toml", "--jobs", 2, "--out", "new", *CPU),
    "calibrate": ("calibrate", "run", *CPU),
    "calibrate, overwrite": ("calibrate", "calibrated", "--overwrite", "--coverage", 0.8, *CPU),
    "extend": ("extend", "run", "new-triples.tsv", "--out", "new", *CPU),
    "index, exact": (*INDEX, "--kind", "exact"),
    "index, ivf": (*INDEX, "--kind", "ivf", "--recall", 0.1),
    "complete, TSV": ("complete", "run", "--top", 50, "--out", "new.tsv", *CPU),
    "complete, Parquet": ("complete", "calibrated", "--top", 50, "--out", "new.parquet", *CPU),
    "predict": ("predict", "calibrated", "--queries", "queries.tsv", "--out", "new.jsonl", *CPU),
    "ensemble": ("ensemble", "run", "calibrated", "--out", "new", "--device", "cpu"),
    "sparsify": ("sparsify", "run", "--share", 0.5, "--out", "new", *CPU),
    "export, NumPy": ("export", "run", "--out", "new"),
    "export, TSV": ("export", "run", "--format", "tsv", "--out", "new"),
    "gather": ("gather", "shards"),
    # The first word is the process that is killed. Of "all", process 0 is killed at its event and
    # the others with it.
    "train, process 0 of 2": ("process 0", *TRAIN, "--out", "new"),
    "train, process 1 of 2": ("process 1", *TRAIN, "--out", "new"),
    "train, all processes": ("all processes", *TRAIN, "--out", "new"),
    "record": ("record", "run", "--name", "mine/new", "--records", "records"),
    "record, again": ("record", "run", "calibrated", "--name", "mine/old", "--records", "records"),
}
TPE = (
    SPACE.replace("[2, 3]", "{ low = 2, high = 9 }")
    + """method = "tpe"
trials = 12  # the first ten are random
"""
)
AGE_HEARTBEATS = """
begin;
delete from trial_user_attributes where key = 'heartbeat';
update trials set datetime_start = datetime('now', '-1 day') where state = 'RUNNING';
commit;
"""


def runner(words: Words) -> Callable[..., int]:
    """What runs a command that may be killed."""
    return run_processes if str(words[0]).split()[0] in ("process", "all") else run_killed


def run_words(words: list[str]) -> int:
    """A command of dualkg, or `record` of the paper."""
    if words[0] != "record":
        return in_process(words)
    from dualkg.cli import main
    from paper.__main__ import app

    sys.argv = ["python -m paper", *words]
    return exit_status(partial(main, app))


def run_killed(shim: Any, home: Path, event: str, place: int, words: list[str]) -> int:
    """Run a command that kills itself at an event; else, count the events."""
    age_heartbeats(home / "new" / "study.db")
    kinds = EVENTS.get(event, 0)
    shim.fault_arm(os.fsencode(home), kinds, place if kinds else -1, -signal.SIGKILL, 0)
    status = run_words(words)
    shim.fault_disarm()
    counts = {event: shim.fault_count(kind.bit_length() - 1) for event, kind in EVENTS.items()}
    facts = {"events": counts, "modules": list(sys.modules)}
    home.with_name("counts.json").write_text(json.dumps(facts))
    return status


def run_processes(shim: Any, home: Path, event: str, place: int, words: list[str]) -> int:
    """Run a training in two processes, as torchrun does, of which one kills itself at an event."""
    killed = words[0]
    line = words[1:]
    watched = 1 if killed == "process 1" else 0
    group = {
        "WORLD_SIZE": str(NUM_PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "torture",
    }
    pids = {}
    for rank in range(NUM_PROCESSES):
        call = partial(run_killed, shim, home, event, place) if rank == watched else run_words
        output = home.with_name(f"output-{rank}")
        with patch.dict(os.environ, {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
            pids[rank] = fork_command(*line, cwd=home, output=output, call=call).pid
    stop_by = signal.SIGKILL if killed == "all processes" else signal.SIGTERM
    statuses = wait_for_group(pids, stop_by)
    for rank in pids:
        output = home.with_name(f"output-{rank}")
        print(output.read_text(encoding="utf-8", errors="replace"), flush=True)
    if statuses[watched] == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    return max(statuses.values())


def wait_for_group(pids: dict[int, int], stop_by: signal.Signals) -> dict[int, int]:
    """The exit statuses of processes.

    When one has failed, the others are stopped, as torchrun does it.
    """
    statuses: dict[int, int] = {}
    end = None
    while len(statuses) < len(pids):
        for rank in pids.keys() - statuses.keys():
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        has_failed = any(statuses.values())
        if has_failed and end is None:
            end = time.monotonic() + STOP_SECONDS
            for rank in pids.keys() - statuses.keys():
                os.kill(pids[rank], stop_by)
        if end and time.monotonic() > end:
            print("a process did not end after SIGTERM", flush=True)
            for rank in pids.keys() - statuses.keys():
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.01)
    return statuses


def free_port() -> int:
    """A free port below those that the system gives to connections, so that it stays free."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def age_heartbeats(study: Path) -> None:
    """Let all trials of a study seem dead, so that a killed one is repeated at once."""
    if not study.exists():
        return
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(study)) as database:
        database.executescript(AGE_HEARTBEATS)


def write_fingerprints(home: Path, words: list[str]) -> int:
    """Write what the files hold now, for the process that has forked this one."""
    home.with_name("found.json").write_text(json.dumps(fingerprints(home)))
    return 0


def make_good(good: Path, shim: Any) -> int:
    """Make what commands need: data, runs of several kinds, and a record."""
    import dualkg as kg

    write_triples(good / "mine.tsv")
    (good / "new-triples.tsv").write_text("new\tcolour\tcolour1\nnew\tshape\tshape2\n")
    (good / "space.toml").write_text(SPACE)
    (good / "tpe.toml").write_text(TPE)
    (good / "queries.tsv").write_text("thing1\tcolour\t?\n?\tshape\tshape2\n")
    (good / "empty").mkdir()
    words = [str(word) for word in ("process 0", *TRAIN, "--seed", 3, "--out", "shards")]
    status = run_processes(shim, good, "", -1, words)
    if status:
        return status
    lines: list[Words] = [
        (*TRAIN, "--out", "run"),
        (*TRAIN, "--seed", 1, "--out", "calibrated"),
        ("calibrate", "calibrated", *CPU),
        ("record", "run", "--name", "mine/old", "--records", "records"),
    ]
    for line in lines:
        status = run_words([str(word) for word in line])
        if status:
            return status

    recipe = kg.load_recipe("run/recipe.toml").with_changes({"training.seed": 2})
    train_and_interrupt(recipe, "stopped")
    return 0

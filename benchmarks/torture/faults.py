"""A failing disk: full, read-only, or with an error at any write, sync or rename of a command.

A C shim that is loaded before the C library fails one call, or all from one call on, below a
folder. A case fails if the command ends in a traceback, in a message without the name of a file, or
damages what was there before; or if the command does not succeed when it is run again with a good
disk. It needs Linux and a C compiler.
"""

import ctypes
import errno
import hashlib
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.torture.common import (
    ON_CPU,
    SPACE,
    TRACEBACK,
    Status,
    failure,
    rounds,
    run_command,
    train_and_interrupt,
    write_triples,
)
from benchmarks.torture.swaps import train_shards

SECONDS = 60  # the longest time of a case
SHIM = Path(__file__).with_name("shim.c")
WRITE = 1
SYNC = 2
NAME = 4
RENAME = 8
REMOVE = 16
# The kinds of calls that fail, the error, and whether all later ones fail, too. Nothing can be
# written from the first call on where the disk is read-only.
FAULTS = {
    "full": (WRITE | NAME, errno.ENOSPC, True),
    "quota": (WRITE, errno.EDQUOT, True),
    "error at one write": (WRITE, errno.EIO, False),
    "error at one sync": (SYNC, errno.EIO, False),
    "error at one name": (NAME, errno.EIO, False),
    "errors from one call on": (WRITE | SYNC | NAME, errno.EIO, True),
    "read-only": (WRITE | NAME, errno.EROFS, True),
}
SMALL = ["--no-tune", "--epochs", "2", "--dim", "2"]
COMMANDS = {
    "train": ["train", "graph.tsv", *SMALL, "--out", "new"],
    "overwrite": ["train", "graph.tsv", *SMALL, "--out", "run", "--overwrite"],
    "resume": ["resume", "stopped"],
    "calibrate": ["calibrate", "run", "--overwrite", "--coverage", "0.8"],
    "complete": ["complete", "run", "--out", "new.tsv"],
    "complete parquet": ["complete", "run", "--out", "new.parquet"],
    "predict": ["predict", "run", "--queries", "queries.tsv", "--out", "new.jsonl"],
    "extend": ["extend", "run", "extension.tsv", "--out", "new"],
    "index": ["index", "run", "--kind", "exact", "--out", "new"],
    "index ivf": ["index", "run", "--kind", "ivf", "--recall", "0.1", "--out", "new"],
    "export": ["export", "run", "--out", "new"],
    "export safetensors": ["export", "run", "--format", "safetensors", "--out", "new"],
    "export tsv": ["export", "run", "--format", "tsv", "--out", "new"],
    "sparsify": ["sparsify", "run", "--share", "0.5", "--out", "new"],
    "ensemble": ["ensemble", "run", "run", "--weights", "equal", "--out", "new"],
    "resume, one of several": ["resume", "stopped-parts"],
    "gather": ["gather", "run-parts"],
    "tune": ["tune", "space.toml", "--out", "new"],
}
# Files of `run` that a command may change; None is all of them.
REPLACED = {
    "calibrate": ["calibration.json"],
    "overwrite": None,
    "resume": None,
    "resume, one of several": None,
    "gather": None,
}
# The run that a command finishes, in place of `run`.
FINISHED = {
    "train": "new",
    "resume": "stopped",
    "resume, one of several": "stopped-parts",
    "gather": "run-parts",
}


def compile_shim(folder: Path) -> Path:
    library = folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def load_shim(library: str) -> Any:
    """The functions of the shim, in a process that was started with it.

    A negative code of an error is a signal that ends the process.
    """
    shim: Any = ctypes.CDLL(library)
    shim.fault_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
    ]
    shim.fault_disarm.restype = ctypes.c_long
    shim.fault_count.restype = ctypes.c_long
    return shim


def make_good(good: Path) -> None:
    """Make what commands need: a graph, a calibrated run, an interrupted run, and queries."""
    import dualkg as kg

    good.mkdir()
    write_triples(good / "graph.tsv")
    (good / "queries.tsv").write_text("thing1\tcolour\t?\n")
    (good / "extension.tsv").write_text("new\tcolour\tcolour1\nnew\tshape\tshape2\n")
    recipe = kg.Recipe().with_changes(
        {
            "data.graph": str(good / "graph.tsv"),
            "model.dim": 2,
            "training.epochs": 2,
            "training.batch_size": 64,
            "regularizer.name": "DURA",
            "regularizer.weight": 0.05,
        }
    )
    kg.calibrate(kg.train_recipe(recipe, out=good / "run"))
    saved_often = recipe.with_changes({"training.checkpoint_seconds": 0.0})
    train_and_interrupt(saved_often, good / "stopped")
    (good / "space.toml").write_text(SPACE.replace("mine.tsv", "graph.tsv"))
    train_shards(good / "run", good / "stopped-parts")
    shutil.copytree(good / "stopped-parts", good / "run-parts")
    status, text = run_command(["resume", str(good / "run-parts")])
    if status:
        raise RuntimeError(f"the runs were not made: {text}")


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of all files below a folder, without locks."""
    checksums = {}
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.endswith(".lock"):
            checksums[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return checksums


class FailingDisk:
    """Commands in a folder whose disk fails, in a process with the shim."""

    def __init__(self, shim: Any, home: Path) -> None:
        self.shim = shim
        self.folder = home / "here"
        self.good = home / "good"
        # On a good disk: the calls of a command by their kinds, and the files that it makes.
        self.num_calls: dict[tuple[str, int], int] = {}
        self.good_files: dict[str, dict[str, str]] = {}
        self.replaced_files: dict[str, dict[str, str]] = {}

    def run_case(self, name: str, fault: str, draw: random.Random) -> tuple[str, str | None]:
        """Fail one call of a command, or all from one on.

        Returns how the command ended, and what is wrong with that.
        """
        kinds, code, sticky = FAULTS[fault]
        words = COMMANDS[name]
        problem = self.count_calls(name, kinds)
        if problem:
            return "not reached", problem

        num_calls = self.num_calls[name, kinds]
        place = 0 if fault == "read-only" else draw.randrange(max(1, num_calls))
        self.restore()
        before = hashes(self.folder)
        self.shim.fault_arm(os.fsencode(self.folder), kinds, place, code, int(sticky))
        try:
            status, text = run_command(words)
        finally:
            num_seen = self.shim.fault_disarm()

        is_reached = num_seen > place
        outcome = "not reached"
        if is_reached:
            outcome = "refused with a sentence" if status else "done all the same"
        problem = (
            check_message(status, text, is_reached=is_reached)
            or self.check_unchanged(name, before, status)
            or self.check_no_temporary_files(status, fault, sticky=sticky)
            or self.check_files(name, status)
            or (check_repeated(name, words) if status else None)
        )
        return outcome, f"at call {place} of {num_calls}: {problem}" if problem else None

    def restore(self) -> None:
        """Begin with the good files again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.good, self.folder)
        os.chdir(self.folder)

    def count_calls(self, name: str, kinds: int) -> str | None:
        """Run a command on a good disk, once for each set of kinds."""
        if (name, kinds) in self.num_calls:
            return None
        self.restore()
        self.shim.fault_arm(os.fsencode(self.folder), kinds, -1, 0, 0)
        status, text = run_command(COMMANDS[name])
        self.num_calls[name, kinds] = self.shim.fault_disarm()
        self.good_files[name] = self.made_files()
        self.replaced_files[name] = hashes(self.folder)
        return f"it fails on a good disk: {text[-300:]}" if status else None

    def made_files(self) -> dict[str, str]:
        """The files that a command made, except those with times in them."""
        made = {}
        for name, sha in hashes(self.folder).items():
            if name.startswith("new") and not name.endswith(".json"):
                made[name] = sha
        return made

    def check_unchanged(self, name: str, before: dict[str, str], status: Status) -> str | None:
        """Only files that the command replaces may have changed, and are then the new ones."""
        replaced = REPLACED.get(name, [])
        if replaced is None:
            return None
        after = hashes(self.folder)
        changed = [file for file, sha in before.items() if after.get(file) != sha]
        damaged = []
        for file in changed:
            is_new = after.get(file) == self.replaced_files[name].get(file)
            if Path(file).name not in replaced or not is_new:
                damaged.append(file)
        if damaged:
            return f"{', '.join(damaged)} changed, and the command ended with {status}"
        return None

    def check_no_temporary_files(self, status: Status, fault: str, *, sticky: bool) -> str | None:
        """A refused command removes its temporary files, if the disk lets it."""
        if not status or fault == "read-only" or sticky:
            return None
        left = [file for file in hashes(self.folder) if ".tmp" in file]
        return f"{', '.join(left[:3])} was left" if left else None

    def check_files(self, name: str, status: Status) -> str | None:
        """A command that succeeded made whole files; runs are checked by `dualkg check`."""
        has_comparable_files = name.startswith(("complete", "predict", "export"))
        if status == 0 and has_comparable_files and self.made_files() != self.good_files[name]:
            return "it ended with 0, and its files are not those of a good disk"
        if status and name != "overwrite":
            return None
        check_status, report = run_command(["check", FINISHED.get(name, "run")])
        is_resumable = name == "overwrite" and "dualkg resume" in report
        if check_status and not is_resumable:
            return f"damaged after status {status}: {report[-300:]}"
        return None


def check_message(status: Status, text: str, *, is_reached: bool) -> str | None:
    """A command ends as documented, and a refusal names a file."""
    if status not in (0, 1, 2) or TRACEBACK in text:
        return f"status {status}: {text[-800:]}"
    if not status or not is_reached:
        return None
    lines = text.strip().splitlines()
    last_line = lines[-1] if lines else ""
    message = last_line.partition("dualkg: ")[2]
    if not re.search(r"[\w./-]*(?:run|stopped|new|\.lock)[\w./-]*", message):
        return f"a message without the name of a file: {last_line[-300:]}"
    return None


def check_repeated(name: str, words: list[str]) -> str | None:
    """Run the command again with a good disk, or resume what it began."""
    if name in ("train", "overwrite"):
        out = words[words.index("--out") + 1]
        if Path(out, "checkpoint.safetensors").exists():
            words = ["resume", out]
    status, text = run_command(words)
    if any(sentence in text for sentence in ("is finished", "are in one file already")):
        return None
    return f"run again, it ended with {status}: {text[-300:]}" if status else None


def worker(pipe: Connection, home: str, library: str) -> None:
    """Run cases, (command, fault, seed) each, in a process with the shim."""
    os.environ |= {"DUALKG_CACHE": str(Path(home) / "cache"), "COLUMNS": "200", **ON_CPU}
    os.environ.pop("DUALKG_DATA", None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch

    torch.set_num_threads(1)
    if not Path(home, "good").exists():
        make_good(Path(home, "good"))
    disk = FailingDisk(load_shim(library), Path(home))
    pipe.send("ready")
    while (case := pipe.recv()) is not None:
        name, fault, seed = case
        try:
            pipe.send(disk.run_case(name, fault, random.Random(seed)))
        except Exception as error:
            pipe.send(("none", f"the campaign failed: {type(error).__name__}: {error}"))


def start(home: str, library: Path) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = str(library)
    try:
        process = context.Process(target=worker, args=(theirs, home, str(library)), daemon=True)
        process.start()
    finally:
        os.environ.pop("LD_PRELOAD")
        if before is not None:
            os.environ["LD_PRELOAD"] = before
    theirs.close()
    if not ours.poll(300) or ours.recv() != "ready":
        raise RuntimeError("the worker did not start")
    return process, ours


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Fail calls of all commands in turn, and count cases by fault and by command."""
    by_fault = Counter[str]()
    by_command = Counter[str]()
    failures = list[dict[str, Any]]()
    outcomes = Counter[str]()
    pairs = [(name, fault) for name in COMMANDS for fault in FAULTS]
    random.Random(seed).shuffle(pairs)
    with tempfile.TemporaryDirectory(prefix="dualkg-faults-") as home:
        try:
            library = compile_shim(Path(home))
        except (OSError, subprocess.CalledProcessError) as error:
            return {"cases": 0, "skipped": f"there is no C compiler ({error})", "failures": []}
        process, pipe = start(home, library)
        try:
            for number in rounds(minutes):
                name, fault = pairs[number % len(pairs)]
                by_fault[fault] += 1
                by_command[name] += 1
                try:
                    pipe.send((name, fault, f"{seed}-{number}"))
                    late = ("none", f"longer than {SECONDS} seconds")
                    outcome, problem = pipe.recv() if pipe.poll(SECONDS) else late
                except EOFError:
                    outcome = "none"
                    problem = "the process ended"
                outcomes[f"{fault}: {outcome}"] += 1
                if problem:
                    failures.append(
                        failure("faults", number=number, command=name, fault=fault, problem=problem)
                    )
                if problem and ("seconds" in problem or "process ended" in problem):
                    process.kill()
                    process.join()
                    process, pipe = start(home, library)
        finally:
            process.kill()
            process.join()
    figures = {"by_fault": by_fault, "by_command": by_command, "outcomes": outcomes}
    return {"cases": by_fault.total(), **figures, "failures": failures}

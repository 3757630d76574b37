"""Moves: the folder that a command writes is moved, removed or replaced by another meanwhile.

The change is made just before a file operation of the command, any of those between its lock and
its end. The command must then end with a sentence and a status other than 0, the folder that took
the name must not have changed by a byte, and the folder that was moved must be whole. While the
command runs, its folder is locked under the other name, too.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.torture.common import (
    TRACEBACK,
    Words,
    failure,
    fork_command,
    in_process,
    load_program,
    rounds,
    train_and_interrupt,
    training,
    write_triples,
)
from benchmarks.torture.fingerprints import raw

EPOCHS = 2
SENTENCES = (
    "was moved, removed or replaced while it was being written",
    "was moved, removed or replaced after the server had loaded it",
)
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")
CPU = ("--device", "cpu")
OFTEN = ("--set", "training.checkpoint_seconds=0")
TRAIN = (*training(seed=0, epochs=EPOCHS), *OFTEN)
# The commands, and the run that is copied to `run` before.
COMMANDS: dict[str, tuple[Words, str]] = {
    "train": (TRAIN, ""),
    "train, overwrite": ((*TRAIN, "--overwrite"), "good"),
    "train, two seeds": ((*TRAIN, "--seeds", 2), ""),
    "resume": (("resume", "run", *CPU), "stopped"),
    "calibrate": (("calibrate", "run", "--overwrite", *CPU), "calibrated"),
    "decide": (("decide",), "good"),
}


# -- changes of a folder -----------------------------------------------------


def move(run: Path) -> None:
    run.rename(run.with_name("moved"))


def remove(run: Path) -> None:
    # Another name first, because the command may write into it.
    run.rename(run.with_name("removed"))
    shutil.rmtree(run.with_name("removed"), ignore_errors=True)


def swap(run: Path) -> None:
    """A copy of another finished run takes the place of the run."""
    move(run)
    shutil.copytree(run.with_name("other"), run)


def link(run: Path) -> None:
    """A link to another finished run takes the place of the run."""
    move(run)
    run.symlink_to("other")


CHANGES: dict[str, Callable[[Path], None]] = {
    "move": move,
    "remove": remove,
    "swap": swap,
    "link": link,
}


# -- a command whose folder is changed ---------------------------------------


def run_changed(home: Path, change: str, place: int, words: list[str]) -> int:
    """Run a command, and change its folder before one of its operations; count them."""
    from dualkg import files

    count = 0
    is_busy = False

    def before_operation(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, is_busy
        if event not in OPERATIONS or is_busy:
            return
        # A new folder is held just before it has its name.
        is_held = any(held.descriptor is not None for held in files.held.HELD)
        if not (is_held and (home / "run").exists()) or (
            event == "open" and not _writes(arguments)
        ):
            return
        count += 1
        if count - 1 == place:
            is_busy = True
            CHANGES[change](home / "run")
            _check_lock(home)
            is_busy = False

    sys.addaudithook(before_operation)
    status = decide(home) if words[0] == "decide" else in_process(words)
    is_busy = True
    (home / "count.json").write_text(json.dumps(count))
    return status


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or "w" in str(mode)


def _check_lock(home: Path) -> None:
    """Write down what a second process would do that opens the folder by its new name."""
    from dualkg import files
    from dualkg.errors import LockedError

    moved = home / "moved"
    if not moved.exists() or not (moved / files.INNER_LOCK).exists():
        return
    folder = os.open(moved, os.O_RDONLY)
    try:
        files.held.lock_inside(folder, moved)
    except LockedError:
        return
    finally:
        os.close(folder)
    (home / "unlocked").touch()


def decide(home: Path) -> int:
    """Decide on new facts as the server does."""
    from dualkg.errors import DualkgError
    from dualkg.inference.decisions import Decision, DecisionStore
    from dualkg.serve.limits import Limits
    from dualkg.serve.service import ServedRuns, Service

    service = Service(
        ServedRuns.load([home / "run"], device="cpu"), limits=Limits(), log=False, read_only=False
    )

    def update(store: DecisionStore) -> object:
        decision = Decision("thing1", "colour", "colour1", "accepted", None, "2026-01-01T00:00:00Z")
        return store.update([decision])

    try:
        service.decisions(service.runs.default, update)
    except DualkgError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


# -- the campaign ------------------------------------------------------------


class Arena:
    """Good runs, and a folder for each case."""

    def __init__(self, home: Path) -> None:
        self.good = home / "good"
        self.here = home / "here"
        self.output = home / "output"
        self.good.mkdir()
        made = fork_command(
            cwd=self.good, output=self.output, call=lambda words: make_good(self.good)
        )
        text = made.wait()
        if made.status:
            raise RuntimeError(f"the runs were not made: {text}")
        self.num_operations: dict[str, int] = {}

    def run(self, name: str, change: str, place: int) -> tuple[int, str]:
        """The exit status of a command whose folder is changed, and its output."""
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        for path in ("mine.tsv", "other"):
            copy = shutil.copytree if path == "other" else shutil.copyfile
            copy(self.good / path, self.here / path)
        words, source = COMMANDS[name]
        if source:
            shutil.copytree(self.good / source, self.here / "run")
        call = partial(run_changed, self.here, change, place)
        command = fork_command(*words, cwd=self.here, output=self.output, call=call)
        text = command.wait()
        return command.status or 0, text

    def count(self, name: str) -> int:
        """How many operations a command has while it holds its folder."""
        if name not in self.num_operations:
            status, text = self.run(name, "move", -1)
            if status:
                raise RuntimeError(f"{name} fails if nothing is moved: {text[-800:]}")
            self.num_operations[name] = json.loads((self.here / "count.json").read_text())
        return self.num_operations[name]

    def case(self, name: str, change: str, place: int) -> list[str]:
        """What is wrong after a change before one operation."""
        status, text = self.run(name, change, place)
        count = 0
        with suppress(OSError):
            count = json.loads((self.here / "count.json").read_text())
        if count <= place:
            return []  # it was not reached
        wrong = []
        sentence = " ".join(text.split())
        is_explained = any(known in sentence for known in SENTENCES)
        run = self.here / "run"
        # A run that is about to be replaced may be moved aside: the new one gets its name.
        is_replaced = status == 0 and name == "train, overwrite" and change in ("move", "remove")
        if is_replaced:
            wrong += self._check(run, is_finished=True)
        elif status != 1 or not is_explained or TRACEBACK in text:
            wrong.append(f"ended with {status}: {text[-600:]}")
        if (self.here / "unlocked").exists():
            wrong.append("the folder was not locked under its new name")
        if raw(self.here / "other") != raw(self.good / "other"):
            wrong.append("the run that the link leads to has changed")
        if change == "swap" and raw(run) != raw(self.good / "other"):
            wrong.append("the run that took the place has changed")
        if change in ("move", "remove") and run.exists() and not is_replaced:
            wrong.append(f"a folder is there again: {sorted(raw(run))}")
        moved = self.here / "moved"
        return [*wrong, *(self._check(moved) if moved.exists() else [])]

    def _check(self, run: Path, *, is_finished: bool = False) -> list[str]:
        """What is wrong with a run: it is whole, and nothing else is left in it."""
        call = partial(check, run, is_finished)
        checked = fork_command(cwd=self.here, output=self.output, call=call)
        text = checked.wait()
        return [f"{run.name} is damaged: {text[-600:]}"] if checked.status else []


def make_good(good: Path) -> int:
    """Make what commands begin with."""
    import dualkg as kg

    write_triples(good / "mine.tsv")
    lines: list[Words] = [
        training(seed=1, epochs=EPOCHS, out="good"),
        training(seed=2, epochs=EPOCHS, out="other"),
        training(seed=3, epochs=EPOCHS, out="calibrated"),
        ("calibrate", "calibrated", *CPU),
    ]
    for line in lines:
        status = in_process([str(word) for word in line])
        if status:
            return status
    changes = {"training.seed": 4, "training.epochs": 4, "training.checkpoint_seconds": 0.0}
    recipe = kg.load_recipe("good/recipe.toml").with_changes(changes)
    train_and_interrupt(recipe, "stopped")
    return 0


def check(moved: Path, is_finished: bool, words: list[str]) -> int:
    """0 if the files of a folder are good, after the next command that writes it."""
    from dualkg import files
    from dualkg.inference.integrity import check_run

    for folder in (moved, *moved.glob("seed-*")):
        with files.locked(folder):
            pass
    hidden = [path.name for path in moved.rglob(".*")]
    if hidden:
        print(f"left: {hidden}")
        return 1
    if not files.contents(moved):
        return 0
    for run in check_run(moved):
        if is_finished and not run.finished:
            print("it is not finished")
            return 1
        for file in run.files:
            if file.damaged:
                print(file)
                return 1
    return 0


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    load_program()
    from importlib import import_module

    import_module("dualkg.serve.service")
    chance = random.Random(seed)
    by_command: Counter[str] = Counter()
    by_change: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory(prefix="dualkg-moves-") as home:
        arena = Arena(Path(os.path.realpath(home)))
        for number in rounds(minutes):
            name = list(COMMANDS)[number % len(COMMANDS)]
            change = chance.choice(list(CHANGES))
            place = chance.randrange(arena.count(name))
            wrong = arena.case(name, change, place)
            by_command[name] += 1
            by_change[change] += 1
            if wrong:
                case = {"command": name, "change": change, "place": place, "seed": seed}
                failures.append(failure("moves", **case, wrong=wrong))
    return {
        "moves": by_command.total(),
        "by_command": dict(by_command),
        "by_change": dict(by_change),
        "operations": arena.num_operations,
        "failures": failures,
    }

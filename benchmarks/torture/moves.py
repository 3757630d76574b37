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
from typing import Any, NamedTuple

from benchmarks.torture.common import (
    SPACE,
    TRACEBACK,
    Words,
    failure,
    fork_command,
    import_like,
    in_process,
    load_program,
    rounds,
    train_and_interrupt,
    training,
    write_new_triples,
    write_triples,
)
from benchmarks.torture.fingerprints import raw
from benchmarks.torture.swaps import train_shards

EPOCHS = 2
SENTENCES = (
    "was moved, removed or replaced while it was being written",
    "was moved, removed or replaced after the server had loaded it",
)
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")
CPU = ("--device", "cpu")
OFTEN = ("--set", "training.checkpoint_seconds=0")
TRAIN = (*training(seed=0, epochs=EPOCHS), *OFTEN)
NEW = ("--out", "run/new")


class Moved(NamedTuple):
    """A command, and the folder that is copied to `run` before.

    A command with `makes` writes that below the folder, which is not its own: it may also succeed
    in a folder that was made again, or has taken the name. It looks for the last time before it
    gives up its lock, and cannot know of a folder that is removed after that: then it may succeed,
    if all that it makes was there when the folder was removed.
    """

    words: Words
    source: str = ""
    makes: str = ""


COMMANDS = {
    "train": Moved(TRAIN),
    "train, overwrite": Moved((*TRAIN, "--overwrite"), "good"),
    "train, two seeds": Moved((*TRAIN, "--seeds", 2)),
    "resume": Moved(("resume", "run", *CPU), "stopped"),
    "resume, one of several": Moved(("resume", "run", *CPU), "shards"),
    "calibrate": Moved(("calibrate", "run", "--overwrite", *CPU), "calibrated"),
    "decide": Moved(("decide",), "good"),
    "gather": Moved(("gather", "run"), "divided"),
    "tune": Moved(("tune", "space.toml", "--out", "run", *CPU), "empty"),
    "train below": Moved((*training(seed=0, epochs=EPOCHS, out="run/new"),), "empty", "new"),
    "extend": Moved(("extend", "good", "new.tsv", *NEW, *CPU), "empty", "new"),
    "ensemble": Moved(("ensemble", "good", "calibrated", *NEW, *CPU), "empty", "new"),
    "sparsify": Moved(("sparsify", "good", "--share", 0.5, *NEW, *CPU), "empty", "new"),
    "index": Moved(("index", "good", "--kind", "exact", *NEW), "empty", "new"),
    "export": Moved(("export", "good", *NEW), "empty", "new"),
    "complete": Moved(
        ("complete", "good", "--top", 5, "--out", "run/new.tsv", *CPU), "empty", "new.tsv"
    ),
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


def run_changed(home: Path, change: str, place: int, makes: str, words: list[str]) -> int:
    """Run a command, and change its folder before one of its operations; count them."""
    from dualkg import files

    count = 0
    num_looks_after = 0
    made_before: list[str] = []
    is_busy = False
    check = files.held.HeldFolder.check

    def counted_check(held: files.held.HeldFolder) -> None:
        nonlocal num_looks_after
        num_looks_after += count > place >= 0
        check(held)

    def before_operation(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, is_busy, made_before
        if event not in OPERATIONS or is_busy:
            return
        # A new folder is held just before it has its name; one above it is not held.
        is_held = bool(makes) or any(
            home / "run" in held.paths and held.descriptor is not None for held in files.held.HELD
        )
        if not (is_held and (home / "run").exists()) or (
            event == "open" and not _writes(arguments)
        ):
            return
        count += 1
        if count - 1 == place:
            is_busy = True
            made_before = _files_of(home / "run" / makes) if makes else []
            CHANGES[change](home / "run")
            _check_lock(home)
            is_busy = False

    files.held.HeldFolder.check = counted_check  # type: ignore[method-assign]
    sys.addaudithook(before_operation)
    status = decide(home) if words[0] == "decide" else in_process(words)
    is_busy = True
    facts = {
        "count": count,
        "looks_after": num_looks_after,
        "made_before": made_before,
        "modules": list(sys.modules),
    }
    (home / "count.json").write_text(json.dumps(facts))
    return status


def _files_of(path: Path) -> list[str]:
    """The files in a folder, or the name of a file."""
    return sorted(raw(path)) if path.is_dir() else [path.name] * path.is_file()


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
    from dualkg.serve.limits import Limits

    from dualkg.errors import DualkgError
    from dualkg.inference.decisions import Decision, DecisionStore
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
        self.made: dict[str, list[str]] = {}

    def run(self, name: str, change: str, place: int) -> tuple[int, str]:
        """The exit status of a command whose folder is changed, and its output."""
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        for path in ("mine.tsv", "new.tsv", "space.toml"):
            shutil.copyfile(self.good / path, self.here / path)
        words, source, makes = COMMANDS[name]
        for folder in ("other", "good", "calibrated"):
            if folder == "other" or folder in words:
                shutil.copytree(self.good / folder, self.here / folder)
        if source:
            shutil.copytree(self.good / source, self.here / "run")
        call = partial(run_changed, self.here, change, place, makes)
        command = fork_command(*words, cwd=self.here, output=self.output, call=call)
        text = command.wait()
        return command.status or 0, text

    def count(self, name: str) -> int:
        """How many operations a command has while it holds its folder."""
        if name not in self.num_operations:
            status, text = self.run(name, "move", -1)
            if status:
                raise RuntimeError(f"{name} fails if nothing is moved: {text[-800:]}")
            counted = json.loads((self.here / "count.json").read_text())
            import_like(counted["modules"])
            self.num_operations[name] = counted["count"]
            self.made[name] = self._made(name)
        return self.num_operations[name]

    def case(self, name: str, change: str, place: int) -> list[str]:
        """What is wrong after a change before one operation."""
        status, text = self.run(name, change, place)
        facts = {"count": 0}
        with suppress(OSError):
            facts = json.loads((self.here / "count.json").read_text())
        if facts["count"] <= place:
            return []  # it was not reached
        if COMMANDS[name].makes:
            # A folder may go when all is made and the command has looked for the last time.
            is_after = not facts["looks_after"] and facts["made_before"] == self.made[name]
            return self._below(name, change, status, text, is_after=is_after)
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
        is_run = moved.exists() and name != "tune"
        return [*wrong, *(self._check(moved) if is_run else [])]

    def _below(
        self, name: str, change: str, status: int, text: str, *, is_after: bool
    ) -> list[str]:
        """What is wrong with a command that writes below the folder that was changed."""
        wrong = []
        if status not in (0, 1, 2) or TRACEBACK in text:
            wrong.append(f"ended with {status}: {text[-600:]}")
        made = self._made(name)
        # If the folder is moved after the last look, what was made is in it.
        is_moved = change != "remove" and self._made(name, "moved") == self.made[name]
        is_gone = change == "remove" and is_after
        if made != self.made[name] and (made or (status == 0 and not (is_moved or is_gone))):
            wrong.append(f"ended with {status}, and is incomplete: {made}: {text[-300:]}")
        now = raw(self.here / "other")
        before = raw(self.good / "other")
        if {file: now.get(file) for file in before} != before:
            wrong.append("a file of another run has changed")
        return wrong

    def _made(self, name: str, folder: str = "run") -> list[str]:
        """The files of what a command makes."""
        return _files_of(self.here / folder / COMMANDS[name].makes)

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
    write_new_triples(good / "new.tsv")
    (good / "space.toml").write_text(SPACE, encoding="utf-8")
    (good / "empty").mkdir()
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
    train_shards(Path("good"), Path("shards"))
    shutil.copytree("shards", "divided")
    return in_process(["resume", "divided", *CPU])


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

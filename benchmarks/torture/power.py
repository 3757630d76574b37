"""Power cuts: commands run on a disk that forgets (`disk.py`), and the power fails at any event.

Every state must open as the old or the new one; an unfinished run must resume to the same weights.
"""

import hashlib
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.torture.common import (
    Words,
    failure,
    load_program,
    rounds,
    run_command,
    training,
    weights_of,
    write_new_triples,
    write_triples,
)
from benchmarks.torture.disk import Data, Recorder, Tree
from dualkg import files

EPOCHS = 2
DATA: tuple[Data, ...] = ("none", "half", "all")
VARIANTS = list(product((False, True), DATA))  # names by folder or not, and how much data


# -- what opens after a cut --------------------------------------------------


def run_outcome(home: Path) -> str:
    """The weights of `run`, resumed if it is not finished."""
    from dualkg.training.ensemble import load_run
    from dualkg.training.run import RunFolder

    folder = RunFolder(home / "run")
    files.recover(folder.path)
    if not folder.path.exists() or not files.contents(folder.path):
        return "nothing"
    if not folder.finished:
        run_in(home, ("resume", "run", "--device", "cpu"))
    load_run(folder.path)
    damage = folder.damage()
    if damage:
        raise ValueError(f"damaged: {damage}")
    with files.locked(folder.path):
        pass
    hidden = [file.name for file in (*home.glob(".*"), *folder.path.glob(".*"))]
    if hidden:
        raise ValueError(f"left: {hidden}")
    return checksum(b"".join(weights_of(folder.weights).values()))


def calibration_outcome(home: Path) -> str:
    from dualkg.inference.calibration import load_calibration
    from dualkg.training.ensemble import load_run

    run = load_run(home / "run")
    if not (home / "run" / "calibration.json").exists():
        return "nothing"
    saved = load_calibration(home / "run", run.graph)
    return str((saved.calibration.as_dict(), saved.checks))


def file_outcome(name: str) -> Callable[[Path], str]:
    """Either no file or folder, or a whole one."""

    def outcome(home: Path) -> str:
        path = home / name
        files.recover(path)
        if not path.exists():
            return "nothing"
        content = b""
        for part in [path] if path.is_file() else sorted(path.rglob("*")):
            if part.is_file():
                content += part.name.encode() + part.read_bytes()
        return checksum(content)

    return outcome


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


# -- scenarios ---------------------------------------------------------------


@dataclass
class Scenario:
    """The commands before, those that are recorded, and a function that names the outcome."""

    before: list[Words]
    recorded: list[Words]
    outcome: Callable[[Path], str]
    exchange: bool = True


TRAIN = training(seed=0, epochs=EPOCHS)
OVERWRITE = (*training(seed=1, epochs=EPOCHS), "--overwrite")
CALIBRATE = ("calibrate", "run", "--device", "cpu")
SCENARIOS = {
    "train": Scenario([], [TRAIN], run_outcome),
    "train, checkpoints": Scenario(
        [], [(*TRAIN, "--set", "training.checkpoint_seconds=0")], run_outcome
    ),
    "overwrite": Scenario([TRAIN], [OVERWRITE], run_outcome),
    "overwrite by two renames": Scenario([TRAIN], [OVERWRITE], run_outcome, exchange=False),
    "fill an empty folder": Scenario([("mkdir", "run")], [TRAIN], run_outcome),
    "resume": Scenario(
        [TRAIN, ("unlink", "run/report.json")], [("resume", "run", "--device", "cpu")], run_outcome
    ),
    "calibrate": Scenario([TRAIN], [CALIBRATE], calibration_outcome),
    "calibrate again": Scenario(
        [TRAIN, CALIBRATE],
        [(*CALIBRATE, "--overwrite", "--coverage", 0.8)],
        calibration_outcome,
    ),
    "extend": Scenario(
        [training(seed=0, epochs=EPOCHS, out="base")],
        [("extend", "base", "new.tsv", "--out", "run", "--device", "cpu")],
        run_outcome,
    ),
    "export": Scenario([TRAIN], [("export", "run", "--out", "tables")], file_outcome("tables")),
    "complete": Scenario(
        [TRAIN, CALIBRATE],
        [("complete", "run", "--top", 20, "--out", "list.tsv", "--device", "cpu")],
        file_outcome("list.tsv"),
    ),
    "index": Scenario(
        [TRAIN], [("index", "run", "--kind", "exact", "--out", "index")], file_outcome("index")
    ),
}


def run_in(home: Path, words: Words) -> None:
    """Run a command in a folder; a status other than 0 is an error."""
    name, *arguments = [str(word) for word in words]
    if name == "mkdir":
        (home / arguments[0]).mkdir()
        return
    if name == "unlink":
        (home / arguments[0]).unlink()
        return
    here = Path.cwd()
    os.chdir(home)
    try:
        status, text = run_command([name, *arguments])
    finally:
        os.chdir(here)
    if status:
        raise ValueError(f"{words[:2]} ended with {status}: {text[-500:]}")


def record(scenario: Scenario, home: Path) -> tuple[Recorder, set[str]]:
    """Run a scenario; return its record and the outcomes that are allowed: before and after it."""
    write_triples(home / "mine.tsv")
    write_new_triples(home / "new.tsv")
    for words in scenario.before:
        run_in(home, words)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(home, folder, dirs_exist_ok=True)
        before = scenario.outcome(Path(copy))
    recorder = Recorder(home)
    exchange = files.writes._exchange_names if scenario.exchange else lambda *names: False
    with patch.object(files.writes, "_exchange_names", exchange), recorder.recording():
        for words in scenario.recorded:
            run_in(home, words)
    return recorder, {before, scenario.outcome(home)}


# -- the campaign ------------------------------------------------------------


class Cuts:
    """Cuts of one scenario in random order, and what opened after each."""

    def __init__(self, name: str, home: Path, chance: random.Random) -> None:
        self.name = name
        self.scenario = SCENARIOS[name]
        self.chance = chance
        self.recorder, self.allowed = record(self.scenario, home)
        self.events = list(range(self.recorder.start, self.recorder.event + 1))
        chance.shuffle(self.events)
        self.outcomes: dict[int, str] = {}  # by the hash of a tree
        self.num_cuts = 0

    def cut(self, number: int) -> list[dict[str, Any]]:
        """Open all variants of the disk after a cut; return those that are not allowed."""
        event = self.events[number]
        self.num_cuts += 1
        wrong = []
        for by_folder, data in VARIANTS:
            tree = self.recorder.state(event, self.chance, by_folder=by_folder, data=data)
            key = hash(tuple(sorted(tree.items())))
            if key not in self.outcomes:
                self.outcomes[key] = outcome_of(tree, self.scenario)
            if self.outcomes[key] not in self.allowed:
                details = {
                    "scenario": self.name,
                    "cut": event - self.recorder.start,
                    "by_folder": by_folder,
                    "data": data,
                    "outcome": self.outcomes[key],
                    "files": sorted(tree),
                }
                wrong.append(details)
        return wrong

    def figures(self) -> dict[str, int]:
        return {
            "events": len(self.events),
            "cuts": self.num_cuts,
            "different_states": len(self.outcomes),
        }


def outcome_of(tree: Tree, scenario: Scenario) -> str:
    """The outcome of a tree on a disk of its own, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        for place, content in tree.items():
            if content is None:
                Path(folder, place).mkdir()
            else:
                Path(folder, place).write_bytes(content)
        try:
            return scenario.outcome(Path(folder))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Try cuts of each scenario, all of them or for its share of the time."""
    load_program()
    end = time.monotonic() + 60 * minutes
    chance = random.Random(seed)
    failures = []
    totals = Counter[str]()
    by_scenario = {}
    # Short scenarios come first, and leave their time to others.
    names = list(reversed(SCENARIOS))
    for number, name in enumerate(names):
        num_left = len(names) - number
        with tempfile.TemporaryDirectory() as folder:
            cuts = Cuts(name, Path(folder), chance)
            minutes_left = (end - time.monotonic()) / 60
            for place in rounds(minutes_left / num_left, most=len(cuts.events)):
                for details in cuts.cut(place):
                    failures.append(failure("power", seed=seed, **details))
        by_scenario[name] = cuts.figures()
        totals.update(by_scenario[name])
    num_states = totals["cuts"] * len(VARIANTS)
    return {**totals, "states": num_states, "by_scenario": by_scenario, "failures": failures}

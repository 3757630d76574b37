"""Swaps: derived files of one run beside the weights of another, links that lead nowhere, damage.

Two runs on one graph differ in their seed only, so every file of one fits the other. A command must
refuse what was made from the other run with a sentence that names it, or do as if the file were its
own: the same predictions or weights, bit for bit. `dualkg check` must say so, too.
"""

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.torture.common import (
    TRACEBACK,
    Status,
    Words,
    failure,
    load_program,
    rounds,
    run_command,
    training,
    weights_of,
    write_triples,
)

EPOCHS = 2
CPU = ("--device", "cpu")
QUERY = ("--head", "thing1", "--relation", "colour")
PREDICT = ("predict", "own", *QUERY, "--json", *CPU)


class Derived(NamedTuple):
    """A file that is derived from a run: its path, and commands that read it.

    The result of a command is what it prints, or the file `result`.
    """

    path: str
    commands: tuple[Words, ...]
    is_checked: bool = True  # whether `dualkg check` reads it
    result: str = ""


DERIVED = {
    "calibration": Derived(
        "own/calibration.json",
        (
            PREDICT,
            ("predict", "own", *QUERY, "--coverage", 0.9, "--json", *CPU),
            ("complete", "own", "--top", 5, "--json", *CPU),
            ("calibrate", "own", "--json", *CPU),
            ("serve", "own", "--get", "/api/tails?head=thing1&relation=colour"),
        ),
    ),
    "calibration of seeds": Derived(
        "own-seeds/calibration.json",
        (("predict", "own-seeds", *QUERY, "--json", *CPU),),
        is_checked=False,
    ),
    "index": Derived("own-index", ((*PREDICT, "--index", "own-index"),), is_checked=False),
    "ensemble": Derived(
        "own-ensemble/ensemble.json", (("predict", "own-ensemble", *QUERY, "--json", *CPU),)
    ),
    # The last checkpoint of several processes, which may be resumed by one.
    "shard": Derived(
        "own-shards/checkpoint/last/shard-00001-model-00001-of-00001.safetensors",
        (("resume", "own-shards", *CPU),),
        result="own-shards/weights-00001-of-00001.safetensors",
    ),
    "pointer to shards": Derived(
        "own-shards/checkpoint/latest.json",
        (("resume", "own-shards", *CPU),),
        result="own-shards/weights-00001-of-00001.safetensors",
    ),
}


# -- changes of a derived file -----------------------------------------------


def other(path: Path, chance: random.Random) -> None:
    """The file of the other run takes its place."""
    parts = [
        part.replace("own", "other") if part.startswith("own") else part for part in path.parts
    ]
    source = Path(*parts)
    _remove(path)
    if source.is_dir():
        shutil.copytree(source, path)
    else:
        shutil.copyfile(source, path)


def link_to_other(path: Path, chance: random.Random) -> None:
    other(path, chance)
    target = path.rename(path.with_name(f"{path.name}-target"))
    path.symlink_to(target.name)


def dangling(path: Path, chance: random.Random) -> None:
    _remove(path)
    path.symlink_to("nowhere")


def circular(path: Path, chance: random.Random) -> None:
    _remove(path)
    path.symlink_to(path.name)


def flipped(path: Path, chance: random.Random) -> None:
    """One bit of a file is another."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    file = chance.choice(sorted(files))
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


CHANGES: dict[str, Callable[[Path, random.Random], None]] = {
    change.__name__: change for change in (other, link_to_other, dangling, circular, flipped)
}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- the campaign ------------------------------------------------------------


class Arena:
    """Two runs with all that is derived from them, and what commands print for the first."""

    def __init__(self, home: Path) -> None:
        self.good = home / "good"
        self.here = home / "here"
        self.good.mkdir()
        self.expected: dict[Words, object] = {}
        write_triples(self.good / "mine.tsv")
        for seed, name in enumerate(("own", "other")):
            self._make(seed, name)

    def _make(self, seed: int, name: str) -> None:
        """Train and derive."""
        lines: list[Words] = [
            training(seed=seed, epochs=EPOCHS, out=name),
            (*training(seed=10 * seed, epochs=EPOCHS, out=f"{name}-seeds"), "--seeds", 2),
            ("calibrate", name, *CPU),
            ("calibrate", f"{name}-seeds", *CPU),
            ("index", name, "--kind", "exact", "--out", f"{name}-index"),
            ("ensemble", name, f"{name}-seeds", "--out", f"{name}-ensemble", *CPU),
        ]
        for line in lines:
            status, text = self.run(line, self.good)
            if status:
                raise RuntimeError(f"{line[:2]} ended with {status}: {text[-500:]}")
        train_shards(self.good / name, self.good / f"{name}-shards")

    def result(self, words: Words, derived: Derived, home: Path) -> tuple[Status, str, object]:
        """The exit status of a command, its output, and its result."""
        status, text = self.run(words, home)
        if not derived.result or status:
            return status, text, text
        return status, text, weights_of(home / derived.result)

    def fresh(self, derived: Derived) -> Path:
        """A copy of the good files, and the path of the derived one in it."""
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.good, self.here)
        path = self.here / derived.path
        if path.parent.name == "last":
            path = sorted(path.parent.parent.glob("0*"))[-1] / path.name
        return path

    def run(self, words: Words, home: Path) -> tuple[Status, str]:
        """Run a command in a folder; its exit status and its output."""
        before = Path.cwd()
        os.chdir(home)
        try:
            return run_command([str(word) for word in words])
        finally:
            os.chdir(before)

    def case(self, name: str, change: str, words: Words, chance: random.Random) -> list[str]:
        """What is wrong after a change of a derived file."""
        derived = DERIVED[name]
        run = derived.path.partition("/")[0]
        if words not in self.expected:
            self.fresh(derived)
            status, text, result = self.result(words, derived, self.here)
            if status:
                return [f"fails without a change: {text[-500:]}"]
            self.expected[words] = result
        CHANGES[change](self.fresh(derived), chance)
        status, text, result = self.result(words, derived, self.here)
        wrong = []
        is_named = Path(derived.path).name in text or run in text or "The index" in text
        if status == 0 and result != self.expected[words]:
            wrong.append(f"succeeded with other results: {text[-400:]}")
        if status not in (0, 1, 2) or TRACEBACK in text or (status and not is_named):
            wrong.append(f"ended with {status}: {text[-600:]}")
        if derived.is_checked and status:
            status, text = self.run(("check", run), self.here)
            if status == 0:
                wrong.append(f"refused, and 'check' says that all is good: {text[-400:]}")
        return wrong


def train_shards(source: Path, out: Path) -> None:
    """Train as one of several processes to the second epoch, and leave an unfinished run."""
    import torch

    import dualkg as kg
    from dualkg.tables import Processes
    from dualkg.training.distributed import train_in_processes

    def stop(event: Any) -> None:
        if event.epoch == 2:
            raise KeyboardInterrupt

    changes = {"training.epochs": 3, "training.checkpoint_seconds": 0.0}
    recipe = kg.load_recipe(source / "recipe.toml").with_changes(changes)
    graph = kg.load_run(source).graph
    group = Processes(0, 1, torch.device("cpu"))
    with suppress(KeyboardInterrupt):
        train_in_processes(recipe, graph, group, out=out, on_progress=stop)


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    load_program()
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    failures = []
    cases = []
    for name, derived in DERIVED.items():
        for change in CHANGES:
            cases += [(name, change, words) for words in derived.commands]
    chance.shuffle(cases)
    with tempfile.TemporaryDirectory(prefix="dualkg-swaps-") as home:
        arena = Arena(Path(home))
        for number in rounds(minutes):
            name, change, words = cases[number % len(cases)]
            wrong = arena.case(name, change, words, chance)
            counts[f"{name}: {change}"] += 1
            if wrong:
                details = {"derived": name, "change": change, "words": words, "seed": seed}
                failures.append(failure("swaps", **details, wrong=wrong))
    return {"swaps": counts.total(), "by_case": dict(counts), "failures": failures}

"""Damage: bits, blocks and ends of files are changed in every kind of folder that dualkg writes.

A command that reads the folder must refuse it with a sentence that names the file or the folder, or
do as if the file were whole: the same predictions, lists or weights, bit for bit. Files without a
checksum (decisions, results of a search) may change what a command does, but never end it without
a sentence. If a command refuses a run, `dualkg check` must, too.
"""

import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.torture.common import (
    SPACE,
    TRACEBACK,
    Status,
    Words,
    failure,
    load_program,
    rounds,
    run_command,
    train_and_interrupt,
    training,
    weights_of,
    write_triples,
)
from benchmarks.torture.swaps import train_shards

EPOCHS = 2
CPU = ("--device", "cpu")
QUERY = ("--head", "thing1", "--relation", "colour")
INDEXES = ("exact", "ivf", "hnsw", "sq8")
UNCHECKED = ("decisions.jsonl", "study.db", "best.toml", "trials.csv", "summary.json")
# In what commands print: seconds of a list, and lines of progress.
TIMES = re.compile(r'"seconds": [0-9.e-]+|^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*\n', re.MULTILINE)
DECISION = (
    '{"head": "thing1", "relation": "colour", "tail": "colour2", "verdict": "accepted", '
    '"probability": 0.5, "decided_at": "2026-01-01T00:00:00Z"}\n'
)


class Kind(NamedTuple):
    """A folder, and commands that read it.

    The result of a command is what it prints, or the weights of `result`.
    """

    folder: str
    commands: tuple[Words, ...]
    result: str = ""
    is_run: bool = True  # which `dualkg check` reads
    others: tuple[str, ...] = ()  # that the commands read


def _predict(run: str, *options: object) -> Words:
    return ("predict", run, *QUERY, "--json", *CPU, *options)


KINDS = {
    "run": Kind(
        "run",
        (
            _predict("run"),
            _predict("run", "--coverage", 0.9),
            ("complete", "run", "--top", 5, "--json", *CPU),
            ("evaluate", "run", "--json", *CPU),
            ("compare", "run", "other", "--json"),
            ("similar", "run", "thing1", "--json"),
            ("export", "run", "--format", "tsv", "--out", "exported"),
            ("serve", "run", "--get", "/api/decisions"),
            ("serve", "run", "--get", "/api/tails?head=thing1&relation=colour"),
            ("serve", "run", "--get", "/run"),
        ),
        others=("other",),
    ),
    "unfinished run": Kind("stopped", (("resume", "stopped", *CPU),), "weights.safetensors"),
    "several processes": Kind(
        "shards", (("resume", "shards", *CPU),), "weights-00001-of-00001.safetensors"
    ),
    "divided weights": Kind(
        "divided",
        (_predict("divided"), ("evaluate", "divided", "--json", *CPU), ("gather", "divided")),
    ),
    "ensemble": Kind(
        "ensemble",
        (_predict("ensemble"), ("evaluate", "ensemble", "--json", *CPU)),
        others=("run", "other"),
    ),
    "study": Kind(
        "study",
        (
            ("tune", "space.toml", "--out", "study", *CPU),
            ("train", "study/best.toml", "--out", "new", *CPU),
        ),
        is_run=False,
    ),
} | {
    f"index, {kind}": Kind(
        f"index-{kind}",
        (_predict("other", "--index", f"index-{kind}"),),
        is_run=False,
        others=("other",),
    )
    for kind in INDEXES
}


# -- damage of a file --------------------------------------------------------


def flip(content: bytearray, draw: random.Random) -> None:
    """One bit is another."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def zero(content: bytearray, draw: random.Random) -> None:
    """A block of zeros, as of a disk that lost it."""
    place = draw.randrange(len(content))
    size = min(draw.choice((1, 64, 4096)), len(content) - place)
    content[place : place + size] = bytes(size)


def overwrite(content: bytearray, draw: random.Random) -> None:
    """A block of another part of the file."""
    size = min(draw.choice((4, 64, 512)), len(content))
    source = draw.randrange(len(content) - size + 1)
    place = draw.randrange(len(content) - size + 1)
    content[place : place + size] = content[source : source + size]


def append(content: bytearray, draw: random.Random) -> None:
    content += draw.choice((b"\0", b"\n", b" ", b"}", draw.randbytes(64)))


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip,
    flip,
    flip,
    cut,
    zero,
    overwrite,
    append,
)


def damage(folder: Path, draw: random.Random) -> tuple[Path, str] | None:
    """Damage one file; None if its content is the same."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size]
    file = draw.choice(sorted(files))
    before = file.read_bytes()
    content = bytearray(before)
    change = draw.choice(DAMAGES)
    change(content, draw)
    if content == before:
        return None
    file.write_bytes(content)
    return file, change.__name__


# -- the campaign ------------------------------------------------------------


class Arena:
    """Good folders of every kind, and what commands print for them."""

    def __init__(self, home: Path) -> None:
        self.good = home / "good"
        self.here = home / "here"
        self.good.mkdir()
        self.expected: dict[Words, object] = {}
        self._make()

    def _make(self) -> None:
        import dualkg as kg

        write_triples(self.good / "mine.tsv")
        (self.good / "space.toml").write_text(SPACE, encoding="utf-8")
        lines: list[Words] = [
            training(seed=0, epochs=EPOCHS, out="run"),
            training(seed=1, epochs=EPOCHS, out="other"),
            ("calibrate", "run", *CPU),
            *(
                ("index", "other", "--kind", kind, "--recall", 0.1, "--out", f"index-{kind}")
                if kind != "exact"
                else ("index", "other", "--kind", kind, "--out", "index-exact")
                for kind in INDEXES
            ),
            ("ensemble", "run", "other", "--out", "ensemble", *CPU),
            ("tune", "space.toml", "--out", "study", *CPU),
        ]
        for line in lines:
            status, text = self.run(line, self.good)
            if status:
                raise RuntimeError(f"{line[:2]} ended with {status}: {text[-500:]}")
        (self.good / "run" / "decisions.jsonl").write_text(DECISION)
        train_shards(self.good / "run", self.good / "shards")
        shutil.copytree(self.good / "shards", self.good / "divided")
        self.run(("resume", "divided", *CPU), self.good)
        changes = {
            "data.graph": str(self.good / "mine.tsv"),
            "training.epochs": 4,
            "training.checkpoint_seconds": 0.0,
        }
        recipe = kg.load_recipe(self.good / "run" / "recipe.toml").with_changes(changes)
        train_and_interrupt(recipe, self.good / "stopped")

    def run(self, words: Words, home: Path) -> tuple[Status, str]:
        """Run a command in a folder; its exit status and its output."""
        before = Path.cwd()
        os.chdir(home)
        try:
            return run_command([str(word) for word in words])
        finally:
            os.chdir(before)

    def fresh(self, kind: Kind) -> None:
        """Copy what the commands of a kind read."""
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        for file in ("mine.tsv", "space.toml"):
            shutil.copyfile(self.good / file, self.here / file)
        for folder in (kind.folder, *kind.others):
            shutil.copytree(self.good / folder, self.here / folder)

    def result(self, kind: Kind, words: Words) -> tuple[Status, str, object]:
        """The exit status of a command, its output, and its result."""
        status, text = self.run(words, self.here)
        if status or not kind.result:
            return status, text, TIMES.sub("", text)
        return status, text, weights_of(self.here / kind.folder / kind.result)

    def expect(self, kind: Kind, words: Words) -> None:
        """Run a command twice on good files; a result with times in it is not compared."""
        results = []
        for _ in range(2):
            self.fresh(kind)
            status, text, result = self.result(kind, words)
            if status:
                raise RuntimeError(f"{words} fails without damage: {text[-500:]}")
            results.append(result)
        self.expected[words] = results[0] if results[0] == results[1] else None

    def case(self, name: str, draw: random.Random) -> tuple[str, list[str]] | None:
        """Damage a file, and run a command; how it ended, and what is wrong. None: no damage."""
        kind = KINDS[name]
        words = draw.choice(kind.commands)
        if words not in self.expected:
            self.expect(kind, words)
        self.fresh(kind)
        damaged = damage(self.here / kind.folder, draw)
        if damaged is None:
            return None
        path, change = damaged
        status, text, result = self.result(kind, words)
        what = f"{change} of {path.relative_to(self.here)}, {' '.join(map(str, words))}"
        wrong = []
        if (
            status == 0
            and path.name not in UNCHECKED
            and self.expected[words] not in (None, result)
        ):
            wrong.append(f"{what} succeeded with other results: {text[-600:]}")
        if status not in (0, 1, 2) or TRACEBACK in text:
            wrong.append(f"{what} ended with {status}: {text[-800:]}")
        elif status and path.name not in text and kind.folder not in text:
            wrong.append(f"{what} does not name a file: {text[-600:]}")
        if status and kind.is_run:
            checked, report = self.run(("check", kind.folder), self.here)
            if checked == 0:
                wrong.append(f"{what} was refused, and 'check' says good: {report[-600:]}")
        return ("refused" if status else "done as before"), wrong


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    load_program()
    by_kind: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    failures = []
    # What a disk does is not part of it: where there is a folder in memory, syncs take no time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dualkg-damage-", dir=memory) as home:
        arena = Arena(Path(os.path.realpath(home)))
        for number in rounds(minutes):
            name = list(KINDS)[number % len(KINDS)]
            case = arena.case(name, random.Random(f"{seed}-{number}"))
            if case is None:
                continue
            outcome, wrong = case
            by_kind[name] += 1
            outcomes[outcome] += 1
            if wrong:
                details = {"kind": name, "number": number, "seed": seed}
                failures.append(failure("damage", **details, wrong=wrong))
    return {
        "files": by_kind.total(),
        "by_kind": dict(by_kind),
        "outcomes": dict(outcomes),
        "failures": failures,
    }

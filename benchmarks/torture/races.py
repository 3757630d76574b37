"""Races: two or eight processes write one run, study, list, index or decision file at the same
time.

Afterwards nothing may be lost: what is there is whole, by its checksums, and is what one of the
processes that succeeded wrote. Each process that did not succeed has said why in a sentence, and no
temporary file or lock is left.
"""

import json
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.torture.common import (
    SPACE,
    Command,
    failure,
    fork_command,
    load_program,
    rounds,
    write_triples,
)

SETTINGS = (
    "--no-tune",
    "--dim",
    4,
    "--epochs",
    3,
    "--batch-size",
    50,
    "--engine",
    "reference",
    "--device",
    "cpu",
)
NUM_SEEDS = 4
TOLD = (
    "is being written by process",
    "is being written by another process",
    "exists already",
    "exists and is not a run",
    "is finished",
    "is a finished run",
    "is not finished",
    "was replaced after it was loaded",
    "which would be lost",
)
NUM_DECISIONS = 5


class Arena:
    """A folder with runs of some seeds, and what the weights of each seed are."""

    def __init__(self, home: Path) -> None:
        self.home = home
        write_triples(home / "mine.tsv")
        (home / "mine.toml").write_text(SPACE.replace("[2, 3]", "[2, 3, 4]"), encoding="utf-8")
        (home / "new.tsv").write_text("newcomer\tcolour\tcolour1\n", encoding="utf-8")
        made = [
            ("train", "mine.tsv", *SETTINGS, "--seed", seed, "--out", f"good-{seed}")
            for seed in range(NUM_SEEDS)
        ]
        self.run(made)
        self.weights = {seed: weights_of(home / f"good-{seed}") for seed in range(NUM_SEEDS)}
        self.run([("calibrate", "good-0", "--device", "cpu")])
        self.run([("complete", "good-0", "--top", 20, "--out", "good.tsv", "--device", "cpu")])

    def run(
        self, lines: list[tuple[object, ...]], chance: random.Random | None = None
    ) -> list[Command]:
        """Start commands at the same moment, within milliseconds of each other, and wait for
        all.
        """
        read, write = os.pipe()
        os.set_inheritable(write, False)
        started = []
        for number, words in enumerate(lines):
            delay = chance.choice([0, 0.003, 0.03, 0.3]) * chance.random() if chance else 0.0
            output = self.home / f".output-{number}"
            call = _decide if words[0] == "decide" else None
            started.append(
                fork_command(
                    *words, cwd=self.home, output=output, delay=delay, gate=read, call=call
                )
            )
        os.write(write, b"x" * len(started))
        os.close(write)
        os.close(read)
        for one in started:
            one.wait()
        return started


def weights_of(run: Path) -> dict[str, bytes]:
    """The tables of a run; the file beside them has times, which differ."""
    return {name: table.tobytes() for name, table in load_file(run / "weights.safetensors").items()}


# -- the races: commands, and what is wrong afterwards -----------------------

Lines = list[tuple[object, ...]]
Check = Callable[[list[Command]], list[str]]


def train_over(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    _copy(arena, "good-0", "run")
    lines = [
        ("train", "mine.tsv", *SETTINGS, "--seed", seed % NUM_SEEDS, "--out", "run", "--overwrite")
        for seed in range(number)
    ]
    return lines, lambda done: _good_run(arena, done)


def train_new(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    lines = [
        ("train", "mine.tsv", *SETTINGS, "--seed", seed % NUM_SEEDS, "--out", "run")
        for seed in range(number)
    ]
    return lines, lambda done: _good_run(arena, done) + _one_winner(done)


def resume(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """The run has lost its report, as if killed just before it."""
    run = _copy(arena, "good-1", "run")
    (run / "report.json").unlink()
    (run / "weights.safetensors").rename(run / "checkpoint.safetensors")
    return [
        ("resume", "run", "--device", "cpu")
    ] * number, lambda done: _good_run(arena, done) + _one_winner(done)


def calibrate(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Some calibrate and some train over the same run: a calibration belongs to the weights beside
    it.
    """
    _copy(arena, "good-0", "run")
    line = ("calibrate", "run", "--device", "cpu", "--overwrite")
    over = ("train", "mine.tsv", *SETTINGS, "--seed", 2)
    lines = [
        line if chance.random() < 0.7 else (*over, "--out", "run", "--overwrite")
        for _ in range(number)
    ]

    def check(done: list[Command]) -> list[str]:
        wrong = _good_run(arena, done)
        made = arena.home / "run" / "calibration.json"
        same = (
            made.exists()
            and made.read_bytes() == (arena.home / "good-0" / "calibration.json").read_bytes()
        )
        trained = not wrong and weights_of(arena.home / "run") != arena.weights[0]
        return [*wrong, "the calibration is of other weights"] if trained and same else wrong

    return lines, check


def complete(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    _copy(arena, "good-0", "run")
    lines: Lines = [
        ("complete", "run", "--top", 20, "--out", "list.tsv", "--device", "cpu")
    ] * number

    def check(done: list[Command]) -> list[str]:
        same = (arena.home / "list.tsv").read_bytes() == (arena.home / "good.tsv").read_bytes()
        return _one_winner(done) + ([] if same else ["the list differs"])

    return lines, check


def derive(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Different commands that write one folder."""
    kinds: Lines = [
        ("export", "good-0", "--out", "run"),
        ("extend", "good-0", "new.tsv", "--out", "run", "--device", "cpu"),
        ("index", "good-0", "--kind", "exact", "--out", "run"),
        ("ensemble", "good-0", "good-1", "--weights", "equal", "--out", "run", "--device", "cpu"),
        ("sparsify", "good-0", "--share", 0.5, "--out", "run", "--device", "cpu"),
    ]
    return [chance.choice(kinds) for _ in range(number)], _one_winner


def read_and_write(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Readers see the old run or the new one, or the message that it is not finished."""
    _copy(arena, "good-0", "run")
    readers: Lines = [
        ("check", "run"),
        ("predict", "run", "--head", "thing1", "--relation", "colour", "--device", "cpu"),
        ("evaluate", "run", "--device", "cpu"),
    ]
    writers: Lines = [
        ("train", "mine.tsv", *SETTINGS, "--seed", 3, "--out", "run", "--overwrite"),
        ("calibrate", "run", "--overwrite", "--device", "cpu"),
    ]
    lines = [chance.choice(writers), *(chance.choice(readers) for _ in range(number - 1))]
    return lines, lambda done: _good_run(arena, done)


def tune(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Processes share a study: all succeed, and each point is trained once."""
    lines: Lines = [
        ("tune", "mine.toml", "--out", "run", "--device", "cpu", "--threads", 1)
    ] * number

    def check(done: list[Command]) -> list[str]:
        sql = """
            select t.trial_id, param_name, param_value
            from trials t join trial_params p using (trial_id)
            where state = 'COMPLETE'
        """
        with closing(sqlite3.connect(arena.home / "run" / "study.db")) as database:
            rows = database.execute(sql).fetchall()
        points: dict[int, set[tuple[str, float]]] = {}
        for trial, name, value in rows:
            points.setdefault(trial, set()).add((name, value))
        counts = Counter(frozenset(point) for point in points.values())
        wrong = [f"exit status {one.status}" for one in done if one.status]
        wrong += (
            []
            if len(counts) == 6 and set(counts.values()) == {1}
            else [f"trials by point: {counts}"]
        )
        wrong += [
            f"{name} is missing"
            for name in ("best.toml", "trials.csv")
            if not (arena.home / "run" / name).exists()
        ]
        return wrong

    return lines, check


def decide(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Processes write decisions, while one may train over the run; a decision that was answered is
    there for good.
    """
    _copy(arena, "good-0", "run")
    lines: Lines = [("decide", who, NUM_DECISIONS, chance.random()) for who in range(number)]
    if chance.random() < 0.5:
        lines[-1] = ("train", "mine.tsv", *SETTINGS, "--seed", 1, "--out", "run", "--overwrite")

    def check(done: list[Command]) -> list[str]:
        from dualkg.inference.decisions import DecisionStore

        saved = {one[0] for one in DecisionStore(arena.home / "run" / "decisions.jsonl").load()}
        who = [one.words[1] for one in done if one.words[0] == "decide"]
        lost = [
            f"{one}-{i}" for one in who for i in range(NUM_DECISIONS) if f"{one}-{i}" not in saved
        ]
        return [f"lost: {lost}"] if lost else []

    return lines, check


RACES = (train_over, train_new, resume, calibrate, complete, derive, read_and_write, tune, decide)


def _copy(arena: Arena, source: str, name: str) -> Path:
    return Path(shutil.copytree(arena.home / source, arena.home / name))


def _one_winner(done: list[Command]) -> list[str]:
    winners = sum(one.status == 0 for one in done)
    return [] if winners == 1 else [f"{winners} processes succeeded; 1 was expected"]


def _good_run(arena: Arena, done: list[Command]) -> list[str]:
    """The run is whole, and has the weights of its seed."""
    from dualkg.inference.integrity import check_run

    path = arena.home / "run"
    try:
        checks = check_run(path)
        seed = next(
            line
            for line in (path / "recipe.toml").read_text().splitlines()
            if line.startswith("seed = ")
        )
        number = int(seed.removeprefix("seed = "))
        good = weights_of(path) == arena.weights[number]
    except Exception as error:
        return [f"the run cannot be checked: {type(error).__name__}: {error}"]
    wrong = [] if good else ["the weights are not those of the seed"]
    wrong += [
        f"{file.file} is damaged: {file.reason}"
        for one in checks
        for file in one.files
        if file.state == "damaged"
    ]
    return wrong + ([] if all(one.finished for one in checks) else ["the run is not finished"])


def _decide(words: list[str]) -> int:
    from dualkg.inference.decisions import Decision, DecisionStore

    store = DecisionStore(Path("run/decisions.jsonl"))
    for i in range(int(words[2])):
        time.sleep(
            float(words[3]) / 2
        )  # some before the training that replaces the run, some after
        store.update(
            [Decision(f"{words[1]}-{i}", "r", "t", "accepted", None, "2026-01-01T00:00:00+00:00")]
        )
    return 0


def _common(arena: Arena, done: list[Command]) -> list[str]:
    """Each loser gets a message, without a traceback, and nothing is left."""
    wrong = []
    for one in done:
        text = one.output.read_text(encoding="utf-8", errors="replace")
        if "Traceback" in text or (one.status != 0 and not any(words in text for words in TOLD)):
            wrong.append(f"{' '.join(one.words[:2])} ended with {one.status}: {text[-600:]}")
    found = [
        path
        for path in arena.home.iterdir()
        if path.name.startswith(".") and not path.name.startswith(".output")
    ]
    run = arena.home / "run"
    found += [path for path in (run.iterdir() if run.is_dir() else ()) if path.name.startswith(".")]
    return wrong + ([f"left: {sorted(path.name for path in found)}"] if found else [])


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    load_program()
    chance = random.Random(seed)
    counts = Counter()
    failures = []
    processes = losers = 0
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder))
        kept = {path.name for path in arena.home.iterdir()}
        for number in rounds(minutes):
            race = RACES[number % len(RACES)]
            size = chance.choice([2, 2, 2, 8])
            lines, check = race(arena, size, chance)
            done = arena.run(lines, chance)
            wrong = [*_common(arena, done), *check(done)]
            counts[race.__name__] += 1
            processes += size
            losers += sum(one.status != 0 for one in done)
            if wrong:
                words = json.dumps([one.words for one in done])
                failures.append(
                    failure(
                        "races",
                        race=race.__name__,
                        round=number,
                        seed=seed,
                        wrong=wrong,
                        words=words,
                    )
                )
            for path in arena.home.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {
        "races": sum(counts.values()),
        "processes": processes,
        "refused with a message": losers,
        "by_race": dict(counts),
        "failures": failures,
    }

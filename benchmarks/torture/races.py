"""Races: several processes write one run, study, list, index or decision file at the same time.

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
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from benchmarks.torture.common import (
    SPACE,
    TRACEBACK,
    Command,
    Words,
    failure,
    fork_command,
    load_program,
    rounds,
    training,
    weights_of,
    write_new_triples,
    write_triples,
)

EPOCHS = 3
NUM_SEEDS = 4
# Sentences that tell why a process did not succeed.
REFUSALS = (
    "is being written by process",
    "is being written by another process",
    "exists already",
    "exists and is not a run",
    "is finished",
    "is a finished run",
    "is not finished",
    "is in training",
    "was replaced after it was loaded",
    "which would be lost",
    "was moved, removed or replaced while it was being written",
    "does not exist",
)
TRAINING_SECONDS = 3.0  # with others at the same time
NUM_DECISIONS = 5
NUM_POINTS = 6  # three dims and two seeds


class Arena:
    """A folder with runs of some seeds, and what the weights of each seed are."""

    def __init__(self, home: Path) -> None:
        self.home = home
        write_triples(home / "mine.tsv")
        (home / "mine.toml").write_text(SPACE.replace("[2, 3]", "[2, 3, 4]"), encoding="utf-8")
        write_new_triples(home / "new.tsv")
        trainings: Lines = []
        for seed in range(NUM_SEEDS):
            trainings.append(training(seed=seed, epochs=EPOCHS, out=f"good-{seed}"))
        self.run(trainings)
        self.weights = {seed: run_weights(home / f"good-{seed}") for seed in range(NUM_SEEDS)}
        self.run([("calibrate", "good-0", "--device", "cpu")])
        self.run([("complete", "good-0", "--top", 20, "--out", "good.tsv", "--device", "cpu")])
        self.initial_names = {path.name for path in home.iterdir()}

    def clear(self) -> None:
        """Remove what a race has left."""
        for path in self.home.iterdir():
            if path.name in self.initial_names:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def run(self, lines: list[Words], chance: random.Random | None = None) -> list[Command]:
        """Start commands within milliseconds of each other, and wait for all."""
        read, write = os.pipe()
        os.set_inheritable(write, False)
        commands = []
        for number, words in enumerate(lines):
            delay = chance.choice([0, 0.003, 0.03, 0.3]) * chance.random() if chance else 0.0
            command = fork_command(
                *words,
                cwd=self.home,
                output=self.home / f".output-{number}",
                delay=delay,
                gate=read,
                call=CALLS.get(str(words[0])),
            )
            commands.append(command)
        # Each command starts when it has read a byte.
        os.write(write, b"x" * len(commands))
        os.close(write)
        os.close(read)
        for command in commands:
            command.wait()
        return commands


def run_weights(run: Path) -> dict[str, bytes]:
    return weights_of(run / "weights.safetensors")


# -- the races: commands, and what is wrong afterwards -----------------------

Lines = list[Words]
Check = Callable[[list[Command]], list[str]]


def _training(seed: int, *options: object) -> Words:
    return (*training(seed=seed % NUM_SEEDS, epochs=EPOCHS), *options)


def train_over(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    _copy(arena, "good-0", "run")
    lines = [_training(seed, "--overwrite") for seed in range(number)]
    return lines, lambda commands: _good_run(arena)


def train_new(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    lines = [_training(seed) for seed in range(number)]
    return lines, lambda commands: _good_run(arena) + _one_winner(commands)


def resume(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """The run has lost its report, as if killed just before it."""
    run = _copy(arena, "good-1", "run")
    (run / "report.json").unlink()
    (run / "weights.safetensors").rename(run / "checkpoint.safetensors")
    line = ("resume", "run", "--device", "cpu")
    return [line] * number, lambda commands: _good_run(arena) + _one_winner(commands)


def calibrate(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Some calibrate and some train over the same run.

    A calibration belongs to the weights beside it.
    """
    _copy(arena, "good-0", "run")
    lines: Lines = []
    for _ in range(number):
        if chance.random() < 0.7:
            lines.append(("calibrate", "run", "--device", "cpu", "--overwrite"))
        else:
            lines.append(_training(2, "--overwrite"))

    def check(commands: list[Command]) -> list[str]:
        wrong = _good_run(arena)
        if wrong or run_weights(arena.home / "run") == arena.weights[0]:
            return wrong
        calibration = arena.home / "run" / "calibration.json"
        earlier = arena.home / "good-0" / "calibration.json"
        if calibration.exists() and calibration.read_bytes() == earlier.read_bytes():
            return ["the calibration is of other weights"]
        return []

    return lines, check


def complete(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    _copy(arena, "good-0", "run")
    line = ("complete", "run", "--top", 20, "--out", "list.tsv", "--device", "cpu")

    def check(commands: list[Command]) -> list[str]:
        wrong = _one_winner(commands)
        if (arena.home / "list.tsv").read_bytes() != (arena.home / "good.tsv").read_bytes():
            wrong.append("the list differs")
        return wrong

    return [line] * number, check


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
        _training(3, "--overwrite"),
        ("calibrate", "run", "--overwrite", "--device", "cpu"),
    ]
    lines = [chance.choice(writers)]
    lines += [chance.choice(readers) for _ in range(number - 1)]
    return lines, lambda commands: _good_run(arena)


def tune(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Processes share a study: all succeed, and each point is trained once."""
    line = ("tune", "mine.toml", "--out", "run", "--device", "cpu", "--threads", 1)

    def check(commands: list[Command]) -> list[str]:
        counts = _trained_points(arena.home / "run" / "study.db")
        wrong = [f"exit status {command.status}" for command in commands if command.status]
        if len(counts) != NUM_POINTS or set(counts.values()) != {1}:
            wrong.append(f"trials by point: {counts}")
        for name in ("best.toml", "trials.csv"):
            if not (arena.home / "run" / name).exists():
                wrong.append(f"{name} is missing")
        return wrong

    return [line] * number, check


def _trained_points(study: Path) -> Counter[frozenset[tuple[str, float]]]:
    """How often each point of the space was trained to its end."""
    sql = """
        select t.trial_id, param_name, param_value
        from trials t join trial_params p using (trial_id)
        where state = 'COMPLETE'
    """
    with closing(sqlite3.connect(study)) as database:
        rows = database.execute(sql).fetchall()
    points: dict[int, set[tuple[str, float]]] = {}
    for trial, name, value in rows:
        points.setdefault(trial, set()).add((name, value))
    return Counter(frozenset(point) for point in points.values())


def decide(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """Processes write decisions, while one may train over the run.

    A decision that was answered is there for good.
    """
    _copy(arena, "good-0", "run")
    lines: Lines = [("decide", writer, NUM_DECISIONS, chance.random()) for writer in range(number)]
    if chance.random() < 0.5:
        lines[-1] = _training(1, "--overwrite")

    def check(commands: list[Command]) -> list[str]:
        from dualkg.inference.decisions import DecisionStore

        decisions = DecisionStore(arena.home / "run" / "decisions.jsonl").load()
        saved_heads = {decision[0] for decision in decisions}
        lost = []
        for command in commands:
            if command.words[0] == "decide":
                heads = [f"{command.words[1]}-{i}" for i in range(NUM_DECISIONS)]
                lost += [head for head in heads if head not in saved_heads]
        return [f"lost: {lost}"] if lost else []

    return lines, check


def move(arena: Arena, number: int, chance: random.Random) -> tuple[Lines, Check]:
    """The folder is moved while processes write it, and another run may take its name."""
    _copy(arena, "good-0", "run")
    change = chance.choice(["move", "swap"])
    lines: Lines = [("move", change, chance.random())]
    for seed in range(1, number):
        if chance.random() < 0.7:
            lines.append(_training(seed, "--overwrite"))
        else:
            lines.append(("calibrate", "run", "--device", "cpu", "--overwrite"))

    def check(commands: list[Command]) -> list[str]:
        # A command that began after the change has written another folder of the name.
        wrong = _good_run(arena) if (arena.home / "run").exists() else []
        wrong += [f"moved: {what}" for what in _good_run(arena, "moved", is_finished=False)]
        if change == "swap" and not (arena.home / "run").exists():
            wrong.append("the run that took the name is gone")
        return wrong

    return lines, check


RACES = (
    train_over,
    train_new,
    resume,
    calibrate,
    complete,
    derive,
    read_and_write,
    tune,
    decide,
    move,
)


def _copy(arena: Arena, source: str, name: str) -> Path:
    return Path(shutil.copytree(arena.home / source, arena.home / name))


def _one_winner(commands: list[Command]) -> list[str]:
    num_winners = sum(command.status == 0 for command in commands)
    return [] if num_winners == 1 else [f"{num_winners} processes succeeded; 1 was expected"]


def _good_run(arena: Arena, name: str = "run", *, is_finished: bool = True) -> list[str]:
    """The run is whole, and has the weights of its seed if it is finished."""
    from dualkg.inference.integrity import check_run

    path = arena.home / name
    try:
        checks = check_run(path)
        seed = tomllib.loads((path / "recipe.toml").read_text())["training"]["seed"]
        is_finished = is_finished or checks[0].finished
        has_weights_of_seed = not is_finished or run_weights(path) == arena.weights[seed]
    except Exception as error:
        return [f"the run cannot be checked: {type(error).__name__}: {error}"]
    wrong = [] if has_weights_of_seed else ["the weights are not those of the seed"]
    for check in checks:
        for file in check.files:
            if file.state == "damaged":
                wrong.append(f"{file.file} is damaged: {file.reason}")
    if is_finished and not all(check.finished for check in checks):
        wrong.append("the run is not finished")
    return wrong


def _decide(words: list[str]) -> int:
    """Save decisions, some before a training replaces the run, and some after."""
    from dualkg.inference.decisions import Decision, DecisionStore

    _, writer, num_decisions, delay = words
    store = DecisionStore(Path("run/decisions.jsonl"))
    for i in range(int(num_decisions)):
        time.sleep(float(delay) / 2)
        head = f"{writer}-{i}"
        store.update([Decision(head, "r", "t", "accepted", None, "2026-01-01T00:00:00+00:00")])
    return 0


def _move(words: list[str]) -> int:
    """Move the run away, at a time at which the others train; another one may take its name."""
    _, change, share = words
    time.sleep(TRAINING_SECONDS * float(share))
    Path("run").rename("moved")
    if change == "swap":
        shutil.copytree("good-3", ".good-3")
        with suppress(OSError):  # one that began after the move was faster
            Path(".good-3").rename("run")
        shutil.rmtree(".good-3", ignore_errors=True)
    return 0


CALLS = {"decide": _decide, "move": _move}


def _refused_and_clean(arena: Arena, commands: list[Command]) -> list[str]:
    """Each loser gets a message, without a traceback, and nothing is left."""
    wrong = []
    for command in commands:
        text = command.output.read_text(encoding="utf-8", errors="replace")
        is_explained = any(sentence in text for sentence in REFUSALS)
        if TRACEBACK in text or (command.status != 0 and not is_explained):
            words = " ".join(command.words[:2])
            wrong.append(f"{words} ended with {command.status}: {text[-600:]}")
    run = arena.home / "run"
    hidden = [path.name for path in arena.home.glob(".*") if not path.name.startswith(".output")]
    hidden += [path.name for path in run.glob(".*")]
    hidden += [path.name for path in (arena.home / "moved").glob(".*")]
    if hidden:
        wrong.append(f"left: {sorted(hidden)}")
    return wrong


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    load_program()
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    failures = []
    num_processes = 0
    num_refused = 0
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder))
        for number in rounds(minutes):
            race = RACES[number % len(RACES)]
            size = chance.choice([2, 2, 2, 8])
            lines, check = race(arena, size, chance)
            commands = arena.run(lines, chance)
            wrong = [*_refused_and_clean(arena, commands), *check(commands)]
            counts[race.__name__] += 1
            num_processes += size
            num_refused += sum(command.status != 0 for command in commands)
            if wrong:
                details = {
                    "race": race.__name__,
                    "round": number,
                    "seed": seed,
                    "wrong": wrong,
                    "words": json.dumps([command.words for command in commands]),
                }
                failures.append(failure("races", **details))
            arena.clear()
    return {
        "races": sum(counts.values()),
        "processes": num_processes,
        "refused with a message": num_refused,
        "by_race": dict(counts),
        "failures": failures,
    }

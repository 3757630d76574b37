"""Mutated inputs: commands read files that were changed within their structure or byte by byte.

An input fails if it ends in a traceback, a crash, a message of more than `MAX_MESSAGE` characters,
after more than `MAX_SECONDS` of computing or `MAX_WAIT` of waiting, or with more than `MAX_MIB` of
memory. Commands run in a worker process, which is restarted when it crashes or hangs. An input that
the parser of its format accepts has come past the first parser, and is counted. One input again:
python -m benchmarks.torture.inputs --seed SEED --only NUMBER.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.torture.cases import LOAD_SPACE, Case, Inputs
from benchmarks.torture.common import MAX_FAILURES, ON_CPU, TRACEBACK, rounds, run_command

MAX_SECONDS = 10.0  # of a processor
MAX_WAIT = 120.0  # seconds, after which a command waits for something
MAX_MIB = 1024
MAX_MESSAGE = 4000
START_SECONDS = 300  # in which a worker has made the good files
ERROR_LINE = re.compile(r"(\w+(?:Error|Exception)): [^\n\\]{0,150}")


# -- in the worker process ---------------------------------------------------


def run_case(case: Case) -> str | None:
    """Run a case in this process; return what is wrong with how it ended."""
    if case.words[0] == LOAD_SPACE:
        return _load_space(case.words[1])
    status, text = run_command(case.words)
    if status not in (0, 1, 2):
        return str(status)
    if TRACEBACK in text:
        last_traceback = text[text.rindex(TRACEBACK) :]
        error_line = ERROR_LINE.search(last_traceback)
        details = error_line[0] if error_line else text[-200:]
        return f"a traceback in the output: {details}"
    if status and len(text) > MAX_MESSAGE:
        return f"a message of {len(text):,} characters"
    return None


def _load_space(path: str) -> str | None:
    """Read a search space; return what is wrong with how it was refused."""
    from dualkg.errors import DualkgError
    from dualkg.tuning import load_space

    try:
        load_space(path)
    except DualkgError as error:
        num_characters = len(str(error))
        if num_characters > MAX_MESSAGE:
            return f"a message of {num_characters:,} characters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def peak_mib(*, reset: bool = False) -> int:
    """The largest memory of this process since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(peak[1]) >> 10 if peak else 0


def case_of(inputs: Inputs, seed: int, number: int) -> Case:
    return inputs.case(random.Random(f"{seed}-{number}"))


def worker(pipe: Connection, home: str, seed: int) -> None:
    """Run the cases whose numbers arrive.

    Answers are the family, the words and whether the input was parsed; then the peak memory and
    what is wrong.
    """
    os.environ |= {"DUALKG_CACHE": str(Path(home) / "cache"), "COLUMNS": "120", **ON_CPU}
    os.environ.pop("DUALKG_DATA", None)
    # Libraries write to stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch

    torch.set_num_threads(1)
    inputs = Inputs(Path(home))
    if not inputs.good.exists():
        inputs.make()
    os.chdir(home)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        case = case_of(inputs, seed, number)
        pipe.send((case.family, case.words, case.parsed))
        peak_mib(reset=True)
        problem = run_case(case)
        pipe.send((peak_mib(), problem))


# -- the campaign ------------------------------------------------------------


class Outcome(NamedTuple):
    """How a case ended; `broken` says that its worker must be started again."""

    case: Case
    mib: int
    seconds: float
    problem: str | None
    broken: bool = False


class Worker:
    """A worker process."""

    def __init__(self, home: str, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs, home, seed), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(START_SECONDS) or self.pipe.recv() != "ready":
            raise RuntimeError("the worker did not start")

    def run(self, number: int) -> Outcome:
        case = Case("?", [], False)
        try:
            self.pipe.send(number)
            case = Case(*self.pipe.recv())
            computed = self._computed()
            started = time.monotonic()
            while not self.pipe.poll(0.1):
                waited = time.monotonic() - started
                seconds = self._computed() - computed
                if seconds > MAX_SECONDS or waited > MAX_WAIT:
                    problem = f"longer than {MAX_SECONDS:g} seconds"
                    return Outcome(case, 0, seconds, problem, broken=True)
            mib, problem = self.pipe.recv()
            seconds = self._computed() - computed
        except EOFError:
            self.process.join()
            problem = f"the process ended with status {self.process.exitcode}"
            return Outcome(case, 0, 0.0, problem, broken=True)
        if mib > MAX_MIB:
            problem = problem or f"{mib:,} MiB of memory"
        # What a command did not give back would be counted for the next, too.
        return Outcome(case, mib, seconds, problem, broken=mib > MAX_MIB)

    def _computed(self) -> float:
        """Seconds that the process has used: others of a busy machine do not count."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@dataclass
class Figures:
    """What is counted of all cases."""

    inputs: Counter[str] = field(default_factory=Counter)  # by family
    parsed: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)  # by command
    problems: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    most_mib: int = 0
    longest_seconds: float = 0.0

    def add(self, number: int, outcome: Outcome, home: str) -> None:
        case = outcome.case
        self.inputs[case.family] += 1
        self.parsed[case.family] += case.parsed
        self.seconds[" ".join(case.words[:1])] += outcome.seconds  # type: ignore[assignment]
        self.most_mib = max(self.most_mib, outcome.mib)
        self.longest_seconds = max(self.longest_seconds, outcome.seconds)
        if not outcome.problem:
            return
        self.problems[re.sub(r"\d+", "#", outcome.problem)[:120]] += 1
        if len(self.failures) < MAX_FAILURES:
            command = " ".join(word[:100] for word in case.words).replace(home, "HOME")
            details = {"number": number, "command": command, "problem": outcome.problem}
            self.failures.append(details)

    def as_dict(self) -> dict[str, Any]:
        by_family = {}
        for family in sorted(self.inputs):
            by_family[family] = {
                "inputs": self.inputs[family],
                "past_the_first_parser": self.parsed[family],
            }
        seconds = {name: round(seconds, 1) for name, seconds in self.seconds.most_common()}
        num_inputs = self.inputs.total()
        num_parsed = self.parsed.total()
        return {
            "inputs": num_inputs,
            "past_the_first_parser": num_parsed,
            "share_past_the_first_parser": round(num_parsed / max(1, num_inputs), 3),
            "by_family": by_family,
            "most_mib": self.most_mib,
            "longest_seconds": round(self.longest_seconds, 2),
            "failed": self.problems.total(),
            "problems": dict(self.problems.most_common()),
            "seconds": seconds,
            "failures": self.failures,
        }


def campaign(*, minutes: float, seed: int, first: int = 0) -> dict[str, Any]:
    """Run inputs `first`, `first` + 1, … of a seed for some minutes."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="dualkg-inputs-") as home:
        process = Worker(home, seed)
        try:
            for round_number in rounds(minutes):
                number = first + round_number
                outcome = process.run(number)
                figures.add(number, outcome, home)
                if outcome.broken:
                    process.end()
                    process = Worker(home, seed)
        finally:
            process.end()
    return {"first": first, **figures.as_dict()}


def repeat(seed: int, number: int) -> None:
    """Run one input in this process, and leave its files in /tmp."""
    with tempfile.TemporaryDirectory(prefix="dualkg-inputs-") as home:
        inputs = Inputs(Path(home))
        inputs.make()
        case = case_of(inputs, seed, number)
        print(case)
        shutil.copytree(home, f"/tmp/dualkg-input-{number}", dirs_exist_ok=True, symlinks=True)
        print(run_case(case))


def main() -> None:
    """Run inputs of a seed for some minutes from the number `--first`, or `--only` one input."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    choices = parser.parse_args()
    if choices.only is not None:
        repeat(choices.seed, choices.only)
        return
    figures = campaign(minutes=choices.minutes, seed=choices.seed, first=choices.first)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

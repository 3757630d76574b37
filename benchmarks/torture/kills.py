"""Kills: SIGKILL at every fsync and rename of a command, at other operations, and at random.

The command is then run again, or resumed if it says so; it may be killed again on the way. In the
end all files must be those of a command that was never killed, bit for bit but for times, and no
other file may be left. What was there before must not have changed. The file operations of all
libraries are counted by the C shim of `faults`, so this needs Linux and a C compiler. One case
again: python -m benchmarks.torture.kills --case JSON, as in its failure.
"""

import argparse
import ctypes
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.torture.common import (
    ENVIRONMENT,
    ROOT,
    TRACEBACK,
    Command,
    Words,
    failure,
    fork_command,
    import_like,
    load_program,
    rounds,
)
from benchmarks.torture.faults import compile_shim, load_shim
from benchmarks.torture.fingerprints import difference, fingerprint, raw
from benchmarks.torture.killed import (
    EVENTS,
    SCENARIOS,
    make_good,
    run_killed,
    runner,
    write_fingerprints,
)

MOMENT = "moment"  # a kill by the clock, and not at a file operation
SECONDS = 120  # only a broken program needs more
PR_SET_CHILD_SUBREAPER = 36
# The file that a command replaces, or the beginning of such files in a folder.
REPLACED = {
    "resume": "stopped/",
    "calibrate, overwrite": "calibrated/calibration.json",
    "gather": "shards/",
    "train, overwrite": "run/",
    "record, again": "records/",
    "record": "records/RESULTS.md",
}
DONE = (
    "is finished",
    "is a finished run",
    "exists already",
    "has a calibration already",
    "are in one file already",
)
Kill = tuple[str, float]  # an event, and which of them; or `MOMENT` and seconds
Case = tuple[str, list[Kill]]  # a scenario, and kills one after the other


# -- a case ------------------------------------------------------------------


class Arena:
    """A folder that each case begins with, and what commands make of it without a kill."""

    def __init__(self, home: Path, library: str, scenarios: list[str]) -> None:
        self.good = home / "good"
        self.here = home / "here"
        self.output = home / "output"
        self.shim = load_shim(library)
        self.good.mkdir()
        os.environ["DUALKG_CACHE"] = str(self.good / "cache")
        made = self.run((), lambda words: make_good(self.good, self.shim), cwd=self.good)
        if made.status:
            raise RuntimeError(f"the runs were not made: {made.wait()}")
        shutil.rmtree(self.good / "cache", ignore_errors=True)
        os.environ["DUALKG_CACHE"] = str(self.here / "cache")
        self.before = raw(self.good)
        self.expected: dict[str, dict[str, str]] = {}
        self.events: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}
        for name in scenarios:
            self._measure(name)

    def _measure(self, name: str) -> None:
        """Run a scenario twice: what it makes is the same, but for times."""
        for _ in range(2):
            self._fresh()
            started = time.monotonic()
            words = SCENARIOS[name]
            done = self.run(words, partial(runner(words), self.shim, self.here, "", -1))
            self.seconds[name] = time.monotonic() - started
            if done.status:
                raise RuntimeError(f"{name} fails if it is not killed: {done.wait()}")
            made = self._fingerprints()
            if "open" in made:
                raise RuntimeError(f"what {name} makes cannot be opened: {made['open']}")
            expected = self.expected.setdefault(name, made)
            if made != expected:
                raise RuntimeError(f"{name} is not the same twice: {difference(expected, made)}")
            counted = json.loads(self.here.with_name("counts.json").read_text())
            import_like(counted["modules"])
        self.events[name] = counted["events"]

    def run(
        self,
        words: Words,
        call: Any,
        *,
        kill_after: float | None = None,
        cwd: Path | None = None,
    ) -> Command:
        """Run something in a forked process, to its end or for some seconds."""
        command = fork_command(*words, cwd=cwd or self.here, output=self.output, call=call)
        process = os.pidfd_open(command.pid)
        timeout = SECONDS if kill_after is None else kill_after
        has_ended, _, _ = select.select([process], [], [], timeout)
        if not has_ended:
            for pid in [command.pid, *children(command.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os.close(process)
        command.wait()
        # The processes of a command that killed itself end by themselves.
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return command

    def _fresh(self) -> None:
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.good, self.here)

    def _fingerprints(self) -> dict[str, str]:
        ended = self.run((), partial(write_fingerprints, self.here))
        if ended.status:
            return {"open": ended.wait()[-800:]}
        return dict(json.loads(self.here.with_name("found.json").read_text()))

    def case(self, name: str, kills: list[Kill]) -> tuple[list[str], str | None]:
        """Kill a command at one event after the other, and run it again after each.

        Returns the events that were reached, and what is wrong in the end.
        """
        self._fresh()
        words = SCENARIOS[name]
        reached: list[str] = []
        for event, place in kills:
            is_moment = event == MOMENT
            number = -1 if is_moment else int(place)
            ended = self.run(
                words,
                partial(runner(words), self.shim, self.here, event, number),
                kill_after=place if is_moment else None,
            )
            if ended.status != -signal.SIGKILL:
                if not reached and ended.status:
                    return reached, f"it ended with {ended.status}: {ended.wait()[-800:]}"
                break
            reached.append(event)
            lost = self._lost(name)
            if lost:
                return reached, f"lost by the kill: {lost}"
            words = self._again(name, words)
        problem = self._finish(name, words)
        if problem:
            return reached, problem
        made = self._fingerprints()
        if made == self.expected[name]:
            return reached, None
        return reached, difference(self.expected[name], made)

    def _finish(self, name: str, words: Words) -> str | None:
        """Run a command to its end, or what it says resumes it; return what is wrong."""
        for _ in range(3):
            ended = self.run(words, partial(runner(words), self.shim, self.here, "", -1))
            text = ended.wait()
            if TRACEBACK in text or ended.status not in (0, 1, 2):
                return f"run again, it ended with {ended.status}: {text[-1500:]}"
            if ended.status == 0 or any(sentence in text for sentence in DONE):
                return None
            advice = re.search(r"dualkg resume (\S+?),? ", " ".join(text.split()) + " ")
            if not advice:
                return f"run again, it ended with {ended.status}: {text[-800:]}"
            words = resumed(name, advice[1])
        return None

    def _again(self, name: str, words: Words) -> Words:
        """The same command, but a run that was begun is resumed."""
        out = str(words[words.index("--out") + 1]) if "--out" in words else "stopped"
        folder = self.here / out
        saved = (folder / "checkpoint.safetensors", folder / "checkpoint" / "latest.json")
        begun = any(path.exists() for path in saved) and not (folder / "report.json").exists()
        if name == "train, overwrite" and raw(folder) == raw(self.good / out):
            return words
        return resumed(name, out) if begun and "train" in words else words

    def _lost(self, name: str) -> list[str]:
        """Files that were there before and must still be, all that the command does not replace.

        A single file that it replaces must be the old or the new one.
        """
        after = raw(self.here)
        changed = [file for file, content in self.before.items() if after.get(file) != content]
        lost = []
        for file in changed:
            replaced = REPLACED.get(name)
            is_new = file == replaced and file in after
            if is_new:
                is_new = fingerprint(self.here / file) == self.expected[name][file]
            is_in_folder = replaced is not None and replaced.endswith("/")
            is_replaced = is_in_folder and file.startswith(str(replaced))
            if not (is_new or is_replaced):
                lost.append(file)
        return sorted(lost)


def resumed(name: str, folder: str) -> Words:
    """The command that resumes a run, in as many processes as before."""
    words = SCENARIOS[name]
    several = () if runner(words) is run_killed else words[:1]
    return (*several, "resume", folder, "--device", "cpu")


def children(pid: int) -> list[int]:
    with suppress(OSError):
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in listed.split()]
    return []


# -- the campaign ------------------------------------------------------------


def cases(arena: Arena, chance: random.Random) -> Iterator[Case]:
    """Each fsync and each rename of each command, in random order.

    Between and after them are others, some of two kills.
    """
    planned: list[Case] = []
    for name, event, place in syncs_and_renames(arena):
        planned.append((name, [(event, float(place))]))
    chance.shuffle(planned)
    for number, name in enumerate(cycle(arena.events)):
        yield from planned[3 * number : 3 * number + 3]
        num_kills = chance.choice([1, 1, 2])
        yield name, [_random_event(arena, name, chance) for _ in range(num_kills)]


def syncs_and_renames(arena: Arena) -> Iterator[tuple[str, str, int]]:
    """Each fsync and each rename of each command."""
    for name, counts in arena.events.items():
        # Processes of `--jobs` take seconds to start.
        if "--jobs" not in SCENARIOS[name]:
            for event in ("fsync", "rename"):
                for place in range(counts[event]):
                    yield name, event, place


def _random_event(arena: Arena, name: str, chance: random.Random) -> Kill:
    event = chance.choice([MOMENT, MOMENT, *EVENTS])
    if event == MOMENT:
        return event, round(chance.uniform(0, arena.seconds[name]), 4)
    return event, chance.randrange(max(1, arena.events[name][event]))


def patch_program() -> None:
    """Let decisions by the clock depend on counts, and write checkpoints as often as possible."""
    from dualkg.inference.completion import CompletionSettings, api
    from dualkg.tuning import study
    from dualkg.tuning.automatic import AutomaticTuner

    study.HEARTBEATS = study.Heartbeats(grace=1)
    api.DEFAULT_SETTINGS = CompletionSettings(save_interval=0.0)

    def has_budget(self: AutomaticTuner, trials: Sequence[object], *, rung: int) -> bool:
        return len(self.trials) + len(trials) <= (4, 7)[rung]

    AutomaticTuner._has_budget = has_budget  # type: ignore[method-assign,assignment]


def run_cases(
    library: str,
    *,
    minutes: float,
    seed: int,
    only: Case | None = None,
    scenarios: Sequence[str] = (),
) -> dict[str, Any]:
    """The figures, in a process that was started with the shim."""
    # Then `waitpid` also finds the children of killed processes.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    load_program()
    import_module("faiss")
    import_module("paper.__main__")
    patch_program()
    by_command: Counter[str] = Counter()
    by_event: Counter[str] = Counter()
    failures = []
    not_reached = 0
    done = set()
    with tempfile.TemporaryDirectory(prefix="dualkg-kills-") as home:
        names = [only[0]] if only else list(scenarios or SCENARIOS)
        arena = Arena(Path(os.path.realpath(home)), library, names)
        plan = iter([only]) if only else cases(arena, random.Random(seed))
        for _, (name, kills) in zip(rounds(minutes), plan, strict=False):
            reached, problem = arena.case(name, kills)
            by_command[name] += len(reached)
            by_event.update(reached)
            not_reached += not reached
            if len(kills) == 1 and reached and kills[0][0] in ("fsync", "rename"):
                done.add((name, *kills[0]))
            if problem:
                case = json.dumps([name, kills])
                failures.append(failure("kills", case=case, seed=seed, problem=problem))
                print(f"{name} {kills}: {problem}", file=sys.stderr, flush=True)
    events = {}
    for name, counts in arena.events.items():
        events[name] = {event: counts[event] for event in EVENTS}
    return {
        "kills": by_event.total(),
        "by_event": dict(by_event),
        "by_command": dict(by_command),
        "events": events,
        "num_syncs_and_renames": len(list(syncs_and_renames(arena))),
        "num_syncs_and_renames_killed_at": len(done),
        "not_reached": not_reached,  # commands that ended before their event
        "failures": failures,
    }


def campaign(
    *, minutes: float, seed: int, case: Case | None = None, scenarios: Sequence[str] = ()
) -> dict[str, Any]:
    """Kills of all commands, or of some."""
    with tempfile.TemporaryDirectory(prefix="dualkg-shim-") as folder:
        try:
            library = str(compile_shim(Path(folder)))
        except (OSError, subprocess.CalledProcessError) as error:
            return {"kills": 0, "skipped": f"there is no C compiler ({error})", "failures": []}
        results = Path(folder) / "results.json"
        task = json.dumps(
            {
                "library": library,
                "minutes": minutes,
                "seed": seed,
                "only": case,
                "scenarios": list(scenarios),
            }
        )
        line = [sys.executable, "-m", "benchmarks.torture.kills", "--task", task]
        environment = {
            **ENVIRONMENT,
            "LD_PRELOAD": library,
            "DUALKG_COMMIT": "0123456789ab",
            "COLUMNS": "200",
        }
        ended = subprocess.run(
            [*line, "--out", str(results)], cwd=ROOT, env=environment, check=False
        )
        if results.exists():
            return dict(json.loads(results.read_text()))
        problem = f"the campaign ended with {ended.returncode}"
        return {"failures": [failure("kills", problem=problem)]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture.kills")
    parser.add_argument("--case", type=json.loads, help="one case, as in a failure")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=[])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    choices = parser.parse_args()
    if choices.task:
        choices.out.write_text(json.dumps(run_cases(**choices.task)))
    else:
        figures = campaign(
            minutes=choices.minutes,
            seed=choices.seed,
            case=choices.case,
            scenarios=choices.scenarios,
        )
        print(json.dumps(figures, indent=1))

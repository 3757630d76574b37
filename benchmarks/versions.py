"""Seconds per epoch of this version and of an earlier one, in turn: `python benchmarks/versions.py
FOLDER`.

FOLDER is a checkout of the earlier version; `git worktree add FOLDER COMMIT` makes one. Each
version is measured by its own code, in one process that trains all jobs. The results, with the
ratios, are in results/versions.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measurement
from epochs import Job
from training import EFFORTS, JOBS, QUICK, Effort

WORKER = """
import importlib, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a training prints is no answer
sys.path.insert(0, sys.argv[1])
measure = importlib.import_module(sys.argv[2]).measure_dualkg
for line in sys.stdin:
    print(json.dumps(measure(**json.loads(line))), file=answers, flush=True)
"""
MODULES = ("epochs", "trials")  # with `measure_dualkg`, in this version and in 0.1


class Version:
    """A process that measures jobs with the code of a checkout."""

    def __init__(self, folder: Path, **variables: str) -> None:
        benchmarks = folder / "benchmarks"
        module = next((name for name in MODULES if (benchmarks / f"{name}.py").exists()), None)
        if module is None:
            sys.exit(f"{folder} is no checkout of dualkg: it has no benchmarks/epochs.py.")
        paths = [str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
        command = [sys.executable, "-c", WORKER, str(benchmarks), module]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, **pipes, text=True, env=environment, cwd=folder)

    def measure(self, job: Job, device: str, effort: Effort) -> dict[str, Any]:
        precision = "bf16" if measurement.has_bf16(device) else "float32"
        choice = {
            "engine": "auto",
            "precision": precision,
            "epochs": effort.epochs,
            "steps": effort.steps,
        }
        assert self._process.stdin
        assert self._process.stdout
        print(
            json.dumps({"job": asdict(job), "device": device, **choice}),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{job.name} failed; the message is above.")
        found: dict[str, Any] = json.loads(answer)
        return found

    def stop(self) -> None:
        self._process.communicate()


def compare(
    job: Job, device: str, versions: dict[str, Version], effort: Effort, rounds: int
) -> dict[str, Any]:
    """Medians of several rounds, each version first in every second one, and the ratio of new to
    old.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in versions}
    for number in range(rounds):
        for name in list(versions)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(versions[name].measure(job, device, effort))
    seconds = {name: [one["seconds_per_epoch"] for one in each] for name, each in found.items()}
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    peaks = {name: max(one["peak_mib"] for one in each) for name, each in found.items()}
    ratio = medians["new"] / medians["old"]
    measurement.log(
        f"{job.name}: old {medians['old']:.3f}, new {medians['new']:.3f} s/epoch, new/old "
        f"{ratio:.3f}"
    )
    return {
        "job": asdict(job),
        "seconds_per_epoch": medians,
        "ratio": ratio,
        "rounds": seconds,
        "peak_mib": peaks,
    }


def main() -> None:
    parser = measurement.parser(__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--old", help="the commit of the earlier version, if git cannot find it")
    parser.add_argument("--rounds", type=int, default=3)
    choices: argparse.Namespace = parser.parse_args()
    device = measurement.pick_device(choices.device)
    named = {job.name: job for job in JOBS[device]}
    chosen = measurement.wanted(list(named), choices.only)
    on = measurement.describe(device, commit=choices.commit)
    on["old_commit"] = choices.old or measurement.git_commit(choices.folder)
    old = choices.folder.resolve()
    versions = {
        "old": Version(old, DUALKG_CACHE=str(old / ".cache")),
        "new": Version(measurement.HERE.parent),
    }
    effort = QUICK if choices.quick else EFFORTS[device]["auto"]
    for name in chosen:
        found = compare(named[name], device, versions, effort, choices.rounds)
        measurement.save("versions", name, found, on=on, folder=measurement.folder_of(choices))
    for version in versions.values():
        version.stop()


if __name__ == "__main__":
    main()

"""Compare the speed of training with an earlier version: `python benchmarks/versions.py FOLDER`.

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
os.dup2(2, 1)  # Only answers go to stdout, and not what a training prints.
sys.path.insert(0, sys.argv[1])
measure = importlib.import_module(sys.argv[2]).measure_dualkg
for line in sys.stdin:
    print(json.dumps(measure(**json.loads(line))), file=answers, flush=True)
"""
MODULES = ("epochs", "trials")  # where `measure_dualkg` is, in this version and in 0.1


class Version:
    """A process that measures jobs with the code of a checkout."""

    def __init__(self, folder: Path, **variables: str) -> None:
        benchmarks = folder / "benchmarks"
        module = next((name for name in MODULES if (benchmarks / f"{name}.py").exists()), None)
        if module is None:
            sys.exit(f"{folder} is no checkout of dualkg: it has no benchmarks/epochs.py.")
        python_path = str(folder / "src")
        if os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(benchmarks), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path} | variables,
            cwd=folder,
        )

    def measure(self, job: Job, device: str, effort: Effort) -> dict[str, Any]:
        task = {
            "job": asdict(job),
            "device": device,
            "engine": "auto",
            "precision": "bf16" if measurement.has_bf16(device) else "float32",
            "epochs": effort.epochs,
            "steps": effort.steps,
        }
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(task), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{job.name} failed; the message is above.")
        result: dict[str, Any] = json.loads(answer)
        return result

    def stop(self) -> None:
        self._process.communicate()


def compare(
    job: Job, device: str, versions: dict[str, Version], *, effort: Effort, rounds: int
) -> dict[str, Any]:
    """Medians of several rounds, and the ratio of new to old.

    Each version is first in every second round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in versions}
    peaks: dict[str, float] = dict.fromkeys(versions, 0.0)
    for number in range(rounds):
        names = list(versions)
        if number % 2 == 1:
            names.reverse()
        for name in names:
            result = versions[name].measure(job, device, effort)
            seconds[name].append(result["seconds_per_epoch"])
            peaks[name] = max(peaks[name], result["peak_mib"])
    medians = {name: statistics.median(times) for name, times in seconds.items()}
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
    jobs_by_name = {job.name: job for job in JOBS[device]}
    chosen = measurement.wanted(list(jobs_by_name), choices.only)
    on = measurement.describe(device, commit=choices.commit)
    on["old_commit"] = choices.old or measurement.git_commit(choices.folder)
    old_folder = choices.folder.resolve()
    versions = {
        # The caches of the two versions may differ in their formats.
        "old": Version(old_folder, DUALKG_CACHE=str(old_folder / ".cache")),
        "new": Version(measurement.HERE.parent),
    }
    effort = QUICK if choices.quick else EFFORTS[device]["auto"]
    for name in chosen:
        record = compare(jobs_by_name[name], device, versions, effort=effort, rounds=choices.rounds)
        measurement.save("versions", name, record, on=on, folder=measurement.folder_of(choices))
    for version in versions.values():
        version.stop()


if __name__ == "__main__":
    main()

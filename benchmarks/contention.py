"""Seconds of an epoch beside other busy processes, by how long idle OpenMP threads spin.

`python benchmarks/contention.py` trains world by `dualkg train`; the settings alternate. It saves
results/contention.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measurement import RESULTS, describe, log

BUSY = "while True: pass"
SETTINGS: dict[str, dict[str, str]] = {
    "GOMP_SPINCOUNT=300000": {"GOMP_SPINCOUNT": "300000"},  # the default of GNU OpenMP
    "GOMP_SPINCOUNT=10000": {},  # that of `dualkg`
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def seconds_of_epoch(setting: dict[str, str], epochs: int) -> float:
    """Seconds of an epoch of a training in its own process, by the times that its run saves."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "train",
            "world",
            "--no-tune",
            "--epochs",
            str(epochs),
            "--device",
            "cpu",
            "--out",
            f"{folder}/run",
        ]
        command = [sys.executable, "-m", "dualkg", *words]
        subprocess.run(command, env=os.environ | setting, check=True, capture_output=True)
        history = json.loads((Path(folder) / "run" / "history.json").read_text(encoding="utf-8"))
        return sum(entry["seconds"] for entry in history) / epochs


def measure(busy: int, choices: argparse.Namespace) -> dict[str, float]:
    """Medians beside a number of busy processes."""
    busy_processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    try:
        for _ in range(choices.rounds):
            for name, setting in SETTINGS.items():
                seconds[name].append(seconds_of_epoch(setting, choices.epochs))
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()
    return {name: statistics.median(seconds[name]) for name in SETTINGS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--busy", type=int, nargs="+", default=[0, 1, 2, 6], help="numbers of busy processes"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON results")
    choices = parser.parse_args()
    seconds = {}
    for busy in choices.busy:
        seconds[str(busy)] = measure(busy, choices)
        log(f"{busy} busy processes: {json.dumps(seconds[str(busy)])}")
    results: dict[str, Any] = {
        "epochs": choices.epochs,
        "rounds": choices.rounds,
        "seconds_of_epoch": seconds,
        "machine": describe("cpu"),
    }
    choices.out.mkdir(parents=True, exist_ok=True)
    path = choices.out / "contention.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Seconds of a command from a cold start: of one query, of --help, and of importing torch alone.

The commands alternate, so that other load affects all of them. Python has compiled every file
before the first measurement.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import tables

ROUNDS = 7
TORCH = "import torch"


@dataclass(frozen=True)
class Job:
    """A run of ComplEx on a graph."""

    graph: str
    dim: int

    @property
    def name(self) -> str:
        return f"{self.graph} ComplEx dim {self.dim}"


JOBS = {device: [Job("FB15k-237", 200)] for device in ("cpu", "cuda")}


def make_run(job: dict[str, Any], *, device: str, run: str, quick: bool) -> dict[str, Any]:
    """Train a run for one epoch, and choose a query that its graph has an answer to."""
    import dualkg as kg

    spec = Job(**job)
    recipe = kg.Recipe().with_changes(
        {
            "data.graph": spec.graph,
            "model.dim": 4 if quick else spec.dim,
            "training.epochs": 1,
            "training.batch_size": 5000,
        }
    )
    graph = kg.train_recipe(recipe, device=device, out=run).graph
    head, relation, _ = graph.train[0].tolist()
    return {"head": graph.entities[head], "relation": graph.relations[relation]}


def seconds_of(words: list[str]) -> float:
    environment = dict(os.environ)
    # Compiled files are kept, as they are after an ordinary installation.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment)
    return time.perf_counter() - started


def measure_job(job: Job, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        task = {"what": "run", "job": asdict(job), "device": device, "run": run, "quick": quick}
        query = measurement.in_fresh_process(Path(__file__), task)
        options = ["--head", query["head"], "--relation", query["relation"], "--device", device]
        commands = {
            TORCH: ["-c", TORCH],
            "dualkg predict": ["-m", "dualkg", "predict", run, *options],
            "dualkg --help": ["-m", "dualkg", "--help"],
        }
        for words in commands.values():
            seconds_of(words)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(1 if quick else ROUNDS):
            for name, words in commands.items():
                seconds[name].append(seconds_of(words))
    medians = {name: statistics.median(seconds[name]) for name in commands}
    measurement.log(f"{job.name}: {json.dumps(medians)}")
    yield {"job": asdict(job), "measured": medians}


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of a page."""
    rows = []
    for name, record in tables.in_order(jobs):
        torch_seconds = record["measured"][TORCH]
        for command, seconds in record["measured"].items():
            ratio = tables.times(seconds / torch_seconds)
            rows.append([name, f"`{command}`", tables.short(seconds), ratio])
    titles = ["run", "command", "seconds", "of importing torch"]
    note = f"Medians of {ROUNDS} processes each, in turns."
    return [*tables.table(titles, rows, words=2), note, ""]


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measure = partial(measure_job, quick=choices.quick)
    measurement.run("startup", choices, jobs=JOBS, tasks={"run": make_run}, measure=measure)


if __name__ == "__main__":
    main()

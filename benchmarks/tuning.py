"""Trials a minute of `dualkg tune`, with one process and with several side by side.

A grid over λ of ComplEx with DURA, on graphs so small that one training leaves most of a GPU idle,
and on FB15k-237, where it does not. Starting the processes is part of the time, as it is of a
search's.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import tables

COUNTS = {"cuda": (1, 2, 4, 8), "cpu": (1, 2)}


@dataclass(frozen=True)
class Job:
    """A number of trainings of ComplEx."""

    graph: str
    dim: int
    batch: int
    epochs: int
    trials: int

    @property
    def name(self) -> str:
        return f"{self.graph} ComplEx dim {self.dim} batch {self.batch}, {self.epochs} epochs"


JOBS = {
    "cuda": [
        Job("UMLS", 100, 100, 20, 24),
        Job("Kinship", 100, 100, 20, 24),
        Job("FB15k-237", 100, 1000, 10, 16),
    ],
    "cpu": [Job("UMLS", 100, 100, 20, 8)],
}


def measure(job: dict[str, Any], *, device: str, processes: int) -> dict[str, Any]:
    """A search from its beginning to its end."""
    from dualkg.tuning.search import search
    from dualkg.tuning.space import space_from

    spec = Job(**job)
    space = {
        "data": {"graph": spec.graph},
        "model": {"name": "ComplEx", "dim": spec.dim},
        "regularizer": {"name": "DURA"},
        "training": {"epochs": spec.epochs, "batch_size": spec.batch},
        "space": {"regularizer.weight": [0.001 * (number + 1) for number in range(spec.trials)]},
        "search": {"method": "grid", "prune": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "study"
        found = search(
            space_from(space, source="the benchmark"), out=out, device=device, jobs=processes
        )
    return {"per_minute": found.per_minute, "finished": len(found.ranked)}


def measure_job(job: Job, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a record after each number of processes."""
    measured = {}
    counts = COUNTS[device][:2] if quick else COUNTS[device]
    for processes in counts:
        task = {"what": "search", "job": asdict(job), "device": device, "processes": processes}
        result = measurement.in_fresh_process(Path(__file__), task)
        measurement.log(f"{job.name}, {processes} processes: {json.dumps(result)}")
        measured[str(processes)] = result
        yield {"job": asdict(job), "measured": dict(measured)}


def lines(jobs: dict[str, Any]) -> list[str]:
    """The table of a machine."""
    counts = sorted({int(count) for record in jobs.values() for count in record["measured"]})
    titles = ["trials a minute"]
    titles += [f"{count} at once" if count > 1 else "one" for count in counts]
    rows = []
    for name, record in tables.in_order(jobs):
        cells = [name]
        for count in counts:
            result = record["measured"].get(str(count), {})
            cells.append(tables.short(result.get("per_minute")))
        rows.append(cells)
    return tables.table(titles, rows)


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measurement.run(
        "tuning",
        choices,
        jobs=JOBS,
        tasks={"search": measure},
        measure=partial(measure_job, quick=choices.quick),
    )


if __name__ == "__main__":
    main()

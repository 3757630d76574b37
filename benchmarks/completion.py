"""Seconds and peak memory of completing FB15k-237: its 10,000 most probable missing triples.

On a CPU among the heads and tails that a relation has in train (`types`), on a GPU among all. The
weights are trained for a few steps: the more a model has learned, the more candidates its bounds
exclude, and the less time it takes.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import epochs
import measurement
import peers
import tables

STEPS = {"cpu": 60, "cuda": 1000}  # training steps


@dataclass(frozen=True)
class Job:
    """A graph to complete by ComplEx."""

    graph: str
    dim: int
    types: bool = False
    top: int = 10_000

    @property
    def name(self) -> str:
        among = "types" if self.types else "whole"
        return f"{self.graph} ComplEx dim {self.dim} {among}"


JOBS = {
    "cuda": [Job("FB15k-237", 2000)],
    "cpu": [Job("FB15k-237", 200, types=True)],
}


# -- one measurement, in a process of its own --------------------------------


def make_weights(job: dict[str, Any], *, device: str, arrays: str, steps: int) -> dict[str, Any]:
    """Train for some steps and save the tables."""
    import dualkg as kg

    chosen = Job(**job)
    graph = kg.load_graph(chosen.graph)
    kind = epochs.Job(chosen.graph, "ComplEx", chosen.dim, 1000)
    recipe = epochs.recipe_for(kind, engine="auto", precision="float32", epochs=2)
    trainer, _ = epochs.train_epochs(recipe, epochs.part_of(graph, steps * kind.batch // 4), device)
    peers.write_arrays(Path(arrays), graph, trainer.model)
    return {}


def load(job: Job, arrays: str) -> tuple[Any, Any]:
    """The model with its weights, and the graph."""
    import torch

    import dualkg as kg

    graph = kg.load_graph(job.graph)
    saved = np.load(arrays)
    model = kg.ComplEx(graph.shape, dim=job.dim)
    with torch.no_grad():
        model.head_table.copy_(torch.from_numpy(saved["entities"]))
        model.relations.copy_(torch.from_numpy(saved["relations"]))
    return model.eval(), graph


def measure(job: dict[str, Any], *, device: str, arrays: str, quick: bool) -> dict[str, Any]:
    """The calibration, and the list; on a GPU the first list is the warm-up."""
    from dualkg.inference.completion import complete
    from dualkg.inference.probability import Calibration

    chosen = Job(**job)
    model, graph = load(chosen, arrays)
    measurement.forget_peak(device)
    model.to(device)
    started = time.perf_counter()
    calibration = Calibration.fit(model, graph)
    calibrating = time.perf_counter() - started
    choices = {"types": chosen.types, "calibration": calibration, "top": chosen.top}
    relations = list(range(5)) if quick else None
    times = []
    # The time of all cores, to which a busy machine adds nothing.
    core_time = time.process_time()
    for _ in range(4 if device == "cuda" else 1):
        measurement.wait_for(device)
        started = time.perf_counter()
        completed = complete(model, graph, relations=relations, **choices)
        times.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(times[1:] or times),
        "core_seconds": (time.process_time() - core_time) / len(times),
        "calibration_seconds": calibrating,
        "num_found": len(completed),
        "least_probability": float(completed.probability[-1]),
        "least_log_probability": float(completed.log_probability.min()),
        "num_entities": graph.shape.num_entities,
        "num_relations": graph.shape.num_relations,
        "width": model.head_table.shape[1],
        "peak_mib": measurement.peak_mib(device),
    }


# -- all of them -------------------------------------------------------------


def measure_job(job: Job, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        common = {"job": asdict(job), "device": device, "arrays": str(Path(folder) / "weights.npz")}
        steps = 8 if quick else STEPS[device]
        measurement.in_fresh_process(Path(__file__), {"what": "weights", **common, "steps": steps})
        task = {"what": "list", **common, "quick": quick}
        result = measurement.in_fresh_process(Path(__file__), task)
    measurement.log(f"{job.name}: {json.dumps(result)}")
    yield {"job": asdict(job), "steps": steps, "measured": {"dualkg": result}}


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of a page."""
    rows = []
    for name, record in tables.in_order(jobs):
        result = record["measured"]["dualkg"]
        num_candidates = result["num_entities"] ** 2 * result["num_relations"]
        rows.append(
            [
                name,
                f"{num_candidates:.3g}",
                tables.short(result["seconds"]),
                tables.short(result["core_seconds"]),
                tables.short(result["calibration_seconds"]),
                f"{result['peak_mib']:,.0f}",
            ]
        )
    titles = [
        "graph and model",
        "triples there could be",
        "seconds",
        "of all cores",
        "calibrating",
        "peak MiB",
    ]
    return tables.table(titles, rows)


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measurement.run(
        "completion",
        choices,
        jobs=JOBS,
        tasks={"weights": make_weights, "list": measure},
        measure=partial(measure_job, quick=choices.quick),
    )


if __name__ == "__main__":
    main()

"""Seconds and peak memory of filtered ranking on FB15k-237, against other implementations.

The same weights, trained briefly, are ranked by `dualkg.rank`, by a loop over the queries and by
PyKEEN's evaluator, each in a fresh process; their MRR must agree to 1e-4.
"""

import dataclasses
import json
import statistics
import sys
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

TOLERANCE = 1e-4
STEPS = 40  # training steps, enough for a ranking that is not random


@dataclass(frozen=True)
class Job:
    """A split to rank by ComplEx."""

    graph: str
    split: str
    dim: int

    @property
    def name(self) -> str:
        return f"{self.graph} {self.split} ComplEx dim {self.dim}"


JOBS = {"cuda": [Job("FB15k-237", "valid", 2000)], "cpu": [Job("FB15k-237", "test", 100)]}


# -- one measurement, in a process of its own --------------------------------


def make_weights(job: dict[str, Any], *, device: str, arrays: str) -> dict[str, Any]:
    """Train briefly and keep the tables."""
    import dualkg as kg

    spec = Job(**job)
    graph = kg.load_graph(spec.graph)
    kind = epochs.Job(spec.graph, "ComplEx", spec.dim, 1000)
    recipe = epochs.recipe_for(kind, engine="auto", precision="float32", epochs=2)
    trainer, _ = epochs.train_epochs(recipe, epochs.part_of(graph, STEPS * kind.batch // 2), device)
    peers.write_arrays(Path(arrays), graph, trainer.model)
    return {}


def load(job: Job, arrays: str, *, num_triples: int | None) -> tuple[Any, Any, Any]:
    """The trained model, the graph with some triples to rank, and the whole graph."""
    import torch

    import dualkg as kg

    graph = kg.load_graph(job.graph)
    part = dataclasses.replace(graph, **{job.split: graph.split(job.split)[:num_triples]})
    saved = np.load(arrays)
    model = kg.ComplEx(graph.shape, dim=job.dim)
    with torch.no_grad():
        model.head_table.copy_(torch.from_numpy(saved["entities"]))
        model.relations.copy_(torch.from_numpy(saved["relations"]))
    return model.eval(), part, graph


def measure_dualkg(
    job: dict[str, Any], *, device: str, arrays: str, num_triples: int | None, repeats: int
) -> dict[str, Any]:
    """`dualkg.rank`, and the filter that it needs; the first ranking is the warm-up."""
    import dualkg as kg

    spec = Job(**job)
    model, part, graph = load(spec, arrays, num_triples=num_triples)
    started = time.perf_counter()
    known = kg.KnownAnswers.of(graph)
    filtering = time.perf_counter() - started
    measurement.forget_peak(device)
    model.to(device)
    times = []
    for _ in range(repeats + 1):
        measurement.wait_for(device)
        started = time.perf_counter()
        ranks = kg.rank(model, part, split=spec.split, known=known)
        times.append(time.perf_counter() - started)
    first, *others = times
    return {
        "seconds": statistics.median(others),
        "filter_seconds": filtering,
        "warm_up_seconds": max(first - statistics.median(others), 0.0),
        "mrr": float((1 / ranks.mean).mean()),
        "num_queries": 2 * len(ranks.triples),
        "num_distinct_queries": distinct_queries(ranks.triples),
        "num_entities": graph.shape.num_entities,
        "width": model.head_table.shape[1],
        "peak_mib": measurement.peak_mib(device),
    }


def measure_tutorial(
    job: dict[str, Any], *, device: str, arrays: str, num_triples: int | None
) -> dict[str, Any]:
    """A loop over the queries, and the filter that it needs."""
    import torch

    import tutorial

    spec = Job(**job)
    saved = np.load(arrays)
    num_entities, num_relations = saved["shape"].tolist()
    measurement.forget_peak(device)
    model = tutorial.ComplEx(num_entities, 2 * num_relations, spec.dim)
    with torch.no_grad():
        model.entities.weight.copy_(torch.from_numpy(saved["entities"]))
        model.relations.weight.copy_(torch.from_numpy(saved["relations"]))
    model.to(device)
    splits = {name: torch.from_numpy(saved[name]) for name in ("train", "valid", "test")}
    started = time.perf_counter()
    triples = torch.cat(list(splits.values()))
    known = tutorial.known_answers(tutorial.in_both_directions(triples, num_relations))
    filtering = time.perf_counter() - started
    started = time.perf_counter()
    queries = tutorial.in_both_directions(splits[spec.split][:num_triples], num_relations)
    ranks = tutorial.rank(model, queries, known)
    return {
        "seconds": time.perf_counter() - started,
        "filter_seconds": filtering,
        "mrr": float((1 / np.array(ranks)).mean()),
        "peak_mib": measurement.peak_mib(device),
    }


def distinct_queries(triples: Any) -> int:
    """The number of distinct queries, (head, relation, ?) and (?, relation, tail)."""
    return sum(len(np.unique(triples[:, columns], axis=0)) for columns in ([0, 1], [1, 2]))


# -- all of them -------------------------------------------------------------


def measure_job(job: Job, device: str, *, quick: bool, python: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        arrays = str(Path(folder) / "weights.npz")
        task = {"what": "weights", "job": asdict(job), "device": device, "arrays": arrays}
        answer = measurement.in_fresh_process(Path(__file__), task)
        if "failed" in answer:
            sys.exit(f"No weights to rank with: {answer['failed']}")

        common = {"device": device, "arrays": arrays, "num_triples": 200 if quick else None}
        ours = {"job": asdict(job), **common}
        theirs = {"what": "rank", "split": job.split, **common}
        tasks = {
            "dualkg": {"what": "dualkg", **ours, "repeats": 1 if quick else 5},
            "tutorial": {"what": "tutorial", **ours},
            "PyKEEN, batch as it chooses": {**theirs, "batch": None},
            "PyKEEN, batch 512": {**theirs, "batch": 512},
        }
        measured = {}
        for name, task in tasks.items():
            if task["what"] == "rank":
                measured[name] = peers.run_task(task, python)
            else:
                measured[name] = measurement.in_fresh_process(Path(__file__), task)
            measurement.log(f"{job.name}, {name}: {json.dumps(measured[name])}")
    check_agreement(measured)
    yield {"job": asdict(job), "measured": measured}


def check_agreement(measured: dict[str, dict[str, Any]]) -> None:
    """Refuse to compare the speed of rankings that are not the same."""
    mrr = {name: result["mrr"] for name, result in measured.items() if "mrr" in result}
    if max(mrr.values()) - min(mrr.values()) > TOLERANCE:
        sys.exit(f"The rankings do not agree, so their times cannot be compared: {mrr}")


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    tasks = {"dualkg": measure_dualkg, "tutorial": measure_tutorial, "weights": make_weights}
    measure = partial(measure_job, quick=choices.quick, python=choices.peers)
    measurement.run("ranking", choices, jobs=JOBS, tasks=tasks, measure=measure)


if __name__ == "__main__":
    main()

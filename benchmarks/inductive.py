"""Seconds of giving an entity a place by a few triples, `predictor.add`, beside the same problem solved plainly.

Plainly is by autograd through log Σ exp(scores), to a tenth of the slope. The weights are trained for two epochs: where
they know little, few rivals do not stand for all. `difference` is how far apart the two rows are that solve one and the
same problem, relative to their length.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import completion
import measuring
import tables

COUNTS = (1, 3, 10, 30)  # of triples given
PLAIN_TOLERANCE = 1e-5
STEPS = 1_088  # of batches of 1,000: two epochs of FB15k-237
Triple = tuple[str, str, str]


class Job(completion.Job):
    """A graph that ComplEx has learned, to be extended."""

    @property
    def name(self) -> str:
        return f"{self.graph} ComplEx dim {self.dim}"


JOBS = {device: [Job("FB15k-237", 200)] for device in ("cpu", "cuda")}


@contextmanager
def plainly() -> Iterator[None]:
    """Problems that are solved meanwhile are solved plainly."""
    from dualkg.inference import inductive, inductive_solver

    def log_sums(images: Any, candidates: Any) -> Any:
        return (images @ candidates.T).logsumexp(-1)

    with (
        mock.patch.object(inductive, "log_sums_with_slopes", log_sums),
        mock.patch.object(inductive_solver, "TOLERANCE", PLAIN_TOLERANCE),
        mock.patch.object(inductive_solver, "are_solved_together", return_value=False),
        mock.patch.object(inductive_solver, "by_few_rivals", lambda problem, start, **_: (start, False)),
    ):
        yield


def given_to(graph: Any, num: int, seed: int) -> list[Triple]:
    """Triples of an entity of train that has so many, under a new name."""
    random = np.random.default_rng(seed)
    ends = graph.train[:, [0, 2]]
    enough = np.flatnonzero(np.bincount(ends.ravel()) >= num)
    entity = int(random.choice(enough))
    own = graph.train[(ends == entity).any(1)]
    own = own[random.permutation(len(own))[:num]]
    return [
        (
            "inductive_entity" if head == entity else graph.entities[head],
            graph.relations[relation],
            "inductive_entity" if tail == entity and head != entity else graph.entities[tail],
        )
        for head, relation, tail in own.tolist()
    ]


def prepared(model: Any, graph: Any, triples: list[Triple]) -> tuple[Any, float]:
    """A predictor that has been asked once, and the seconds of that: it prepares what all problems share."""
    import dualkg as kg

    predictor, started = kg.Predictor(model, graph), time.perf_counter()
    predictor.add("inductive_entity", triples=triples)
    return predictor, time.perf_counter() - started


def timed(ways: dict[str, Any], several: list[list[Triple]]) -> dict[str, dict[str, float]]:
    """Seconds and those of all cores, of each way; the ways take turns, so that a busy machine slows both."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for triples in several:
        for way, predictor in ways.items():
            with plainly() if way == "plain" else nullcontext():
                started, worked = time.perf_counter(), time.process_time()
                predictor.add("inductive_entity", triples=triples)
                times[way].append((time.perf_counter() - started, time.process_time() - worked))
    return {
        way: {
            "best": min(seconds for seconds, _ in found),
            "median": statistics.median(seconds for seconds, _ in found),
            "core_seconds": statistics.median(worked for _, worked in found),
        }
        for way, found in times.items()
    }


def difference(predictor: Any, cases: dict[int, list[list[Triple]]]) -> float:
    """The largest distance of the two rows of one problem, relative to the row."""
    largest = 0.0
    for several in cases.values():
        fast = predictor.add("inductive_entity", triples=several[0]).model.entities[-1].detach()
        with plainly():
            plain = predictor.add("inductive_entity", triples=several[0]).model.entities[-1].detach()
        largest = max(largest, float((fast - plain).norm() / plain.norm()))
    return largest


def measure(job: dict[str, Any], *, device: str, arrays: str, quick: bool) -> dict[str, Any]:
    """Both ways on the same triples."""
    model, graph = completion.load(completion.Job(**job), arrays)
    model.to(device)
    cases = {num: [given_to(graph, num, seed) for seed in range(2 if quick else 9)] for num in COUNTS}
    fast, first = prepared(model, graph, cases[1][0])
    with plainly():
        plain, plain_first = prepared(model, graph, cases[1][0])
    measured = {str(num): timed({"dualkg": fast, "plain": plain}, several) for num, several in cases.items()}
    first_seconds = {"dualkg": first, "plain": plain_first}
    return {"seconds": measured, "first_seconds": first_seconds, "difference": difference(fast, cases)}


def measure_job(job: Job, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        common = {"job": asdict(job), "device": device, "arrays": str(Path(folder) / "weights.npz")}
        steps = 8 if quick else STEPS
        measuring.in_fresh_process(Path(__file__), {"what": "weights", **common, "steps": steps})
        found = measuring.in_fresh_process(Path(__file__), {"what": "rows", **common, "quick": quick})
    measuring.tell(f"{job.graph}: {json.dumps(found)}")
    yield {"job": asdict(job), "steps": steps, "measured": found}


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of a page."""
    rows = []
    for name, record in tables.in_order(jobs):
        for num, ways in sorted(record["measured"]["seconds"].items(), key=lambda item: int(item[0])):
            ours, plain = ways["dualkg"]["median"], ways["plain"]["median"]
            rows.append([name, num, tables.short(1000 * ours), tables.short(1000 * plain), tables.times(plain / ours)])
    titles = ["graph and model", "triples given", "ms", "plainly, ms", "times as fast"]
    return [*tables.table(titles, rows), "Medians of nine entities each.", ""]


def main() -> None:
    choices = measuring.parser(__doc__).parse_args()
    tasks = {"weights": completion.make_weights, "rows": measure}
    measuring.run("inductive", choices, jobs=JOBS, tasks=tasks, measure=partial(measure_job, quick=choices.quick))


if __name__ == "__main__":
    main()

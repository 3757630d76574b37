"""Seconds of embedding an inductive entity, `predictor.add`, against plain autograd.

Plain autograd differentiates log Σ exp(scores) in the usual way. The weights are trained for two
epochs. `difference` is the relative distance of the two solutions of one problem, `batch_seconds`
the time of each of many entities.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import completion
import measurement
import tables

COUNTS = (1, 3, 10, 30)  # triples given per entity
PLAIN_TOLERANCE = 1e-5
STEPS = 1_088  # steps with 1,000 triples: two epochs of FB15k-237
Triple = tuple[str, str, str]


@dataclass(frozen=True)
class Job:
    """A graph that ComplEx has learned, to be extended."""

    graph: str
    dim: int

    @property
    def name(self) -> str:
        return f"{self.graph} ComplEx dim {self.dim}"


JOBS = {device: [Job("FB15k-237", 200)] for device in ("cpu", "cuda")}


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Solve problems meanwhile through the log-sum-exp of PyTorch, to another tolerance."""
    import torch

    from dualkg.inference import inductive, lbfgs

    def log_normalizers(queries: Any, candidates: Any) -> Any:
        return (queries @ candidates.T).logsumexp(-1)

    with (
        mock.patch.object(inductive, "log_normalizers", log_normalizers),
        mock.patch.dict(lbfgs.TOLERANCE, {torch.float32: PLAIN_TOLERANCE}),
    ):
        yield


def triples_of_one(graph: Any, num: int, seed: int, *, name: str = "new") -> list[Triple]:
    """`num` training triples of an entity that has at least as many, under a new name."""
    random = np.random.default_rng(seed)
    ends = graph.train[:, [0, 2]]
    frequent = np.flatnonzero(np.bincount(ends.ravel()) >= num)
    entity = int(random.choice(frequent))
    rows = graph.train[(ends == entity).any(1)]
    rows = rows[random.permutation(len(rows))[:num]]
    triples = []
    for head, relation, tail in rows.tolist():
        head_name = graph.entities[head]
        tail_name = graph.entities[tail]
        # A triple of the entity with itself is given as one with the known entity.
        if head == entity:
            head_name = name
        elif tail == entity:
            tail_name = name
        triples.append((head_name, graph.relations[relation], tail_name))
    return triples


def warmed_up(model: Any, graph: Any, triples: list[Triple]) -> tuple[Any, float]:
    """A predictor after its first entity, and the seconds that this took.

    The first entity prepares the context that all problems share.
    """
    import dualkg as kg

    predictor = kg.Predictor(model, graph)
    started = time.perf_counter()
    predictor.add("new", triples=triples)
    return predictor, time.perf_counter() - started


def timed(predictors: dict[str, Any], cases: list[list[Triple]]) -> dict[str, dict[str, float]]:
    """Wall-clock and core seconds of each method.

    The methods alternate, so that a busy machine slows both.
    """
    seconds: dict[str, list[float]] = {method: [] for method in predictors}
    core_seconds: dict[str, list[float]] = {method: [] for method in predictors}
    for triples in cases:
        for method, predictor in predictors.items():
            with plain_autograd() if method == "autograd" else nullcontext():
                started = time.perf_counter()
                core_time = time.process_time()
                predictor.add("new", triples=triples)
                seconds[method].append(time.perf_counter() - started)
                core_seconds[method].append(time.process_time() - core_time)
    return {
        method: {
            "best": min(seconds[method]),
            "median": statistics.median(seconds[method]),
            "core_seconds": statistics.median(core_seconds[method]),
        }
        for method in predictors
    }


def difference(predictor: Any, cases: dict[int, list[list[Triple]]]) -> float:
    """The largest relative distance of the two solutions of one problem."""
    largest = 0.0
    for entities in cases.values():
        triples = entities[0]
        fast = predictor.add("new", triples=triples).model.head_table[-1].detach()
        with plain_autograd():
            plain = predictor.add("new", triples=triples).model.head_table[-1].detach()
        largest = max(largest, float((fast - plain).norm() / plain.norm()))
    return largest


def measure(job: dict[str, Any], *, device: str, arrays: str, quick: bool) -> dict[str, Any]:
    """Both methods on the same triples."""
    model, graph = completion.load(completion.Job(**job), arrays)
    model.to(device)
    num_entities = 2 if quick else 9
    cases = {}
    for num in COUNTS:
        cases[num] = [triples_of_one(graph, num, seed) for seed in range(num_entities)]
    fast, fast_first = warmed_up(model, graph, cases[1][0])
    with plain_autograd():
        plain, plain_first = warmed_up(model, graph, cases[1][0])
    predictors = {"dualkg": fast, "autograd": plain}
    return {
        "seconds": {str(num): timed(predictors, cases[num]) for num in COUNTS},
        "first_seconds": {"dualkg": fast_first, "autograd": plain_first},
        "batch_seconds": batch_seconds(model, graph, 10 if quick else 100),
        "difference": difference(fast, cases),
    }


def batch_seconds(model: Any, graph: Any, num_entities: int) -> float:
    """Seconds of each of many entities with three triples, embedded in one batch."""
    from dualkg.inference.extension import extend
    from dualkg.inference.inductive import FrozenContext

    context = FrozenContext.of(model, graph)
    triples = []
    for seed in range(num_entities):
        triples += triples_of_one(graph, 3, seed, name=f"new {seed}")
    started = time.perf_counter()
    extend(context, triples)
    return (time.perf_counter() - started) / num_entities


def measure_job(job: Job, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        common = {"job": asdict(job), "device": device, "arrays": str(Path(folder) / "weights.npz")}
        steps = 8 if quick else STEPS
        measurement.in_fresh_process(Path(__file__), {"what": "weights", **common, "steps": steps})
        task = {"what": "rows", **common, "quick": quick}
        result = measurement.in_fresh_process(Path(__file__), task)
    measurement.log(f"{job.graph}: {json.dumps(result)}")
    yield {"job": asdict(job), "steps": steps, "measured": result}


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of a page."""
    rows = []
    for name, record in tables.in_order(jobs):
        seconds = record["measured"]["seconds"]
        for num in sorted(seconds, key=int):
            ours = seconds[num]["dualkg"]["median"]
            plain = seconds[num]["autograd"]["median"]
            rows.append(
                [
                    name,
                    num,
                    tables.short(1000 * ours),
                    tables.short(1000 * plain),
                    tables.times(plain / ours),
                ]
            )
    titles = ["graph and model", "triples given", "ms", "plain autograd, ms", "times as fast"]
    return [*tables.table(titles, rows), "Medians of nine entities each.", ""]


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    tasks = {"weights": completion.make_weights, "rows": measure}
    measurement.run(
        "inductive",
        choices,
        jobs=JOBS,
        tasks=tasks,
        measure=partial(measure_job, quick=choices.quick),
    )


if __name__ == "__main__":
    main()

"""Seconds per epoch and peak memory of `dualkg train`, compared with other implementations.

On a GPU: whole epochs of the published recipes, against the reference engine. On a CPU: FB15k-237
at dim 100 and 200, against the reference engine, a tutorial-style PyTorch loop and PyKEEN, in
alternating rounds of fresh processes.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import epochs
import measurement
import peers
from epochs import Job

JOBS = {
    "cuda": [
        Job("FB15k-237", "ComplEx", 2000, 1000),
        Job("FB15k-237", "ComplEx", 2000, 100),
        Job("FB15k-237", "CP", 2000, 1000),
        Job("FB15k-237", "CP", 2000, 100),
        Job("FB15k-237", "RESCAL", 512, 1024),
        Job("WN18RR", "ComplEx", 2000, 500),
        Job("WN18RR", "ComplEx", 2000, 100),
        Job("WN18RR", "RESCAL", 256, 1024),
        Job("YAGO3-10-quarter", "ComplEx", 1000, 1000),
    ],
    "cpu": [Job("FB15k-237", "ComplEx", 100, 1000), Job("FB15k-237", "ComplEx", 200, 1000)],
}


@dataclass(frozen=True)
class Effort:
    """Rounds of fresh processes, epochs of each, and steps per epoch.

    The first epoch is a warm-up. Without `steps`, an epoch has all its steps.
    """

    rounds: int
    epochs: int
    steps: int | None


EFFORTS = {
    "cuda": {"auto": Effort(1, 4, None), "reference": Effort(1, 3, 60)},
    "cpu": {"auto": Effort(3, 3, 20), "reference": Effort(3, 3, 20), "PyKEEN": Effort(1, 3, 5)},
}
QUICK = Effort(1, 2, 3)
# The batch size is doubled when grouped by query, so that a step has about as many queries (a query
# has 3.4 answers on FB15k-237, 1.7 on WN18RR).
BATCH_FACTOR = 2


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "dualkg": epochs.measure_dualkg,
    "several": epochs.measure_several,
    "tutorial": epochs.measure_tutorial,
    "prepare": epochs.prepare,
}


def variants(
    job: Job, device: str, arrays: str, *, quick: bool
) -> dict[str, tuple[Effort, dict[str, Any]]]:
    """The effort and the task of each variant of a job, by name."""
    precisions = ["bf16"] if measurement.has_bf16(device) else []
    if device == "cpu":
        precisions.append("float32")
    engines = {"reference engine": ("reference", "float32", "triples")}
    for precision in precisions:
        engines[f"dualkg {precision}"] = ("auto", precision, "triples")
    for precision in precisions:
        engines[f"dualkg {precision}, grouped by query"] = ("auto", precision, "queries")

    tasks = {}
    for name, (engine, precision, order) in engines.items():
        effort = QUICK if quick else EFFORTS[device][engine]
        sized_job = job if order == "triples" else replace(job, batch=BATCH_FACTOR * job.batch)
        task = {
            "what": "dualkg",
            "job": asdict(sized_job),
            "device": device,
            "order": order,
            "engine": engine,
            "precision": precision,
            "epochs": effort.epochs,
            "steps": effort.steps,
        }
        tasks[name] = (effort, task)
    if device == "cpu":
        # PyKEEN is much slower, so it is measured for fewer steps.
        tutorial_effort = QUICK if quick else EFFORTS[device]["reference"]
        pykeen_effort = QUICK if quick else EFFORTS[device]["PyKEEN"]
        tasks["tutorial"] = (
            tutorial_effort,
            peer_task("tutorial", job, arrays, effort=tutorial_effort),
        )
        tasks["PyKEEN"] = (pykeen_effort, peer_task("train", job, arrays, effort=pykeen_effort))
    return tasks


def peer_task(what: str, job: Job, arrays: str, *, effort: Effort) -> dict[str, Any]:
    """The same job on a CPU for other code; the steps of the first epoch are the warm-up."""
    return {
        "what": what,
        "arrays": arrays,
        "dim": job.dim,
        "batch": job.batch,
        "device": "cpu",
        "steps": (effort.epochs - 1) * (effort.steps or 1),
        "warm_up": effort.steps,
    }


def measure_job(job: Job, device: str, *, quick: bool, python: Path) -> Iterator[dict[str, Any]]:
    """Measure all variants in alternating rounds, so that other load affects all alike.

    Yields a record after each round.
    """
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        arrays = str(Path(folder) / "graph.npz")
        tasks_by_name = variants(job, device, arrays, quick=quick)
        if device == "cpu":
            task = {"what": "prepare", "job": asdict(job), "arrays": arrays}
            answer = measurement.in_fresh_process(Path(__file__), task)
            if "failed" in answer:
                sys.exit(f"{job.graph} cannot be read: {answer['failed']}")
            all_rounds = run_in_turn(tasks_by_name, python)
        else:
            all_rounds = iter([run_together(tasks_by_name)])
        for rounds in all_rounds:
            measured = {name: combined(results) for name, results in rounds.items() if results}
            yield {"job": asdict(job), "measured": measured}
    for name, result in measured.items():
        log(job, name, result)


def run_in_turn(
    tasks_by_name: dict[str, tuple[Effort, dict[str, Any]]], python: Path
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Measure each variant in its own process, and yield all rounds so far after each round.

    A failed variant is not retried.
    """
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks_by_name}
    for number in range(max(effort.rounds for effort, _ in tasks_by_name.values())):
        for name, (effort, task) in tasks_by_name.items():
            if number >= effort.rounds or any("failed" in result for result in rounds[name]):
                continue
            if task["what"] == "train":
                result = peers.run_task(task, python)
            else:
                result = measurement.in_fresh_process(Path(__file__), task)
            rounds[name].append(result)
            seconds = result.get("seconds_per_epoch", result)
            measurement.log(f"round {number + 1}, {name}: {seconds}")
        yield rounds


def run_together(
    tasks_by_name: dict[str, tuple[Effort, dict[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Measure all variants in one process.

    GPU memory can be reset, and starting a process would take longer than a measurement.
    """
    tasks = [task for _, task in tasks_by_name.values()]
    answer = measurement.in_fresh_process(Path(__file__), {"what": "several", "tasks": tasks})
    # A process that failed as a whole has one answer for all variants.
    results = answer.get("found", [answer] * len(tasks))
    return {name: [result] for name, result in zip(tasks_by_name, results, strict=True)}


def combined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of several rounds, and the highest peak."""
    for result in rounds:
        if "failed" in result:
            return result
    seconds = [result["seconds_per_epoch"] for result in rounds]
    return {
        **rounds[0],
        "rounds": seconds,
        "seconds_per_epoch": statistics.median(seconds),
        "warm_up_seconds": statistics.median(result["warm_up_seconds"] for result in rounds),
        "peak_mib": max(result["peak_mib"] for result in rounds),
    }


def log(job: Job, name: str, result: dict[str, Any]) -> None:
    if "failed" in result:
        measurement.log(f"{job.name}, {name}: {result['failed']}")
        return
    measurement.log(
        f"{job.name}, {name}: {result['seconds_per_epoch']:.3f} s/epoch, peak "
        f"{result['peak_mib']:,.0f} MiB, warm-up {result['warm_up_seconds']:.1f} s"
    )


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measure = partial(measure_job, quick=choices.quick, python=choices.peers)
    measurement.run("training", choices, jobs=JOBS, tasks=TASKS, measure=measure)


if __name__ == "__main__":
    main()

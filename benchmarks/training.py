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
    """Rounds of fresh processes, epochs (the first is a warm-up), and steps per epoch; None is all
    steps.
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
ANSWERS = 2


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
    found = {}
    precisions = ["bf16"] if measurement.has_bf16(device) else []
    if device == "cpu":
        precisions.append("float32")
    engines = [("reference engine", "reference", "float32", "triples")]
    engines += [(f"dualkg {precision}", "auto", precision, "triples") for precision in precisions]
    engines += [
        (f"dualkg {precision}, grouped by query", "auto", precision, "queries")
        for precision in precisions
    ]
    for name, engine, precision, order in engines:
        effort = QUICK if quick else EFFORTS[device][engine]
        choice = {
            "engine": engine,
            "precision": precision,
            "epochs": effort.epochs,
            "steps": effort.steps,
        }
        sized_job = job if order == "triples" else replace(job, batch=ANSWERS * job.batch)
        found[name] = (
            effort,
            {
                "what": "dualkg",
                "job": asdict(sized_job),
                "device": device,
                "order": order,
                **choice,
            },
        )
    if device == "cpu":
        sized = {"arrays": arrays, "dim": job.dim, "batch": job.batch, "device": device}
        for name, what, kind in (
            ("tutorial", "tutorial", "reference"),
            ("PyKEEN", "train", "PyKEEN"),
        ):
            effort = QUICK if quick else EFFORTS[device][kind]
            steps = {"steps": (effort.epochs - 1) * (effort.steps or 1), "warm_up": effort.steps}
            found[name] = effort, {"what": what, **sized, **steps}
    return found


def measure_job(job: Job, device: str, *, quick: bool, python: Path) -> Iterator[dict[str, Any]]:
    """Measure all variants in alternating rounds, so that other load affects all alike; yield a
    record per round.
    """
    with tempfile.TemporaryDirectory() as folder:
        arrays = str(Path(folder) / "graph.npz")
        tasks_by_name = variants(job, device, arrays, quick=quick)
        if device == "cpu":
            prepared = {"what": "prepare", "job": asdict(job), "arrays": arrays}
            done = measurement.in_fresh_process(Path(__file__), prepared)
            if "failed" in done:
                sys.exit(f"{job.graph} cannot be read: {done['failed']}")
        found: dict[str, dict[str, Any]] = {}
        for rounds in (
            run_in_turn(tasks_by_name, python) if device == "cpu" else [run_together(tasks_by_name)]
        ):
            found = {name: combined(measured) for name, measured in rounds.items() if measured}
            yield {"job": asdict(job), "measured": found}
    for name, one in found.items():
        log(job, name, one)


def run_in_turn(
    tasks_by_name: dict[str, tuple[Effort, dict[str, Any]]], python: Path
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yield all rounds so far after each; each measurement has its own process; a failed variant is
    not retried.
    """
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks_by_name}
    for number in range(max(effort.rounds for effort, _ in tasks_by_name.values())):
        for name, (effort, task) in tasks_by_name.items():
            if number >= effort.rounds or any("failed" in found for found in rounds[name]):
                continue
            here = task["what"] != "train"
            found = (
                measurement.in_fresh_process(Path(__file__), task)
                if here
                else peers.run_task(task, python)
            )
            rounds[name].append(found)
            measurement.log(f"round {number + 1}, {name}: {found.get('seconds_per_epoch', found)}")
        yield rounds


def run_together(
    tasks_by_name: dict[str, tuple[Effort, dict[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Measure all variants in one process: GPU memory can be reset, and starting a process takes
    longer.
    """
    tasks = [task for _, task in tasks_by_name.values()]
    found = measurement.in_fresh_process(Path(__file__), {"what": "several", "tasks": tasks})
    return dict(
        zip(tasks_by_name, [[one] for one in found.get("found", [found] * len(tasks))], strict=True)
    )


def combined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of several rounds, and the highest peak."""
    failed = next((found for found in rounds if "failed" in found), None)
    if failed:
        return failed
    return {
        **rounds[0],
        "rounds": [found["seconds_per_epoch"] for found in rounds],
        "seconds_per_epoch": statistics.median(found["seconds_per_epoch"] for found in rounds),
        "warm_up_seconds": statistics.median(found["warm_up_seconds"] for found in rounds),
        "peak_mib": max(found["peak_mib"] for found in rounds),
    }


def log(job: Job, name: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        measurement.log(f"{job.name}, {name}: {found['failed']}")
        return
    measurement.log(
        f"{job.name}, {name}: {found['seconds_per_epoch']:.3f} s/epoch, peak "
        f"{found['peak_mib']:,.0f} MiB, warm-up {found['warm_up_seconds']:.1f} s"
    )


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measure = partial(measure_job, quick=choices.quick, python=choices.peers)
    measurement.run("training", choices, jobs=JOBS, tasks=TASKS, measure=measure)


if __name__ == "__main__":
    main()

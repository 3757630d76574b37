"""How time and memory of an epoch grow with entities, triples, dim and batch, on synthetic graphs.

One of the four doubles while the others stay. The sizes follow from --budget, the seconds in total.
On a CPU each point has a fresh process, and its memory is what it adds to a process that has
trained something tiny.
"""

import json
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import epochs
import graphs
import limits
import measurement
from fits import AXES

NUM_RELATIONS = 100
NUM_POINTS = 5
EPOCHS = 4  # the first warms up
SLACK = 2.5  # how many times the limit an epoch is expected to take


@dataclass(frozen=True)
class Point:
    """The sizes of a training."""

    entities: int
    triples: int
    dim: int
    batch: int


TINY = Point(200, 400, 4, 50)
# The smallest sizes; a small budget has fewer triples.
BASES = {"cuda": Point(16_000, 100_000, 256, 1024), "cpu": Point(4000, 8000, 50, 256)}
BUDGETS = {"cuda": 80.0, "cpu": 300.0}
SECONDS_OF_A_PROCESS = {"cuda": 15.0, "cpu": 5.0}


def points_of(axis: str, base: Point) -> list[Point]:
    """Five points, each twice the one before along one axis; batches go from a quarter to four
    times.
    """
    first = getattr(base, axis) // (4 if axis == "batch" else 1)
    return [replace(base, **{axis: first * 2**number}) for number in range(NUM_POINTS)]


def base_within(budget: float, device: str, ceilings: dict[str, float]) -> Point:
    """The largest sizes whose points take the budget in total, estimated by the ceilings of the
    machine.
    """
    base = BASES[device]
    bf16 = measurement.has_bf16(device)
    processes = 1 if device == "cuda" else len(AXES) * NUM_POINTS
    left = max(budget - processes * SECONDS_OF_A_PROCESS[device], budget / 4)
    expected = sum(
        EPOCHS * SLACK * expected_seconds(point, ceilings, bf16=bf16)
        for axis in AXES
        for point in points_of(axis, base)
    )
    triples = int(base.triples * min(1.0, left / expected))
    return replace(base, triples=max(triples, 2 * base.batch))


def expected_seconds(point: Point, ceilings: dict[str, float], *, bf16: bool) -> float:
    """The least that an epoch of a point could take."""
    width = 2 * point.dim
    step = limits.Step(
        point.batch, point.entities, width, width, point.batch, NUM_RELATIONS, False, bf16
    )
    found = limits.limit(step.work(), ceilings, bf16=bf16, times=2 * point.triples / point.batch)
    assert found is not None, "the ceilings were measured just now"
    return found.sum


# -- one measurement, in a process of its own --------------------------------


def measure_points(points: list[dict[str, int]], *, device: str) -> dict[str, Any]:
    """Seconds of the best epoch, and the memory it took, for each point."""
    train_point(TINY, device)
    return {
        "points": [asdict(Point(**point)) | train_point(Point(**point), device) for point in points]
    }


def train_point(point: Point, device: str) -> dict[str, float]:
    measurement.forget_peak(device)
    before = (measurement.resident_mib() or 0.0) if device == "cpu" else 0.0
    graph = graphs.generate_graph(point.entities, point.triples, num_relations=NUM_RELATIONS)
    job = epochs.Job("made", "ComplEx", point.dim, point.batch)
    precision = "bf16" if measurement.has_bf16(device) else "float32"
    recipe = epochs.recipe_for(job, engine="auto", precision=precision, epochs=EPOCHS)
    _, found = epochs.train_epochs(recipe, graph, device)
    return {"seconds": min(found["epoch_seconds"]), "mib": max(found["peak_mib"] - before, 0.1)}


# -- all of them -------------------------------------------------------------


def measure_axes(axes: list[str], base: Point, device: str) -> dict[str, dict[str, Any]]:
    """The points of each axis; on a GPU, whose memory can be counted again, all in one process."""
    sizes = {axis: [asdict(point) for point in points_of(axis, base)] for axis in axes}
    if device == "cuda":
        found = run([point for points in sizes.values() for point in points], device)
        rest = iter(found.get("points", []))
        together = {axis: {"points": list(islice(rest, NUM_POINTS))} for axis in axes}
        return dict.fromkeys(axes, found) if "failed" in found else together
    return {
        axis: joined([run([point], device) for point in points]) for axis, points in sizes.items()
    }


def run(points: list[dict[str, int]], device: str) -> dict[str, Any]:
    found = measurement.in_fresh_process(Path(__file__), {"points": points, "device": device})
    for point in found.get("points", [found]):
        measurement.log(json.dumps(point))
    return found


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The points of several processes, or what went wrong in one of them."""
    failed = [part for part in parts if "failed" in part]
    return (
        failed[0] if failed else {"points": [point for part in parts for point in part["points"]]}
    )


def main() -> None:
    parser = measurement.parser(__doc__)
    parser.add_argument(
        "--budget", type=float, help="about how many seconds; 300 on a CPU, 80 on a GPU"
    )
    choices = parser.parse_args()
    if choices.task:
        print(json.dumps(measure_points(**choices.task)))
        return
    chosen = measurement.wanted(list(AXES), choices.only)
    if choices.list:
        print(*chosen, sep="\n")
        return
    device = measurement.pick_device(choices.device)
    on = measurement.describe(device, commit=choices.commit)
    ceilings = measurement.in_fresh_process(
        Path(measurement.__file__), {"device": device, "quick": True}
    )
    base = base_within(
        choices.budget or (30.0 if choices.quick else BUDGETS[device]), device, ceilings
    )
    for axis, found in measure_axes(chosen, base, device).items():
        measurement.save("scaling", axis, found, on=on, folder=measurement.folder_of(choices))


if __name__ == "__main__":
    main()

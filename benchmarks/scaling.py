"""How time and memory of an epoch grow with entities, triples, dim and batch, on synthetic graphs.

One of the four doubles while the others stay. The sizes follow from --budget, the seconds in total.
On a CPU each point has a fresh process, and its memory is what it adds to a process that has
trained something tiny.
"""

import json
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import epochs
import graphs
import limits
import measurement
from fits import AXES

NUM_RELATIONS = 100
NUM_POINTS = 5
EPOCHS = 4  # the first is the warm-up
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
    """Five points, each twice the one before along one axis.

    Batches go from a quarter of the base to four times the base.
    """
    first = getattr(base, axis) // (4 if axis == "batch" else 1)
    return [replace(base, **{axis: first * 2**number}) for number in range(NUM_POINTS)]


def base_within(budget: float, device: str, ceilings: dict[str, float]) -> Point:
    """The largest sizes whose points take the budget in total.

    The time is estimated by the ceilings of the machine.
    """
    base = BASES[device]
    bf16 = measurement.has_bf16(device)
    num_processes = 1 if device == "cuda" else len(AXES) * NUM_POINTS
    training_budget = max(budget - num_processes * SECONDS_OF_A_PROCESS[device], budget / 4)
    expected = 0.0
    for axis in AXES:
        for point in points_of(axis, base):
            expected += EPOCHS * SLACK * expected_seconds(point, ceilings, bf16=bf16)
    triples = int(base.triples * min(1.0, training_budget / expected))
    return replace(base, triples=max(triples, 2 * base.batch))


def expected_seconds(point: Point, ceilings: dict[str, float], *, bf16: bool) -> float:
    """The least that an epoch of a point could take."""
    width = 2 * point.dim
    step = limits.Step(
        batch=point.batch,
        num_entities=point.entities,
        width=width,
        relation_width=width,
        present_heads=point.batch,
        present_relations=NUM_RELATIONS,
        two_entity_tables=False,
        bf16=bf16,
    )
    num_steps = 2 * point.triples / point.batch
    limit = limits.limit(step.work(), ceilings, bf16=bf16, times=num_steps)
    assert limit is not None, "the ceilings were measured just now"
    return limit.sum


# -- one measurement, in a process of its own --------------------------------


def measure_points(points: list[dict[str, int]], *, device: str) -> dict[str, Any]:
    """Seconds of the best epoch, and the memory it took, for each point."""
    train_point(TINY, device)
    measured = []
    for point in points:
        result = train_point(Point(**point), device)
        measured.append({**point, **result})
    return {"points": measured}


def train_point(point: Point, device: str) -> dict[str, float]:
    """Seconds of the best epoch of a synthetic graph, and the memory that training adds."""
    measurement.forget_peak(device)
    before = (measurement.resident_mib() or 0.0) if device == "cpu" else 0.0
    graph = graphs.generate_graph(point.entities, point.triples, num_relations=NUM_RELATIONS)
    job = epochs.Job("made", "ComplEx", point.dim, point.batch)
    precision = "bf16" if measurement.has_bf16(device) else "float32"
    recipe = epochs.recipe_for(job, engine="auto", precision=precision, epochs=EPOCHS)
    _, costs = epochs.train_epochs(recipe, graph, device)
    return {"seconds": min(costs["epoch_seconds"]), "mib": max(costs["peak_mib"] - before, 0.1)}


# -- all of them -------------------------------------------------------------


def measure_axes(axes: list[str], base: Point, device: str) -> dict[str, dict[str, Any]]:
    """The points of each axis; on a GPU, whose memory can be counted again, all in one process."""
    sizes = {axis: [asdict(point) for point in points_of(axis, base)] for axis in axes}
    if device == "cuda":
        answer = run(list(chain.from_iterable(sizes.values())), device)
        if "failed" in answer:
            return dict.fromkeys(axes, answer)
        points = iter(answer["points"])
        return {axis: {"points": list(islice(points, NUM_POINTS))} for axis in axes}

    measured = {}
    for axis, points_of_axis in sizes.items():
        measured[axis] = joined([run([point], device) for point in points_of_axis])
    return measured


def run(points: list[dict[str, int]], device: str) -> dict[str, Any]:
    task = {"points": points, "device": device}
    answer = measurement.in_fresh_process(Path(__file__), task)
    for point in answer.get("points", [answer]):
        measurement.log(json.dumps(point))
    return answer


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The points of several processes, or what went wrong in one of them."""
    points = []
    for answer in answers:
        if "failed" in answer:
            return answer
        points += answer["points"]
    return {"points": points}


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
    default_budget = 30.0 if choices.quick else BUDGETS[device]
    base = base_within(choices.budget or default_budget, device, ceilings)
    for axis, record in measure_axes(chosen, base, device).items():
        measurement.save("scaling", axis, record, on=on, folder=measurement.folder_of(choices))


if __name__ == "__main__":
    main()

"""Entity tables in host memory beside tables on the device: steps of ComplEx by sampled softmax.

`python benchmarks/host_memory.py --device cuda` takes at most five minutes on one GPU, and adds its
figures to results/host_memory.json. The graph that it stands for is Freebase. Its largest dim whose
weights and Adagrad's sums of rows fit the GPU is computed, and steps with tables of that dim there
are taken in turn with steps of dim 400 on tables in host memory, each in several rounds.

The time of a step does not depend on how many entities the tables have, once they are larger than
any cache: they have as many here as half of the free memory of the host holds. Heads and tails are
skewed as in Freebase: a few are in many batches. Measured, too, are

- the bytes that a step copies in each direction, and the time that the link takes for them alone;
- reading rows from the tables and writing them;
- steps that prepare no batch ahead, and steps on rows that are on the device already.

On a CPU, the same code copies rows within its memory.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import measurement
import tables
from measurement import log, wait_for

TOPIC = "host_memory"
NUM_TRIPLES = 304_727_650  # Freebase: 90 % of 338,586,276 triples, 86,054,151 entities
FREEBASE = (86_054_151, 14_824)
ROUNDS = 7
SIDES = 2  # examples of a triple
FREE_SHARE = 0.5  # of the host's memory that the tables take
WARM_UP = 12  # steps
PLACES = {"device": "on the device", "host": "in host memory"}


@dataclass(frozen=True)
class Job:
    """The sizes of a measurement."""

    name: str
    dim: int = 400
    batch_size: int = 4000
    num_negatives: int = 10_000
    steps: int = 300  # of a round
    most_entities: int = 24_000_000
    device_dim: int | None = None  # None: the largest that fits


JOBS = {
    "cuda": [Job("Freebase, dim 400")],
    "cpu": [
        Job(
            "dim 100",
            dim=100,
            batch_size=1000,
            num_negatives=2000,
            steps=10,
            most_entities=400_000,
            device_dim=100,
        )
    ],
}


def recipe_of(job: Job, dim: int) -> Any:
    import dualkg as kg

    return kg.Recipe().with_changes(
        {
            "model.name": "ComplEx",
            "model.dim": dim,
            "regularizer.name": "DURA",
            "regularizer.weight": 0.01,
            "loss.name": "SampledSoftmax",
            "loss.num_negatives": job.num_negatives,
            "optimizer.sums": "rows",
            "training.batch_size": job.batch_size,
        }
    )


def largest_dim(job: Job, device: torch.device) -> int:
    """The largest dim, in steps of 10, with which Freebase's weights and sums fit a GPU."""
    from dualkg.data.graph import GraphShape
    from dualkg.training.memory import available_memory
    from dualkg.training.placement import SMALL, USED_SHARE, bytes_of_weights

    available = USED_SHARE * available_memory(device)
    dim = 10
    while True:
        recipe = recipe_of(job, dim + 10)
        small = recipe.model.build(SMALL, seed=0)
        if bytes_of_weights(recipe, small, GraphShape(*FREEBASE)) > available:
            return dim
        dim += 10


class Steps:
    """Steps of one kind of tables on batches that are made beforehand."""

    def __init__(self, job: Job, tables: Any, dim: int, device: torch.device) -> None:
        import dualkg as kg
        from dualkg.training.engines import choose_engine
        from dualkg.training.optimizers import build_optimizer
        from dualkg.training.steps import build_step

        self.job = job
        self.tables = tables
        self.device = device
        recipe = recipe_of(job, dim)
        shape = kg.GraphShape(tables.num_entities, FREEBASE[1])
        model = recipe.model.build(shape, seed=0, tables=tables).to(device)
        with torch.no_grad():
            for table in model.parameters():
                # Every page is written, as after training.
                table.fill_(0.01)
        regularizer = recipe.regularizer.build()
        self.engine = choose_engine(recipe, model, regularizer)
        optimizer = build_optimizer(
            recipe.optimizer, model.parameters(), entity_tables=model.entity_tables, one_pass=True
        )
        graph: Any = SimpleNamespace(shape=shape)
        loss = recipe.loss.bind(model, graph, batch_size=job.batch_size, seed=0)
        self.step = build_step(self.engine, model, loss, regularizer, optimizer)
        self.num_relation_ids = model.num_relation_ids
        self.num_made = 0

    def batches(self, number: int) -> list[Tensor]:
        """Batches with heads and tails whose density falls with the square root of their id."""
        random = torch.Generator(self.device).manual_seed(self.num_made)
        self.num_made += 1
        size = (number * self.job.batch_size,)
        uniform = torch.rand((2, *size), generator=random, device=self.device, dtype=torch.float64)
        ends = (self.tables.num_entities * uniform**2).long()
        relations = torch.randint(self.num_relation_ids, size, generator=random, device=self.device)
        triples = torch.stack([ends[0], relations, ends[1]], dim=1)
        return list(triples.split(self.job.batch_size))

    def seconds(self, number: int, *, ahead: bool = True) -> float:
        """Seconds of a step, with all copies, on new batches."""
        batches: Iterator[Tensor] = iter(self.batches(number))
        wait_for(self.device.type)
        started = time.perf_counter()
        for batch in self.tables.ahead(batches) if ahead else batches:
            self.step(batch, 0.1)
        self.tables.complete_updates()
        wait_for(self.device.type)
        return (time.perf_counter() - started) / number


def fastest(work: Callable[[], object], device: torch.device) -> float:
    return measurement.seconds_of(work, device.type, least=0.3)


def link(bytes_of_step: int, device: torch.device) -> dict[str, float]:
    """Seconds in which the link copies the bytes of a step: up, down, and both at once."""
    if device.type == "cpu":
        return {}
    host = torch.zeros(2, bytes_of_step // 4, pin_memory=True)
    rows = torch.zeros(2, bytes_of_step // 4, device=device)
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            rows[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(rows[1], non_blocking=True)

    return {
        "up": fastest(lambda: rows[0].copy_(host[0], non_blocking=True), device),
        "down": fastest(lambda: host[1].copy_(rows[1], non_blocking=True), device),
        "both": fastest(both, device),
    }


def parts_of_step(steps: Steps) -> dict[str, float]:
    """Seconds of the parts of a step on tables in host memory, each by itself."""
    host_step: Any = steps.step
    [batch] = steps.batches(1)
    host_step(batch, 0.1)
    steps.tables.complete_updates()
    factors = host_step.model.factors(*batch.unbind(-1))
    ids = torch.unique(host_step.loss.entities_read(host_step.model, factors))
    count = torch.tensor([len(ids)], device=ids.device)

    def read() -> None:
        for copies in host_step.copies:
            copies.to_device(0, ids, count)

    def write() -> None:
        for copies in host_step.copies:
            copies.to_host(0, ids, count)

    device = steps.device
    return {
        "rows": len(ids),
        "reading rows": fastest(read, device),
        "writing rows": fastest(write, device),
        "step on the device": fastest(lambda: host_step.step(batch, 0.1), device),
    }


def measure(job: Job, device: torch.device, *, rounds: int) -> dict[str, Any]:
    from dualkg.tables.base import local_tables
    from dualkg.tables.host import HostTables
    from dualkg.training.memory import available_memory

    free = available_memory(torch.device("cpu"))
    row_bytes = 4 * (2 * job.dim + 1)
    num_entities = min(job.most_entities, int(FREE_SHARE * free / row_bytes))
    device_dim = job.device_dim or largest_dim(job, device)
    log(f"{num_entities:,} entities; dim {device_dim} on the device, {job.dim} in host memory")

    made = time.perf_counter()
    on_gpu = device if device.type == "cuda" else None
    local = local_tables(num_entities, device=on_gpu, initialize=False)
    on_device = Steps(job, local, device_dim, device)
    in_host_memory = Steps(job, HostTables(num_entities, initialize=False), job.dim, device)
    log(f"Tables after {time.perf_counter() - made:.0f} s: {in_host_memory.engine}")

    for steps in (on_device, in_host_memory):
        steps.seconds(WARM_UP)
    host_step: Any = in_host_memory.step
    times: dict[str, list[float]] = {"device": [], "host": [], "host, none ahead": []}
    bytes_before = host_step.bytes_copied
    num_host_steps = 0
    gc.collect()
    for number in range(rounds):
        times["device"].append(on_device.seconds(job.steps))
        times["host"].append(in_host_memory.seconds(job.steps))
        few = max(job.steps // 10, 2)
        times["host, none ahead"].append(in_host_memory.seconds(few, ahead=False))
        num_host_steps += job.steps + few
        shown = ", ".join(f"{name} {1e3 * each[-1]:.2f} ms" for name, each in times.items())
        log(f"Round {number + 1} of {rounds}: {shown}")

    bytes_of_step = (host_step.bytes_copied - bytes_before) // num_host_steps
    medians = {name: statistics.median(each) for name, each in times.items()}
    parts = parts_of_step(in_host_memory)
    of_link = link(bytes_of_step, device)
    steps_of_epoch = -(-SIDES * NUM_TRIPLES // job.batch_size)
    alone = parts["step on the device"]
    hidden = medians["host, none ahead"] - medians["host"]
    return {
        "num_entities": num_entities,
        "device_dim": device_dim,
        "dim": job.dim,
        "engines": {"device": str(on_device.engine), "host": str(in_host_memory.engine)},
        "seconds_of_step": {name: round(value, 6) for name, value in medians.items()},
        "rounds": {name: [round(value, 6) for value in each] for name, each in times.items()},
        "ratio": round(medians["host"] / medians["device"], 3),
        "hours_of_epoch": {
            name: round(medians[name] * steps_of_epoch / 3600, 3) for name in ("device", "host")
        },
        "bytes_of_step_each_way": bytes_of_step,
        "seconds_of_link": {name: round(value, 6) for name, value in of_link.items()},
        "seconds_of_parts": {name: round(value, 6) for name, value in parts.items()},
        "hidden_share": round(hidden / max(medians["host, none ahead"] - alone, 1e-9), 3),
    }


def lines(jobs: dict[str, Any]) -> list[str]:
    """The table of a machine: steps of both kinds of tables, and epochs of Freebase."""
    titles = ["job", "tables", "dim", "ms a step", "hours of an epoch", "ratio", "MB each way"]
    rows = []
    for name, record in tables.in_order(jobs):
        ratio = {"device": "", "host": f"{record['ratio']:.2f}"}
        megabytes = {"device": "", "host": f"{record['bytes_of_step_each_way'] / 1e6:.1f}"}
        dims = {"device": record["device_dim"], "host": record["dim"]}
        for kind, place in PLACES.items():
            milliseconds = 1e3 * record["seconds_of_step"][kind]
            hours = record["hours_of_epoch"][kind]
            cells = [name, place, str(dims[kind]), f"{milliseconds:.2f}", f"{hours:.2f}"]
            rows.append([*cells, ratio[kind], megabytes[kind]])
    return tables.table(titles, rows, words=2)


def main() -> None:
    options = measurement.parser(__doc__)
    options.add_argument("--dim", type=int, help="of the tables in host memory")
    options.add_argument("--device-dim", type=int, help="of the tables on the device")
    options.add_argument("--entities", type=int, help="at most so many")
    choices: argparse.Namespace = options.parse_args()
    device = torch.device(measurement.pick_device(choices.device))
    jobs = {job.name: job for job in JOBS[device.type]}
    names = measurement.wanted(list(jobs), choices.only)
    if choices.list:
        print(*names, sep="\n")
        return
    on = measurement.describe(device.type, commit=choices.commit)
    for name in names:
        job = jobs[name]
        if choices.quick:
            job = replace(job, steps=4, most_entities=50_000)
        if choices.dim:
            job = replace(job, name=f"dim {choices.dim}", dim=choices.dim)
        if choices.device_dim:
            job = replace(job, device_dim=choices.device_dim)
        if choices.entities:
            job = replace(job, most_entities=choices.entities)
        record = measure(job, device, rounds=2 if choices.quick else ROUNDS)
        log(f"{job.name}: {record['ratio']} times the seconds of a step")
        folder = measurement.folder_of(choices)
        measurement.save(TOPIC, job.name, record, on=on, folder=folder)


if __name__ == "__main__":
    main()

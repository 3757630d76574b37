"""One step of 1-vs-all on divided tables, by dualkg and by DTensor with `loss_parallel`.

`python benchmarks/split_tables.py` starts two processes with gloo for each job and measures them in
turn. Each takes the same steps of ComplEx with softmax over all entities: rows of heads and tails
are fetched, mapped, scored against all entities, and the gradients are found.

- `dualkg fused`: `ShardedGradientTables`, without autograd.
- `dualkg reference`: `PartialModel` by autograd.
- `DTensor`: the entity table is a DTensor with `Shard(0)`, and `loss_parallel` computes the cross
  entropy. Rows of the batch are fetched by dualkg, because the backward pass of a look-up in such a
  table is not supported.

The gradients are compared with those of one process in float64.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import measurement

TOPIC = "split_tables"
NUM_PROCESSES = 2
STEPS = 6


class Job(NamedTuple):
    """The sizes of a step."""

    num_entities: int
    dim: int
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.num_entities:,} entities, dim {self.dim}, batch {self.batch_size}"


JOBS = [Job(14_541, 100, 500), Job(40_943, 200, 500)]
EXACT = Job(37, 4, 16)  # in float64, compared with one process


def batch_of(job: Job) -> Tensor:
    random = torch.Generator().manual_seed(0)
    columns = [job.num_entities, 22, job.num_entities]
    ids = [torch.randint(0, size, (job.batch_size,), generator=random) for size in columns]
    return torch.stack(ids, dim=1)


def model_of(job: Job, tables: Any) -> Any:
    import dualkg as kg

    shape = kg.GraphShape(job.num_entities, 11)
    return kg.ComplEx.with_tables(tables, shape, dim=job.dim, seed=1, init_scale=0.1)


def dualkg_step(job: Job, index: int, *, fused: bool, dtype: torch.dtype) -> Callable[[], Any]:
    """A function that takes a step and returns objective, entity gradient and relation gradient."""
    import dualkg as kg
    from dualkg.losses.softmax import BoundOneVsAll
    from dualkg.models.partial import PartialModel
    from dualkg.tables import Shard, ShardedTables
    from dualkg.training.fused import FusedStep
    from dualkg.training.steps import ReferenceStep
    from dualkg.training.updates import OnePassAdagrad

    shard = Shard(job.num_entities, index, NUM_PROCESSES)
    model = PartialModel(model_of(job, ShardedTables(shard)).to(dtype))
    batch = batch_of(job)
    if fused:
        optimizer = OnePassAdagrad(model.parameters(), 0.0)
        step: Any = FusedStep(model, BoundOneVsAll(), kg.NoRegularizer(), optimizer)
    else:
        # Gradients alone need no optimizer.
        no_optimizer: Any = None
        step = ReferenceStep(model, BoundOneVsAll(), kg.NoRegularizer(), no_optimizer)

    def take() -> Any:
        model.zero_grad(set_to_none=True)
        objective = step.gradients(batch)
        entities = step.tables.gradient("head") if fused else model.embedding.entities.grad
        return objective, entities, model.embedding.relations.grad, shard.ids

    return take


def dtensor_step(job: Job, index: int, *, dtype: torch.dtype) -> Callable[[], Any]:
    """The same step with scores by DTensor, which are divided by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    from dualkg.tables import LocalTables
    from dualkg.tables.shard import Shard as Rows

    mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
    whole = model_of(job, LocalTables(job.num_entities)).to(dtype)
    rows = Rows(job.num_entities, index, NUM_PROCESSES)
    order = rows.order.entities(torch.arange(job.num_entities))
    entities = distribute_tensor(whole.entities.detach()[order], mesh, [Shard(0)])
    entities.requires_grad_()
    heads, relations, tails = batch_of(job).unbind(1)
    targets = DTensor.from_local(rows.order.rows(tails), mesh, [Replicate()])

    def take() -> Any:
        entities.grad = None
        whole.relations.grad = None
        head = rows.fetch(entities.detach().to_local(), heads).requires_grad_()
        mapped = whole.map_head(head, relations)
        scores = DTensor.from_local(mapped, mesh, [Replicate()]) @ entities.T
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(scores, targets)
            loss.backward()
        gradient = entities.grad.to_local()  # type: ignore[union-attr]
        rows.add_rows(gradient, heads, head.grad)  # type: ignore[arg-type]
        return loss.detach().full_tensor(), gradient, whole.relations.grad, rows.ids

    return take


STEP_KINDS: dict[str, Callable[..., Callable[[], Any]]] = {
    "dualkg fused": lambda job, index, dtype: dualkg_step(job, index, fused=True, dtype=dtype),
    "dualkg reference": lambda job, index, dtype: dualkg_step(job, index, fused=False, dtype=dtype),
    "DTensor": lambda job, index, dtype: dtensor_step(job, index, dtype=dtype),
}


def largest_error(kind: str, index: int) -> float:
    """The largest difference of a gradient from that of one process, in float64."""
    import dualkg as kg
    from dualkg.losses.softmax import BoundOneVsAll
    from dualkg.tables import LocalTables
    from dualkg.training.steps import ReferenceStep

    whole = model_of(EXACT, LocalTables(EXACT.num_entities)).double()
    # Gradients alone need no optimizer.
    no_optimizer: Any = None
    reference = ReferenceStep(whole, BoundOneVsAll(), kg.NoRegularizer(), no_optimizer)
    expected = reference.gradients(batch_of(EXACT))
    objective, entities, relations, ids = STEP_KINDS[kind](EXACT, index, torch.float64)()
    differences = [
        (objective - expected).abs(),
        (entities - whole.entities.grad[ids]).abs().max(),
        (relations - whole.relations.grad).abs().max(),
    ]
    return max(float(difference) for difference in differences)


def milliseconds(take: Callable[[], Any], rounds: int) -> list[float]:
    take()
    times = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        take()
        times.append(1000 * (time.perf_counter() - started))
    return times


def member(index: int, meeting: str, output: str) -> None:
    """One of the processes; process 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=index, world_size=NUM_PROCESSES
    )
    results: dict[str, Any] = {"errors": {}, "steps": {}}
    for kind in STEP_KINDS:
        error = torch.tensor(largest_error(kind, index))
        dist.all_reduce(error, dist.ReduceOp.MAX)
        results["errors"][kind] = float(error)
    for job in JOBS:
        steps = {kind: make(job, index, torch.float32) for kind, make in STEP_KINDS.items()}
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for _ in range(3):
            for kind, take in steps.items():
                times[kind] += milliseconds(take, STEPS)
        medians = {kind: round(statistics.median(values), 2) for kind, values in times.items()}
        results["steps"][job.name] = medians
    if index == 0:
        Path(output).write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    measurement.log(f"{NUM_PROCESSES} processes, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        arguments = (str(Path(folder) / "meeting"), str(output))
        mp.spawn(member, arguments, nprocs=NUM_PROCESSES)  # type: ignore[no-untyped-call]
        results = json.loads(output.read_text())
    on = measurement.describe("cpu", commit=choices.commit)
    for name, medians in results["steps"].items():
        record = {"num_processes": NUM_PROCESSES, "errors": results["errors"], "measured": medians}
        measurement.save(TOPIC, name, record, on=on, folder=measurement.folder_of(choices))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())

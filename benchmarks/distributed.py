"""What several processes cost: `python benchmarks/distributed.py steps` takes steps of ComplEx with
DURA in one and in several processes, or of one shard of several by itself. `sampled` compares steps
of sampled softmax in two processes with those of one that has half the negatives; `--device cuda`
does so on one GPU, which the processes share by gloo. `weights` draws the initial weights of a
large table.

`python benchmarks/distributed.py gpu --out measured` takes everything that needs a GPU, in about
five minutes: steps and bytes of 1-vs-all and of sampled softmax in one and in two processes, and
the initial weights of 86 million entities. Each command adds its figures to
results/distributed.json; `merge measured` takes over those of another machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from measurement import RESULTS, describe, log, peak_mib

ROWS = 1_000_000
NUM_RELATIONS = 1_000


# -- steps in several processes ----------------------------------------------


FACTS = {
    "entities": 2_000_000,
    "triples": 100_000,
    "dim": 64,
    "batch": 100,
    "negatives": 0,
    "shards": 0,
    "steps": 5,
}


def measure_steps(choices: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and peak memory of a process, by the number of processes.

    0 processes are one without torchrun.
    """
    figures: dict[str, Any] = {}
    for key in (*FACTS, "sums", "device"):
        figures[key] = getattr(choices, key)
    for number in choices.processes:
        name = f"{number} processes" if number else "without torchrun"
        figures[name] = _figures_of(figures, number)
        log(f"{name}: {figures[name]}")
    return figures


def _figures_of(job: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """The figures of a job in some processes; 0 are one without torchrun."""
    options = [f"--{key}={job[key]}" for key in (*FACTS, "sums", "device")]
    launcher = [sys.executable]
    if num_processes:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_processes)]
    num_threads = job.get("threads") or max(1, (os.cpu_count() or 1) // max(1, num_processes))
    member = subprocess.run(
        [*launcher, __file__, "member", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
    )
    return dict(json.loads(member.stdout))


# The size of ogbl-wikikg2 on a GPU, and one that two CPU cores train.
SAMPLED = {
    "cpu": {"entities": 200_000, "triples": 100_000, "dim": 100, "batch": 1_000, "steps": 10}
    | {"negatives": 4_000},
    "cuda": {"entities": 2_500_000, "triples": 16_100_000, "dim": 500, "batch": 4_000}
    | {"negatives": 10_000, "steps": 100},
}


def measure_sampled(choices: argparse.Namespace) -> dict[str, Any]:
    """Steps of sampled softmax in two processes, and in one with half the negatives.

    One of two shards by itself has what a process computes, without the other's part of the time:
    two processes share the cores, or the GPU, of a machine. All have one thread on a CPU.
    """
    job: dict[str, Any] = {**FACTS, **SAMPLED[choices.device], "sums": "elements"}
    job |= {"device": choices.device, "threads": 1}
    negatives = job["negatives"]
    halves = {**job, "negatives": negatives // 2}
    figures = {**job}
    runs = {"one process, half the negatives": (halves, 0)}
    runs["one of two shards"] = ({**job, "shards": 2}, 0)
    runs["two processes"] = (job, 2)
    for name, (facts, num_processes) in runs.items():
        rounds = []
        for _ in range(choices.rounds):
            rounds.append(_figures_of(facts, num_processes))
            log(f"{name}: {rounds[-1]}")
        figures[name] = min(rounds, key=lambda found: float(found["seconds"]))
    seconds_of_one = figures["one process, half the negatives"]["seconds"]
    for name in ("one of two shards", "two processes"):
        figures[name]["ratio"] = figures[name]["seconds"] / seconds_of_one
    figures["bytes of the formula"] = all_reduced_bytes(job["batch"], 2 * job["dim"])
    return figures


# 1-vs-all in one and in two processes that share a GPU: the size of FB15k-237.
ONE_VS_ALL = {"entities": 14_541, "triples": 272_115, "dim": 500, "batch": 1_000, "steps": 200}
# Rows and columns of the initial weights of a GPU: Freebase with ComplEx of dim 128, 82 GiB.
WEIGHTS_OF_GPU = {"rows": 86_054_151, "width": 256}


def measure_gpu(choices: argparse.Namespace) -> None:
    """Everything that needs a GPU; each part is saved when it is measured."""
    choices.device = "cuda"
    steps = {**vars(choices), **FACTS, **ONE_VS_ALL, "sums": "elements"}
    steps |= {"processes": [0, 2]}
    figures = measure_steps(argparse.Namespace(**steps))
    figures["bytes of the formula"] = all_reduced_bytes(figures["batch"], 2 * figures["dim"])
    save("1-vs-all on a GPU", figures, choices)
    save("sampled softmax on a GPU", measure_sampled(choices), choices)
    # At last, because this process then keeps most of the GPU's memory.
    weights = argparse.Namespace(**vars(choices), **WEIGHTS_OF_GPU)
    save("initial weights, cuda", measure_weights(weights), choices)


def random_graph(num_entities: int, num_triples: int) -> Any:
    """A graph of random ids with skewed degrees."""
    from dualkg.data.graph import Graph
    from dualkg.data.vocabulary import Vocabulary

    random = np.random.default_rng(0)
    triples = np.empty((num_triples, 3), np.int32)
    for start in range(0, num_triples, ROWS):
        part = triples[start : start + ROWS]
        for column, size in enumerate((num_entities, NUM_RELATIONS, num_entities)):
            part[:, column] = size * random.random(len(part)) ** 2
    entities, relations = (
        Vocabulary(pa.array(range(1)).cast(pa.string()).take(pa.array(np.zeros(size, np.int64))))
        for size in (num_entities, NUM_RELATIONS)
    )
    return Graph("random", entities, relations, triples, triples[:10], triples[:10])


def take_steps(choices: argparse.Namespace) -> None:
    """Take steps of a trainer on random triples; process 0 prints the figures.

    A single process trains as without torchrun, or with `--shards` as one of several, alone in its
    group.
    """
    import torch.distributed as dist

    from dualkg.errors import RequestError
    from dualkg.training.distributed import processes

    recipe = recipe_of_steps(choices)
    figures: dict[str, Any] = {}
    with processes(choices.device) as group, tempfile.TemporaryDirectory() as folder:
        graph = random_graph(choices.entities, choices.triples)
        is_alone = group.count == 1 and choices.shards > 0
        if is_alone:
            backend = "cpu:gloo,cuda:nccl" if group.device.type == "cuda" else "gloo"
            meeting = f"file://{folder}/meeting"
            dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        try:
            trainer = trainer_of_steps(recipe, graph, group, num_shards=choices.shards)
        except RequestError as error:
            figures["refused"] = str(error)
        else:
            figures |= _timed(trainer, choices.steps)
        (most,) = group.largest(peak_mib(group.device.type))
        if is_alone:
            dist.destroy_process_group()
        if group.first:
            print(json.dumps(figures | {"peak_mib": round(most)}))


def recipe_of_steps(choices: argparse.Namespace) -> Any:
    """ComplEx with DURA and the loss that was chosen."""
    from dualkg.training.recipe import Recipe

    settings = {
        "model.name": "ComplEx",
        "model.dim": choices.dim,
        "regularizer.name": "DURA",
        "regularizer.weight": 0.05,
        "optimizer.sums": choices.sums,
        "training.batch_size": choices.batch,
        "validation.every": 0,
    }
    if choices.negatives:
        settings |= {"loss.name": "SampledSoftmax", "loss.num_negatives": choices.negatives}
    return Recipe().with_changes(settings)


def trainer_of_steps(recipe: Any, graph: Any, group: Any, *, num_shards: int) -> Any:
    """A trainer of the rows of this process, with small random weights.

    The weights of a recipe are the same for any number of processes, which takes minutes for tens
    of millions of entities. Here each process draws its own on its device.
    """
    import torch

    from dualkg.models.partial import PartialModel
    from dualkg.tables.base import DeviceTables, EntityTables, local_tables
    from dualkg.tables.shard import Shard
    from dualkg.training.distributed import FolderStore
    from dualkg.training.trainer import Trainer

    num_entities = graph.shape.num_entities
    count = group.count if group.count > 1 else num_shards
    if count:
        shard = Shard(num_entities, group.index, count)
        if group.count == 1:
            # Rows cannot be sent to processes that are not there.
            shard = Shard(num_entities, group.index, count, least_bytes=sys.maxsize)
        tables: EntityTables = DeviceTables(
            shard, device=group.device, initialize=False, capturable=group.capturable
        )
    else:
        tables = local_tables(num_entities, device=group.device, initialize=False)
    whole = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables)
    model = PartialModel(whole) if count else whole
    model = model.to(group.device)

    random = torch.Generator(group.device)
    for table in model.parameters():
        # Relations are then the same in all processes, whatever the number of rows before them.
        random.manual_seed(0)
        table.data.normal_(0, 1e-3, generator=random)
    names = [name for name, _ in model.named.named_parameters()]
    store = FolderStore(group, shard, names) if group.count > 1 else None
    regularizer = recipe.regularizer.build()
    return Trainer(model, graph, recipe, regularizer, group=group, store=store)


def _timed(trainer: Any, num_steps: int) -> dict[str, Any]:
    """Seconds of a step after some of warm-up, and of an epoch by the number of its steps."""
    import torch

    from dualkg.kernels.hardware import matmul_precision

    on_gpu = trainer.model.device.type == "cuda"
    steps_of_warm_up = 8 if on_gpu else 1

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    batches = trainer.batches(0)
    losses = []
    with matmul_precision(trainer.recipe.training.precision):
        with all_reduces() as sizes:
            trainer.step(next(batches), 0.1)
        for batch in islice(batches, steps_of_warm_up - 1):
            trainer.step(batch, 0.1)
        started = clock()
        for batch in islice(batches, num_steps):
            losses.append(trainer.step(batch, 0.1).clone())
        seconds = (clock() - started) / len(losses)
    figures = {
        "seconds": seconds,
        "epoch_seconds": seconds * trainer.num_steps,
        "steps_of_epoch": trainer.num_steps,
        "engine": str(trainer.engine),
        "loss": float(losses[-1]),
    }
    # A step that will be captured is taken on another stream first.
    if sizes:
        figures["all_reduced_bytes"] = sum(sizes)
    return figures


@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """The bytes of each all-reduce meanwhile, without rows that their owners send."""
    import torch.distributed as dist

    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counted(values: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append(values.nbytes)
        return all_reduce(values, *arguments, **options)

    with patch.object(dist, "all_reduce", counted):
        yield sizes


# -- initial weights -----------------------------------------------------------


def measure_weights(choices: argparse.Namespace) -> dict[str, Any]:
    """Rows a second of initial weights, drawn row by row on a device and in order on the host."""
    from functools import partial

    import torch

    from dualkg.kernels.noise import fill_normal_
    from dualkg.tables.base import local_tables

    device = torch.device(choices.device)
    num_threads = torch.get_num_threads()
    figures: dict[str, Any] = {"rows": choices.rows, "width": choices.width}
    figures |= {"device": choices.device, "threads": num_threads}
    generator = torch.Generator().manual_seed(0)

    def draw_in_order(block: Any) -> Any:
        return block.normal_(generator=generator)

    def seconds_of(draw: Any) -> float:
        started = time.perf_counter()
        draw()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    few = local_tables(2**16, device=device)
    fill = partial(fill_normal_, key=1)
    few.draw_rows(choices.width, fill)  # kernels are compiled
    many = local_tables(choices.rows, device=device)
    of_many = seconds_of(lambda: many.draw_rows(choices.width, fill))
    of_few = seconds_of(lambda: few.draw(choices.width, draw_in_order))
    figures["rows a second"] = choices.rows / of_many
    figures["rows a second in order"] = few.num_entities / of_few
    figures["seconds"] = of_many
    log(f"{figures}")
    return figures


def all_reduced_bytes(batch_size: int, width: int) -> int:
    """The bytes of a fast step with reciprocals that are all-reduced, in float32.

    They are the same for 1-vs-all and for sampled softmax with any number of negatives: the rows of
    heads and tails, the gradient of the mapped heads, and for each query the largest score and the
    sum of the softmax.
    """
    return 4 * (3 * batch_size * width + 2 * batch_size)


# -- results -------------------------------------------------------------------


def save(name: str, figures: dict[str, Any], choices: argparse.Namespace) -> None:
    """Add the figures of a command to the results, in the place of earlier ones."""
    on = describe(figures.get("device", "cpu"), commit=choices.commit)
    write({name: figures | {"machine": on}}, choices.out)


def write(figures: dict[str, Any], folder: Path) -> None:
    path = folder / "distributed.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results | figures, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("steps", "member"):
        steps = commands.add_parser(name, help="steps in several processes")
        for key, value in FACTS.items():
            steps.add_argument(f"--{key}", type=int, default=value)
        steps.add_argument("--sums", default="elements", help="of Adagrad: elements or rows")
        steps.add_argument("--device", default="cpu")
        steps.add_argument(
            "--processes", type=int, nargs="+", default=[1, 2], help="0: one, without torchrun"
        )
        steps.add_argument("--name", default="steps", help="of the figures in the results")
    sampled = commands.add_parser("sampled", help="sampled softmax in two processes and in one")
    sampled.add_argument("--device", default="cpu", choices=list(SAMPLED))
    sampled.add_argument("--rounds", type=int, default=2, help="the fastest of some runs counts")
    weights = commands.add_parser("weights", help="initial weights of a large table")
    weights.add_argument("--rows", type=int, default=500_000)
    weights.add_argument("--width", type=int, default=400)
    weights.add_argument("--device", default="cpu", choices=list(SAMPLED))
    gpu = commands.add_parser("gpu", help="everything that needs a GPU, in about five minutes")
    gpu.add_argument("--rounds", type=int, default=1, help="the fastest of some runs counts")
    merge = commands.add_parser("merge", help="take over results of another machine")
    merge.add_argument("folder", type=Path)
    for command in commands.choices.values():
        command.add_argument(
            "--out", type=Path, default=RESULTS, help="the folder of the JSON results"
        )
        command.add_argument("--commit", help="the measured commit, if git cannot find it")
    choices = parser.parse_args()
    if choices.command == "member":
        take_steps(choices)
    elif choices.command == "gpu":
        measure_gpu(choices)
    elif choices.command == "merge":
        write(json.loads((choices.folder / "distributed.json").read_text()), choices.out)
    elif choices.command == "sampled":
        name = "sampled softmax" if choices.device == "cpu" else "sampled softmax on a GPU"
        save(name, measure_sampled(choices), choices)
    elif choices.command == "weights":
        save(f"initial weights, {choices.device}", measure_weights(choices), choices)
    else:
        save(choices.name, measure_steps(choices), choices)


if __name__ == "__main__":
    main()

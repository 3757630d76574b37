"""What large graphs take: `python benchmarks/distributed.py data` reads one larger than memory, in
a fresh process, and `steps` takes steps of ComplEx with DURA in one and in several processes, or of
one shard of several by itself. `sampled` compares steps of sampled softmax in two processes with
those of one that has half the negatives; `--device cuda` does so on one GPU, which the processes
share by gloo. `weights` draws the initial weights of a large table. `costs` compares the cost model
with recorded trainings, and extrapolates it to several GPUs. `machines` runs the tests of two
machines, which need Linux and root, and notes what each took.

`python benchmarks/distributed.py gpu --out measured` takes everything that needs a GPU, in about
five minutes: steps and bytes of 1-vs-all and of sampled softmax in one and in two processes, and
the initial weights of 86 million entities. Each command adds its figures to
results/distributed.json; `merge measured` takes over those of another machine.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

import tables
from measurement import RESULTS, describe, log, peak_mib, resident_mib

ROWS = 1_000_000
NUM_RELATIONS = 1_000
BATCH_SIZE = 1_000
NUM_BATCHES = 1_000


# -- data larger than memory -------------------------------------------------


def write_triples(path: Path, *, num_triples: int, num_names: int, seed: int = 0) -> None:
    """Write triples with skewed degrees, a part at a time.

    Every name occurs, and the names are in no order.
    """
    random = np.random.default_rng(seed)
    # Multiplication by a step that is coprime to the number of names permutes them.
    step = num_names * 5 // 8 | 1
    while np.gcd(step, num_names) != 1:
        step += 1
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")

    def names(numbers: np.ndarray[Any, Any], prefix: str) -> pa.Array:
        return pa.compute.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")

    with path.open("wb") as sink:
        for start in range(0, num_triples, ROWS):
            rows = np.arange(start, min(start + ROWS, num_triples))
            tails = (num_names * random.random(len(rows)) ** 2).astype(np.int64)
            frequent_heads = (num_names * random.random(len(rows)) ** 3).astype(np.int64)
            heads = np.where(rows < num_names, rows, frequent_heads)
            relations = (NUM_RELATIONS * random.random(len(rows)) ** 2).astype(np.int64)
            table = {
                "head": names(heads * step % num_names, "/entity/"),
                "relation": names(relations, "/relation/"),
                "tail": names(tails * step % num_names, "/entity/"),
            }
            pa.csv.write_csv(pa.table(table), sink, options)


class Memory(threading.Thread):
    """Samples the memory of this process that is not a mapped file, and remembers the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.anonymous = max(self.anonymous, resident_mib("RssAnon") or 0.0)


def measured(work: Any) -> dict[str, Any]:
    """Seconds and peak memory of this process: all that was resident, and without mapped files."""
    memory = Memory()
    started = time.perf_counter()
    cpu_started = time.process_time()
    memory.start()
    result = work()
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    memory.ended.set()
    memory.join()
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_mib": round(peak_mib()),
        "peak_mib_without_maps": round(memory.anonymous),
        **result,
    }


def read_graph(path: str) -> dict[str, Any]:
    """Read, encode and split a file, and save the graph in the cache."""
    from dualkg.data.loading import load_graph

    graph = load_graph(path)
    return {
        "counts": graph.counts,
        "mapped": graph.is_mapped,
        "fingerprint": graph.fingerprint[:16],
    }


def open_for_training(path: str) -> dict[str, Any]:
    """Open the graph from the cache, and take batches of an epoch with reciprocals."""
    from dualkg.data.loading import load_graph
    from dualkg.training.batches import MappedExamples

    graph = load_graph(path)
    examples = MappedExamples(graph.train, graph.shape.num_relations, reciprocal=True)
    batches = islice(examples.batches(BATCH_SIZE, seed=0, epoch=0), NUM_BATCHES)
    total = sum(int(batch.sum()) for batch in batches)
    return {
        "examples": len(examples),
        "batches": NUM_BATCHES,
        "batch_size": BATCH_SIZE,
        "sum": total,
    }


PARTS = {"read": read_graph, "open": open_for_training}


def measure_data(choices: argparse.Namespace) -> dict[str, Any]:
    """Each part in a fresh process, which has its own peak memory."""
    with tempfile.TemporaryDirectory(prefix="dualkg-large-", dir=choices.folder) as folder:
        path = Path(folder) / "triples.tsv"
        write_triples(path, num_triples=choices.triples, num_names=choices.names, seed=choices.seed)
        figures: dict[str, Any] = {
            "triples": choices.triples,
            "names": choices.names,
            "file_mb": path.stat().st_size >> 20,
        }
        for part in PARTS:
            words = [sys.executable, __file__, "here", "--part", part, "--file", str(path)]
            environment = os.environ | {"DUALKG_CACHE": str(Path(folder) / "cache")}
            reader = subprocess.run(
                words, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            figures[part] = json.loads(reader.stdout.splitlines()[-1])
            log(f"{part}: {json.dumps(figures[part])}")
        return figures


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
    for key in (*FACTS, "sums", "device", "mapped"):
        figures[key] = getattr(choices, key)
    figures["checkpoint"] = choices.checkpoint
    for number in choices.processes:
        name = f"{number} processes" if number else "without torchrun"
        figures[name] = _figures_of(figures, number)
        log(f"{name}: {figures[name]}")
    return figures


def _figures_of(job: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """The figures of a job in some processes; 0 are one without torchrun."""
    options = [f"--{key}={job[key]}" for key in (*FACTS, "sums", "device")]
    if job["mapped"]:
        options.append("--mapped")
    if job.get("checkpoint"):
        options.append("--checkpoint")
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
    job: dict[str, Any] = {**FACTS, **SAMPLED[choices.device], "sums": "elements", "mapped": False}
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
    steps = {**vars(choices), **FACTS, **ONE_VS_ALL, "sums": "elements", "mapped": False}
    steps |= {"checkpoint": False, "processes": [0, 2]}
    figures = measure_steps(argparse.Namespace(**steps))
    figures["bytes of the formula"] = all_reduced_bytes(figures["batch"], 2 * figures["dim"])
    save("1-vs-all on a GPU", figures, choices)
    save("sampled softmax on a GPU", measure_sampled(choices), choices)
    # At last, because this process then keeps most of the GPU's memory.
    weights = argparse.Namespace(**vars(choices), **WEIGHTS_OF_GPU)
    save("initial weights, cuda", measure_weights(weights), choices)


def random_graph(num_entities: int, num_triples: int, mapped: Path | None) -> Any:
    """A graph of random ids with skewed degrees.

    Its triples are a memory-mapped file, if a path is given.
    """
    from dualkg.data.graph import Graph
    from dualkg.data.vocabulary import Vocabulary

    random = np.random.default_rng(0)
    shape = (num_triples, 3)
    if mapped:
        triples: Any = np.memmap(mapped, np.int32, "w+", shape=shape)
    else:
        triples = np.empty(shape, np.int32)
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
        mapped = Path(folder) / "triples" if choices.mapped else None
        graph = random_graph(choices.entities, choices.triples, mapped)
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
            if choices.checkpoint:
                figures["checkpoint"] = _checkpoint(trainer, Path(folder) / "checkpoint")
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
    from dualkg.tables import EntityTables, LocalTables, Shard, ShardedTables
    from dualkg.training.distributed import FolderStore
    from dualkg.training.trainer import Trainer

    num_entities = graph.shape.num_entities
    count = group.count if group.count > 1 else num_shards
    if count:
        shard = Shard(num_entities, group.index, count)
        if group.count == 1:
            # Rows cannot be sent to processes that are not there.
            shard = Shard(num_entities, group.index, count, least_bytes=sys.maxsize)
        tables: EntityTables = ShardedTables(
            shard, device=group.device, initialize=False, capturable=group.capturable
        )
    else:
        tables = LocalTables(num_entities, device=group.device, initialize=False)
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


def _checkpoint(trainer: Any, path: Path) -> dict[str, Any]:
    """Seconds for which training waits for a checkpoint, written before or while it goes on.

    Both are taken twice, in turn, and the second ones are reported: the first make folders and
    processes.
    """
    # All processes write to the folder of the first.
    path = Path(trainer.group.gather(str(path))[0])
    batches = trainer.batches(1)

    def seconds_of(work: Callable[[], Any]) -> float:
        trainer.group.largest(0)
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    figures: dict[str, Any] = {}
    for _ in range(2):
        figures["waited_for"] = seconds_of(lambda: trainer.save(path))
        held_up = seconds_of(lambda: trainer.save(path, wait=False))
        steps = []
        while trainer.group.any(not trainer.store.is_written):
            steps.append(seconds_of(lambda: trainer.step(next(batches), 0.1)))
        held_up += seconds_of(trainer._finish_save)
        figures["in_the_background"] = held_up
        figures["steps_meanwhile"] = len(steps)
        figures["seconds_of_a_step_meanwhile"] = sum(steps) / max(1, len(steps))
    shards = path.glob("*/*.safetensors")
    figures["bytes_of_a_process"] = max(file.stat().st_size for file in shards)
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
    from dualkg.tables import LocalTables

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

    few = LocalTables(2**16, device=device)
    fill = partial(fill_normal_, key=1)
    few.draw_rows(choices.width, fill)  # kernels are compiled
    many = LocalTables(choices.rows, device=device)
    of_many = seconds_of(lambda: many.draw_rows(choices.width, fill))
    of_few = seconds_of(lambda: few.draw(choices.width, draw_in_order))
    figures["rows a second"] = choices.rows / of_many
    figures["rows a second in order"] = few.num_entities / of_few
    figures["seconds"] = of_many
    log(f"{figures}")
    return figures


# -- the cost model ----------------------------------------------------------

BATCH_SIZE_OF_LARGE = 4_000
NEGATIVES_OF_LARGE = 10_000


class MeasuredStep(NamedTuple):
    """Steps on one GPU in `distributed.json`: parts of the tables, and words for the docs."""

    num_parts: int
    text: str


MEASURED_STEPS = {
    "whole": MeasuredStep(1, "ogbl-wikikg2's size, dim 500, full softmax"),
    "shard": MeasuredStep(8, "ogbl-wikikg2's size, dim 500, full softmax, one of 8 shards"),
    "sampled": MeasuredStep(1, "ogbl-wikikg2's size, dim 500, 10,000 negatives"),
    "freebase": MeasuredStep(1, "Freebase's size, dim 128, 10,000 negatives"),
}
SAMPLED_STEPS = ("sampled", "freebase")
H100_BANDWIDTH = 3.35 / 4.8  # of its memory, relative to that of an H200, by their data sheets
H100_MEMORY = 80e9
NUM_COLLECTIVES = 5  # of a step: rows of heads and tails, a maximum, a sum, a gradient


class Cluster(NamedTuple):
    """GPUs, the assumed bytes a second of an all-reduce, and the seconds before it begins.

    An all-reduce of S bytes over all GPUs of several machines sends 2·S from each machine, whose
    links carry it together.
    """

    num_gpus: int
    link: float
    latency: float


CLUSTERS = {
    "8 H100": Cluster(8, 450e9, 20e-6),
    "64 H100, a link for each GPU": Cluster(64, 8 * 50e9, 50e-6),
    "64 H100, a link for each machine": Cluster(64, 50e9, 50e-6),
}


class LargeGraph(NamedTuple):
    """The sizes of a training with ComplEx: rows of `2 · dim` numbers."""

    num_entities: int
    num_triples: int
    dim: int


LARGE_GRAPHS = {
    "ogbl-wikikg2": LargeGraph(2_500_604, 16_109_182, 500),
    "Wikidata5M": LargeGraph(4_594_485, 20_614_279, 500),
    "Freebase": LargeGraph(86_054_151, 304_727_650, 400),
}


def all_reduced_bytes(batch_size: int, width: int) -> int:
    """The bytes of a fast step with reciprocals that are all-reduced, in float32.

    They are the same for 1-vs-all and for sampled softmax with any number of negatives: the rows of
    heads and tails, the gradient of the mapped heads, and for each query the largest score and the
    sum of the softmax.
    """
    return 4 * (3 * batch_size * width + 2 * batch_size)


class Rates(NamedTuple):
    """What a device does in a second: operations of products, and bytes read or written."""

    operations: float
    bytes: float


def step_seconds(
    rates: Rates, *, batch_size: int, candidates: int, rows: int, width: int, score_bytes: int
) -> float:
    """Seconds of three products, and of passes over scores, tables and their gradients."""
    from dualkg.models.base import SCORE_PASSES, UPDATE_PASSES

    operations = 6 * batch_size * candidates * width
    of_scores = SCORE_PASSES * batch_size * candidates * score_bytes
    of_tables = UPDATE_PASSES * 4 * rows * width
    return operations / rates.operations + (of_scores + of_tables) / rates.bytes


def divided_seconds(rates: Any, job: dict[str, Any], *, num_processes: int) -> float:
    """Seconds of what is divided over processes, by the formula."""
    batch_size = job["batch"]
    candidates = rows = job["entities"]
    if job["negatives"]:
        candidates = job["negatives"]
        rows = 2 * batch_size + candidates
    return step_seconds(
        rates,
        batch_size=batch_size,
        candidates=math.ceil(candidates / num_processes),
        rows=math.ceil(rows / num_processes),
        width=2 * job["dim"],
        score_bytes=2,
    )


def fit_rest(rates: Any, results: dict[str, Any]) -> dict[str, float]:
    """Seconds of what every process does with the whole batch: s + p · B · W.

    They are what two measured steps of sampled softmax take beyond the formula.
    """
    rests = {}
    for name in SAMPLED_STEPS:
        job = results[name]
        rest = job["1 processes"]["seconds"] - divided_seconds(rates, job, num_processes=1)
        rests[2 * job["dim"] * job["batch"]] = rest
    (few, rest_of_few), (many, rest_of_many) = sorted(rests.items())
    of_number = (rest_of_many - rest_of_few) / (many - few)
    return {"seconds": rest_of_few - few * of_number, "seconds of a number": of_number}


def rest_seconds(rest: dict[str, float], job: dict[str, Any]) -> float:
    return rest["seconds"] + rest["seconds of a number"] * 2 * job["dim"] * job["batch"]


def estimate_cluster(
    cluster: Cluster, graph: LargeGraph, *, negatives: int, rates: Any, rest: dict[str, float]
) -> dict[str, float]:
    """The parts of a step, an epoch and the memory of each GPU."""
    job = {"batch": BATCH_SIZE_OF_LARGE, "negatives": negatives, "dim": graph.dim}
    job["entities"] = graph.num_entities
    batch_size = job["batch"]
    width = 2 * graph.dim
    number = cluster.num_gpus
    of_kernels = divided_seconds(rates, job, num_processes=number) + rest_seconds(rest, job)
    # A ring all-reduce sends nearly twice the bytes.
    sent = 2 * (number - 1) / number * all_reduced_bytes(batch_size, width)
    of_link = sent / cluster.link + NUM_COLLECTIVES * cluster.latency
    num_rows = math.ceil(graph.num_entities / number)
    # Weights and Adagrad's sums of rows; with all entities those of elements, a bfloat16 copy of
    # weights, and bfloat16 scores.
    bytes_of_gpu = 4 * num_rows * (width + 1)
    if not negatives:
        bytes_of_gpu = num_rows * (10 * width + 2 * batch_size)
    seconds = of_kernels + of_link
    return {
        "kernels_ms": 1e3 * of_kernels,
        "sent_mb": sent / 1e6,
        "link_ms": 1e3 * of_link,
        "epoch_seconds": math.ceil(2 * graph.num_triples / batch_size) * seconds,
        "bytes_of_gpu": bytes_of_gpu,
        "fits": bytes_of_gpu < H100_MEMORY,
    }


def compare_costs(choices: argparse.Namespace) -> dict[str, Any]:
    """The time of steps by arithmetic: of trainings on one H200 beside what was measured, and of
    large graphs on several H100.

    The rates are those of `measurement.py`, the trainings those of `training.py`, and the steps
    those of `steps`.
    """
    ceilings = json.loads((RESULTS / "ceilings.json").read_text())
    trainings = json.loads((RESULTS / "training.json").read_text())
    results = json.loads((RESULTS / "distributed.json").read_text())
    of_gpu = ceilings[choices.gpu]["all"]
    rates = Rates(of_gpu["bf16_operations_per_second"], of_gpu["copied_bytes_per_second"])

    compared = {}
    for name, entry in trainings[choices.gpu].items():
        facts = entry["measured"].get("dualkg bf16")
        if not facts or facts["relation_width"] > facts["width"]:
            continue
        estimated = step_seconds(
            rates,
            batch_size=entry["job"]["batch"],
            candidates=facts["num_entities"],
            rows=facts["num_entities"],
            width=facts["width"],
            score_bytes=2,
        )
        measured = facts["seconds_per_epoch"] / facts["steps_per_epoch"]
        compared[name] = {"estimated_ms": 1000 * estimated, "measured_ms": 1000 * measured}

    rest = fit_rest(rates, results)
    steps = {}
    for name, measured_step in MEASURED_STEPS.items():
        job = results[name]
        estimated = divided_seconds(rates, job, num_processes=measured_step.num_parts)
        steps[name] = {
            "estimated_ms": 1e3 * (estimated + rest_seconds(rest, job)),
            "measured_ms": 1e3 * job["1 processes"]["seconds"],
        }

    of_h100 = rates._replace(bytes=H100_BANDWIDTH * rates.bytes)
    of_number = rest["seconds of a number"] / H100_BANDWIDTH
    rest_of_h100 = {**rest, "seconds of a number": of_number}
    estimates: dict[str, Any] = {}
    for graph_name, graph in LARGE_GRAPHS.items():
        for negatives in (0, NEGATIVES_OF_LARGE):
            loss = f"{negatives:,} negatives" if negatives else "full softmax"
            training = f"{graph_name}, dim {graph.dim}, {loss}"
            estimates[training] = {}
            for cluster_name, cluster in CLUSTERS.items():
                estimates[training][cluster_name] = estimate_cluster(
                    cluster, graph, negatives=negatives, rates=of_h100, rest=rest_of_h100
                )
    return {
        "gpu": choices.gpu,
        "operations": rates.operations,
        "bytes": rates.bytes,
        "trainings": compared,
        "rest": rest,
        "steps": steps,
        "estimates": estimates,
    }


def cost_tables(costs: dict[str, Any]) -> list[list[str]]:
    """The estimates, and measured steps beside the formula, as in docs/distributed.md."""
    titles = ["training", "GPUs", "ms of kernels", "MB sent", "ms of links", "an epoch"]
    rows = []
    for training, by_cluster in costs["estimates"].items():
        for cluster, found in by_cluster.items():
            cells = [training, cluster, f"{found['kernels_ms']:.2f}", f"{found['sent_mb']:.0f}"]
            epoch = readable(found["epoch_seconds"]) if found["fits"] else "does not fit"
            memory = f"{found['bytes_of_gpu'] / 1e9:.1f} GB"
            rows.append([*cells, f"{found['link_ms']:.2f}", epoch, memory])
    estimates = tables.table([*titles, "memory of a GPU"], rows, words=2)
    rows = []
    for name, words in MEASURED_STEPS.items():
        found = costs["steps"][name]
        rows.append([words.text, f"{found['estimated_ms']:.2f}", f"{found['measured_ms']:.2f}"])
    return [estimates, tables.table(["steps", "estimated ms", "measured"], rows)]


def readable(seconds: float) -> str:
    """Such as 7 s, 2 min 15 s or 2 h 29 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, rest_of_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_of_minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# -- two machines --------------------------------------------------------------

TESTS_OF_MACHINES = Path(__file__).parents[1] / "tests" / "training" / "test_two_machines.py"


def measure_machines() -> dict[str, Any]:
    """The outcome of each test of two machines, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "tests.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider"]
        words += [f"--junit-xml={listing}", str(TESTS_OF_MACHINES)]
        subprocess.run(words, cwd=TESTS_OF_MACHINES.parents[2], check=False, stdout=sys.stderr)
        return outcomes(listing)


def outcomes(listing: Path) -> dict[str, Any]:
    """Passed, skipped or failed, and seconds, of each test in a JUnit file."""
    figures: dict[str, Any] = {}
    for case in ElementTree.parse(listing).getroot().iter("testcase"):
        marks = {child.tag for child in case}
        is_wrong = bool(marks & {"failure", "error"})
        outcome = "failed" if is_wrong else "skipped" if "skipped" in marks else "passed"
        seconds = round(float(case.attrib["time"]), 1)
        figures[case.attrib["name"]] = {"outcome": outcome, "seconds": seconds}
    return figures


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
    data = commands.add_parser("data", help="read, split and open a graph larger than memory")
    data.add_argument("--triples", type=int, default=50_000_000)
    data.add_argument("--names", type=int, default=20_000_000)
    data.add_argument("--seed", type=int, default=0)
    data.add_argument(
        "--folder",
        type=Path,
        help="where the file and the cache are made; by default a temporary one",
    )
    for name in ("steps", "member"):
        steps = commands.add_parser(name, help="steps in several processes")
        for key, value in FACTS.items():
            steps.add_argument(f"--{key}", type=int, default=value)
        steps.add_argument("--sums", default="elements", help="of Adagrad: elements or rows")
        steps.add_argument(
            "--mapped", action="store_true", help="train on a memory-mapped file of triples"
        )
        steps.add_argument("--checkpoint", action="store_true", help="also time checkpoints")
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
    costs = commands.add_parser(
        "costs", help="the cost model beside recorded trainings, and its extrapolation"
    )
    costs.add_argument("--gpu", default="NVIDIA H200")
    gpu = commands.add_parser("gpu", help="everything that needs a GPU, in about five minutes")
    gpu.add_argument("--rounds", type=int, default=1, help="the fastest of some runs counts")
    commands.add_parser("machines", help="the tests of two machines, as network namespaces")
    merge = commands.add_parser("merge", help="take over results of another machine")
    merge.add_argument("folder", type=Path)
    for command in commands.choices.values():
        command.add_argument(
            "--out", type=Path, default=RESULTS, help="the folder of the JSON results"
        )
        command.add_argument("--commit", help="the measured commit, if git cannot find it")
    here = commands.add_parser("here")
    here.add_argument("--part", choices=list(PARTS), required=True)
    here.add_argument("--file", required=True)
    choices = parser.parse_args()
    if choices.command == "here":
        print(json.dumps(measured(lambda: PARTS[choices.part](choices.file))))
    elif choices.command == "member":
        take_steps(choices)
    elif choices.command == "costs":
        save("costs", compare_costs(choices), choices)
    elif choices.command == "gpu":
        measure_gpu(choices)
    elif choices.command == "machines":
        save("two machines", measure_machines(), choices)
    elif choices.command == "merge":
        write(json.loads((choices.folder / "distributed.json").read_text()), choices.out)
    elif choices.command == "sampled":
        name = "sampled softmax" if choices.device == "cpu" else "sampled softmax on a GPU"
        save(name, measure_sampled(choices), choices)
    elif choices.command == "weights":
        save(f"initial weights, {choices.device}", measure_weights(choices), choices)
    elif choices.command == "steps":
        save(choices.name, measure_steps(choices), choices)
    else:
        save("data", measure_data(choices), choices)


if __name__ == "__main__":
    main()

"""What large graphs take: `python benchmarks/distributed.py data` reads one larger than memory, in
a fresh process, and `steps` takes steps of ComplEx with DURA in one and in several processes, or of
one shard of several by itself. `costs` compares the cost model with recorded trainings, and
extrapolates it to several GPUs.

Each command adds its figures to results/distributed.json.
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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

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
        found: dict[str, Any] = {
            "triples": choices.triples,
            "names": choices.names,
            "file_mb": path.stat().st_size >> 20,
        }
        for part in PARTS:
            words = [sys.executable, __file__, "here", "--part", part, "--file", str(path)]
            environment = os.environ | {"DUALKG_CACHE": str(Path(folder) / "cache")}
            answer = subprocess.run(
                words, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            found[part] = json.loads(answer.stdout.splitlines()[-1])
            log(f"{part}: {json.dumps(found[part])}")
        return found


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
    found: dict[str, Any] = {
        key: getattr(choices, key) for key in (*FACTS, "sums", "device", "mapped")
    }
    facts = [f"--{key}={value}" for key, value in found.items() if key != "mapped"] + [
        "--mapped"
    ] * choices.mapped
    for number in choices.processes:
        launcher = [sys.executable]
        if number:
            launcher += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(number),
            ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, number)))
        }
        command = [*launcher, __file__, "member", *facts]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        name = f"{number} processes" if number else "without torchrun"
        found[name] = json.loads(done.stdout)
        log(f"{name}: {found[name]}")
    return found


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
    import torch
    import torch.distributed as dist
    from dualkg.models.sharded import Shard, ShardedModel

    from dualkg.errors import RequestError
    from dualkg.kernels.hardware import matmul_precision
    from dualkg.models.base import only_rows, skip_initialization
    from dualkg.training.distributed import DistributedTrainer, processes
    from dualkg.training.memory import estimate_step
    from dualkg.training.recipe import Recipe
    from dualkg.training.trainer import Trainer

    loss: dict[str, Any] = {"loss.name": "SampledSoftmax", "loss.num_negatives": choices.negatives}
    settings = {
        "model.dim": choices.dim,
        "training.batch_size": choices.batch,
        "optimizer.sums": choices.sums,
    }
    settings |= {
        "model.name": "ComplEx",
        "regularizer.name": "DURA",
        "regularizer.weight": 0.05,
        "validation.every": 0,
    }
    recipe = Recipe().with_changes(settings | (loss if choices.negatives else {}))
    figures: dict[str, Any] = {}
    with processes(choices.device) as group, tempfile.TemporaryDirectory() as folder:
        graph = random_graph(
            choices.entities, choices.triples, Path(folder) / "triples" if choices.mapped else None
        )
        try:
            with skip_initialization():  # which takes minutes for tens of millions of entities
                if group.world_size > 1:
                    trainer: Trainer = DistributedTrainer.build(recipe, graph, group)
                elif choices.shards:
                    nccl = group.device.type == "cuda"
                    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
                    meeting = f"file://{folder}/meeting"
                    dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
                    shard = Shard(choices.entities, 0, choices.shards)
                    with only_rows(shard, device=group.device):
                        model = ShardedModel(recipe.model.build(graph.shape, seed=0), shard).to(
                            group.device
                        )
                    trainer = DistributedTrainer(
                        model, graph, recipe, recipe.regularizer.build(), group
                    )
                else:
                    trainer = Trainer.of_recipe(recipe, graph, device=group.device)
        except RequestError as error:
            figures["refused"] = str(error)
        else:
            random = torch.Generator(group.device).manual_seed(0)
            for table in trainer.model.parameters():
                table.data.normal_(0, 1e-3, generator=random)
            del trainer.step
            trainer.step = trainer._step()
            if isinstance(trainer, DistributedTrainer):
                sharded = trainer.model
            else:
                sharded = ShardedModel(trainer.model, Shard(choices.entities))
            figures["estimated_seconds"] = estimate_step(recipe, sharded, trainer.engine)
            figures |= _timed(trainer, choices.steps, matmul_precision(recipe.training.precision))
        (most,) = group.largest(peak_mib(group.device.type))
        if choices.shards and group.world_size == 1:
            dist.destroy_process_group()
        if group.first:
            print(json.dumps(figures | {"peak_mib": round(most)}))


def _timed(trainer: Any, num_steps: int, precision: Any) -> dict[str, Any]:
    """Seconds of a step after some of warm-up, and of an epoch by the number of its steps."""
    import torch

    on_gpu = trainer.model.device.type == "cuda"
    warm_up = 8 if on_gpu else 1
    losses = []
    with precision:
        for number, batch in enumerate(islice(trainer.batches(0), warm_up + num_steps)):
            if number == warm_up:
                if on_gpu:
                    torch.cuda.synchronize()
                started = time.perf_counter()
            losses.append(trainer.step(batch, 0.1).clone())
        if on_gpu:
            torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / (len(losses) - warm_up)
    facts = {
        "seconds": seconds,
        "epoch_seconds": seconds * trainer.num_steps,
        "steps_of_epoch": trainer.num_steps,
    }
    return facts | {"engine": str(trainer.engine), "loss": float(losses[-1])}


# -- the cost model ----------------------------------------------------------

# Bytes a second that each of a number of GPUs sends: assumed NVLink, and a network of 400 Gbit/s.
LINKS = {1: math.inf, 8: 450e9, 64: 50e9}
LARGE = {"batch_size": 4_000, "num_entities": 2_500_000, "width": 1_000, "num_triples": 16_100_000}


def compare_costs(choices: argparse.Namespace) -> dict[str, Any]:
    """The time of steps by arithmetic: of trainings on one H200 beside what was measured, and of a
    large graph.

    The rates are those of `measurement.py`, the trainings those of `training.py`.
    """
    from dualkg.training.memory import Rates, step_seconds

    ceilings, trainings = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("ceilings", "training")
    )
    measured = ceilings[choices.gpu]["all"]
    rates = Rates(measured["bf16_operations_per_second"], measured["copied_bytes_per_second"])
    found: dict[str, Any] = {
        "gpu": choices.gpu,
        **rates._asdict(),
        "trainings": {},
        "large graph": {**LARGE},
    }
    del found["calls"]
    for name, entry in trainings[choices.gpu].items():
        facts = entry["measured"].get("dualkg bf16")
        if facts and facts["relation_width"] <= facts["width"]:
            sizes = {
                "candidates": facts["num_entities"],
                "rows": facts["num_entities"],
                "width": facts["width"],
            }
            seconds = step_seconds(rates, batch_size=entry["job"]["batch"], score_bytes=2, **sizes)
            real = facts["seconds_per_epoch"] / facts["steps_per_epoch"]
            found["trainings"][name] = {"estimated_ms": 1000 * seconds, "measured_ms": 1000 * real}
    batch_size = LARGE["batch_size"]
    width = LARGE["width"]
    steps = math.ceil(2 * LARGE["num_triples"] / batch_size)
    for number, link in LINKS.items():
        rows = LARGE["num_entities"] / number
        seconds = step_seconds(
            rates,
            batch_size=batch_size,
            candidates=int(rows),
            rows=int(rows),
            width=width,
            score_bytes=2,
        )
        sent = 2 * (number - 1) / number * 4 * (3 * batch_size * width + 2 * batch_size)
        seconds += sent / link
        found["large graph"][f"{number} GPUs"] = {
            "step_ms": 1000 * seconds,
            "epoch_seconds": steps * seconds,
        }
    return found


def save(name: str, figures: dict[str, Any], folder: Path) -> None:
    """Add the figures of a command to the results, in the place of earlier ones."""
    path = folder / "distributed.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = figures | {"machine": describe(figures.get("device", "cpu"))}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


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
    data.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON results")
    for name in ("steps", "member"):
        steps = commands.add_parser(name, help="steps in several processes")
        for key, value in FACTS.items():
            steps.add_argument(f"--{key}", type=int, default=value)
        steps.add_argument("--sums", default="elements", help="of Adagrad: elements or rows")
        steps.add_argument(
            "--mapped", action="store_true", help="train on a memory-mapped file of triples"
        )
        steps.add_argument("--device", default="cpu")
        steps.add_argument(
            "--processes", type=int, nargs="+", default=[1, 2], help="0: one, without torchrun"
        )
        steps.add_argument("--name", default="steps", help="of the figures in the results")
        steps.add_argument(
            "--out", type=Path, default=RESULTS, help="the folder of the JSON results"
        )
    costs = commands.add_parser(
        "costs", help="the cost model beside recorded trainings, and its extrapolation"
    )
    costs.add_argument("--gpu", default="NVIDIA H200")
    costs.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON results")
    here = commands.add_parser("here")
    here.add_argument("--part", choices=list(PARTS), required=True)
    here.add_argument("--file", required=True)
    choices = parser.parse_args()
    if choices.command == "here":
        print(json.dumps(measured(lambda: PARTS[choices.part](choices.file))))
    elif choices.command == "member":
        take_steps(choices)
    elif choices.command == "costs":
        save("costs", compare_costs(choices), choices.out)
    elif choices.command == "steps":
        save(choices.name, measure_steps(choices), choices.out)
    else:
        save("data", measure_data(choices), choices.out)


if __name__ == "__main__":
    main()

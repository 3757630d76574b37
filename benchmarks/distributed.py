"""What large graphs take: `python benchmarks/distributed.py data` reads one larger than memory, in a fresh process, and
`steps` takes steps of ComplEx with DURA in one and in several processes.

Each command adds its figures to results/distributed.json.
"""

import argparse
import json
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
BATCH_SIZE, NUM_BATCHES = 1_000, 1_000


# -- data larger than memory --------------------------------------------------------------------------------------


def write_triples(path: Path, *, num_triples: int, num_names: int, seed: int = 0) -> None:
    """Write triples with skewed degrees, a part at a time; every name occurs, the names in no order."""
    random = np.random.default_rng(seed)
    step = next(step for step in range(num_names * 5 // 8 | 1, 2 * num_names + 2) if np.gcd(step, num_names) == 1)
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")

    def names(numbers: np.ndarray[Any, Any], prefix: str) -> pa.Array:
        return pa.compute.binary_join_element_wise(prefix, pa.array(numbers).cast(pa.string()), "")

    with path.open("wb") as sink:
        for start in range(0, num_triples, ROWS):
            rows = np.arange(start, min(start + ROWS, num_triples))
            tails = (num_names * random.random(len(rows)) ** 2).astype(np.int64)
            heads = np.where(rows < num_names, rows, (num_names * random.random(len(rows)) ** 3).astype(np.int64))
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
    memory, clock, processor = Memory(), time.perf_counter(), time.process_time()
    memory.start()
    found = work()
    seconds = {
        "seconds": round(time.perf_counter() - clock, 1),
        "cpu_seconds": round(time.process_time() - processor, 1),
    }
    memory.ended.set()
    memory.join()
    return {**seconds, "peak_mib": round(peak_mib()), "peak_mib_without_maps": round(memory.anonymous), **found}


def read_graph(path: str) -> dict[str, Any]:
    """Read, encode and split a file, and save the graph in the cache."""
    from dualkg.data.loading import load_graph

    graph = load_graph(path)
    return {"counts": graph.counts, "mapped": graph.is_mapped, "fingerprint": graph.fingerprint[:16]}


def open_for_training(path: str) -> dict[str, Any]:
    """Open the graph from the cache, and take batches of an epoch with reciprocals."""
    from dualkg.data.loading import load_graph
    from dualkg.training.batches import MappedExamples

    graph = load_graph(path)
    examples = MappedExamples(graph.train, graph.shape.num_relations, reciprocal=True)
    total = sum(int(batch.sum()) for batch in islice(examples.batches(BATCH_SIZE, seed=0, epoch=0), NUM_BATCHES))
    return {"examples": len(examples), "batches": NUM_BATCHES, "batch_size": BATCH_SIZE, "sum": total}


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
            answer = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            found[part] = json.loads(answer.stdout.splitlines()[-1])
            log(f"{part}: {json.dumps(found[part])}")
        return found


# -- steps in several processes -----------------------------------------------------------------------------------


def measure_steps(choices: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and peak memory of a process, by the number of processes."""
    found: dict[str, Any] = {key: getattr(choices, key) for key in ("entities", "dim", "batch", "steps", "device")}
    for number in choices.processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        facts = [f"--{key}={found[key]}" for key in ("entities", "dim", "batch", "steps", "device")]
        environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // number))}
        command = [*launcher, __file__, "member", *facts]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found[f"{number} processes"] = json.loads(done.stdout)
        log(f"{number} processes: {found[f'{number} processes']}")
    return found


def take_steps(choices: argparse.Namespace) -> None:
    """Take steps on random triples; process 0 prints the figures. A single process trains as without torchrun."""
    from contextlib import nullcontext
    from functools import partial

    import torch

    import dualkg as kg
    from dualkg.data.graph import GraphShape
    from dualkg.models.base import only_rows
    from dualkg.models.sharded import Shard, ShardedModel
    from dualkg.training.distributed import processes
    from dualkg.training.fused import FusedStep
    from dualkg.training.optimizers import Adagrad
    from dualkg.training.sharded_step import ShardedTables

    shape, loss, regularizer = GraphShape(choices.entities, 100), kg.OneVsAll(), kg.DURA(0.05)
    with processes(choices.device) as group:
        shard = Shard(choices.entities, group.rank, group.world_size)
        with only_rows(shard) if group.world_size > 1 else nullcontext():
            model: Any = kg.ComplEx(shape, dim=choices.dim)
        tables: dict[str, Any] = {}
        if group.world_size > 1:
            model, tables = ShardedModel(model, shard), {"tables": partial(ShardedTables, shard=shard)}
        model.to(group.device)
        bound = loss.bind(model, None, batch_size=choices.batch, seed=0)  # type: ignore[arg-type]
        step = FusedStep(model, bound, regularizer, Adagrad(model.parameters(), 0.1), **tables)
        random, sizes = torch.Generator().manual_seed(0), torch.tensor([shape.num_entities, 100, shape.num_entities])
        seconds = []
        for _ in range(choices.steps + 1):
            batch = (torch.rand(choices.batch, 3, generator=random) * sizes).long().to(group.device)
            started = time.perf_counter()
            objective = float(step(batch, 0.1))
            seconds.append(time.perf_counter() - started)
        (most,) = group.largest(peak_mib(group.device.type))
        if group.first:
            print(json.dumps({"seconds": float(np.median(seconds[1:])), "peak_mib": round(most), "loss": objective}))


def save(name: str, figures: dict[str, Any], folder: Path) -> None:
    """Add the figures of a command to the results, in the place of earlier ones."""
    path = folder / "distributed.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = figures | {"machine": describe(figures.get("device", "cpu"))}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="read, split and open a graph larger than memory")
    data.add_argument("--triples", type=int, default=50_000_000)
    data.add_argument("--names", type=int, default=20_000_000)
    data.add_argument("--seed", type=int, default=0)
    data.add_argument("--folder", type=Path, help="where the file and the cache are made; by default a temporary one")
    data.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON results")
    for name in ("steps", "member"):
        steps = commands.add_parser(name, help="steps in several processes")
        for key, value in {"entities": 2_000_000, "dim": 64, "batch": 100, "steps": 3}.items():
            steps.add_argument(f"--{key}", type=int, default=value)
        steps.add_argument("--device", default="cpu")
        steps.add_argument("--processes", type=int, nargs="+", default=[1, 2])
        steps.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON results")
    here = commands.add_parser("here")
    here.add_argument("--part", choices=list(PARTS), required=True)
    here.add_argument("--file", required=True)
    choices = parser.parse_args()
    if choices.command == "here":
        print(json.dumps(measured(lambda: PARTS[choices.part](choices.file))))
    elif choices.command == "member":
        take_steps(choices)
    elif choices.command == "steps":
        save("steps", measure_steps(choices), choices.out)
    else:
        save("data", measure_data(choices), choices.out)


if __name__ == "__main__":
    main()

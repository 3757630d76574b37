"""How long ten million triples take to read, and how much memory: `python benchmarks/loading.py`.

`generate` writes the file, `measure` times a file that is there, `all` (the default) does both.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

import measurement

RESULTS = Path(__file__).parent / "results" / "loading.json"
NUM_RELATIONS = 1000
ROWS = 1_000_000


def generate(path: Path, *, num_triples: int, num_entities: int, seed: int = 0) -> None:
    """Write triples whose entities and relations have skewed degrees, as in real graphs."""
    rng = np.random.default_rng(seed)
    # Names are shuffled, so that the frequent ones are not also the first in the alphabet.
    entities = pa.array([f"/entity/{number:07d}" for number in rng.permutation(num_entities)])
    relations = pa.array([f"/relation/{number:04d}" for number in rng.permutation(NUM_RELATIONS)])

    def skewed(names: pa.Array, num: int, power: float) -> pa.Array:
        return names.take(pa.array((len(names) * rng.random(num) ** power).astype(np.int64)))

    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as sink:
        for start in range(0, num_triples, ROWS):
            num = min(ROWS, num_triples - start)
            table = pa.table(
                {
                    "head": skewed(entities, num, 3),
                    "relation": skewed(relations, num, 2),
                    "tail": skewed(entities, num, 2),
                }
            )
            pa.csv.write_csv(table, sink, options)


def read_once(path: Path) -> dict[str, int]:
    """Read the file alone, without what a graph adds."""
    from dualkg.data.encoding import read_triples
    from dualkg.data.readers import one_source

    read = read_triples({"train": one_source(path)})
    return {"triples": len(read.triples["train"]), "entities": len(read.entities)}


def load_once(path: Path) -> dict[str, int]:
    """Load the file as a graph, from the cache if it is there."""
    graph = importlib.import_module("dualkg").load_graph(str(path))
    triples = sum(len(graph.split(split)) for split in ("train", "valid", "test"))
    return {"triples": triples, "entities": len(graph.entities)}


PARTS: dict[str, Callable[[Path], dict[str, int]]] = {
    "read_triples": read_once,
    "load_graph": load_once,
}


def measure_here(part: str, path: Path) -> dict[str, Any]:
    """Seconds and peak memory of this process, imports left out of the seconds."""
    importlib.import_module("dualkg.data.encoding" if part == "read_triples" else "dualkg")
    before = time.perf_counter()
    counts = PARTS[part](path)
    seconds = time.perf_counter() - before
    # Linux counts in KiB, macOS in bytes.
    units_per_mib = 1 << 20 if sys.platform == "darwin" else 1 << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mib
    return {"seconds": round(seconds, 2), "peak_rss_mib": round(peak), **counts}


def measure(part: str, path: Path, cache: Path) -> dict[str, Any]:
    """Measure in a fresh process, which has its own peak memory."""
    environment = os.environ | {"DUALKG_CACHE": str(cache)}
    command = [sys.executable, __file__, "here", "--part", part, "--file", str(path)]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def measure_all(path: Path, parts: list[str]) -> dict[str, Any]:
    """Each part; a graph is loaded twice, the second time from the cache the first one filled."""
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dualkg-cache-") as folder:
        for part in parts:
            names = ["cold", "cached"] if part == "load_graph" else ["cold"]
            measured[part] = {name: measure(part, path, Path(folder)) for name in names}
            print(f"{part}: {json.dumps(measured[part])}", file=sys.stderr)
    return measured


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cores": measurement.num_cores(),
        "cpu": measurement.cpu_model(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "step", nargs="?", default="all", choices=["all", "generate", "measure", "here"]
    )
    parser.add_argument("--triples", type=int, default=10_000_000)
    parser.add_argument("--entities", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--file", type=Path, help="the TSV file; by default one in a temporary folder"
    )
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="what to measure; repeatable"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    choices = parser.parse_args()
    if choices.file is None and choices.step != "all":
        parser.error(f"{choices.step} needs --file")
    return choices


def run(choices: argparse.Namespace, path: Path) -> None:
    if choices.step in ("all", "generate"):
        generate(
            path, num_triples=choices.triples, num_entities=choices.entities, seed=choices.seed
        )
        print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB", file=sys.stderr)
    if choices.step in ("all", "measure"):
        measured = measure_all(path, choices.part or list(PARTS))
        result = {
            "file_mb": round(path.stat().st_size / 1e6),
            "measured": measured,
            "machine": machine(),
        }
        choices.output.parent.mkdir(parents=True, exist_ok=True)
        choices.output.write_text(json.dumps(result, indent=2) + "\n")
    if choices.step == "here":
        print(json.dumps(measure_here(choices.part[0], path)))


def main() -> None:
    choices = parsed()
    if choices.file is not None:
        run(choices, choices.file)
        return
    with tempfile.TemporaryDirectory(prefix="dualkg-reading-") as folder:
        run(choices, Path(folder) / "triples.tsv")


if __name__ == "__main__":
    main()

"""The exact index beside plain FAISS: query time, build time, memory and exactness.

`FlatFaiss` is what the exact index would be with FAISS alone: `IndexFlat` for float32 and
`IndexScalarQuantizer` for the other storage formats. FAISS has no sparse tables. Every index is
built and searched in fresh processes with one thread. Memory is that of the process beyond what it
held before, with the table of the builder in a memory-mapped file.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import measurement
from search import make_table

DEPTH = 10  # results per query
BATCHES = (1, 10, 200)  # queries that are searched for together
STORAGE_FORMATS = ("float32", "float16", "bf16", "int8")
LIBRARIES = ("dualkg", "faiss")
BLOCK_ROWS = 20_000  # of the reference search
EPOCHS = 3
ROUNDS = 7  # of a measurement, of which the fastest counts


@dataclass(frozen=True)
class Job:
    """A table: of a model trained on `graph`, or synthetic without one."""

    name: str
    entities: int
    width: int
    graph: str | None = None


JOBS = [
    Job("WN18RR, ComplEx 100 (40,943 × 200)", 40_943, 200, "WN18RR"),
    Job("synthetic (1,000,000 × 200)", 1_000_000, 200),
]
QUICK_JOBS = [Job("synthetic (5,000 × 200)", 5_000, 200)]


# -- tables ------------------------------------------------------------------


def trained_table(graph_name: str, width: int) -> tuple[Any, Any]:
    """The entity table of a short training, and the query vectors of validation triples."""
    import torch

    import dualkg as kg
    from dualkg.inference.index import query_vectors, tables_of

    graph = kg.load_graph(graph_name)
    untrained = kg.ComplEx(graph.shape, dim=width // 2)
    model = kg.train(untrained, graph, epochs=EPOCHS, batch_size=1000, seed=0).model
    triples = torch.from_numpy(graph.valid[: max(BATCHES)].astype(np.int64))
    with torch.no_grad():
        queries = query_vectors(model, triples[:, 0], triples[:, 1], "tail")
    return tables_of(model)["tail"].numpy(), queries.numpy()


def make(folder: str, graph: str | None, entities: int, width: int) -> dict[str, Any]:
    """Write a table, queries, and the best rows of each query by products in float64."""
    if graph is None:
        table, queries = make_table(entities, width, num_queries=max(BATCHES))
    else:
        table, queries = trained_table(graph, width)
    np.save(Path(folder, "table.npy"), np.ascontiguousarray(table))
    np.save(Path(folder, "queries.npy"), np.ascontiguousarray(queries))

    scores = np.empty((len(queries), len(table)))
    for start in range(0, len(table), BLOCK_ROWS):
        block = table[start : start + BLOCK_ROWS].astype(np.float64)
        scores[:, start : start + BLOCK_ROWS] = queries.astype(np.float64) @ block.T
    best = [np.argsort(-row, kind="stable")[:DEPTH] for row in scores]
    np.save(Path(folder, "best.npy"), np.stack(best))
    return {"shape": list(table.shape)}


# -- indexes -----------------------------------------------------------------


class FlatFaiss:
    """An exact index of FAISS alone, for inner products."""

    codes: ClassVar[dict[str, str]] = {
        "float32": "Flat",
        "float16": "SQfp16",
        "bf16": "SQbf16",
        "int8": "SQ8",
    }

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def build(cls, table: npt.NDArray[np.float32], storage: str) -> "FlatFaiss":
        import faiss

        index = faiss.index_factory(table.shape[1], cls.codes[storage], faiss.METRIC_INNER_PRODUCT)
        index.train(table)
        index.add(table)
        return cls(index)

    def save(self, path: Path) -> None:
        import faiss

        faiss.write_index(self.index, str(path))

    @classmethod
    def load(cls, path: Path, *, in_memory: bool = True) -> "FlatFaiss":
        import faiss

        flags = 0 if in_memory else faiss.IO_FLAG_MMAP_IFC
        return cls(faiss.read_index(str(path), flags))

    def search(self, queries: Any, k: int) -> npt.NDArray[np.int64]:
        ids: npt.NDArray[np.int64] = self.index.search(queries, k)[1]
        return ids


class OwnIndex:
    """The exact index of dualkg with the methods of `FlatFaiss`."""

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def build(cls, table: npt.NDArray[np.float32], storage: Any) -> "OwnIndex":
        import torch

        from dualkg.inference.index import ExactIndex

        return cls(ExactIndex.build(torch.from_numpy(table), storage=storage))

    def save(self, path: Path) -> None:
        path.mkdir()
        self.index.save(path)
        about = {"shape": self.index.shape, "storage": self.index.storage}
        (path / "about.json").write_text(json.dumps(about))

    @classmethod
    def load(cls, path: Path, *, in_memory: bool = True) -> "OwnIndex":
        from dualkg.inference.index import ExactIndex

        about = json.loads((path / "about.json").read_text())
        index = ExactIndex.load(
            path,
            "inner product",
            tuple(about["shape"]),
            storage=about["storage"],
            in_memory=in_memory,
        )
        return cls(index)

    def search(self, queries: Any, k: int) -> npt.NDArray[np.int64]:
        import torch

        ids: npt.NDArray[np.int64] = self.index.search(torch.from_numpy(queries), k).ids.numpy()
        return ids


INDEXES: dict[str, Any] = {"dualkg": OwnIndex, "faiss": FlatFaiss}


def one_thread() -> None:
    """Import both libraries, so that memory is compared without them, and use one thread."""
    import faiss
    import torch

    import dualkg.inference.index

    assert dualkg.inference.index
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)


def build(folder: str, library: str, storage: str) -> dict[str, Any]:
    """Build and save an index."""
    one_thread()
    table = np.load(Path(folder, "table.npy"), mmap_mode="c")
    before = measurement.resident_mib() or 0.0
    started = time.perf_counter()
    index = INDEXES[library].build(table, storage)
    seconds = time.perf_counter() - started
    peak = measurement.peak_mib() - before

    path = Path(folder, f"{library}-{storage}")
    index.save(path)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return {
        "build_seconds": seconds,
        "build_peak_mib": peak,
        "file_mib": sum(file.stat().st_size for file in files) / 2**20,
    }


def search(folder: str, library: str, storage: str, in_memory: bool) -> dict[str, Any]:
    """Load an index and search it for batches of queries."""
    one_thread()
    queries = np.load(Path(folder, "queries.npy"))
    best = np.load(Path(folder, "best.npy"))
    before = measurement.resident_mib() or 0.0
    # Pages of a memory-mapped file are not counted: the system takes them back when it needs them.
    own_before = measurement.resident_mib("RssAnon") or 0.0
    index = INDEXES[library].load(Path(folder, f"{library}-{storage}"), in_memory=in_memory)
    own_loaded = measurement.resident_mib("RssAnon") or 0.0

    milliseconds = {}
    for size in BATCHES:
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            index.search(queries[:size], DEPTH)
            times.append(time.perf_counter() - started)
        milliseconds[str(size)] = 1000 * min(times)

    ids = index.search(queries, DEPTH)
    shared = (ids[:, :, None] == best[:, None, :]).any(1)
    return {
        "milliseconds": milliseconds,
        "memory_mib": own_loaded - own_before,
        "peak_mib": measurement.peak_mib() - before,
        "recall": float(shared.mean()),
        "same_ranks": float((ids == best).all(1).mean()),
    }


def ties(library: str) -> dict[str, Any]:
    """Whether rows of equal score are in the order of their ids, as without an index."""
    one_thread()
    random = np.random.default_rng(0)
    rows = random.standard_normal((50, 32), dtype=np.float32)
    table = np.ascontiguousarray(rows[random.integers(50, size=20_000)])
    queries = random.standard_normal((20, 32), dtype=np.float32)
    # Rows that are equal have equal products only if these are computed in the same order.
    scores = queries.astype(np.float64) @ table.T.astype(np.float64)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]
    ids = INDEXES[library].build(table, "float32").search(queries, DEPTH)
    return {"ties_in_order": float((ids == best).all(1).mean())}


# -- all of them -------------------------------------------------------------


def measure(job: Job, device: str) -> Iterator[dict[str, Any]]:
    """Measure all storage formats of both libraries on one table."""
    del device
    run = partial(measurement.in_fresh_process, Path(__file__))
    with tempfile.TemporaryDirectory() as folder:
        made = run(
            {
                "what": "make",
                "folder": folder,
                "graph": job.graph,
                "entities": job.entities,
                "width": job.width,
            }
        )
        measured: dict[str, Any] = {}
        for storage in STORAGE_FORMATS:
            for library in LIBRARIES:
                index = {"folder": folder, "library": library, "storage": storage}
                record = run({"what": "build", **index})
                record |= run({"what": "search", **index, "in_memory": True})
                if storage == "float32":
                    record["memory_mapped"] = run({"what": "search", **index, "in_memory": False})
                    record |= run({"what": "ties", "library": library})
                measured.setdefault(storage, {})[library] = record
                measurement.log(f"{job.name}, {storage}, {library}: {json.dumps(record)}")
            # Every format is saved when it is measured: large tables take long.
            yield {"job": {"name": job.name, "graph": job.graph, **made}, "measured": measured}


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    jobs = QUICK_JOBS if choices.quick else JOBS
    measurement.run(
        "exact_search",
        choices,
        jobs={"cpu": jobs, "cuda": jobs},
        tasks={"make": make, "build": build, "search": search, "ties": ties},
        measure=measure,
    )


if __name__ == "__main__":
    main()

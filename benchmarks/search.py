"""Queries per second against recall of the exact index and of the FAISS indexes, on a synthetic
table.

Queries are searched one at a time by one thread. The table resembles trained ones: entities of a
type are close together, types differ in size and spread, the first axes have most of the variance,
and norms are skewed. A query points to a type, not to an entity. `--entities` and `--width` set the
size of the table.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import measurement

Floats = npt.NDArray[np.float32]
ROWS = 100_000  # made at once
DEPTH = 10  # results per query
BATCHES = (1, 10, 200)  # queries that are searched for together in a storage format
STORAGE = "storage formats"  # the name of the comparison among the results
NUM_QUERIES = 300  # to find the effort with, and as many to measure with
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the effort that was found
WANTED = 0.95
FASTER = 20.0  # recall, and speed relative to the exact index


@dataclass(frozen=True)
class Job:
    """The size of a table, a metric and a type of index."""

    entities: int
    width: int
    metric: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.entities:,} × {self.width}, {self.metric}, {self.kind}"


def jobs(entities: int, width: int) -> list[Job]:
    pairs = [
        ("inner product", "ivf"),
        ("inner product", "hnsw"),
        ("inner product", "sq8"),
        ("euclidean", "ivf"),
    ]
    return [Job(entities, width, metric, kind) for metric, kind in [*pairs, ("euclidean", "hnsw")]]


# -- the synthetic table -----------------------------------------------------


@dataclass(frozen=True)
class Types:
    """The distribution of entities: centres, shares and spreads of the types, and a common
    offset.
    """

    axes: Floats
    common: Floats
    centres: Floats
    shares: npt.NDArray[np.float64]
    spreads: Floats


def draw_types(num: int, width: int, random: np.random.Generator) -> Types:
    """Variance falls as 1 / j^0.9 along the axes; the largest types have many times more entities
    than others.
    """
    axes = np.arange(1, width + 1, dtype=np.float32) ** -0.45
    axes /= np.linalg.norm(axes)
    shares = np.arange(1, num + 1) ** -0.8
    return Types(
        axes=axes,
        common=0.6 * axes * random.standard_normal(width, dtype=np.float32),
        centres=axes * random.standard_normal((num, width), dtype=np.float32),
        shares=shares / shares.sum(),
        spreads=random.lognormal(np.log(0.55), 0.25, num).astype(np.float32),
    )


def make_table(
    entities: int, width: int, *, num_queries: int, seed: int = 0
) -> tuple[Floats, Floats]:
    """The table, and queries that score the entities of one type high; norms are log-normal, σ
    0.3.
    """
    random = np.random.default_rng(seed)
    types = draw_types(max(4, entities // 500), width, random)
    table = np.empty((entities, width), dtype=np.float32)
    for start in range(0, entities, ROWS):
        num = min(ROWS, entities - start)
        of = random.choice(len(types.shares), num, p=types.shares)
        noise = types.axes * random.standard_normal((num, width), dtype=np.float32)
        rows = types.common + types.centres[of] + types.spreads[of, None] * noise
        lengths = random.lognormal(0.0, 0.3, (num, 1)).astype(np.float32)
        table[start : start + num] = lengths * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    chosen = random.choice(len(types.shares), num_queries, p=types.shares)
    noise = types.axes * random.standard_normal((num_queries, width), dtype=np.float32)
    return table, types.centres[chosen] + noise


# -- one measurement, in a process of its own --------------------------------


def measure(job: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Build an index, find its effort on half of the queries, and measure its curve on the other
    half.
    """
    import torch

    from dualkg.inference.index import ExactIndex
    from dualkg.inference.index_build import queries_per_second, recalls, tuned

    spec: Any = Job(**job)
    num, seconds = (50, 0.2) if quick else (NUM_QUERIES, 3.0)
    table, queries = map(
        torch.from_numpy, make_table(spec.entities, spec.width, num_queries=2 * num)
    )
    exact = ExactIndex.build(table, spec.metric)
    best = exact.search(queries, 100).ids
    started = time.perf_counter()
    index = tuned(
        table, spec.metric, kind=spec.kind, queries=queries[:num], best=best[:num], recall=WANTED
    )
    built = time.perf_counter() - started
    effort = index.effort
    points = []
    for factor in FACTORS:
        index.effort = max(1, min(round(effort * factor), index.max_effort))
        point = {
            "effort": index.effort,
            "tuned": factor == 1,
            "recall": recalls(index, queries[num:], best[num:]),
        }
        # The exact index is measured at every point, so that other work on the machine affects
        # both.
        for name, one in (("queries_per_second", index), ("exact_queries_per_second", exact)):
            point[name] = queries_per_second(one, queries[num:], k=DEPTH, seconds=seconds)
        points.append(point)
    facts = {
        "build_seconds": built,
        "reduced": index.max_norm is not None,
        "peak_mib": measurement.peak_mib(),
    }
    return {**facts, "points": points}


def measure_storage(entities: int, width: int, *, quick: bool) -> dict[str, Any]:
    """Milliseconds of a search in each storage format and in the scalar quantizer of FAISS, on one
    thread.
    """
    import faiss
    import torch

    from dualkg.inference.index import ExactIndex
    from dualkg.inference.index_build import threads

    table, queries = map(torch.from_numpy, make_table(entities, width, num_queries=max(BATCHES)))
    quantizer = faiss.ScalarQuantizer
    found = {}
    for storage, code in (
        ("float16", quantizer.QT_fp16),
        ("bf16", quantizer.QT_bf16),
        ("int8", quantizer.QT_8bit),
    ):
        theirs = faiss.IndexScalarQuantizer(width, code, faiss.METRIC_INNER_PRODUCT)
        theirs.train(table.numpy())
        theirs.add(table.numpy())
        ours: Any = ExactIndex.build(table, storage=storage)  # type: ignore[arg-type]
        with threads(1):
            found[storage] = {
                str(num): {
                    "dualkg": best_milliseconds(ours.search, queries[:num], quick=quick),
                    "faiss": best_milliseconds(theirs.search, queries[:num].numpy(), quick=quick),
                }
                for num in BATCHES
            }
    return found


def best_milliseconds(search: Callable[..., Any], queries: Any, *, quick: bool) -> float:
    times = []
    for _ in range(1 if quick else 5):
        started = time.perf_counter()
        search(queries, DEPTH)
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


# -- all of them -------------------------------------------------------------


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """The tuned point, and whether it reaches the target recall and speed."""
    point = next(point for point in found["points"] if point["tuned"])
    times = point["queries_per_second"] / point["exact_queries_per_second"]
    recall = point["recall"][str(DEPTH)]
    return {"recall": recall, "times": times, "reached": recall >= WANTED and times >= FASTER}


def show(job: Job, found: dict[str, Any]) -> None:
    measurement.log(job.name)
    for point in found["points"]:
        recall = "  ".join(f"recall@{k} {value:.3f}" for k, value in point["recall"].items())
        times = point["queries_per_second"] / point["exact_queries_per_second"]
        mark = "  ← tuned" if point["tuned"] else ""
        rate = f"{point['queries_per_second']:,.0f} queries per second, {times:.1f} × exact"
        measurement.log(f"  effort {point['effort']:>5}  {recall}  {rate}{mark}")


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of RESULTS.md: the tuned point of each index."""
    import tables

    rows = []
    storage = jobs.get(STORAGE, {"measured": {"milliseconds": {}}})["measured"]["milliseconds"]
    for name, record in tables.in_order(
        {name: record for name, record in jobs.items() if name != STORAGE}
    ):
        found = record["measured"]
        if "points" not in found:
            rows.append([name, found["failed"], *["–"] * 5])
            continue
        point = next(point for point in found["points"] if point["tuned"])
        rates = [f"{point[key]:,.0f}" for key in ("queries_per_second", "exact_queries_per_second")]
        recall = [f"{point['recall'][k]:.3f}" for k in ("10", "100")]
        times = tables.times(found["verdict"]["times"])
        rows.append([name, *recall, *rates, times, tables.short(found["build_seconds"])])
    cells = [
        [
            name,
            *(f"{batches[str(num)][code]:,.0f}" for num in BATCHES for code in ("dualkg", "faiss")),
        ]
        for name, batches in storage.items()
    ]
    columns = [
        "exact search",
        *(f"{num} queries, {code}" for num in BATCHES for code in ("dualkg", "FAISS")),
    ]
    titles = [
        "index",
        "recall@10",
        "recall@100",
        "queries per second",
        "exact",
        "of exact",
        "build time, s",
    ]
    return [
        *tables.table(titles, rows, words=1),
        "One query at a time, one thread; effort for a recall of 0.95.",
        "",
        *(
            [*tables.table(columns, cells, words=1), "Milliseconds, one thread.", ""]
            if cells
            else []
        ),
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """Queries per second against recall@10: a line for each index, dashed for the exact index."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    import figures

    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        measured = {
            name: record["measured"]
            for name, record in results.items()
            if "points" in record["measured"]
        }
        for name, found in measured.items():
            points = found["points"]
            line = (
                [point["recall"][str(DEPTH)] for point in points],
                [point["queries_per_second"] for point in points],
            )
            axes.plot(*line, marker="o", markersize=4, label=name)
        exact = [
            point["exact_queries_per_second"]
            for found in measured.values()
            for point in found["points"]
        ]
        for times, text, dashes in ((1, "exact", "--"), (FASTER, f"{FASTER:g} × exact", ":")):
            axes.axhline(
                times * statistics.median(exact), color=figures.OTHER, linestyle=dashes, label=text
            )
        axes.axvline(WANTED, color=figures.OTHER, linewidth=0.8)
        axes.set(
            yscale="log",
            xlabel=f"recall@{DEPTH}",
            ylabel="queries per second, one at a time, one thread",
        )
        axes.legend(frameon=False)
        figures.write(figure, path)


def main() -> None:
    options = measurement.parser(__doc__)
    options.add_argument("--entities", type=int, default=1_000_000, help="rows of the table")
    options.add_argument("--width", type=int, default=200, help="numbers per row")
    options.add_argument(
        "--storage", action="store_true", help="compare the storage formats with those of FAISS"
    )
    options.add_argument(
        "--picture", type=Path, help="draw the saved results of this machine as SVG and PNG"
    )
    choices = options.parse_args()
    if choices.task:
        print(json.dumps(measure(**choices.task)))
        return
    every = {
        job.name: job for job in jobs(5000 if choices.quick else choices.entities, choices.width)
    }
    chosen = measurement.wanted(list(every), choices.only)
    if choices.list:
        print(*chosen, sep="\n")
        return
    on = {
        **measurement.describe("cpu", commit=choices.commit),
        "faiss": measurement.version("faiss-cpu"),
    }
    folder = measurement.folder_of(choices)
    if choices.picture:
        draw(measurement.load("search", folder)[on["device"]], choices.picture)
        return
    if choices.storage:
        entities = 5000 if choices.quick else min(choices.entities, 50_000)
        found = measure_storage(entities, choices.width, quick=choices.quick)
        measurement.log(json.dumps(found, indent=1))
        job = {"entities": entities, "width": choices.width}
        measurement.save(
            "search",
            STORAGE,
            {"job": job, "measured": {"milliseconds": found}},
            on=on,
            folder=folder,
        )
        return
    for name in chosen:
        found = measurement.in_fresh_process(
            Path(__file__), {"job": asdict(every[name]), "quick": choices.quick}
        )
        if "points" in found:
            found["verdict"] = verdict(found)
            show(every[name], found)
        measurement.log(f"{name}: {json.dumps(found.get('verdict', found))}")
        measurement.save(
            "search", name, {"job": asdict(every[name]), "measured": found}, on=on, folder=folder
        )


if __name__ == "__main__":
    main()

"""Queries per second against recall of the exact and the FAISS indexes, on a synthetic table.

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
ROWS = 100_000  # rows of the table that are drawn at once
DEPTH = 10  # results per query
BATCHES = (1, 10, 200)  # queries that are searched for together in a storage format
STORAGE = "storage formats"  # the name of the comparison among the results
NUM_QUERIES = 300  # queries to find the effort with, and as many to measure with
FACTORS = (0.25, 0.5, 1, 2, 4)  # multiples of the effort that was found
WANTED = 0.95  # the target recall
FASTER = 20.0  # the target speed, relative to the exact index


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
    return [
        Job(entities, width, "inner product", "ivf"),
        Job(entities, width, "inner product", "hnsw"),
        Job(entities, width, "inner product", "sq8"),
        Job(entities, width, "euclidean", "ivf"),
        Job(entities, width, "euclidean", "hnsw"),
    ]


# -- the synthetic table -----------------------------------------------------


@dataclass(frozen=True)
class Types:
    """The distribution of entities: centres, shares and spreads of types, and a common offset."""

    axes: Floats
    common: Floats
    centres: Floats
    shares: npt.NDArray[np.float64]
    spreads: Floats


def draw_types(num: int, width: int, random: np.random.Generator) -> Types:
    """Draw types: variance falls as 1 / j^0.9 along the axes, and types differ in size."""
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
    """The table, and queries that score the entities of one type high.

    Norms are log-normal with σ = 0.3.
    """
    random = np.random.default_rng(seed)
    types = draw_types(max(4, entities // 500), width, random)
    table = np.empty((entities, width), dtype=np.float32)
    for start in range(0, entities, ROWS):
        num = min(ROWS, entities - start)
        type_ids = random.choice(len(types.shares), num, p=types.shares)
        noise = types.axes * random.standard_normal((num, width), dtype=np.float32)
        rows = types.common + types.centres[type_ids] + types.spreads[type_ids, None] * noise
        lengths = random.lognormal(0.0, 0.3, (num, 1)).astype(np.float32)
        table[start : start + num] = lengths * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    chosen = random.choice(len(types.shares), num_queries, p=types.shares)
    noise = types.axes * random.standard_normal((num_queries, width), dtype=np.float32)
    return table, types.centres[chosen] + noise


# -- one measurement, in a process of its own --------------------------------


def measure(job: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Build an index, find its effort on half of the queries, and measure it on the other half."""
    import torch

    from dualkg.inference.index import ExactIndex
    from dualkg.inference.index_build import queries_per_second, recalls, tuned

    spec: Any = Job(**job)
    num = 50 if quick else NUM_QUERIES
    seconds = 0.2 if quick else 3.0
    arrays = make_table(spec.entities, spec.width, num_queries=2 * num)
    table, queries = map(torch.from_numpy, arrays)
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
        recall = recalls(index, queries[num:], best[num:])
        # The exact index is measured at every point, so that other work on the machine affects
        # both.
        rate = queries_per_second(index, queries[num:], k=DEPTH, seconds=seconds)
        exact_rate = queries_per_second(exact, queries[num:], k=DEPTH, seconds=seconds)
        points.append(
            {
                "effort": index.effort,
                "tuned": factor == 1,
                "recall": recall,
                "queries_per_second": rate,
                "exact_queries_per_second": exact_rate,
            }
        )
    return {
        "build_seconds": built,
        "reduced": index.max_norm is not None,
        "peak_mib": measurement.peak_mib(),
        "points": points,
    }


def measure_storage(entities: int, width: int, *, quick: bool) -> dict[str, Any]:
    """Milliseconds of a search in each storage format, and in the quantizer of FAISS.

    Both use one thread.
    """
    import faiss
    import torch

    from dualkg.inference.index import ExactIndex
    from dualkg.inference.index_build import threads

    table, queries = map(torch.from_numpy, make_table(entities, width, num_queries=max(BATCHES)))
    quantizers = {
        "float16": faiss.ScalarQuantizer.QT_fp16,
        "bf16": faiss.ScalarQuantizer.QT_bf16,
        "int8": faiss.ScalarQuantizer.QT_8bit,
    }
    milliseconds: dict[str, dict[str, Any]] = {}
    for storage, quantizer in quantizers.items():
        theirs = faiss.IndexScalarQuantizer(width, quantizer, faiss.METRIC_INNER_PRODUCT)
        theirs.train(table.numpy())
        theirs.add(table.numpy())
        ours: Any = ExactIndex.build(table, storage=storage)  # type: ignore[arg-type]
        milliseconds[storage] = {}
        for num in BATCHES:
            batch = queries[:num]
            with threads(1):
                milliseconds[storage][str(num)] = {
                    "dualkg": best_milliseconds(ours.search, batch, quick=quick),
                    "faiss": best_milliseconds(theirs.search, batch.numpy(), quick=quick),
                }
    return milliseconds


def best_milliseconds(search: Callable[..., Any], queries: Any, *, quick: bool) -> float:
    times = []
    for _ in range(1 if quick else 5):
        started = time.perf_counter()
        search(queries, DEPTH)
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


# -- all of them -------------------------------------------------------------


def tuned_point(result: dict[str, Any]) -> dict[str, Any]:
    return dict(next(point for point in result["points"] if point["tuned"]))


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """The tuned point, and whether it reaches the target recall and speed."""
    point = tuned_point(result)
    times = point["queries_per_second"] / point["exact_queries_per_second"]
    recall = point["recall"][str(DEPTH)]
    return {"recall": recall, "times": times, "reached": recall >= WANTED and times >= FASTER}


def show(job: Job, result: dict[str, Any]) -> None:
    measurement.log(job.name)
    for point in result["points"]:
        recall = "  ".join(f"recall@{k} {value:.3f}" for k, value in point["recall"].items())
        times = point["queries_per_second"] / point["exact_queries_per_second"]
        mark = "  ← tuned" if point["tuned"] else ""
        rate = f"{point['queries_per_second']:,.0f} queries per second, {times:.1f} × exact"
        measurement.log(f"  effort {point['effort']:>5}  {recall}  {rate}{mark}")


def lines(jobs: dict[str, Any]) -> list[str]:
    """The section of RESULTS.md: the tuned point of each index."""
    import tables

    index_jobs = {name: record for name, record in jobs.items() if name != STORAGE}
    rows = []
    for name, record in tables.in_order(index_jobs):
        result = record["measured"]
        if "points" not in result:
            rows.append([name, result["failed"], "–", "–", "–", "–", "–"])
            continue
        point = tuned_point(result)
        rows.append(
            [
                name,
                f"{point['recall']['10']:.3f}",
                f"{point['recall']['100']:.3f}",
                f"{point['queries_per_second']:,.0f}",
                f"{point['exact_queries_per_second']:,.0f}",
                tables.times(result["verdict"]["times"]),
                tables.short(result["build_seconds"]),
            ]
        )
    titles = [
        "index",
        "recall@10",
        "recall@100",
        "queries per second",
        "exact",
        "of exact",
        "build time, s",
    ]
    section = [
        *tables.table(titles, rows),
        "One query at a time, one thread; effort for a recall of 0.95.",
        "",
    ]
    if STORAGE in jobs:
        section += storage_lines(jobs[STORAGE]["measured"]["milliseconds"])
    return section


def storage_lines(milliseconds: dict[str, dict[str, Any]]) -> list[str]:
    """The table of storage formats."""
    import tables

    titles = ["exact search"]
    for num in BATCHES:
        titles += [f"{num} queries, dualkg", f"{num} queries, FAISS"]
    rows = []
    for storage, batches in milliseconds.items():
        cells = [storage]
        for num in BATCHES:
            batch = batches[str(num)]
            cells += [f"{batch['dualkg']:,.0f}", f"{batch['faiss']:,.0f}"]
        rows.append(cells)
    return [*tables.table(titles, rows), "Milliseconds, one thread.", ""]


def draw(results: dict[str, Any], path: Path) -> None:
    """Queries per second against recall@10: a line for each index, dashed for the exact index."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    import figures

    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        exact_rates = []
        for name, record in results.items():
            points = record["measured"].get("points")
            if not points:
                continue
            recall = [point["recall"][str(DEPTH)] for point in points]
            rates = [point["queries_per_second"] for point in points]
            axes.plot(recall, rates, marker="o", markersize=4, label=name)
            exact_rates += [point["exact_queries_per_second"] for point in points]
        exact = statistics.median(exact_rates)
        axes.axhline(exact, color=figures.OTHER, linestyle="--", label="exact")
        axes.axhline(
            FASTER * exact, color=figures.OTHER, linestyle=":", label=f"{FASTER:g} × exact"
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
    entities = 5000 if choices.quick else choices.entities
    jobs_by_name = {job.name: job for job in jobs(entities, choices.width)}
    chosen = measurement.wanted(list(jobs_by_name), choices.only)
    if choices.list:
        print(*chosen, sep="\n")
        return
    on = measurement.describe("cpu", commit=choices.commit)
    on["faiss"] = measurement.version("faiss-cpu")
    folder = measurement.folder_of(choices)
    if choices.picture:
        draw(measurement.load("search", folder)[on["device"]], choices.picture)
        return
    if choices.storage:
        entities = min(entities, 50_000)
        milliseconds = measure_storage(entities, choices.width, quick=choices.quick)
        measurement.log(json.dumps(milliseconds, indent=1))
        record = {
            "job": {"entities": entities, "width": choices.width},
            "measured": {"milliseconds": milliseconds},
        }
        measurement.save("search", STORAGE, record, on=on, folder=folder)
        return
    for name in chosen:
        job = jobs_by_name[name]
        task = {"job": asdict(job), "quick": choices.quick}
        result = measurement.in_fresh_process(Path(__file__), task)
        if "points" in result:
            result["verdict"] = verdict(result)
            show(job, result)
        measurement.log(f"{name}: {json.dumps(result.get('verdict', result))}")
        record = {"job": asdict(job), "measured": result}
        measurement.save("search", name, record, on=on, folder=folder)


if __name__ == "__main__":
    main()

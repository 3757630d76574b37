"""The tables of what dualkg does itself although a library could: one decision for each.

They are in a module of their own, because the environment that writes the page has none of the
libraries.
"""

from typing import Any

import tables

Jobs = dict[str, Any]
UNDER_LOAD = ", under load"


def exact_search(jobs: Jobs) -> list[str]:
    rows = []
    sizes: list[str] = []
    for name, record in tables.in_order(jobs):
        for storage, libraries in record["measured"].items():
            for library, result in libraries.items():
                milliseconds = result["milliseconds"]
                sizes = sorted(milliseconds, key=int)
                times = [tables.short(milliseconds[size]) for size in sizes]
                ties = f"{result['ties_in_order']:.0%}" if "ties_in_order" in result else "–"
                memory = tables.short(result["memory_mib"])
                recall = f"{result['recall']:.3f}"
                rows.append([name, storage, library, *times, recall, ties, memory])
    columns = [f"{size} at once, ms" for size in sizes]
    titles = ["queries", "storage", "", *columns, "recall", "ties in order", "MiB"]
    return [
        *tables.table(titles, rows, words=3),
        "Measured by [exact_search.py](exact_search.py) with one thread. Decision: the exact index "
        "is dualkg's own, because it is faster for a batch of queries, and entities of equal score "
        "come in the order of their ids, as without an index; FAISS is faster for a single query.",
        "",
    ]


def larger_than_memory(jobs: Jobs) -> list[str]:
    rows = []
    limits = set()
    for name, record in tables.in_order(jobs):
        job = f"{name}, {record['triples']:,} triples"
        limits.add(record["memory_limit_of_duckdb"])
        for library, facts in record["libraries"].items():
            version = record["versions"].get(library)
            label = f"{library} {version}" if version else library
            if "failed" in facts:
                rows.append([job, label, tables.MISSING, "–", "–", "–", "–"])
                continue
            cells = [tables.short(facts["seconds"]), tables.short(facts["cpu_seconds"])]
            cells += [tables.mib(facts), "yes" if facts["same_result"] else "no"]
            rows.append([job, label, *cells, str(facts["lines"])])
    titles = ["job", "", "s", "s of processor", "peak MiB", "same result", "lines of code"]
    return [
        *tables.table(titles, rows, words=2),
        "Measured by [larger_than_memory.py](larger_than_memory.py), medians of rounds; `encode` "
        "gives names their ids, `answers` sorts the distinct answers of queries, and DuckDB was "
        f"limited to {', '.join(sorted(limits))}. Decision: such graphs are read by dualkg's own "
        "code, because it takes the least memory and processor time for the same result.",
        "",
    ]


def split_tables(jobs: Jobs) -> list[str]:
    rows = []
    for name, record in tables.in_order(jobs):
        measured = record["measured"]
        job = f"{name}, {record['num_processes']} processes"
        for step, milliseconds in sorted(measured.items(), key=lambda item: item[1]):
            ratio = tables.times(milliseconds / measured["dualkg fused"])
            error = f"{record['errors'][step]:.1e}"
            rows.append([job, step, tables.short(milliseconds), ratio, error])
    titles = ["job", "step", "ms", "of dualkg fused", "largest error of a gradient"]
    return [
        *tables.table(titles, rows, words=2),
        "Measured by [split_tables.py](split_tables.py) with gloo; errors are those of a small "
        "graph in float64, beside one process. Decision: dualkg divides tables by "
        "its own collectives, because its steps take less time than those of DTensor, which cannot "
        "differentiate a look-up in a divided table.",
        "",
    ]


def study_storage(jobs: Jobs) -> list[str]:
    rows = []
    for name, record in tables.in_order(jobs):
        measured = record["measured"]
        times = [tables.short(measured[f"ms_per_trial_{count}"]) for count in (1, 2)]
        after_kill = str(measured["recovery_seconds"])
        before_heartbeat = str(measured["recovery_seconds_before_first_heartbeat"])
        rows.append([name, *times, after_kill, before_heartbeat])
    titles = ["study", "ms a trial", "two processes"]
    titles += ["repeated after a kill, s", "killed before a heartbeat, s"]
    return [
        *tables.table(titles, rows),
        "Measured by [study_storage.py](study_storage.py) with trials that train nothing. "
        "Decision: heartbeats are attributes of trials, because every storage of Optuna has them, "
        "and the trial of a process that is killed before its first heartbeat is repeated, too.",
        "",
    ]


def connections(jobs: Jobs) -> list[str]:
    rows = []
    for variant, record in jobs.items():
        if variant.endswith(UNDER_LOAD):
            continue
        failed = record["failed_checks"]
        number = f"{len(failed)} of {len(record['checks'])}"
        loaded = jobs.get(f"{variant}{UNDER_LOAD}")
        rows.append([variant, "; ".join(failed) or "none", number, *_under_load(loaded)])
    titles = ["server", "checks that fail", "number", "failed requests under load"]
    titles += ["p99 alone, ms", "p99 beside abuse, ms"]
    return [
        *tables.table(titles, rows, words=2),
        "Measured by [connections.py](connections.py); *uvicorn* is plain uvicorn with its own "
        "limits, and the rows after it are dualkg without one part. Decision: dualkg has limits of "
        "its own, because each part is there for a check that fails without it, and requests that "
        "are never finished shut out the ordinary clients of plain uvicorn.",
        "",
    ]


def _under_load(record: dict[str, Any] | None) -> list[str]:
    """Failed requests of ordinary clients, and their latencies alone and beside abuse."""
    if record is None:
        return ["–", "–", "–"]
    num_failures = sum(record["num_failures"].values()) + record["num_failures_alone"]
    latencies = record["latencies"]["all"]
    p99 = [tables.short(latencies[phase]["p99_ms"]) for phase in ("quiet", "abuse")]
    return [f"{num_failures} of {record['num_requests']:,}", *p99]

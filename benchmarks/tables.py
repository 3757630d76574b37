"""The tables of RESULTS.md, from saved results."""

from collections.abc import Iterable, Iterator
from typing import Any

import fits
import limits

MISSING = "not measured here"
Results = dict[str, dict[str, Any]]


# -- formatting numbers ------------------------------------------------------


def short(number: float | None) -> str:
    """Three significant digits."""
    if number is None:
        return "–"
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 10:
        return f"{number:.1f}"
    if number >= 1:
        return f"{number:.2f}"
    return f"{number:.3f}"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{short(ratio)} ×"


def table(titles: list[str], rows: Iterable[list[str]], *, words: int = 1) -> list[str]:
    """A Markdown table; the first columns are text, the others numbers."""
    marks = ["---"] * words + ["--:"] * (len(titles) - words)
    lines = [titles, marks, *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def measured_on(jobs: dict[str, Any]) -> list[str]:
    """A line for each machine, set of versions, day and commit that records of jobs come from."""
    origins = [_origin(record["on"]) for _, record in in_order(jobs)]
    return [*dict.fromkeys(origins), ""]


def _origin(on: dict[str, Any]) -> str:
    packages = [name for name in ("python", "torch", "triton", "numba") if on.get(name)]
    versions = ", ".join(f"{name} {on[name]}" for name in packages)
    machine = on["device"]
    if on["bf16"] and not on["gpu"]:
        machine += f" with {', '.join(on['bf16'])}"
    commit = on["commit"] or "unknown"
    return f"Measured on {machine}, {on['date']}, commit {commit}; {versions}."


def is_gpu(jobs: dict[str, Any]) -> bool:
    return any(record["on"]["gpu"] for record in jobs.values())


def picture(topic: str, device: str, results: Results) -> str:
    """The name of a picture without its ending, such as training-cuda.

    Several devices of a kind are numbered.
    """
    gpu = is_gpu(results[device])
    same_kind = [name for name in sorted(results) if is_gpu(results[name]) == gpu]
    number = same_kind.index(device)
    name = f"{topic}-cuda" if gpu else f"{topic}-cpu"
    return f"{name}-{number + 1}" if number else name


def ceilings_of(device: str, results: dict[str, Results]) -> dict[str, Any]:
    return dict(results["ceilings"].get(device, {}).get("all", {}))


# -- training ----------------------------------------------------------------


def training_limit(
    variant: dict[str, Any], batch: int, ceilings: dict[str, Any], *, bf16: bool
) -> limits.Limit | None:
    """The least seconds an epoch could take on a machine with these ceilings."""
    if "failed" in variant:
        return None
    step = limits.Step(
        batch=batch,
        num_entities=variant["num_entities"],
        width=variant["width"],
        relation_width=variant["relation_width"],
        present_heads=variant["present_heads"],
        present_relations=variant["present_relations"],
        two_entity_tables=variant["two_entity_tables"],
        bf16=bf16,
    )
    return limits.limit(step.work(), ceilings, bf16=bf16, times=variant["steps_per_epoch"])


def gpu_training(device: str, results: dict[str, Results]) -> list[str]:
    rows = []
    for name, record in in_order(results["training"][device]):
        ours = record["measured"]["dualkg bf16"]
        reference = record["measured"]["reference engine"]
        grouped_by_query = record["measured"].get("dualkg bf16, grouped by query", {})
        ceilings = ceilings_of(device, results)
        least = training_limit(ours, record["job"]["batch"], ceilings, bf16=True)
        theirs = results["published"]["training"].get(name, {})
        their_seconds = short(theirs.get("seconds"))
        if "note" in theirs:
            their_seconds += f" ({theirs['note']})"
        rows.append(
            [
                name,
                their_seconds,
                short(ours.get("seconds_per_epoch")),
                short(grouped_by_query.get("seconds_per_epoch")),
                short(reference.get("seconds_per_epoch")),
                short(least and least.larger),
                short(least and least.sum),
                times(ratio(ours.get("seconds_per_epoch"), least and least.sum)),
                times(ratio(theirs.get("seconds"), ours.get("seconds_per_epoch"))),
                short(ours.get("warm_up_seconds")),
                f"{gib(ours)} / {gib(reference)}",
            ]
        )
    titles = [
        "seconds per epoch",
        "authors' code",
        "dualkg",
        "grouped by query",
        "reference engine",
        "limit",
        "sum",
        "dualkg / sum",
        "authors' / dualkg",
        "warm-up, s",
        "peak GiB, dualkg / reference",
    ]
    return [
        *table(titles, rows),
        "dualkg takes products in bfloat16; the reference engine is autograd in float32. *Limit* "
        "is the larger of operations / matrix rate and bytes / copy bandwidth, *sum* is both; "
        "[limits.py](limits.py) counts them. " + results["published"]["about"],
        "",
    ]


PRECISIONS = ("float32", "bf16")


def cpu_training(device: str, results: dict[str, Results]) -> list[str]:
    rows = []
    for name, record in in_order(results["training"][device]):
        measured = record["measured"]
        our_seconds = {}
        for precision in PRECISIONS:
            ours = measured.get(f"dualkg {precision}", {})
            our_seconds[precision] = ours.get("seconds_per_epoch")
        for variant, result in sorted(measured.items(), key=seconds_of):
            seconds = result.get("seconds_per_epoch")
            rows.append(
                [
                    name,
                    label(variant, result),
                    MISSING if seconds is None else short(seconds),
                    *(times(ratio(seconds, base)) for base in our_seconds.values()),
                    mib(result),
                    short(result.get("warm_up_seconds")),
                ]
            )
        for precision in PRECISIONS:
            ours = measured.get(f"dualkg {precision}", {"failed": MISSING})
            ceilings = ceilings_of(device, results)
            is_bf16 = precision == "bf16"
            least = training_limit(ours, record["job"]["batch"], ceilings, bf16=is_bf16)
            if least:
                # A limit is compared with the training in its own precision only.
                ratios = dict.fromkeys(PRECISIONS, "–")
                ratios[precision] = times(ratio(least.sum, our_seconds[precision]))
                both = f"{short(least.larger)} / {short(least.sum)}"
                what = f"limit, {precision}: the larger / the sum"
                rows.append([name, what, both, *ratios.values(), "–", "–"])
    titles = ["job", "", "s/epoch", "of dualkg float32", "of dualkg bf16", "peak MiB", "warm-up, s"]
    return [
        *table(titles, rows, words=2),
        "Medians over alternating rounds of fresh processes, over some steps of an epoch. "
        '*Grouped by query* is `training.order = "queries"`, with twice the triples in a step. '
        "PyKEEN's epoch is the smaller job of the distinct (head, relation) pairs, without a "
        "regularizer. LibKGE is not on the package index, so it is not measured.",
        "",
    ]


def seconds_of(variant: tuple[str, dict[str, Any]]) -> float:
    """The sort key of rows; those that were not measured come last."""
    _, result = variant
    return float(result.get("seconds_per_epoch", result.get("seconds", 1e9)))


def label(variant: str, result: dict[str, Any]) -> str:
    """The name of a variant, with its version if it is not dualkg."""
    name = "tutorial-style PyTorch" if variant == "tutorial" else variant
    if "version" in result:
        name = name.replace("PyKEEN", f"PyKEEN {result['version']}")
    return name


def in_order(jobs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Jobs by name, larger numbers first."""

    def order(job: tuple[str, Any]) -> list[tuple[int, str]]:
        name, _ = job
        return [(-int(word), "") if word.isdigit() else (0, word) for word in name.split()]

    yield from sorted(jobs.items(), key=order)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def gib(result: dict[str, Any]) -> str:
    return short(result["peak_mib"] / 1024) if "peak_mib" in result else MISSING


def mib(result: dict[str, Any]) -> str:
    return f"{result['peak_mib']:,.0f}" if "peak_mib" in result else "–"


# -- ranking, growth, and the rest -------------------------------------------


def ranking(device: str, results: dict[str, Results]) -> list[str]:
    rows = []
    for name, record in in_order(results["ranking"][device]):
        measured = record["measured"]
        theirs = results["published"]["ranking"].get(name)
        ours = measured["dualkg"]
        for variant, result in sorted(measured.items(), key=seconds_of):
            rows.append(
                [
                    name,
                    label(variant, result),
                    short(result["seconds"]) if "filter_seconds" in result else "–",
                    short(with_filter(result)) if "seconds" in result else MISSING,
                    times(ratio(with_filter(result), with_filter(ours))),
                    f"{result['mrr']:.4f}" if "mrr" in result else "–",
                    mib(result),
                ]
            )
        if theirs and is_gpu(results["ranking"][device]):
            rows.append([name, "authors' code", short(theirs["seconds"]), "–", "–", "–", "–"])
        work = limits.ranking_work(
            ours["num_distinct_queries"], ours["num_entities"], ours["width"]
        )
        least = limits.limit(work, ceilings_of(device, results), bf16=False)
        if least:
            both = f"{short(least.larger)} / {short(least.sum)}"
            rows.append([name, "limit: the larger / the sum", both, "–", "–", "–", "–"])
    titles = ["job", "", "ranking alone, s", "with its filter, s", "of dualkg", "MRR", "peak MiB"]
    return [
        *table(titles, rows, words=2),
        "The same weights, trained briefly. *With its filter* adds the time to find the known "
        "answers once.",
        "",
    ]


def with_filter(result: dict[str, Any]) -> float | None:
    """Seconds of a ranking and of the filter that it needs; None if it was not measured."""
    if "seconds" not in result:
        return None
    return float(result["seconds"] + result.get("filter_seconds", 0.0))


def growth(device: str, results: dict[str, Results]) -> list[str]:
    rows = []
    for axis in fits.AXES:
        points = results["scaling"][device].get(axis, {}).get("points")
        if not points:
            continue
        cells = [axis, f"{points[0][axis]:,} – {points[-1][axis]:,}"]
        for measure in ("seconds", "mib"):
            whole, last = fits.fits_of(axis, points, measure)
            cells += [f"{whole.exponent:z.2f} (R² {whole.r_squared:.3f})", f"{last.exponent:z.2f}"]
        rows.append(cells)
    titles = ["what grows", "from – to", "time ~ x^", "last three", "memory ~ x^", "last three"]
    name = picture("scaling", device, results["scaling"])
    return [f"![how time and memory of an epoch grow]({name}.svg)", "", *table(titles, rows)]


def ceilings(results: dict[str, Results]) -> list[str]:
    rows = []
    for device, jobs in sorted(results["ceilings"].items()):
        rates = jobs["all"]
        cells = [device]
        for precision in ("bf16", "float32"):
            operations = rates.get(f"{precision}_operations_per_second")
            cells.append(short(operations / 1e12) if operations else "–")
        cells.append(short(rates["copied_bytes_per_second"] / 1e9))
        rows.append(cells)
    return table(["ceilings", "bf16, 10¹² op/s", "float32, 10¹² op/s", "copy, GB/s"], rows)


def reading(results: dict[str, Any]) -> list[str]:
    rows = []
    for part, costs_by_kind in results["measured"].items():
        for kind, costs in costs_by_kind.items():
            triples = f"{costs['triples']:,}"
            peak = f"{costs['peak_rss_mib']:,}"
            rows.append([part, kind, triples, short(costs["seconds"]), peak])
    on = results["machine"]
    return [
        *table(["loading", "", "triples", "s", "peak MiB"], rows, words=2),
        f"A TSV file of {results['file_mb']} MB. Measured on {on['cores']} cores of {on['cpu']}, "
        f"{on['date']}; python {on['python']}, pyarrow {on['pyarrow']}.",
        "",
    ]

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
    return (
        f"{number:,.0f}"
        if number >= 100
        else f"{number:.{1 if number >= 10 else 2 if number >= 1 else 3}f}"
    )


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{short(ratio)} ×"


def table(titles: list[str], rows: Iterable[list[str]], *, words: int = 1) -> list[str]:
    """A Markdown table; the first columns are text, the others numbers."""
    marks = ["---"] * words + ["--:"] * (len(titles) - words)
    lines = [titles, marks, *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def measured_on(records: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each machine, set of versions, day and commit that records come from."""
    return [*dict.fromkeys(_origin(record["on"]) for record in records), ""]


def _origin(on: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {on[name]}" for name in ("python", "torch", "triton", "numba") if on.get(name)
    )
    features = f" with {', '.join(on['bf16'])}" if on["bf16"] and not on["gpu"] else ""
    return f"Measured on {on['device']}{features}, {on['date']}, commit {on['commit'] or 'unknown'}; {versions}."


def is_gpu(jobs: dict[str, Any]) -> bool:
    return any(record["on"]["gpu"] for record in jobs.values())


def picture(topic: str, device: str, results: Results) -> str:
    """The name of a picture without its ending: of the kind of device, numbered where there are
    several.
    """
    gpu = is_gpu(results[device])
    alike = [other for other in sorted(results) if is_gpu(results[other]) == gpu]
    number = alike.index(device)
    return f"{topic}-{'cuda' if gpu else 'cpu'}{f'-{number + 1}' if number else ''}"


def ceilings_of(device: str, found: dict[str, Results]) -> dict[str, Any]:
    return dict(found["ceilings"].get(device, {}).get("all", {}))


# -- training ----------------------------------------------------------------


def training_limit(
    variant: dict[str, Any], batch: int, ceilings: dict[str, Any], *, bf16: bool
) -> limits.Limit | None:
    """The least seconds an epoch could take on a machine with these ceilings."""
    if "failed" in variant:
        return None
    names = (
        "num_entities",
        "width",
        "relation_width",
        "present_heads",
        "present_relations",
        "two_entity_tables",
    )
    step = limits.Step(batch=batch, bf16=bf16, **{name: variant[name] for name in names})
    return limits.limit(step.work(), ceilings, bf16=bf16, times=variant["steps_per_epoch"])


def gpu_training(device: str, found: dict[str, Results]) -> list[str]:
    jobs = found["training"][device]
    published = found["published"]["training"]
    rows = []
    for name, record in in_order(jobs):
        ours = record["measured"]["dualkg bf16"]
        plain = record["measured"]["reference engine"]
        grouped_by_query = record["measured"].get("dualkg bf16, grouped by query", {})
        least = training_limit(ours, record["job"]["batch"], ceilings_of(device, found), bf16=True)
        theirs = published.get(name, {})
        note = f" ({theirs['note']})" if "note" in theirs else ""
        rows.append(
            [
                name,
                short(theirs.get("seconds")) + note,
                short(ours.get("seconds_per_epoch")),
                short(grouped_by_query.get("seconds_per_epoch")),
                short(plain.get("seconds_per_epoch")),
                short(least and least.larger),
                short(least and least.sum),
                times(ratio(ours.get("seconds_per_epoch"), least and least.sum)),
                times(ratio(theirs.get("seconds"), ours.get("seconds_per_epoch"))),
                short(ours.get("warm_up_seconds")),
                " / ".join(gib(one) for one in (ours, plain)),
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
    ]
    titles += ["dualkg / sum", "authors' / dualkg", "warm-up, s", "peak GiB, dualkg / reference"]
    return [
        *table(titles, rows),
        "dualkg takes products in bfloat16; the reference engine is autograd in float32. *Limit* "
        "is the larger of operations / matrix rate and bytes / copy bandwidth, *sum* is both; "
        "[limits.py](limits.py) counts them. " + found["published"]["about"],
        "",
    ]


def cpu_training(device: str, found: dict[str, Results]) -> list[str]:
    rows = []
    for name, record in in_order(found["training"][device]):
        measured = record["measured"]
        ours = {
            kind: measured.get(f"dualkg {kind}", {}).get("seconds_per_epoch")
            for kind in ("float32", "bf16")
        }
        for variant, one in sorted(measured.items(), key=seconds_of):
            seconds = one.get("seconds_per_epoch")
            ratios = [times(ratio(seconds, base)) for base in ours.values()]
            cells = [
                name,
                label(variant, one),
                MISSING if seconds is None else short(seconds),
                *ratios,
            ]
            rows.append([*cells, mib(one), short(one.get("warm_up_seconds"))])
        for kind, base in ours.items():
            variant = measured.get(f"dualkg {kind}", {"failed": MISSING})
            ceilings = ceilings_of(device, found)
            bf16 = kind == "bf16"
            least = training_limit(variant, record["job"]["batch"], ceilings, bf16=bf16)
            if least:
                what = f"limit, {kind}: the larger / the sum"
                ratios = [
                    times(ratio(least.sum, base)) if base == other else "–"
                    for other in ours.values()
                ]
                rows.append(
                    [name, what, f"{short(least.larger)} / {short(least.sum)}", *ratios, "–", "–"]
                )
    titles = ["job", "", "s/epoch", "of dualkg float32", "of dualkg bf16", "peak MiB", "warm-up, s"]
    return [
        *table(titles, rows, words=2),
        "Medians over alternating rounds of fresh processes, over some steps of an epoch. *Grouped by "
        'query* is `training.order = "queries"`, with twice the triples in a step. PyKEEN\'s '
        "epoch is the smaller job of the distinct (head, relation) pairs, without a regularizer. LibKGE is not on the "
        "package index, so it is not measured.",
        "",
    ]


def seconds_of(variant: tuple[str, dict[str, Any]]) -> float:
    """The sort key of rows; those that were not measured come last."""
    one = variant[1]
    return float(one.get("seconds_per_epoch", one.get("seconds", 1e9)))


def label(variant: str, one: dict[str, Any]) -> str:
    """The name of a variant, with its version if it is not dualkg."""
    name = {"tutorial": "tutorial-style PyTorch"}.get(variant, variant)
    return name.replace("PyKEEN", f"PyKEEN {one['version']}") if "version" in one else name


def in_order(jobs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Jobs by name, larger numbers first."""

    def words(job: tuple[str, Any]) -> list[tuple[int, str]]:
        return [(-int(word), "") if word.isdigit() else (0, word) for word in job[0].split()]

    yield from sorted(jobs.items(), key=words)


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def gib(one: dict[str, Any]) -> str:
    return short(one["peak_mib"] / 1024) if "peak_mib" in one else MISSING


def mib(one: dict[str, Any]) -> str:
    return f"{one['peak_mib']:,.0f}" if "peak_mib" in one else "–"


# -- ranking, growth, and the rest -------------------------------------------


def ranking(device: str, found: dict[str, Results]) -> list[str]:
    rows = []
    for name, record in in_order(found["ranking"][device]):
        measured = record["measured"]
        theirs = found["published"]["ranking"].get(name)
        ours = measured["dualkg"]
        for variant, one in sorted(measured.items(), key=seconds_of):
            alone = short(one["seconds"]) if "filter_seconds" in one else "–"
            mrr = f"{one['mrr']:.4f}" if "mrr" in one else "–"
            ratios = times(ratio(with_filter(one), with_filter(ours)))
            whole = short(with_filter(one)) if "seconds" in one else MISSING
            rows.append([name, label(variant, one), alone, whole, ratios, mrr, mib(one)])
        if theirs and is_gpu(found["ranking"][device]):
            rows.append([name, "authors' code", short(theirs["seconds"]), *["–"] * 4])
        work = limits.ranking_work(
            ours["num_distinct_queries"], ours["num_entities"], ours["width"]
        )
        least = limits.limit(work, ceilings_of(device, found), bf16=False)
        if least:
            both = f"{short(least.larger)} / {short(least.sum)}"
            rows.append([name, "limit: the larger / the sum", both, *["–"] * 4])
    titles = ["job", "", "ranking alone, s", "with its filter, s", "of dualkg", "MRR", "peak MiB"]
    return [
        *table(titles, rows, words=2),
        "The same weights, trained briefly. *With its filter* adds the time to find the known "
        "answers once.",
        "",
    ]


def with_filter(one: dict[str, Any]) -> float | None:
    return one["seconds"] + one.get("filter_seconds", 0.0) if "seconds" in one else None


def growth(device: str, found: dict[str, Results]) -> list[str]:
    rows = []
    for axis in fits.AXES:
        points = found["scaling"][device].get(axis, {}).get("points")
        if not points:
            continue
        cells = [axis, f"{points[0][axis]:,} – {points[-1][axis]:,}"]
        for measure in ("seconds", "mib"):
            whole, last = fits.fits_of(axis, points, measure)
            cells += [f"{whole.exponent:z.2f} (R² {whole.r_squared:.3f})", f"{last.exponent:z.2f}"]
        rows.append(cells)
    titles = ["what grows", "from – to", "time ~ x^", "last three", "memory ~ x^", "last three"]
    name = picture("scaling", device, found["scaling"])
    return [f"![how time and memory of an epoch grow]({name}.svg)", "", *table(titles, rows)]


def ceilings(found: dict[str, Results]) -> list[str]:
    rows = []
    for device, jobs in sorted(found["ceilings"].items()):
        one = jobs["all"]
        rates = [one.get(f"{name}_operations_per_second") for name in ("bf16", "float32")]
        cells = [short(rate / 1e12) if rate else "–" for rate in rates]
        rows.append([device, *cells, short(one["copied_bytes_per_second"] / 1e9)])
    return table(["ceilings", "bf16, 10¹² op/s", "float32, 10¹² op/s", "copy, GB/s"], rows)


def reading(kept: dict[str, Any]) -> list[str]:
    rows = [
        [part, kind, f"{one['triples']:,}", short(one["seconds"]), f"{one['peak_rss_mib']:,}"]
        for part, kinds in kept["measured"].items()
        for kind, one in kinds.items()
    ]
    on = kept["machine"]
    return [
        *table(["loading", "", "triples", "s", "peak MiB"], rows, words=2),
        f"A TSV file of {kept['file_mb']} MB. Measured on {on['cores']} cores of {on['cpu']}, "
        f"{on['date']}; python {on['python']}, pyarrow {on['pyarrow']}.",
        "",
    ]

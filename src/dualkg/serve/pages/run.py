"""The page of a run, or of two side by side: metrics, learning curves, calibration, sparsity, recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from dualkg.serve.routes.runs import OtherRun, run_page
from dualkg.serve.schemas import RunDetails
from dualkg.serve.service import Context
from dualkg.serve.templating import minus, page, page_router, page_url, visible

routes = page_router()
METRICS = {"mrr": "MRR", "hits_at_1": "Hits@1", "hits_at_3": "Hits@3", "hits_at_10": "Hits@10", "mr": "Mean rank"}
COMPARED = {"mrr": "MRR", "hits_at_1": "H@1", "hits_at_3": "H@3", "hits_at_10": "H@10"}  # keys of a comparison
GROUPS = (("relation", "Relation"), ("cardinality", "Cardinality"), ("direction", "Asked for"))
LETTERS = "ab"  # CSS classes of the first and the second run
Series = Sequence[Sequence[tuple[float, float]]]


@routes.get("/run")
async def page_of_run(request: Request, context: Context, other: OtherRun = None) -> Response:
    """One run; beside it another one, if two are served or one was named."""
    found = await run_page(context, other)
    runs = found.runs
    beside = runs[1].run if len(runs) == 2 else ""
    params = {"with": beside if len(context.service.runs) > 1 else None}
    return page(
        request,
        context,
        "run.html",
        json=page_url(context, "/run.json", **params),
        found=found,
        runs=list(zip(runs, LETTERS, strict=False)),
        beside=beside,
        about=_about(runs[0]),
        metrics=METRICS,
        compared=COMPARED,
        reports=[report for run in runs if (report := run.reports.get("test"))],
        curves=_learning_curves(runs),
        groups=_groups(runs),
        reliability=_reliability(runs),
        choices=_choices(runs),
        metric_text=metric_text,
        signed=signed,
        bytes_text=_bytes_text,
    )


def metric_text(metric: str, value: float | None) -> str:
    """A metric as papers write it: .479, and mean ranks in full."""
    if value is None:
        return "–"
    if metric == "mr":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.3f}".replace("0.", ".", 1)


def signed(value: float) -> str:
    return minus(f"{value:+.3f}".replace("0.", ".", 1))


def _about(run: RunDetails) -> str:
    regularizer = run.recipe.get("regularizer", {}).get("name", "none")
    by = "" if regularizer == "none" else f" with {regularizer}"
    spent = (run.costs or {}).get("training_seconds")
    return (
        f"{run.model}{by}, dim {run.recipe['model']['dim']}, on the {run.graph.counts['train']:,} training triples of "
        f"{run.graph.name}: {len(run.history):,} epochs{'' if spent is None else f', in {_seconds_text(spent)}'}."
    )


def _seconds_text(number: float) -> str:
    minutes, seconds = divmod(round(number), 60)
    return f"{minutes:,} min {seconds} s" if minutes else f"{number:.{0 if number >= 10 else 1}f} s"


def _bytes_text(number: float) -> str:
    return f"{number / 2**20:,.1f} MiB" if number >= 2**20 else f"{number / 2**10:,.0f} KiB"


def _groups(runs: Sequence[RunDetails]) -> list[dict[str, Any]]:
    """Test metrics by relation, cardinality and direction, where all runs have them."""
    reports = [run.reports.get("test") or {} for run in runs]
    labels = {item.name: item.label for run in runs for item in run.relations}
    found = []
    for kind, column in GROUPS if all(reports) else ():
        by_run = [report.get(f"by_{kind}") or {} for report in reports]
        keys = dict.fromkeys(key for groups in by_run for key in groups)
        rows = [(labels.get(key, key), [groups.get(key, {}) for groups in by_run]) for key in keys]
        if rows:
            found.append({"kind": kind, "column": column, "rows": rows})
    return found


def _choices(runs: Sequence[RunDetails]) -> list[tuple[str, str, list[str], bool]]:
    """Section, name and values of every recipe key, and whether they agree; keys without a value are left out."""
    flat = [
        {
            (section, name): value
            for section, values in run.recipe.items()
            for name, value in (values.items() if isinstance(values, dict) else [("", values)])
            if value not in (None, {}, [])
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for one in flat for key in one)
    found = []
    for key in keys:
        values = [one.get(key) for one in flat]
        found.append((*key, [_value_text(value) for value in values], values[0] == values[-1]))
    return found


def _value_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else visible(str(value))


@dataclass(frozen=True)
class Axis:
    """From numbers to pixels."""

    low: float
    high: float
    first: float  # pixel of the lowest number
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high) if self.log else value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.first + share * (self.last - self.first), 1)


@dataclass(frozen=True)
class Chart:
    """Shapes with their CSS classes; the template draws them."""

    label: str  # for screen readers
    width: int = 440
    height: int = 240
    left: int = 46
    right: int = 52
    top: int = 14
    bottom: int = 34
    paths: list[tuple[str, str]] = field(default_factory=list)
    circles: list[tuple[float, float, float, str]] = field(default_factory=list)
    texts: list[tuple[float, float, str, str]] = field(default_factory=list)

    def axis(self, low: float, high: float, *, vertical: bool, log: bool = False) -> Axis:
        pixels = (self.height - self.bottom, self.top) if vertical else (self.left, self.width - self.right)
        return Axis(low, high, *pixels, log=log)

    def draw_grid(
        self, x: Axis, y: Axis, ticks: tuple[Sequence[float], Sequence[float]], text: Callable[[float], str], below: str
    ) -> None:
        x_text = text if x.log else "{:,.0f}".format
        self.paths.extend((f"M{x.first},{y(row)}H{x.last}", "rule") for row in ticks[1])
        self.texts.extend((self.left - 7, y(row) + 4, "axis end-anchored", text(row)) for row in ticks[1])
        self.texts.extend((x(at), self.height - self.bottom + 18, "axis middle", x_text(at)) for at in ticks[0])
        self.texts.append((self.width - self.right, self.height - 3, "axis end-anchored", below))


def line_chart(series: Series, *, label: str, text: Callable[[float], str], dots: bool = False) -> Chart | None:
    """Values of one or two runs over epochs."""
    finite = [[point for point in line if math.isfinite(point[1])] for line in series]
    points = [point for line in finite for point in line]
    if not points:
        return None
    chart = Chart(label)
    steps = ticks(min(y for _, y in points), max(y for _, y in points))
    x = chart.axis(0, max(1, *(x for x, _ in points)), vertical=False)
    y = chart.axis(steps[0], steps[-1], vertical=True)
    epochs = [step for step in ticks(0, x.high) if step <= x.high and step == int(step)]
    chart.draw_grid(x, y, (epochs, steps), text, "epoch")
    ends: list[tuple[float, float]] = []
    for letter, line in zip(LETTERS, finite, strict=False):
        pixels = [(x(epoch), y(value)) for epoch, value in line]
        if not pixels:
            continue
        chart.paths.append(("M" + "L".join(f"{left},{top}" for left, top in pixels), f"line {letter}"))
        if dots or len(pixels) == 1:
            chart.circles.extend((left, top, 2.5, f"spot {letter}") for left, top in pixels)
        left, top = pixels[-1]
        if any(abs(left - other) < 50 and abs(top - height) < 13 for other, height in ends):
            top -= 14
        ends.append((left, top))
        chart.texts.append((left + 6, round(top + 4, 1), f"end {letter}", text(line[-1][1])))
    return chart


def reliability_diagram(
    series: Sequence[Sequence[tuple[float, float, float]]], *, least: float, label: str
) -> Chart | None:
    """Predicted probability, observed frequency and its standard error; on the diagonal the first two agree."""
    if not any(series):
        return None
    chart = Chart(label, width=340, height=340, right=16)
    steps = [step for step in (0.01, 0.03, 0.1, 0.3, 1.0) if step >= least]
    x, y = (chart.axis(least, 1, vertical=vertical, log=True) for vertical in (False, True))
    chart.draw_grid(x, y, (steps, steps), lambda share: f"{100 * share:g} %", "said")
    chart.paths.append((f"M{x(least)},{y(least)}L{x(1)},{y(1)}", "diagonal"))
    chart.texts.append((chart.left, chart.top - 3, "axis", "found"))
    for letter, bins in zip(LETTERS, series, strict=False):
        for predicted, observed, error in bins:
            span = f"M{x(predicted)},{y(observed - error)}V{y(observed + error)}"
            chart.paths.append((span, f"whisker {letter}"))
            chart.circles.append((x(predicted), y(observed), 4.5, f"spot {letter}"))
    return chart


def ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Round numbers from below the lowest to above the highest."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    size: float = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _learning_curves(runs: Sequence[RunDetails]) -> list[tuple[str, Chart | None]]:
    """Loss and validation MRR over epochs."""
    losses = [[(float(e["epoch"]), float(e["loss"])) for e in run.history if e.get("loss") is not None] for run in runs]
    mrrs = [[(float(e["epoch"]), float(e["valid_mrr"])) for e in run.history if e.get("valid_mrr")] for run in runs]

    def label(title: str, series: Series) -> str:
        return " ".join(
            f"{title} of {run.run}: from {line[0][1]:.3g} to {line[-1][1]:.3g} in {len(run.history)} epochs."
            for run, line in zip(runs, series, strict=True)
            if line
        )

    def mrr_text(value: float) -> str:
        return metric_text("mrr", value)

    if not any(losses):
        return []
    mrr_title = "MRR on valid"
    return [
        ("Loss", line_chart(losses, label=label("Loss", losses), text="{:.2f}".format)),
        (mrr_title, line_chart(mrrs, label=label(mrr_title, mrrs), text=mrr_text, dots=True)),
    ]


def _reliability(runs: Sequence[RunDetails]) -> dict[str, Any] | None:
    """The reliability diagram, and the check of each run on likely candidates."""
    checks: list[Mapping[str, Any]] = [(run.reliability or {}).get("likely") or {} for run in runs]
    if not any(run.reliability for run in runs):
        return None
    series = [[(bin["predicted"], bin["observed"], bin["noise"]) for bin in one.get("bins") or []] for one in checks]
    least = min((one["min_probability"] for one in checks if one), default=0.01)
    label = "What was said against what was found; " + " ".join(
        f"{run.run}: expected calibration error {one['ece']:.3f}."
        for run, one in zip(runs, checks, strict=True)
        if one.get("ece") is not None
    )
    return {"chart": reliability_diagram(series, least=least, label=label), "checks": checks}

"""The page of a run, or of two side by side: metrics, learning curves, calibration, sparsity, recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from fastapi import Response

from dualkg.serve.routes.runs import OtherRun, run_page
from dualkg.serve.schemas import RunDetails
from dualkg.serve.service import Context
from dualkg.serve.templating import TEMPLATES, minus, page, page_router, page_url, visible

routes = page_router()
LETTERS = "ab"  # CSS classes of the first and the second run
Series = Sequence[Sequence[tuple[float, float]]]


@routes.get("/run")
async def page_of_run(context: Context, other: OtherRun = None) -> Response:
    """One run; next to it another one, if two are served or one was named."""
    found = await run_page(context, other)
    runs = found.runs
    second = runs[1].run if len(runs) == 2 else ""
    params = {"with": second if len(context.service.runs) > 1 else None}
    reports = [run.reports["test"] for run in runs if run.reports.get("test")]
    return page(
        context,
        "run.html",
        json=page_url(context, "/run.json", **params),
        found=found,
        runs=list(zip(runs, LETTERS, strict=False)),
        second=second,
        reports=reports if len(reports) == len(runs) else [],
        labels={item.name: item.label for run in runs for item in run.relations},
        curves=_learning_curves(runs),
        reliability=_reliability(runs),
        settings=_settings(runs),
    )


def metric_text(value: float | None, metric: str = "mrr") -> str:
    """A metric as papers write it: .479, and mean ranks in full."""
    if value is None:
        return "–"
    if metric == "mr":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.3f}".replace("0.", ".", 1)


def signed(value: float) -> str:
    return minus(f"{value:+.3f}".replace("0.", ".", 1))


def duration(number: float) -> str:
    minutes, seconds = divmod(round(number), 60)
    return f"{minutes:,} min {seconds} s" if minutes else f"{number:.{0 if number >= 10 else 1}f} s"


TEMPLATES.filters |= {"metric_text": metric_text, "signed": signed, "duration": duration}


def _settings(runs: Sequence[RunDetails]) -> list[tuple[str, str, list[str], bool]]:
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
    values = {key: [one.get(key) for one in flat] for one in flat for key in one}
    return [(*key, [_value_text(value) for value in found], found[0] == found[-1]) for key, found in values.items()]


def _value_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else visible(str(value))


class Axis(NamedTuple):
    """From numbers to pixels."""

    low: float
    high: float
    first: float  # pixel of the lowest number
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        numbers = [max(value, self.low), self.low, self.high]
        at, *ends = [math.log(number) for number in numbers] if self.log else numbers
        return round(float(np.interp(at, ends, (self.first, self.last))), 1)


@dataclass(frozen=True)
class Chart:
    """Ticks, and shapes with their CSS classes, in pixels; the template draws them."""

    label: str  # for screen readers
    titles: tuple[str, str]  # of the axes
    width: int = 440
    height: int = 240
    right: int = 52
    left, top, bottom = 46, 14, 34
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)
    circles: list[tuple[float, float, float, str]] = field(default_factory=list)
    texts: list[tuple[float, float, str, str]] = field(default_factory=list)

    def axis(self, low: float, high: float, *, vertical: bool, log: bool = False) -> Axis:
        pixels = (self.height - self.bottom, self.top) if vertical else (self.left, self.width - self.right)
        return Axis(low, high, *pixels, log)


def line_chart(series: Series, *, label: str, text: Callable[[float], str], dots: bool = False) -> Chart | None:
    """Values of one or two runs over epochs."""
    finite = [[point for point in line if math.isfinite(point[1])] for line in series]
    points = [point for line in finite for point in line]
    if not points:
        return None
    chart = Chart(label, ("epoch", ""))
    epochs, values = zip(*points, strict=True)
    steps = ticks(min(values), max(values))
    x = chart.axis(0, max(1, *epochs), vertical=False)
    y = chart.axis(steps[0], steps[-1], vertical=True)
    chart.x_ticks.extend((x(tick), f"{tick:,.0f}") for tick in ticks(0, x.high) if tick <= x.high and tick == int(tick))
    chart.y_ticks.extend((y(tick), text(tick)) for tick in steps)
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
    chart = Chart(label, ("predicted", "observed"), width=340, height=340, right=16)
    x, y = (chart.axis(least, 1, vertical=vertical, log=True) for vertical in (False, True))
    for tick in (0.01, 0.03, 0.1, 0.3, 1.0):
        if tick >= least:
            chart.x_ticks.append((x(tick), f"{100 * tick:g} %"))
            chart.y_ticks.append((y(tick), f"{100 * tick:g} %"))
    chart.paths.append((f"M{x(least)},{y(least)}L{x(1)},{y(1)}", "diagonal"))
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
    charts: list[tuple[str, Chart | None]] = []
    texts: dict[str, tuple[str, Callable[[float], str]]]
    texts = {"loss": ("Loss", "{:.2f}".format), "valid_mrr": ("MRR on valid", metric_text)}
    for key, (title, text) in texts.items():
        series = [
            [(float(one["epoch"]), float(one[key])) for one in run.history if one.get(key) is not None] for run in runs
        ]
        label = " ".join(
            f"{title} of {run.run}: from {line[0][1]:.3g} to {line[-1][1]:.3g} in {len(run.history)} epochs."
            for run, line in zip(runs, series, strict=True)
            if line
        )
        charts.append((title, line_chart(series, label=label, text=text, dots=key == "valid_mrr")))
    return charts if charts[0][1] else []


def _reliability(runs: Sequence[RunDetails]) -> dict[str, Any] | None:
    """The reliability diagram, and the check of each run on likely candidates."""
    if not any(run.reliability for run in runs):
        return None
    checks: list[dict[str, Any]] = [(run.reliability or {}).get("likely") or {} for run in runs]
    series = [[(bin["predicted"], bin["observed"], bin["noise"]) for bin in one.get("bins") or []] for one in checks]
    least = min((one["min_probability"] for one in checks if one), default=0.01)
    label = "Predicted probability and observed frequency; " + " ".join(
        f"{run.run}: expected calibration error {one['ece']:.3f}."
        for run, one in zip(runs, checks, strict=True)
        if one.get("ece") is not None
    )
    return {"chart": reliability_diagram(series, least=least, label=label), "checks": checks}

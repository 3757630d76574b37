"""The page of a run, or of two side by side: metrics, learning curves, calibration, sparsity, recipe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from fastapi import Response

from dualkg.serve.routes.runs import OtherRun, run_page
from dualkg.serve.schemas import RunDetails
from dualkg.serve.service import Context
from dualkg.serve.templating import TEMPLATES, minus, page, page_router, page_url

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
        curves={
            "Loss": line_chart(_history(runs, "loss"), text="{:.2f}".format),
            "MRR on valid": line_chart(_history(runs, "valid_mrr"), text=metric_text, dots=True),
        },
        reliability=reliability_diagram([(run.reliability or {}).get("likely") or {} for run in runs]),
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


def _settings(runs: Sequence[RunDetails]) -> list[tuple[str, str, list[Any], bool]]:
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
    return [(*key, found, found[0] == found[-1]) for key, found in values.items()]


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
    """Values of one or two runs, and the axes that `templates/charts.html` draws them with."""

    series: Sequence[Sequence[tuple[float, ...]]]
    x: Axis
    y: Axis
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    text: Callable[[float], str]  # a value in words
    dots: bool = True


def _history(runs: Sequence[RunDetails], key: str) -> Series:
    return [[(one["epoch"], one[key]) for one in run.history if one.get(key) is not None] for run in runs]


def line_chart(series: Series, *, text: Callable[[float], str], dots: bool = False) -> Chart | None:
    """Values over epochs; those that are not finite are left out."""
    finite = [[point for point in line if math.isfinite(point[1])] for line in series]
    points = [point for line in finite for point in line]
    if not points:
        return None
    epochs, values = zip(*points, strict=True)
    last, y_ticks = max(1, *epochs), ticks(min(values), max(values))
    x_ticks = [tick for tick in ticks(0, last) if tick <= last and tick == int(tick)]
    x, y = Axis(0, last, 46, 388), Axis(y_ticks[0], y_ticks[-1], 206, 14)
    return Chart(finite, x, y, x_ticks, y_ticks, text, dots)


def reliability_diagram(checks: Sequence[dict[str, Any]]) -> Chart | None:
    """Predicted probability, observed frequency and its standard error; on the diagonal the first two agree."""
    series = [[(bin["predicted"], bin["observed"], bin["noise"]) for bin in one.get("bins") or []] for one in checks]
    if not any(series):
        return None
    least = min(one["min_probability"] for one in checks if one)
    steps = [step for step in (0.01, 0.03, 0.1, 0.3, 1.0) if step >= least]
    x, y = Axis(least, 1, 46, 324, log=True), Axis(least, 1, 306, 14, log=True)
    return Chart(series, x, y, steps, steps, lambda share: f"{100 * share:g} %")


def ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Round numbers from below the lowest to above the highest."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    size: float = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]

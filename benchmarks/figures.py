"""The pictures of RESULTS.md, from saved results. They need matplotlib."""

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

import fits
import tables

OURS = "#1b6ca8"
REFERENCE = "#7fb2d9"
OTHER = "#a9b1b8"
LIMIT = "#e0912f"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "svg.hashsalt": "dualkg",  # the same picture is the same file
    "svg.fonttype": "path",
}
COLUMNS = 2
UNITS = {
    "entities": "entities",
    "triples": "training triples",
    "dim": "dim (complex coordinates)",
    "batch": "batch (queries a step)",
}


def draw_all(results: dict[str, Any], folder: Path) -> None:
    """Draw all figures of the results."""
    with mpl.rc_context(STYLE):
        for device, jobs in results["training"].items():
            groups = gpu_bars(device, results) if tables.is_gpu(jobs) else cpu_bars(device, results)
            figure = bars(groups, f"Seconds an epoch on {device}")
            write(figure, folder / tables.picture("training", device, results["training"]))
        for device, axes in results["scaling"].items():
            figure = growth(axes, f"How time and memory of an epoch of ComplEx grow on {device}")
            write(figure, folder / tables.picture("scaling", device, results["scaling"]))


def write(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


# -- bars --------------------------------------------------------------------

# Job → label, seconds and colour of each bar.
Bars = dict[str, list[tuple[str, float | None, str]]]


def gpu_bars(device: str, results: dict[str, Any]) -> Bars:
    """For each job: the authors' code, the reference engine, ours, and the sum of the limits."""
    groups: Bars = {}
    for name, record in tables.in_order(results["training"][device]):
        ours = record["measured"]["dualkg bf16"]
        reference = record["measured"]["reference engine"]
        ceilings = tables.ceilings_of(device, results)
        least = tables.training_limit(ours, record["job"]["batch"], ceilings, bf16=True)
        theirs = results["published"]["training"].get(name, {})
        their_label = "authors' code"
        if theirs.get("note"):
            their_label += f", {theirs['note']}"
        groups[name] = [
            (their_label, theirs.get("seconds"), OTHER),
            ("reference engine", reference.get("seconds_per_epoch"), REFERENCE),
            ("dualkg", ours.get("seconds_per_epoch"), OURS),
            ("limit: products + memory", least.sum if least else None, LIMIT),
        ]
    return groups


def cpu_bars(device: str, results: dict[str, Any]) -> Bars:
    """For each job: the peers, the reference engine and ours, the slowest first."""
    groups: Bars = {}
    for name, record in tables.in_order(results["training"][device]):
        bars_of_job = []
        for variant, result in record["measured"].items():
            label = tables.label(variant, result)
            if variant == "PyKEEN":
                label += ", a smaller job"
            bars_of_job.append((label, result.get("seconds_per_epoch"), variant_colour(variant)))
        groups[name] = sorted(bars_of_job, key=lambda bar: -(bar[1] or 0))
    return groups


def variant_colour(variant: str) -> str:
    if variant == "reference engine":
        return REFERENCE
    return OURS if variant.startswith("dualkg ") else OTHER


def bars(groups: Bars, title: str) -> Figure:
    """A small chart for each job with its own scale; bars that were not measured are left out."""
    num_bars = max(len(bars_of_job) for bars_of_job in groups.values())
    columns = min(COLUMNS, len(groups))
    num_rows = math.ceil(len(groups) / columns)
    height = 0.6 + num_rows * (0.45 + 0.22 * num_bars)
    figure = Figure(figsize=(5 * columns, height), layout="constrained")
    # Trademarks and generic words of a processor's name would not fit.
    for word in ("(R)", "(TM)", " Processor"):
        title = title.replace(word, "")
    figure.suptitle(title, fontsize=11 if columns == 1 else 12, x=0.01, horizontalalignment="left")
    panels = list(figure.subplots(num_rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.set_axis_off()
    # The last panel of the grid may be empty.
    for axes, (job, bars_of_job) in zip(panels, groups.items(), strict=False):
        measured = [(label, seconds, colour) for label, seconds, colour in bars_of_job if seconds]
        draw_bars(axes, job, measured)
        axes.set_ylim(num_bars - 0.5, -0.6)
    return figure


def draw_bars(axes: Axes, job: str, bars_of_job: list[tuple[str, float, str]]) -> None:
    """Bars from the top, each followed by its number and its name."""
    axes.set_title(job, loc="left", fontweight="bold", fontsize=9)
    longest = max((seconds for _, seconds, _ in bars_of_job), default=1.0)
    for row, (label, seconds, colour) in enumerate(bars_of_job):
        axes.barh(row, seconds, color=colour, height=0.8)
        text = f"{tables.short(seconds)}  {label}"
        axes.text(seconds + longest / 60, row, text, va="center", fontsize=8)
    axes.set_xlim(0, longest * 1.4)


# -- growth ------------------------------------------------------------------


def growth(measured: dict[str, Any], title: str) -> Figure:
    """Time above, memory below, a column for each thing that grows."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    figure.suptitle(
        f"{title}\ndashed: fit to the last three points; grey: in proportion", fontsize=11
    )
    grid = figure.subplots(2, len(fits.AXES), sharey="row", sharex="col", squeeze=False)
    for column, axis in enumerate(fits.AXES):
        points = measured.get(axis, {}).get("points")
        for row, measure in enumerate(("seconds", "mib")):
            axes: Axes = grid[row][column]
            axes.grid(True, which="major", color="#e3e6e8", linewidth=0.6)
            axes.set_axisbelow(True)
            if points:
                draw_fit(axes, axis, points, measure)
        verb = "grow" if axis in ("entities", "triples") else "grows"
        grid[0][column].set_title(f"{axis} {verb}")
        grid[1][column].set_xlabel(UNITS[axis])
    grid[0][0].set_ylabel("seconds an epoch")
    grid[1][0].set_ylabel("memory, MiB")
    return figure


def draw_fit(axes: Axes, axis: str, points: list[dict[str, float]], measure: str) -> None:
    """Points, the fit to the last three, and a line of proportional growth."""
    x = [point[axis] for point in points]
    y = [point[measure] for point in points]
    whole, last = fits.fits_of(axis, points, measure)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(x, [thousands(value) for value in x])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
    axes.minorticks_off()
    if whole.exponent > 0.5:
        proportional = [y[-1] * value / x[-1] for value in x]
        axes.plot(x, proportional, color=OTHER, linewidth=0.8)
    fitted = [last.scale * value**last.exponent for value in x]
    axes.plot(x, fitted, "--", color=LIMIT, linewidth=1.2)
    axes.plot(x, y, "o", color=OURS, markersize=5)
    text = f"x^{whole.exponent:z.2f}, R² {whole.r_squared:.3f}\nlast three: x^{last.exponent:z.2f}"
    frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
    axes.text(0.05, 0.96, text, transform=axes.transAxes, va="top", fontsize=8, bbox=frame)


def thousands(value: float) -> str:
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if value >= 10_000 and value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"

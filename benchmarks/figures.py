"""The pictures of RESULTS.md, from saved results. They need matplotlib."""

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


def draw_all(found: dict[str, Any], folder: Path) -> None:
    """Draw all figures of the results."""
    with mpl.rc_context(STYLE):
        for device, jobs in found["training"].items():
            groups = gpu_bars(device, found) if tables.is_gpu(jobs) else cpu_bars(device, found)
            figure = bars(groups, f"Seconds an epoch on {device}")
            write(figure, folder / tables.picture("training", device, found["training"]))
        for device, axes in found["scaling"].items():
            figure = growth(axes, f"How time and memory of an epoch of ComplEx grow on {device}")
            write(figure, folder / tables.picture("scaling", device, found["scaling"]))


def write(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=160, metadata={"Software": None})


# -- bars --------------------------------------------------------------------

Bars = dict[str, list[tuple[str, float | None, str]]]


def gpu_bars(device: str, found: dict[str, Any]) -> Bars:
    """For each job: the authors' code, the reference engine, ours, and the sum of the limits."""
    groups: Bars = {}
    for name, record in tables.in_order(found["training"][device]):
        ours = record["measured"]["dualkg bf16"]
        plain = record["measured"]["reference engine"]
        batch = record["job"]["batch"]
        ceilings = tables.ceilings_of(device, found)
        least = tables.training_limit(ours, batch, ceilings, bf16=True)
        theirs = found["published"]["training"].get(name, {})
        groups[name] = [
            (
                ", ".join(["authors' code", *filter(None, [theirs.get("note")])]),
                theirs.get("seconds"),
                OTHER,
            ),
            ("reference engine", plain.get("seconds_per_epoch"), REFERENCE),
            ("dualkg", ours.get("seconds_per_epoch"), OURS),
            ("limit: products + memory", least.sum if least else None, LIMIT),
        ]
    return groups


def cpu_bars(device: str, found: dict[str, Any]) -> Bars:
    """For each job: the peers, the reference engine and ours."""
    colours = {
        "reference engine": REFERENCE,
        **{
            f"dualkg {kind}{order}": OURS
            for kind in ("float32", "bf16")
            for order in ("", ", grouped by query")
        },
    }
    groups: Bars = {}
    for name, record in tables.in_order(found["training"][device]):
        measured = {
            label: one.get("seconds_per_epoch") for label, one in record["measured"].items()
        }
        ordered = sorted(measured.items(), key=lambda item: -(item[1] or 0))
        groups[name] = [
            (
                tables.label(label, record["measured"][label])
                + (", a smaller job" if label == "PyKEEN" else ""),
                seconds,
                colours.get(label, OTHER),
            )
            for label, seconds in ordered
        ]
    return groups


def bars(groups: Bars, title: str) -> Figure:
    """A small chart for each job, each with its own scale; jobs that were not measured are left
    out.
    """
    num_bars = max(len(lines) for lines in groups.values())
    columns = min(COLUMNS, len(groups))
    num_rows = -(-len(groups) // columns)
    figure = Figure(
        figsize=(5 * columns, 0.6 + num_rows * (0.45 + 0.22 * num_bars)), layout="constrained"
    )
    figure.suptitle(title, fontsize=11 if columns == 1 else 12, x=0.01, horizontalalignment="left")
    grid = list(figure.subplots(num_rows, columns, squeeze=False).flat)
    for place in grid:
        place.set_axis_off()
    for place, (job, lines) in zip(grid, groups.items(), strict=False):
        draw_bars(
            place, job, [(label, seconds, colour) for label, seconds, colour in lines if seconds]
        )
        place.set_ylim(num_bars - 0.5, -0.6)
    return figure


def draw_bars(place: Axes, job: str, lines: list[tuple[str, float, str]]) -> None:
    """Bars from the top, each followed by its number and its name."""
    place.set_title(job, loc="left", fontweight="bold", fontsize=9)
    longest = max((seconds for _, seconds, _ in lines), default=1.0)
    for row, (label, seconds, colour) in enumerate(lines):
        place.barh(row, seconds, color=colour, height=0.8)
        place.text(
            seconds + longest / 60,
            row,
            f"{tables.short(seconds)}  {label}",
            va="center",
            fontsize=8,
        )
    place.set_xlim(0, longest * 1.4)


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
            place: Axes = grid[row][column]
            place.grid(True, which="major", color="#e3e6e8", linewidth=0.6)
            place.set_axisbelow(True)
            if points:
                draw_fit(place, axis, points, measure)
        grid[0][column].set_title(
            f"{axis} grow" if axis in ("entities", "triples") else f"{axis} grows"
        )
        grid[1][column].set_xlabel(UNITS[axis])
    grid[0][0].set_ylabel("seconds an epoch")
    grid[1][0].set_ylabel("memory, MiB")
    return figure


def draw_fit(place: Axes, axis: str, points: list[dict[str, float]], measure: str) -> None:
    x = [point[axis] for point in points]
    y = [point[measure] for point in points]
    whole, last = fits.fits_of(axis, points, measure)
    place.set(xscale="log", yscale="log")
    place.set_xticks(x, [thousands(value) for value in x])
    place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    place.yaxis.set_major_formatter(lambda value, _: thousands(value))
    place.minorticks_off()
    if whole.exponent > 0.5:
        place.plot(x, [y[-1] * value / x[-1] for value in x], color=OTHER, linewidth=0.8)
    place.plot(
        x, [last.scale * value**last.exponent for value in x], "--", color=LIMIT, linewidth=1.2
    )
    place.plot(x, y, "o", color=OURS, markersize=5)
    text = f"x^{whole.exponent:z.2f}, R² {whole.r_squared:.3f}\nlast three: x^{last.exponent:z.2f}"
    frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
    place.text(0.05, 0.96, text, transform=place.transAxes, va="top", fontsize=8, bbox=frame)


def thousands(value: float) -> str:
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if value >= 10_000 and value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"

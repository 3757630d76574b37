"""A reliability diagram: what was found against what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float, float]  # predicted, found, and how far apart chance alone would leave the two on average
TICKS = {0.001: "0.1%", 0.01: "1%", 0.1: "10%", 1.0: "100%"}
WIDE = 2.5  # of 100 bins whose probabilities are right, about 95 lie within so many times what chance leaves


def draw_reliability(panels: Mapping[str, Sequence[Point]], *, graph: str = "", ece: float | None = None) -> Drawing:
    """Panel → its bins. On the diagonal probabilities hold; both axes are logarithmic, since most are small."""
    if not panels or not all(panels.values()):
        raise RequestError("A reliability diagram needs a panel with a bin in it, and none came.")
    least = min(value for points in panels.values() for point in points for value in point[:2] if value > 0)
    low = max(min(least / 1.6, 0.008), 1e-7)
    with style.in_style():
        figure, sheets = style.sheet(5.2 if len(panels) == 1 else 8.6 / len(panels) + 0.4, columns=len(panels))
        for axes, (title, points) in zip(sheets, panels.items(), strict=True):
            style.entitle(axes, title)
            _axes(axes, low)
            _points(axes, sorted(points), low)
        sheets[0].set_ylabel("share found true")
    return Drawing(figure, _caption(graph, ece))


def _axes(axes: Axes, low: float) -> None:
    from matplotlib.ticker import NullLocator

    axes.set(xscale="log", yscale="log", xlim=(low, 1.05), ylim=(low, 1.05), xlabel="probability predicted")
    ticks = [place for place in TICKS if place >= low]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(ticks, [TICKS[place] for place in ticks])
        axis.grid(True)
    axes.set_aspect("equal")
    axes.spines["left"].set_visible(False)


def _points(axes: Axes, points: Sequence[Point], low: float) -> None:
    axes.plot([low, 1], [low, 1], color=style.QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
    predicted = [point[0] for point in points]
    bounds = [[max(low, place - WIDE * chance), min(1.0, place + WIDE * chance)] for place, _, chance in points]
    axes.fill_between(
        predicted, [low for low, _ in bounds], [high for _, high in bounds], color=style.FAINT, linewidth=0, zorder=1
    )
    found = [max(point[1], low) for point in points]
    axes.plot(predicted, found, color=style.ACCENT, linewidth=1.4, zorder=3)
    for number, point in enumerate(points):  # a bin in which nothing was true stands on the floor, hollow
        face = style.ACCENT if point[1] > 0 else style.PAPER
        axes.scatter(
            predicted[number], found[number], s=34, color=face, edgecolors=style.ACCENT, zorder=4, clip_on=False
        )


def _caption(graph: str, ece: float | None) -> str:
    of = f" of {graph}" if graph else ""
    error = f" Expected calibration error: {ece:.4f}." if ece is not None else ""
    return (
        f"Candidates{of} in bins of equal mass: the share of each that is true, against the probability predicted. "
        f"On the dashed line the two agree; the grey band is what chance alone would do.{error}"
    )

"""What newcomers are worth against the triples that they were placed by, beside training anew with those triples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from dualkg.analysis.extra import needing
from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.answers.newcomers.study import Measured, counted
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "asking": ("Asked about", "questions that give a newcomer"),
    "asked_for": ("Asked for", "questions that it answers"),
    "others": ("The others", "questions of the known alone"),
}
WAYS = {"extended": ("placed", style.ACCENT, -0.05), "retrained": ("trained anew", style.CONTRAST, 0.05)}


def draw_newcomers(found: Sequence[Measured], *, graph: str = "") -> Drawing:
    """A line for each way over the triples given, a dot for each seed; a panel for each kind of question."""
    if not any(one.way in WAYS for one in found):
        raise RequestError("A figure of newcomers needs some that were placed or trained, and none came.")
    counts = sorted({_number(one) for one in found if one.way in WAYS})
    top = max(getattr(one, view).mrr for one in found for view in PANELS)
    with needing("matplotlib", to="A figure"):
        from matplotlib.ticker import MultipleLocator
    with style.in_style():
        figure, panels = style.sheet(3.7, columns=len(PANELS), gap=0.03, sharey=True)
        for axes, (view, titles) in zip(panels, PANELS.items(), strict=True):
            style.entitle(axes, *titles)
            _lines(axes, found, view, counts)
            axes.set_xticks(range(len(counts)), ["all" if count == float("inf") else f"{count:g}" for count in counts])
            axes.set(xlim=(-0.3, len(counts) - 0.7), ylim=(0, 1.08 * top), xlabel="triples of each that are given")
            axes.yaxis.grid(True)
            axes.spines["left"].set_visible(False)
        panels[0].set_ylabel("MRR")
        panels[0].yaxis.set_major_locator(MultipleLocator(0.1))
        panels[1].legend(loc="upper left")
    return Drawing(figure, _caption(found, graph))


def _lines(axes: Axes, found: Sequence[Measured], view: str, counts: Sequence[float]) -> None:
    for way, (name, colour, aside) in WAYS.items():
        seeds = {place + aside: list(_values(found, way, view, count)) for place, count in enumerate(counts)}
        seeds = {place: values for place, values in seeds.items() if values}
        style.line_of_seeds(axes, seeds, name=name, colour=colour)
    if at_mean := [getattr(one, view).mrr for one in found if one.way == "mean"]:
        place = fmean(at_mean)
        axes.axhline(place, color=style.QUIET, linewidth=0.8, linestyle=(0, (4, 3)), label="at the mean", zorder=2)


def _values(found: Sequence[Measured], way: str, view: str, count: float) -> Iterator[float]:
    return (getattr(one, view).mrr for one in found if one.way == way and _number(one) == count)


def _number(one: Measured) -> float:
    return float("inf") if one.given is None else one.given


def _caption(found: Sequence[Measured], graph: str) -> str:
    return (
        f"{counted(found)}{' of ' * bool(graph)}{graph} withheld, and placed by so many of their "
        f"triples, beside training anew with those triples. A dot is a seed. Dashed: newcomers at the mean of all rows."
    )

"""MRR against the share of zeros (Figure 3 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Mapping[float, float]  # share of zeros → MRR
FIXED = {"DURA": style.ACCENT, "N3": style.CONTRAST, "": "#7a8791"}  # by the end of a line's name: CP-DURA, CP-N3, CP
OTHERS = ("#3a9a7a", "#8a5aa8", "#b04a5a", "#5b6fc4", "#9a8330", "#2f3b46")


def draw_sparsity(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]],
    *,
    published: Mapping[str, Curve] | None = None,
    graph: str = "",
) -> Drawing:
    """Panel → line → one curve a seed. A regularizer has one colour in all panels.

    A line is the mean over its seeds, the band their least and greatest. `published` has points by the lines' names.
    """
    _check(panels)
    published = published or {}
    colours = _colours(panels)
    top = 1.12 * max(
        mrr for lines in panels.values() for curves in lines.values() for one in curves for mrr in one.values()
    )
    with style.in_style():
        figure, sheets = style.sheet(3.7 if len(panels) > 1 else 4.4, columns=len(panels), gap=0.06, sharey=True)
        for axes, (title, lines) in zip(sheets, panels.items(), strict=True):
            style.entitle(axes, title)
            axes.set(xlim=(0, 0.95), ylim=(0, top), xlabel="entity entries set to zero")
            axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 0.95])
            axes.yaxis.grid(True)
            axes.spines["left"].set_visible(False)
            axes.locator_params(axis="y", nbins=5)
            _lines(axes, lines, published, colours)
        sheets[0].set_ylabel("MRR")
    marked = any(name in published for lines in panels.values() for name in lines)
    return Drawing(figure, _caption(panels, graph, published=marked))


def _lines(
    axes: Axes, lines: Mapping[str, Sequence[Curve]], published: Mapping[str, Curve], colours: Mapping[str, str]
) -> None:
    from matplotlib.lines import Line2D

    ends = []
    for name, curves in lines.items():
        colour, shares = colours[name], sorted(curves[0])
        values = np.array([[one[share] for share in shares] for one in curves])
        axes.plot(shares, values.mean(0), color=colour, linewidth=1.8, clip_on=False, zorder=3)
        if len(curves) > 1:
            axes.fill_between(shares, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
        ends.append(float(values.mean(0)[-1]))
        points = published.get(name, {})
        axes.scatter(
            list(points),
            list(points.values()),
            marker="D",
            s=30,
            facecolors=style.PAPER,
            edgecolors=colour,
            linewidths=1.3,
            zorder=4,
            clip_on=False,
        )
    if any(name in published for name in lines):
        diamond: dict[str, Any] = {"markerfacecolor": style.PAPER, "markeredgecolor": style.QUIET, "markersize": 5.5}
        axes.legend(
            handles=[Line2D([], [], linestyle="", marker="D", label="published", **diamond)],
            loc="lower left",
            labelcolor=style.QUIET,
            handletextpad=0.2,
        )
    low, high = axes.get_ylim()
    gap = 0.068 * (high - low)
    places = style.spaced(ends, gap, least=low + gap / 2)
    for name, end, place in zip(lines, ends, places, strict=True):
        bold: dict[str, Any] = {"color": colours[name], "fontweight": "bold", "fontsize": 8.5}
        axes.plot([0.95, 0.985], [end, place], color=colours[name], linewidth=0.7, clip_on=False)
        axes.text(0.995, place, name, verticalalignment="center", **bold)


def _colours(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> dict[str, str]:
    """A colour for every line by what its name ends in, or where a panel has that twice by the whole name."""
    ends = {name: name.partition("-")[2] for lines in panels.values() for name in lines}
    if any(len({ends[name] for name in lines}) < len(lines) for lines in panels.values()):
        ends = {name: name for name in ends}
    free = [end for end in dict.fromkeys(ends.values()) if end not in FIXED]
    if len(free) > len(OTHERS):
        raise RequestError(f"There are {len(OTHERS)} colours left for lines to be told apart; {len(free)} are needed.")
    colours = FIXED | dict(zip(free, OTHERS, strict=False))
    return {name: colours[end] for name, end in ends.items()}


def _check(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> None:
    if not panels or not all(panels.values()):
        raise RequestError("A sparsity figure needs a panel with a line in it, and none came.")
    for lines in panels.values():
        for name, curves in lines.items():
            if not curves or any(sorted(one) != sorted(curves[0]) for one in curves):
                raise RequestError(
                    f"The seeds of {name} must have the same shares of zeros, so that a mean can be taken."
                )


def _caption(panels: Mapping[str, Mapping[str, Sequence[Curve]]], graph: str, *, published: bool) -> str:
    seeds = {len(curves) for lines in panels.values() for curves in lines.values()}
    several = max(seeds) > 1
    count = f"{max(seeds)}" if len(seeds) == 1 else f"up to {max(seeds)}"
    return (
        f"MRR{' on ' * bool(graph)}{graph} when the smallest entries of the entity embeddings are set to zero."
        + (f" A line is the mean of {count} seeds, its band the least and the greatest." if several else "")
        + (" Diamonds are the numbers of the paper." if published else "")
    )

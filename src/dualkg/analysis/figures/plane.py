"""The tails of one query where models of dim 2 have them (Figure 1 of the paper, measured)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.analysis.plane import FEWEST, MOST, Plane
from dualkg.analysis.projection import Vectors
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

GREY, MANY = "#aab4bc", 2000
DOTS: dict[str, Any] = {"color": style.ACCENT, "edgecolors": style.PAPER, "linewidths": 0.6}
DASHES: dict[str, Any] = {"color": style.QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}


def draw_planes(planes: Mapping[str, Plane], *, graph: str = "") -> Drawing:
    """Panels side by side on one scale, by the models' names: h R as an arrow, its tails, other entities grey."""
    if len({(one.query.head, one.query.relation) for one in planes.values()}) != 1:
        raise RequestError("The panels compare models on one query, so all of them show the same one.")
    frame = _frame(planes)
    with style.in_style():
        figure, panels = style.squares(len(planes), legend_rows=1)
        for axes, (title, plane) in zip(panels, planes.items(), strict=True):
            below = f"tails from their centroid {plane.lengths.scatter:.2f} · from hR {plane.lengths.gap:.2f}"
            style.entitle(axes, title, below)
            style.without_axes(axes)
            axes.set(xlim=frame[:, 0], ylim=frame[:, 1])
            _panel(axes, plane, frame)
        handles = _legend(next(iter(planes.values())).query.name)
        figure.legend(handles=handles, loc="lower center", ncols=3, handletextpad=0.5, columnspacing=2.5)
    return Drawing(figure, _caption(planes, graph, frame))


def _panel(axes: Axes, plane: Plane, frame: Vectors) -> None:
    from matplotlib.patches import Circle

    axes.axhline(0, color=style.FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=style.FAINT, linewidth=0.8, zorder=0)
    # Of very many, density shows, and in the SVG they are one image and not a megabyte of dots.
    many = len(plane.others) > MANY
    grey: dict[str, Any] = {"s": 3 if many else 9, "alpha": 0.25 if many else 0.6, "rasterized": many}
    axes.scatter(plane.others[:, 0], plane.others[:, 1], color=GREY, linewidths=0, zorder=1, **grey)
    centre = plane.tails.mean(0)
    axes.add_patch(Circle(tuple(centre), plane.lengths.scatter, facecolor=style.ACCENT, alpha=0.12, linewidth=0))
    if plane.mapped_head.any():
        _mapped_head(axes, plane.mapped_head, centre, frame)
    axes.scatter(plane.tails[:, 0], plane.tails[:, 1], s=26, zorder=3, **DOTS)


def _mapped_head(axes: Axes, mapped_head: Vectors, centre: Vectors, frame: Vectors) -> None:
    """h R as an arrow, and where scores are that of the tails' centroid: the line through it, across h R."""
    x, y = mapped_head
    axes.axline(tuple(centre), (centre[0] - y, centre[1] + x), zorder=1, **DASHES)
    tip = mapped_head * _share_inside(mapped_head, frame)
    arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.5", "color": style.CONTRAST, "linewidth": 1.8}
    axes.annotate("", tuple(tip), (0, 0), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0}, zorder=4)
    # Past the head of the arrow, or where the frame is near, beside it.
    along = mapped_head / np.linalg.norm(mapped_head)
    near = (np.abs(tip - frame) < 0.08 * (frame[1] - frame[0])).any()
    beyond = 12 * np.array([along[1], -along[0]]) - 14 * along if near else 11 * along
    middle: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center", "zorder": 4}
    bold: dict[str, Any] = {"color": style.CONTRAST, "fontweight": "bold", **middle}
    axes.annotate("hR", tuple(tip), tuple(beyond), textcoords="offset points", **bold)


def _legend(query: str) -> list[Line2D]:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"linestyle": "", "marker": "o"}
    return [
        Line2D([], [], color=style.ACCENT, markersize=5.5, label=f"answers to {query}", **dot),
        Line2D([], [], color=GREY, markersize=3.5, label="other entities", **dot),
        Line2D([], [], label="equal scores", **DASHES),
    ]


def _frame(planes: Mapping[str, Plane]) -> Vectors:
    """Lower and upper corner of the square that all panels show: tails, nearly all others, and arrows not too long."""
    inside = [np.vstack([one.tails, np.zeros(2)]) for one in planes.values()]
    inside += [np.quantile(one.others, [0.01, 0.99], axis=0) for one in planes.values() if len(one.others)]
    small = _square(np.vstack(inside))
    allowed = small.mean(0) + 1.6 * (small - small.mean(0))
    inside += [one.mapped_head[None] for one in planes.values() if _share_inside(one.mapped_head, allowed) == 1]
    return _square(np.vstack(inside))


def _square(points: Vectors) -> Vectors:
    """Lower and upper corner of a square around points, with a margin."""
    low, high = points.min(0), points.max(0)
    half = 1.16 * float((high - low).max()) / 2
    corners: Vectors = (low + high) / 2 + np.array([[-half], [half]])
    return corners


def _share_inside(arrow: Vectors, frame: Vectors) -> float:
    """How much of an arrow from the origin is inside a frame around it."""
    limits = np.where(arrow > 0, frame[1], frame[0])
    shares = np.divide(limits, arrow, out=np.full(2, np.inf), where=arrow != 0)
    return float(min(1.0, shares.min()))


def _num_outside(plane: Plane, frame: Vectors) -> int:
    return int(((plane.others < frame[0]) | (plane.others > frame[1])).any(1).sum())


def _caption(planes: Mapping[str, Plane], graph: str, frame: Vectors) -> str:
    outside = {name: _num_outside(plane, frame) for name, plane in planes.items()}
    lost = ", ".join(
        f"{count:,} {'entity' if count == 1 else 'entities'} of {name}" for name, count in outside.items() if count
    )
    long = [name for name, plane in planes.items() if _share_inside(plane.mapped_head, frame) < 1]
    cut = f" The arrow of {' and '.join(long)} goes on beyond the frame." if long else ""
    first = next(iter(planes.values()))
    typical = "; ".join(f"{name} {one.typical.scatter:.2f} and {one.typical.gap:.2f}" for name, one in planes.items())
    return (
        f"The {len(first.tails)} tails of ({first.query.name}, ?){' in ' * bool(graph)}{graph} where models of dim 2 "
        f"have them, the mapped head hR, and all other entities in grey. On the dashed line scores are equal. Unit: "
        f"the mean distance of all entities from their centroid, in each model. The disc has the tails' mean distance "
        f"from their centroid as its radius. Median of the {first.num_queries:,} queries with {FEWEST} to {MOST} tails "
        f"in train, from the centroid and from hR: {typical}.{cut}{f' Outside the frame: {lost}.' if lost else ''}"
    )

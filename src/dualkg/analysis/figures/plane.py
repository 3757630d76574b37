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
            _panel(axes, plane)
        handles = panels[0].get_legend_handles_labels()[0][::-1]
        figure.legend(handles=handles, loc="lower center", ncols=3, handletextpad=0.5, columnspacing=2.5)
    outside = {name: _num_outside(plane, frame) for name, plane in planes.items()}
    return Drawing(figure, _caption(planes, graph, outside))


def _panel(axes: Axes, plane: Plane) -> None:
    from matplotlib.patches import Circle

    axes.axhline(0, color=style.FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=style.FAINT, linewidth=0.8, zorder=0)
    small = 9 if len(plane.others) < 2000 else 3
    axes.scatter(
        plane.others[:, 0],
        plane.others[:, 1],
        s=small,
        color="#aab4bc",
        alpha=0.6,
        linewidths=0,
        zorder=1,
        label="other entities",
    )
    centre = plane.tails.mean(0)
    axes.add_patch(Circle(tuple(centre), plane.lengths.scatter, facecolor=style.ACCENT, alpha=0.12, linewidth=0))
    if plane.mapped_head.any():
        _mapped_head(axes, plane.mapped_head, centre)
    answers = f"answers to {plane.query.name}"
    dots: dict[str, Any] = {"color": style.ACCENT, "edgecolors": style.PAPER, "linewidths": 0.6}
    axes.scatter(plane.tails[:, 0], plane.tails[:, 1], s=26, zorder=3, label=answers, **dots)


def _mapped_head(axes: Axes, mapped_head: Vectors, centre: Vectors) -> None:
    """h R as an arrow, and where scores are that of the tails' centroid: the line through it, across h R."""
    x, y = mapped_head
    dashes: dict[str, Any] = {"color": style.QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}
    axes.axline(tuple(centre), (centre[0] - y, centre[1] + x), zorder=1, label="equal scores", **dashes)
    arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.5", "color": style.CONTRAST, "linewidth": 1.8}
    axes.annotate("", (x, y), (0, 0), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0}, zorder=4)
    beyond = 11 * mapped_head / np.linalg.norm(mapped_head)  # points, past the head of the arrow
    middle: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center", "zorder": 4}
    bold: dict[str, Any] = {"color": style.CONTRAST, "fontweight": "bold", **middle}
    axes.annotate("hR", (x, y), tuple(beyond), textcoords="offset points", **bold)


def _frame(planes: Mapping[str, Plane]) -> Vectors:
    """Lower and upper corner of the square that all panels show: arrows, tails, and nearly all other entities."""
    inside = [np.vstack([one.tails, one.mapped_head, np.zeros(2)]) for one in planes.values()]
    inside += [np.quantile(one.others, [0.01, 0.99], axis=0) for one in planes.values() if len(one.others)]
    low, high = np.vstack(inside).min(0), np.vstack(inside).max(0)
    half = 1.16 * float((high - low).max()) / 2
    corners: Vectors = (low + high) / 2 + np.array([[-half], [half]])
    return corners


def _num_outside(plane: Plane, frame: Vectors) -> int:
    return int(((plane.others < frame[0]) | (plane.others > frame[1])).any(1).sum())


def _caption(planes: Mapping[str, Plane], graph: str, outside: Mapping[str, int]) -> str:
    lost = ", ".join(f"{count:,} of {name}" for name, count in outside.items() if count)
    first = next(iter(planes.values()))
    typical = "; ".join(f"{name} {one.typical.scatter:.2f} and {one.typical.gap:.2f}" for name, one in planes.items())
    return (
        f"The {len(first.tails)} tails of ({first.query.name}, ?){' in ' * bool(graph)}{graph} where models of dim 2 "
        f"have them, the mapped head hR, and all other entities in grey. On the dashed line scores are equal. Unit: "
        f"the mean distance of all entities from their centroid, in each model. The disc has the tails' mean distance "
        f"from their centroid as its radius. Median of the {first.num_queries:,} queries with {FEWEST} to {MOST} tails in train, from the "
        f"centroid and from hR: {typical}.{f' Outside the frame: {lost}.' if lost else ''}"
    )

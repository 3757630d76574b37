"""The answers to some queries in the plane, one panel a model (Figure 2 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.analysis.projection import SHARED, Projection
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.lines import Line2D


def draw_projections(projections: Mapping[str, Projection], *, graph: str = "") -> Drawing:
    """Panels side by side, by the models' names; a colour is a query, a ring an entity that answers several."""
    names = _names_of(projections)
    if len(names) > len(style.TEN_COLOURS):
        raise RequestError(
            f"There are {len(style.TEN_COLOURS)} colours that can be told apart; {len(names)} queries came."
        )
    with style.in_style():
        handles = _legend(names, ring=any(found.num_shared for found in projections.values()))
        figure, panels = style.squares(len(projections), legend_rows=(len(handles) + 1) // 2)
        for axes, (title, found) in zip(panels, projections.items(), strict=True):
            style.entitle(axes, title, f"silhouette {found.silhouettes['euclidean'].mean:.3f}")
            style.without_axes(axes)
            axes.margins(0.04)
            x, y = found.positions.T
            for number, colour in enumerate(style.TEN_COLOURS[: len(names)]):
                own = found.groups == number
                axes.scatter(x[own], y[own], s=15, color=colour, alpha=0.9, linewidths=0.3, edgecolors=style.PAPER)
            both = found.groups == SHARED
            axes.scatter(x[both], y[both], s=15, facecolors=style.PAPER, linewidths=0.9, edgecolors=style.INK)
        figure.legend(handles=handles, loc="lower center", ncols=2, handletextpad=0.4, columnspacing=2.5)
    return Drawing(figure, _caption(projections, graph))


def _legend(names: list[str], *, ring: bool) -> list[Line2D]:
    from matplotlib.lines import Line2D

    hollow: dict[str, Any] = {"markerfacecolor": style.PAPER, "markeredgecolor": style.INK, "markersize": 5}
    looks: list[dict[str, Any]] = [{"color": colour, "markersize": 6} for colour in style.TEN_COLOURS[: len(names)]]
    labels = [*names, "answers two or more"] if ring else names
    return [
        Line2D([], [], linestyle="", marker="o", label=label, **look)
        for label, look in zip(labels, [*looks, hollow], strict=False)
    ]


def _names_of(projections: Mapping[str, Projection]) -> list[str]:
    """The queries' names, which must be the same in all panels: there is one legend."""
    found = [[query.name for query in one.queries] for one in projections.values()]
    if not found or any(names != found[0] for names in found):
        raise RequestError("All panels have one legend, so they show the same queries in the same order.")
    return found[0]


def _caption(projections: Mapping[str, Projection], graph: str) -> str:
    first = next(iter(projections.values()))
    by_cosine = ", ".join(f"{name} {one.silhouettes['cosine'].mean:.3f}" for name, one in projections.items())
    count = first.num_shared
    who = "the 1 entity that answers" if count == 1 else f"one of the {count} entities that answer"
    shared = f"A ring is {who} two or more of the queries; the silhouette leaves rings out. " if count else ""
    return (
        f"Answers to {len(first.queries)} queries{' of ' * bool(graph)}{graph}, {len(first.entities):,} entities, by "
        f"t-SNE of their embeddings as tails (perplexity {first.perplexity:g}). Each entity is one point. {shared}The "
        f"silhouette is of the embeddings themselves, by Euclidean distance; by cosine it is {by_cosine}."
    )

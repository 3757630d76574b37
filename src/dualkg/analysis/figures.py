"""The answers to some queries in the plane, one panel a model (Figure 2 of the paper)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dualkg.analysis.projection import SHARED, Projection
from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


INK, QUIET, FAINT, PAPER = "#1f2933", "#6b7782", "#e4e8eb", "#ffffff"
ACCENT, CONTRAST = "#1b6ca8", "#d9822b"
# Ten that stay apart for colour-blind eyes (Petroff, Accessible color sequences for data visualization, 2021).
TEN_COLOURS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
WIDTH = 8.0  # inches: 800 pixels at 100 dots an inch
DOTS_PER_INCH = 200
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the first comes with matplotlib, so it is there
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 9,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dualkg",
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and what is to be said below it."""

    figure: Figure
    caption: str

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure as PNG and as SVG, `path` with each ending; the same figure makes the same bytes."""
        path = Path(path)
        stem = path.stem if path.suffix in (".png", ".svg") else path.name
        targets = [path.with_name(f"{stem}.{kind}") for kind in ("png", "svg")]
        about: list[dict[str, Any]] = [
            {"Software": None, "Description": self.caption},
            {"Date": None, "Creator": None, "Description": self.caption},
        ]
        with in_style():
            for target, metadata in zip(targets, about, strict=True):
                with atomic_write(target) as fresh:
                    self.figure.savefig(fresh, format=target.suffix[1:], dpi=DOTS_PER_INCH, metadata=metadata)
        return targets


@contextmanager
def in_style() -> Iterator[None]:
    """Draw as the house does, whatever the user has set for pictures of their own."""
    with optional_import("matplotlib", purpose="A figure"):
        import matplotlib.style
    with matplotlib.style.context(["default", STYLE]):
        yield


def squares(columns: int, *, legend_rows: int) -> tuple[Figure, list[Axes]]:
    """A white figure of square panels from left to right, with room for titles above and for a legend below."""
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.figure import Figure
    margin, between, above, below = 0.1, 0.2, 0.58, 0.3 + 0.195 * legend_rows
    side = min((WIDTH - 2 * margin - between * (columns - 1)) / columns, 5.5)
    height = below + side + above
    left = (WIDTH - columns * side - between * (columns - 1)) / 2
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    corners = [left + (side + between) * column for column in range(columns)]
    return figure, [figure.add_axes((x / WIDTH, below / height, side / WIDTH, side / height)) for x in corners]


def sheet(height: float, *, columns: int = 1, gap: float = 0.02, **choices: Any) -> tuple[Figure, list[Axes]]:
    """A white figure as wide as the page, and its panels from left to right."""
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=gap)
    figure = Figure(figsize=(WIDTH, height), layout=layout, facecolor=PAPER)
    panels = figure.subplots(1, columns, squeeze=False, **choices)
    return figure, list(panels[0])


def entitle(axes: Axes, title: str, below: str = "") -> None:
    """A panel's title at its left, and below it in quiet ink what is to be read first."""
    axes.set_title(title, pad=22 if below else 8)
    if below:
        axes.annotate(below, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=QUIET)


def line_of_seeds(axes: Axes, values: Mapping[float, Sequence[float]], *, name: str, colour: str) -> None:
    """Place → a value for each seed: a line through their means, and a dot for each."""
    axes.plot(list(values), [fmean(some) for some in values.values()], color=colour, linewidth=1.8, label=name)
    for place, some in values.items():
        axes.scatter([place] * len(some), some, s=16, color=colour, zorder=4, clip_on=False)


def without_axes(axes: Axes) -> None:
    """A panel whose coordinates mean nothing: a faint frame and no numbers."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT, linewidth=0.8)


def spaced(wanted: list[float], gap: float, *, least: float) -> list[float]:
    """Places at least `gap` apart and not below `least`, in the order of the wanted ones and as near them as can be."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    groups: list[list[int]] = []
    centres: list[float] = []
    for place in order:
        groups.append([place])
        centres.append(wanted[place])
        while len(groups) > 1 and centres[-1] - centres[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            merged = groups.pop(-2) + groups.pop()
            del centres[-2:]
            groups.append(merged)
            centres.append(sum(wanted[one] for one in merged) / len(merged))
    places = dict[int, float]()
    for centre, group in zip(centres, groups, strict=True):
        for number, place in enumerate(group):
            places[place] = centre + gap * (number - (len(group) - 1) / 2)
    for number, place in enumerate(order):
        places[place] = max(places[place], least + gap * number)
    return [places[place] for place in range(len(wanted))]


def draw_projections(projections: Mapping[str, Projection], *, graph: str = "") -> Drawing:
    """Panels side by side, by the models' names; a colour is a query, a ring an entity that answers several."""
    names = _names_of(projections)
    if len(names) > len(TEN_COLOURS):
        raise RequestError(f"There are {len(TEN_COLOURS)} colours that can be told apart; {len(names)} queries came.")
    with in_style():
        handles = _legend(names, ring=any(found.num_shared for found in projections.values()))
        figure, panels = squares(len(projections), legend_rows=(len(handles) + 1) // 2)
        for axes, (title, found) in zip(panels, projections.items(), strict=True):
            entitle(axes, title, f"silhouette {found.silhouettes['euclidean'].mean:.3f}")
            without_axes(axes)
            axes.margins(0.04)
            x, y = found.positions.T
            for number, colour in enumerate(TEN_COLOURS[: len(names)]):
                own = found.groups == number
                axes.scatter(x[own], y[own], s=15, color=colour, alpha=0.9, linewidths=0.3, edgecolors=PAPER)
            both = found.groups == SHARED
            axes.scatter(x[both], y[both], s=15, facecolors=PAPER, linewidths=0.9, edgecolors=INK)
        figure.legend(handles=handles, loc="lower center", ncols=2, handletextpad=0.4, columnspacing=2.5)
    return Drawing(figure, _projection_caption(projections, graph))


def _legend(names: list[str], *, ring: bool) -> list[Line2D]:
    from matplotlib.lines import Line2D

    hollow: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgecolor": INK, "markersize": 5}
    looks: list[dict[str, Any]] = [{"color": colour, "markersize": 6} for colour in TEN_COLOURS[: len(names)]]
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


def _projection_caption(projections: Mapping[str, Projection], graph: str) -> str:
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


Point = tuple[float, float, float]  # predicted, found, and how far apart chance alone would leave the two on average
TICKS = {0.001: "0.1%", 0.01: "1%", 0.1: "10%", 1.0: "100%"}
WIDE = 2.5  # of 100 bins whose probabilities are right, about 95 lie within so many times what chance leaves


def draw_reliability(panels: Mapping[str, Sequence[Point]], *, graph: str = "", ece: float | None = None) -> Drawing:
    """Panel → its bins. On the diagonal probabilities hold; both axes are logarithmic, since most are small."""
    if not panels or not all(panels.values()):
        raise RequestError("A reliability diagram needs a panel with a bin in it, and none came.")
    least = min(value for points in panels.values() for point in points for value in point[:2] if value > 0)
    low = max(min(least / 1.6, 0.008), 1e-7)
    with in_style():
        figure, sheets = sheet(5.2 if len(panels) == 1 else 8.6 / len(panels) + 0.4, columns=len(panels))
        for axes, (title, points) in zip(sheets, panels.items(), strict=True):
            entitle(axes, title)
            _axes(axes, low)
            _points(axes, sorted(points), low)
        sheets[0].set_ylabel("share found true")
    return Drawing(figure, _reliability_caption(graph, ece))


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
    axes.plot([low, 1], [low, 1], color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
    predicted = [point[0] for point in points]
    bounds = [[max(low, place - WIDE * chance), min(1.0, place + WIDE * chance)] for place, _, chance in points]
    axes.fill_between(
        predicted, [low for low, _ in bounds], [high for _, high in bounds], color=FAINT, linewidth=0, zorder=1
    )
    found = [max(point[1], low) for point in points]
    axes.plot(predicted, found, color=ACCENT, linewidth=1.4, zorder=3)
    for number, point in enumerate(points):  # a bin in which nothing was true stands on the floor, hollow
        face = ACCENT if point[1] > 0 else PAPER
        axes.scatter(predicted[number], found[number], s=34, color=face, edgecolors=ACCENT, zorder=4, clip_on=False)


def _reliability_caption(graph: str, ece: float | None) -> str:
    of = f" of {graph}" if graph else ""
    error = f" Expected calibration error: {ece:.4f}." if ece is not None else ""
    return (
        f"Candidates{of} in bins of equal mass: the share of each that is true, against the probability predicted. "
        f"On the dashed line the two agree; the grey band is what chance alone would do.{error}"
    )


Curve = Mapping[float, float]  # share of zeros → MRR
FIXED = {"DURA": ACCENT, "N3": CONTRAST, "": "#7a8791"}  # by the end of a line's name: CP-DURA, CP-N3, CP
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
    with in_style():
        figure, sheets = sheet(3.7 if len(panels) > 1 else 4.4, columns=len(panels), gap=0.06, sharey=True)
        for axes, (title, lines) in zip(sheets, panels.items(), strict=True):
            entitle(axes, title)
            axes.set(xlim=(0, 0.95), ylim=(0, top), xlabel="entity entries set to zero")
            axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 0.95])
            axes.yaxis.grid(True)
            axes.spines["left"].set_visible(False)
            axes.locator_params(axis="y", nbins=5)
            _lines(axes, lines, published, colours)
        sheets[0].set_ylabel("MRR")
    marked = any(name in published for lines in panels.values() for name in lines)
    return Drawing(figure, _sparsity_caption(panels, graph, published=marked))


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
            facecolors=PAPER,
            edgecolors=colour,
            linewidths=1.3,
            zorder=4,
            clip_on=False,
        )
    if any(name in published for name in lines):
        diamond: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgecolor": QUIET, "markersize": 5.5}
        axes.legend(
            handles=[Line2D([], [], linestyle="", marker="D", label="published", **diamond)],
            loc="lower left",
            labelcolor=QUIET,
            handletextpad=0.2,
        )
    low, high = axes.get_ylim()
    gap = 0.068 * (high - low)
    places = spaced(ends, gap, least=low + gap / 2)
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


def _sparsity_caption(panels: Mapping[str, Mapping[str, Sequence[Curve]]], graph: str, *, published: bool) -> str:
    seeds = {len(curves) for lines in panels.values() for curves in lines.values()}
    several = max(seeds) > 1
    count = f"{max(seeds)}" if len(seeds) == 1 else f"up to {max(seeds)}"
    return (
        f"MRR{' on ' * bool(graph)}{graph} when the smallest entries of the entity embeddings are set to zero."
        + (f" A line is the mean of {count} seeds, its band the least and the greatest." if several else "")
        + (" Diamonds are the numbers of the paper." if published else "")
    )

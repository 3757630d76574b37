"""The figures of the paper and of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dualkg.analysis.figures import (
    ACCENT,
    CONTRAST,
    FAINT,
    INK,
    PAPER,
    QUIET,
    WIDTH,
    Drawing,
    figure_style,
    new_figure,
    set_titles,
)
from dualkg.analysis.projection import Vectors
from dualkg.extras import optional_import
from paper.projection import SHARED, TAILS, Plane, Projection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


# Distinguishable with colour vision deficiency (Petroff, Accessible color sequences for data visualization, 2021).
TEN_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
CENTRED: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center"}
Facts = Sequence[Mapping[str, Any]]


def square_panels(columns: int, *, legend_rows: int) -> tuple[Figure, list[Axes]]:
    """A white figure of square panels from left to right, with room for titles above and a legend below."""
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.figure import Figure
    margin, between, above, below = 0.1, 0.2, 0.58, 0.3 + 0.195 * legend_rows
    side = min((WIDTH - 2 * margin - between * (columns - 1)) / columns, 5.5)
    height = below + side + above
    left = (WIDTH - columns * side - between * (columns - 1)) / 2
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    corners = [left + (side + between) * column for column in range(columns)]
    return figure, [figure.add_axes((x / WIDTH, below / height, side / WIDTH, side / height)) for x in corners]


def hide_axes(axes: Axes) -> None:
    """Draw a faint frame without numbers, for coordinates without a meaning."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT, linewidth=0.8)


def set_levels(axes: Axes, **options: Any) -> None:
    """Horizontal lines instead of a vertical axis."""
    axes.set(**options)
    axes.yaxis.grid(True)
    axes.spines["left"].set_visible(False)


def plot_seeds(axes: Axes, values: Mapping[float, Sequence[float]], *, name: str, colour: str) -> None:
    """x → one value per seed: a line through the means, and a dot per seed."""
    axes.plot(list(values), [fmean(some) for some in values.values()], color=colour, linewidth=1.8, label=name)
    for x, some in values.items():
        axes.scatter([x] * len(some), some, s=16, color=colour, zorder=4, clip_on=False)


def label_positions(targets: list[float], gap: float, *, minimum: float) -> list[float]:
    """Positions at least `gap` apart and not below `minimum`, in the order of the targets and close to them."""
    from scipy.optimize import isotonic_regression

    order, steps = np.argsort(targets, kind="stable"), gap * np.arange(len(targets))
    spaced = isotonic_regression(np.array(targets)[order] - steps).x + steps
    positions = dict(zip(order.tolist(), np.maximum(spaced, minimum + steps).tolist(), strict=True))
    return [positions[index] for index in range(len(targets))]


# -- the weights of DURA ----------------------------------------------------------------------------------


def draw_dura_weights(
    mrr: Mapping[tuple[float, float], float], *, chosen: tuple[float, float] | None = None, title: str = ""
) -> Drawing:
    """A heat map of (λ1, λ2) → MRR; the best is bold, the `chosen` pair framed, missing ones empty."""
    plain, mapped = (sorted({pair[side] for pair in mrr}) for side in (0, 1))
    low, high = min(mrr.values()), max(mrr.values())
    light, dark = np.array([0.93, 0.96, 0.98]), np.array([0.07, 0.33, 0.54])
    with figure_style():
        from matplotlib.patches import Rectangle

        figure, [axes] = new_figure(1.5 + 0.62 * len(plain))
        set_titles(axes, title, "MRR; darker is better")
        for row, weight in enumerate(plain):
            for column, other in enumerate(mapped):
                value = mrr.get((weight, other))
                share = 0.0 if value is None or high == low else (value - low) / (high - low)
                face: Any = "#f6f7f8" if value is None else tuple(light + share * (dark - light))
                corner = (column - 0.5, row - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, facecolor=face, edgecolor=PAPER, linewidth=2))
                colour = QUIET if value is None else PAPER if share > 0.7 else INK
                text, bold = "–" if value is None else f"{value:.3f}", "bold" if value == high else "normal"
                axes.text(column, row, text, color=colour, fontweight=bold, **CENTRED)
        if chosen and chosen in mrr:
            corner = (mapped.index(chosen[1]) - 0.5, plain.index(chosen[0]) - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=CONTRAST, linewidth=2.2, zorder=3))
        axes.set(xlim=(-0.5, len(mapped) - 0.5), ylim=(len(plain) - 0.5, -0.5))
        axes.set_xticks(range(len(mapped)), [f"{weight:g}" for weight in mapped])
        axes.set_yticks(range(len(plain)), [f"{weight:g}" for weight in plain])
        axes.set(xlabel="λ2, on the mapped norms", ylabel="λ1, on the plain norms")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    (best_plain, best_mapped), best = max(mrr.items(), key=lambda item: item[1])
    framed = f" Framed: λ1 = {chosen[0]:g} and λ2 = {chosen[1]:g}." if chosen and chosen in mrr else ""
    caption = f"MRR over the two weights of DURA. Best is {best:.3f}, at λ1 = {best_plain:g} and λ2 = {best_mapped:g}."
    return Drawing(figure, caption + framed)


# -- Figure 1: one query in the plane ---------------------------------------------------------------------

GREY, MANY = "#aab4bc", 2000
DOTS: dict[str, Any] = {"color": ACCENT, "edgecolors": PAPER, "linewidths": 0.6}
DASHES: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}


def draw_planes(planes: Mapping[str, Plane], *, graph: str = "") -> Drawing:
    """One panel per model on the same scale: h R as an arrow, the tails of the query, other entities grey."""
    frame = _frame(planes)
    with figure_style():
        from matplotlib.lines import Line2D

        figure, panels = square_panels(len(planes), legend_rows=1)
        for axes, (title, plane) in zip(panels, planes.items(), strict=True):
            distances = f"{plane.distances['centroid']:.2f} · from hR {plane.distances['hR']:.2f}"
            set_titles(axes, title, f"tails from their centroid {distances}")
            hide_axes(axes)
            axes.set(xlim=frame[:, 0], ylim=frame[:, 1])
            _plot_plane(axes, plane, frame)
        dot: dict[str, Any] = {"linestyle": "", "marker": "o"}
        query = next(iter(planes.values())).query.name
        handles = [
            Line2D([], [], color=ACCENT, markersize=5.5, label=f"answers to {query}", **dot),
            Line2D([], [], color=GREY, markersize=3.5, label="other entities", **dot),
            Line2D([], [], label="equal scores", **DASHES),
        ]
        figure.legend(handles=handles, loc="lower center", ncols=3, handletextpad=0.5, columnspacing=2.5)
    return Drawing(figure, _plane_caption(planes, graph, frame))


def _plot_plane(axes: Axes, plane: Plane, frame: Vectors) -> None:
    from matplotlib.patches import Circle

    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    many = len(plane.others) > MANY  # then one image in the SVG instead of a megabyte of dots
    grey: dict[str, Any] = {"s": 3 if many else 9, "alpha": 0.25 if many else 0.6, "rasterized": many}
    axes.scatter(plane.others[:, 0], plane.others[:, 1], color=GREY, linewidths=0, zorder=1, **grey)
    centre = plane.tails.mean(0)
    axes.add_patch(Circle(tuple(centre), plane.distances["centroid"], facecolor=ACCENT, alpha=0.12, linewidth=0))
    if plane.mapped_head.any():
        _plot_mapped_head(axes, plane.mapped_head, centre, frame)
    axes.scatter(plane.tails[:, 0], plane.tails[:, 1], s=26, zorder=3, **DOTS)


def _plot_mapped_head(axes: Axes, mapped_head: Vectors, centre: Vectors, frame: Vectors) -> None:
    """h R as an arrow, and the line through the centroid of the tails on which scores are equal."""
    x, y = mapped_head
    axes.axline(tuple(centre), (centre[0] - y, centre[1] + x), zorder=1, **DASHES)
    tip = mapped_head * _share_inside(mapped_head, frame)
    arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.5", "color": CONTRAST, "linewidth": 1.8}
    axes.annotate("", tuple(tip), (0, 0), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0}, zorder=4)
    # The label is beyond the tip of the arrow, or beside it where the frame is close.
    along = mapped_head / np.linalg.norm(mapped_head)
    near = (np.abs(tip - frame) < 0.08 * (frame[1] - frame[0])).any()
    offset = 12 * np.array([along[1], -along[0]]) - 14 * along if near else 11 * along
    bold: dict[str, Any] = {"color": CONTRAST, "fontweight": "bold", "zorder": 4, **CENTRED}
    axes.annotate("hR", tuple(tip), tuple(offset), textcoords="offset points", **bold)


def _frame(planes: Mapping[str, Plane]) -> Vectors:
    """Lower and upper corner of the square that all panels show: tails, nearly all other entities, short arrows."""
    inside = [np.vstack([plane.tails, np.zeros(2)]) for plane in planes.values()]
    inside += [np.quantile(plane.others, [0.01, 0.99], axis=0) for plane in planes.values() if len(plane.others)]
    small = _square(np.vstack(inside))
    allowed = small.mean(0) + 1.6 * (small - small.mean(0))
    inside += [plane.mapped_head[None] for plane in planes.values() if _share_inside(plane.mapped_head, allowed) == 1]
    return _square(np.vstack(inside))


def _square(points: Vectors) -> Vectors:
    """Lower and upper corner of a square around points, with a margin."""
    low, high = points.min(0), points.max(0)
    half = 1.16 * float((high - low).max()) / 2
    corners: Vectors = (low + high) / 2 + np.array([[-half], [half]])
    return corners


def _share_inside(arrow: Vectors, frame: Vectors) -> float:
    """The share of an arrow from the origin that is inside a frame."""
    limits = np.where(arrow > 0, frame[1], frame[0])
    shares = np.divide(limits, arrow, out=np.full(2, np.inf), where=arrow != 0)
    return float(min(1.0, shares.min()))


def _plane_caption(planes: Mapping[str, Plane], graph: str, frame: Vectors) -> str:
    first = next(iter(planes.values()))
    outside = {
        name: int(((plane.others < frame[0]) | (plane.others > frame[1])).any(1).sum())
        for name, plane in planes.items()
    }
    hidden = ", ".join(f"{n:,} {'entity' if n == 1 else 'entities'} of {name}" for name, n in outside.items() if n)
    long = [name for name, plane in planes.items() if _share_inside(plane.mapped_head, frame) < 1]
    cut = f" The arrow of {' and '.join(long)} is cut at the frame." if long else ""
    medians = "; ".join(f"{name} {p.medians['centroid']:.2f} and {p.medians['hR']:.2f}" for name, p in planes.items())
    return (
        f"The {len(first.tails)} tails of ({first.query.name}, ?){' in ' * bool(graph)}{graph} in models of dim 2, the "
        f"mapped head hR, and all other entities in grey. On the dashed line scores are equal. Unit: the mean distance "
        f"of all entities from their centroid, in each model. The radius of the disc is the mean distance of the tails "
        f"from their centroid. Median of the {first.num_queries:,} queries with {TAILS[0]} to {TAILS[1]} tails in "
        f"train, from the centroid and from hR: {medians}.{cut}{f' Outside the frame: {hidden}.' if hidden else ''}"
    )


# -- Figure 2: t-SNE of answers ---------------------------------------------------------------------------


def draw_projections(projections: Mapping[str, Projection], *, graph: str = "") -> Drawing:
    """One panel per model: a colour is a query, a ring an entity that answers several."""
    first = next(iter(projections.values()))
    names = [query.name for query in first.queries]
    with figure_style():
        handles = _query_legend(names, ring=any(projection.num_shared for projection in projections.values()))
        figure, panels = square_panels(len(projections), legend_rows=(len(handles) + 1) // 2)
        for axes, (title, projection) in zip(panels, projections.items(), strict=True):
            set_titles(axes, title, f"silhouette {projection.silhouettes['euclidean'].mean:.3f}")
            hide_axes(axes)
            axes.margins(0.04)
            x, y = projection.positions.T
            for number, colour in enumerate(TEN_COLOURS[: len(names)]):
                own = projection.groups == number
                axes.scatter(x[own], y[own], s=15, color=colour, alpha=0.9, linewidths=0.3, edgecolors=PAPER)
            both = projection.groups == SHARED
            axes.scatter(x[both], y[both], s=15, facecolors=PAPER, linewidths=0.9, edgecolors=INK)
        figure.legend(handles=handles, loc="lower center", ncols=2, handletextpad=0.4, columnspacing=2.5)
    cosine = ", ".join(f"{name} {one.silhouettes['cosine'].mean:.3f}" for name, one in projections.items())
    rings = f"A ring is an entity that answers several of the queries ({first.num_shared}); silhouettes leave it out. "
    return Drawing(
        figure,
        f"Answers to {len(first.queries)} queries{' of ' * bool(graph)}{graph}, {len(first.entities):,} entities, by "
        f"t-SNE of their tail embeddings (perplexity {first.perplexity:g}). Each entity is one point. "
        f"{rings if first.num_shared else ''}The silhouette is that of the embeddings, by Euclidean distance; by "
        f"cosine distance it is {cosine}.",
    )


def _query_legend(names: list[str], *, ring: bool) -> list[Line2D]:
    from matplotlib.lines import Line2D

    hollow: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgecolor": INK, "markersize": 5}
    styles: list[dict[str, Any]] = [{"color": colour, "markersize": 6} for colour in TEN_COLOURS[: len(names)]]
    labels = [*names, "answers two or more"] if ring else names
    return [
        Line2D([], [], linestyle="", marker="o", label=label, **style)
        for label, style in zip(labels, [*styles, hollow], strict=False)
    ]


# -- Figure 3: sparsity -----------------------------------------------------------------------------------

Curve = Mapping[float, float]  # share of zeros → MRR
Panels = Mapping[str, Mapping[str, Sequence[Curve]]]  # panel → line → one curve per seed
REGULARIZER_COLOURS = {"DURA": ACCENT, "N3": CONTRAST, "": "#7a8791"}  # by the suffix of a line's name
OTHER_COLOURS = ("#3a9a7a", "#8a5aa8", "#b04a5a", "#5b6fc4", "#9a8330", "#2f3b46")


def draw_sparsity(panels: Panels, *, published: Mapping[str, Curve] | None = None, graph: str = "") -> Drawing:
    """MRR against the share of zeros. A regularizer has the same colour in all panels.

    A line is the mean over the seeds, its band their range. `published` has points by the names of the lines.
    """
    curves_by_line = {name: curves for lines in panels.values() for name, curves in lines.items()}
    published = published or {}
    colours = _line_colours(panels)
    top = 1.12 * max(mrr for curves in curves_by_line.values() for curve in curves for mrr in curve.values())
    with figure_style():
        figure, all_axes = new_figure(3.7 if len(panels) > 1 else 4.4, columns=len(panels), gap=0.06, sharey=True)
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            set_titles(axes, title)
            set_levels(axes, xlim=(0, 0.95), ylim=(0, top), xlabel="entity entries set to zero")
            axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 0.95])
            axes.locator_params(axis="y", nbins=5)
            _plot_curves(axes, lines, published, colours)
        all_axes[0].set_ylabel("MRR")
    counts = {len(curves) for curves in curves_by_line.values()}
    seeds = f"{max(counts)}" if len(counts) == 1 else f"up to {max(counts)}"
    return Drawing(
        figure,
        f"MRR{' on ' * bool(graph)}{graph} when the smallest entries of the entity embeddings are set to zero."
        + (f" A line is the mean of {seeds} seeds, its band their range." if max(counts) > 1 else "")
        + (" Diamonds are the numbers of the paper." if set(published) & set(curves_by_line) else ""),
    )


def _plot_curves(
    axes: Axes, lines: Mapping[str, Sequence[Curve]], published: Mapping[str, Curve], colours: Mapping[str, str]
) -> None:
    from matplotlib.lines import Line2D

    ends = []
    for name, curves in lines.items():
        colour, shares = colours[name], sorted(curves[0])
        values = np.array([[curve[share] for share in shares] for curve in curves])
        axes.plot(shares, values.mean(0), color=colour, linewidth=1.8, clip_on=False, zorder=3)
        if len(curves) > 1:
            axes.fill_between(shares, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
        ends.append(float(values.mean(0)[-1]))
        points = published.get(name, {})
        diamonds: dict[str, Any] = {"marker": "D", "s": 30, "linewidths": 1.3, "zorder": 4, "clip_on": False}
        axes.scatter(list(points), list(points.values()), facecolors=PAPER, edgecolors=colour, **diamonds)
    if set(published) & set(lines):
        diamond: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgecolor": QUIET, "markersize": 5.5}
        handle = Line2D([], [], linestyle="", marker="D", label="published", **diamond)
        axes.legend(handles=[handle], loc="lower left", labelcolor=QUIET, handletextpad=0.2)
    low, high = axes.get_ylim()
    gap = 0.068 * (high - low)
    labels = label_positions(ends, gap, minimum=low + gap / 2)
    for name, end, label in zip(lines, ends, labels, strict=True):
        bold: dict[str, Any] = {"color": colours[name], "fontweight": "bold", "fontsize": 8.5}
        axes.plot([0.95, 0.985], [end, label], color=colours[name], linewidth=0.7, clip_on=False)
        axes.text(0.995, label, name, verticalalignment="center", **bold)


def _line_colours(panels: Panels) -> dict[str, str]:
    """A colour per line by the suffix of its name, or by the whole name if a panel has a suffix twice."""
    suffixes = {name: name.partition("-")[2] for lines in panels.values() for name in lines}
    if any(len({suffixes[name] for name in lines}) < len(lines) for lines in panels.values()):
        suffixes = {name: name for name in suffixes}
    others = [suffix for suffix in dict.fromkeys(suffixes.values()) if suffix not in REGULARIZER_COLOURS]
    colours = REGULARIZER_COLOURS | dict(zip(others, OTHER_COLOURS, strict=False))
    return {name: colours[suffix] for name, suffix in suffixes.items()}


# -- studies of inference ---------------------------------------------------------------------------------

REMOVALS = {
    "opposing": ("the most opposing triples", CONTRAST),
    "random": ("random triples of the two entities", QUIET),
    "supporting": ("the most supporting triples", ACCENT),
}


def draw_explanations(results: Facts, graph: str = "", *, title: str = "") -> Drawing:
    """MRR after removing training triples and training again: a line per kind of triple, a dot per seed."""
    counts = sorted({result["count"] for result in results})

    def mrr(kind: str, count: int) -> list[float]:
        return [one["metrics"]["mrr"] for one in results if (one["removed"], one["count"]) == (kind, count)]

    with figure_style():
        figure, [axes] = new_figure(3.7)
        set_titles(axes, title or "Explanations", "trained again without some training triples per test triple")
        for kind, (name, colour) in REMOVALS.items():
            values = {float(x): mrr(kind, count) or mrr("nothing", 0) for x, count in enumerate(counts)}
            plot_seeds(axes, values, name=name, colour=colour)
        top = max(result["metrics"]["mrr"] for result in results)
        axes.set_xticks(range(len(counts)), [f"{count}" for count in counts])
        set_levels(axes, xlim=(-0.2, len(counts) - 0.8), ylim=(0, 1.15 * top), ylabel="MRR of the test triples")
        axes.set_xlabel("training triples removed per test triple")
        axes.legend(loc="lower left")
    return Drawing(
        figure,
        f"{results[0]['num_triples']:,} test triples{' of ' * bool(graph)}{graph} without a common entity, ranked "
        f"after training without some training triples of their entities: those that support each most, those that "
        f"oppose it most, or random ones. A dot is a seed.",
    )


def format_bytes(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def draw_quantization(results: Facts, graph: str = "", *, title: str = "") -> Drawing:
    """MRR against bytes: a dot per dense storage format, and a line along the shares of zeros."""
    dense = [result for result in results if result["storage"] != "sparse"]
    sparse = sorted((one for one in results if one["storage"] == "sparse"), key=lambda one: float(one["share"]))

    def points(some: Facts) -> tuple[list[int], list[float]]:
        return [one["bytes"] for one in some], [one["metrics"]["mrr"] for one in some]

    with figure_style():
        from matplotlib.ticker import LogLocator

        figure, [axes] = new_figure(4.0)
        set_titles(axes, title or "MRR against bytes", "dots: dense tables; line: float32 with a share of zeros")
        axes.plot(*points(sparse), color=CONTRAST, linewidth=1.8, marker="o", markersize=4, zorder=3)
        axes.plot(*points(dense), color=ACCENT, linestyle="", marker="o", markersize=7, zorder=4)
        for some, colour, above in ((dense, ACCENT, 12), (sparse, CONTRAST, -12)):
            for one, *point in zip(some, *points(some), strict=True):
                name = f"{one['share']:.0%}" if some is sparse else one["storage"]
                text: dict[str, Any] = {"textcoords": "offset points", "color": colour, "fontsize": 8.5, **CENTRED}
                axes.annotate(name, tuple(point), (0, above), **text)
        top = max(result["metrics"]["mrr"] for result in results)
        axes.set(xscale="log", xlabel="bytes of the entity tables", ylabel="MRR", ylim=(0, 1.15 * top))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
        axes.minorticks_off()
        axes.yaxis.grid(True)
        axes.margins(x=0.1)
    return Drawing(
        figure,
        f"MRR{' on ' * bool(graph)}{graph} against the bytes of the entity embeddings: dense float32, bf16 and int8, "
        f"and float32 without the smallest entries. Relations are float32 and not counted.",
    )


QUERY_PANELS = {
    "as_query": ("In the query", "queries that contain an unseen entity"),
    "as_answer": ("As the answer", "queries that an unseen entity answers"),
    "known_entities": ("Known entities", "queries without unseen entities"),
}
METHODS = {"embedded": ("embedded", ACCENT, -0.05), "retrained": ("trained again", CONTRAST, 0.05)}


def draw_inductive(results: Facts, graph: str) -> Drawing:
    """MRR over the triples per unseen entity: a panel per kind of query, a line per method, a dot per seed."""

    def count(result: Mapping[str, Any]) -> float:
        return inf if result["triples_given"] is None else float(result["triples_given"])

    counts = sorted({count(result) for result in results if result["method"] in METHODS})
    top = max(result[kind]["mrr"] for result in results for kind in QUERY_PANELS)
    with figure_style():
        from matplotlib.ticker import MultipleLocator

        figure, panels = new_figure(3.7, columns=len(QUERY_PANELS), gap=0.03, sharey=True)
        for axes, (kind, titles) in zip(panels, QUERY_PANELS.items(), strict=True):
            set_titles(axes, *titles)
            for method, (name, colour, shift) in METHODS.items():
                chosen = [result for result in results if result["method"] == method]
                by_x = {
                    x + shift: [result[kind]["mrr"] for result in chosen if count(result) == number]
                    for x, number in enumerate(counts)
                }
                plot_seeds(axes, {x: values for x, values in by_x.items() if values}, name=name, colour=colour)
            if at_mean := [result[kind]["mrr"] for result in results if result["method"] == "mean"]:
                dashes: dict[str, Any] = {"linewidth": 0.8, "linestyle": (0, (4, 3)), "zorder": 2}
                axes.axhline(fmean(at_mean), color=QUIET, label="mean embedding", **dashes)
            axes.set_xticks(range(len(counts)), ["all" if number == inf else f"{number:g}" for number in counts])
            set_levels(axes, xlim=(-0.3, len(counts) - 0.7), ylim=(0, 1.08 * top), xlabel="triples per unseen entity")
        panels[0].set_ylabel("MRR")
        panels[0].yaxis.set_major_locator(MultipleLocator(0.1))
        panels[1].legend(loc="upper left")
    return Drawing(
        figure,
        f"{num_entities(results)} of {graph} held out and embedded from some of their triples, "
        f"against training again with these triples. A dot is a seed. Dashed: the mean of all embeddings.",
    )


def num_entities(results: Facts) -> str:
    """The number of held-out entities in words; it may differ between seeds."""
    numbers = [result["num_entities"] for result in results]
    low, high = min(numbers), max(numbers)
    return f"{high:,} entities" if low == high else f"{low:,} to {high:,} entities"

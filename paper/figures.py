"""The figures of the paper and of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dualkg.analysis.figures import ACCENT, CONTRAST, FAINT, PAPER, QUIET, Drawing, figure_style, new_figure, set_titles
from dualkg.analysis.projection import Vectors
from paper.projection import SHARED, TAILS, Plane, Projection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with colour vision deficiency (Petroff, Accessible color sequences for data visualization, 2021).
TEN_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
CENTRED: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center"}
DASHES: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}
Facts = Sequence[Mapping[str, Any]]


def square_panels(columns: int, *, legend_rows: int) -> tuple[Figure, list[Axes]]:
    """Square panels with a faint frame and no numbers, for coordinates without a meaning, above a legend."""
    figure, panels = new_figure(min(7.7 / columns, 5.5) + 0.85 + 0.2 * legend_rows, columns=columns)
    for axes in panels:
        axes.set(xticks=[], yticks=[], box_aspect=1)
        axes.spines[:].set(visible=True, color=FAINT, linewidth=0.8)
    return figure, panels


def set_levels(axes: Axes, **options: Any) -> None:
    """Horizontal lines instead of a vertical axis."""
    axes.set(**options)
    axes.yaxis.grid(True)
    axes.spines["left"].set_visible(False)


@figure_style()
def draw_dura_weights(
    mrr: Mapping[tuple[float, float], float], *, chosen: tuple[float, float] | None = None, title: str = ""
) -> Drawing:
    """A heat map of (λ1, λ2) → MRR; the best is bold, the `chosen` pair framed, missing ones empty."""
    plain, mapped = (sorted({pair[side] for pair in mrr}) for side in (0, 1))
    values = np.array([[mrr.get((weight, other), np.nan) for other in mapped] for weight in plain])
    figure, [axes] = new_figure(1.5 + 0.62 * len(plain))
    set_titles(axes, title, "MRR; darker is better")
    mesh = axes.pcolormesh(values, cmap="Blues", edgecolors=PAPER, linewidth=2)
    for (row, column), value in np.ndenumerate(values):
        colour = PAPER if mesh.norm(value) > 0.55 else None
        bold = "bold" if value == np.nanmax(values) else "normal"
        text = "–" if np.isnan(value) else f"{value:.3f}"
        axes.text(column + 0.5, row + 0.5, text, color=colour, fontweight=bold, **CENTRED)
    (best_plain, best_mapped), best = max(mrr.items(), key=lambda item: item[1])
    caption = f"MRR over the two weights of DURA. Best is {best:.3f}, at λ1 = {best_plain:g} and λ2 = {best_mapped:g}."
    if chosen and chosen in mrr:
        x, y = mapped.index(chosen[1]), plain.index(chosen[0])
        axes.plot([x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color=CONTRAST, linewidth=2.2, clip_on=False)
        caption += f" Framed: λ1 = {chosen[0]:g} and λ2 = {chosen[1]:g}."
    axes.set_xticks(np.arange(len(mapped)) + 0.5, [f"{weight:g}" for weight in mapped])
    axes.set_yticks(np.arange(len(plain)) + 0.5, [f"{weight:g}" for weight in plain])
    axes.set(xlabel="λ2, on the mapped norms", ylabel="λ1, on the plain norms")
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return Drawing(figure, caption)


# -- Figure 1: one query in the plane ---------------------------------------------------------------------

GREY, MANY = "#aab4bc", 2000


@figure_style()
def draw_planes(planes: Mapping[str, Plane], *, graph: str = "") -> Drawing:
    """One panel per model on the same scale: h R as an arrow, the tails of the query, other entities grey."""
    frame = _frame(planes)
    figure, panels = square_panels(len(planes), legend_rows=1)
    for axes, (title, plane) in zip(panels, planes.items(), strict=True):
        distances = f"{plane.distances['centroid']:.2f} · from hR {plane.distances['hR']:.2f}"
        set_titles(axes, title, f"tails from their centroid {distances}")
        axes.set(xlim=frame[:, 0], ylim=frame[:, 1])
        handles = _plot_plane(axes, plane, frame)
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=3, markerscale=1.3, columnspacing=2.5)
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    return Drawing(figure, _plane_caption(planes, graph, frame))


def _plot_plane(axes: Axes, plane: Plane, frame: Vectors) -> list[Any]:
    from matplotlib.patches import Circle

    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    many = len(plane.others) > MANY  # then one image in the SVG instead of a megabyte of dots
    grey = {"s": 3 if many else 9, "alpha": 0.25 if many else 0.6, "rasterized": many, "linewidths": 0, "zorder": 1}
    others = axes.scatter(*plane.others.T, color=GREY, label="other entities", **grey)
    dots = {"s": 26, "edgecolors": PAPER, "linewidths": 0.6, "zorder": 3}
    tails = axes.scatter(*plane.tails.T, color=ACCENT, label=f"answers to {plane.query.name}", **dots)
    centre, head = plane.tails.mean(0), plane.mapped_head
    axes.add_patch(Circle(tuple(centre), plane.distances["centroid"], facecolor=ACCENT, alpha=0.12, linewidth=0))
    if not head.any():
        return [tails, others]
    equal = axes.axline(centre, (centre[0] - head[1], centre[1] + head[0]), zorder=1, label="equal scores", **DASHES)
    tip = head * _share_inside(head, frame)
    arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.5", "color": CONTRAST, "linewidth": 1.8}
    axes.annotate("", tuple(tip), (0, 0), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0}, zorder=4)
    # The label is beyond the tip of the arrow, or beside it where the frame is close.
    along = head / np.linalg.norm(head)
    near = (np.abs(tip - frame) < 0.08 * (frame[1] - frame[0])).any()
    offset = 12 * np.array([along[1], -along[0]]) - 14 * along if near else 11 * along
    bold = {"color": CONTRAST, "fontweight": "bold", "zorder": 4, **CENTRED}
    axes.annotate("hR", tuple(tip), tuple(offset), textcoords="offset points", **bold)
    return [tails, others, equal]


def _frame(planes: Mapping[str, Plane]) -> Vectors:
    """Lower and upper corner of the square that all panels show: tails, nearly all other entities, short arrows."""
    inside = [np.zeros((1, 2)), *(plane.tails for plane in planes.values())]
    inside += [np.quantile(plane.others, [0.01, 0.99], axis=0) for plane in planes.values() if len(plane.others)]
    inside += [plane.mapped_head[None] for plane in planes.values() if np.linalg.norm(plane.mapped_head) < 3]
    low, high = np.vstack(inside).min(0), np.vstack(inside).max(0)
    half = 1.16 * (high - low).max() / 2
    return (low + high) / 2 + np.array([[-half], [half]])


def _share_inside(arrow: Vectors, frame: Vectors) -> float:
    """The share of an arrow from the origin that is inside a frame."""
    limits = np.where(arrow > 0, frame[1], frame[0])
    return min(1.0, np.divide(limits, arrow, out=np.full(2, np.inf), where=arrow != 0).min())


def _plane_caption(planes: Mapping[str, Plane], graph: str, frame: Vectors) -> str:
    first = next(iter(planes.values()))
    counts = {name: ((one.others < frame[0]) | (one.others > frame[1])).any(1).sum() for name, one in planes.items()}
    outside = [f"{n:,} {'entity' if n == 1 else 'entities'} of {name}" for name, n in counts.items() if n]
    long = [name for name, plane in planes.items() if _share_inside(plane.mapped_head, frame) < 1]
    medians = "; ".join(f"{name} {p.medians['centroid']:.2f} and {p.medians['hR']:.2f}" for name, p in planes.items())
    return (
        f"The {len(first.tails)} tails of ({first.query.name}, ?){' in ' * bool(graph)}{graph} in models of dim 2, the "
        f"mapped head hR, and all other entities in grey. On the dashed line scores are equal. Unit: the mean distance "
        f"of all entities from their centroid, in each model. The radius of the disc is the mean distance of the tails "
        f"from their centroid. Median of the {first.num_queries:,} queries with {TAILS[0]} to {TAILS[1]} tails in "
        f"train, from the centroid and from hR: {medians}."
        + (f" The arrow of {' and '.join(long)} is cut at the frame." if long else "")
        + (f" Outside the frame: {', '.join(outside)}." if outside else "")
    )


# -- Figure 2: t-SNE of answers ---------------------------------------------------------------------------


@figure_style()
def draw_projections(projections: Mapping[str, Projection], *, graph: str = "") -> Drawing:
    """One panel per model: a colour is a query, a ring an entity that answers several."""
    first = next(iter(projections.values()))
    names, rings = [query.name for query in first.queries], any(one.num_shared for one in projections.values())
    figure, panels = square_panels(len(projections), legend_rows=(len(names) + rings + 1) // 2)
    for axes, (title, projection) in zip(panels, projections.items(), strict=True):
        set_titles(axes, title, f"silhouette {projection.silhouettes['euclidean'].mean:.3f}")
        axes.margins(0.04)
        styles = [{"color": colour, "linewidths": 0.3, "edgecolors": PAPER} for colour in TEN_COLOURS[: len(names)]]
        groups = [(number, names[number], style) for number, style in enumerate(styles)]
        ring = {"facecolors": PAPER, "linewidths": 0.9, "edgecolors": "black"}
        for number, name, style in [*groups, *([(SHARED, "answers two or more", ring)] if rings else [])]:
            axes.scatter(*projection.positions[projection.groups == number].T, s=15, label=name, **style)
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=2, markerscale=1.5, columnspacing=2.5)
    cosine = ", ".join(f"{name} {one.silhouettes['cosine'].mean:.3f}" for name, one in projections.items())
    shared = f"A ring is an entity that answers several of the queries ({first.num_shared}); silhouettes leave it out. "
    return Drawing(
        figure,
        f"Answers to {len(names)} queries{' of ' * bool(graph)}{graph}, {len(first.entities):,} entities, by t-SNE of "
        f"their tail embeddings (perplexity {first.perplexity:g}). Each entity is one point. "
        f"{shared if first.num_shared else ''}The silhouette is that of the embeddings, by Euclidean distance; by "
        f"cosine distance it is {cosine}.",
    )


# -- Figure 3: sparsity -----------------------------------------------------------------------------------

Curve = Mapping[float, float]  # share of zeros → MRR
Panels = Mapping[str, Mapping[str, Sequence[Curve]]]  # panel → line → one curve per seed
REGULARIZER_COLOURS = {"DURA": ACCENT, "N3": CONTRAST, "": "#7a8791"}  # by the suffix of a line's name
OTHER_COLOURS = ("#3a9a7a", "#8a5aa8", "#b04a5a", "#5b6fc4", "#9a8330", "#2f3b46")


@figure_style()
def draw_sparsity(panels: Panels, *, published: Mapping[str, Curve] | None = None, graph: str = "") -> Drawing:
    """MRR against the share of zeros. A regularizer has the same colour in all panels.

    A line is the mean over the seeds, its band their range. `published` has points by the names of the lines.
    """
    curves_by_line = {name: curves for lines in panels.values() for name, curves in lines.items()}
    colours, published = _line_colours(panels), published or {}
    top = 1.12 * max(mrr for curves in curves_by_line.values() for curve in curves for mrr in curve.values())
    figure, all_axes = new_figure(3.7 if len(panels) > 1 else 4.4, columns=len(panels), gap=0.06, sharey=True)
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        set_titles(axes, title)
        set_levels(axes, xlim=(0, 0.95), ylim=(0, top), xlabel="entity entries set to zero")
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 0.95])
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.locator_params(axis="y", nbins=5)
        diamonds = {"marker": "D", "s": 30, "linewidths": 1.3, "zorder": 4, "clip_on": False, "facecolors": PAPER}
        for name, curves in sorted(lines.items(), key=lambda item: -sum(curve[max(curve)] for curve in item[1])):
            colour, shares = colours[name], sorted(curves[0])
            values = np.array([[curve[share] for share in shares] for curve in curves])
            axes.plot(shares, values.mean(0), color=colour, linewidth=1.8, clip_on=False, zorder=3, label=name)
            axes.fill_between(shares, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
            points = published.get(name, {})
            axes.scatter(list(points), list(points.values()), edgecolors=colour, **diamonds)
        if set(published) & set(lines):
            axes.scatter([], [], edgecolors=QUIET, label="published", **diamonds)
        axes.legend(loc="lower left", handlelength=1.2)
    all_axes[0].set_ylabel("MRR")
    counts = {len(curves) for curves in curves_by_line.values()}
    seeds = f"{'up to ' * (len(counts) > 1)}{max(counts)}"
    return Drawing(
        figure,
        f"MRR{' on ' * bool(graph)}{graph} when the smallest entries of the entity embeddings are set to zero."
        + (f" A line is the mean of {seeds} seeds, its band their range." if max(counts) > 1 else "")
        + (" Diamonds are the numbers of the paper." if set(published) & set(curves_by_line) else ""),
    )


def _line_colours(panels: Panels) -> dict[str, str]:
    """A colour per line by the suffix of its name, or by the whole name if a panel has a suffix twice."""
    suffixes = {name: name.partition("-")[2] for lines in panels.values() for name in lines}
    if any(len({suffixes[name] for name in lines}) < len(lines) for lines in panels.values()):
        suffixes = {name: name for name in suffixes}
    others = [suffix for suffix in dict.fromkeys(suffixes.values()) if suffix not in REGULARIZER_COLOURS]
    colours = REGULARIZER_COLOURS | dict(zip(others, OTHER_COLOURS, strict=False))
    return {name: colours[suffix] for name, suffix in suffixes.items()}


# -- studies of inference ---------------------------------------------------------------------------------

QUERY_PANELS = {
    "as_query": ("In the query", "queries that contain an unseen entity"),
    "as_answer": ("As the answer", "queries that an unseen entity answers"),
    "known_entities": ("Known entities", "queries without unseen entities"),
}
METHODS = {"embedded": ("embedded", ACCENT), "retrained": ("trained again", CONTRAST)}
REMOVALS = {
    "opposing": ("the most opposing triples", CONTRAST),
    "random": ("random triples of the two entities", QUIET),
    "supporting": ("the most supporting triples", ACCENT),
}
Lines = Mapping[tuple[str, str], Mapping[float, list[float]]]  # name and colour → number of triples → MRR by seed


def _plot_seeds(axes: Axes, lines: Lines, *, top: float, xlabel: str, shift: float = 0.0) -> None:
    """A line through the means and a dot per seed, over numbers of triples at equal distances; `shift` parts lines."""
    counts = sorted({count for values in lines.values() for count in values})
    for number, ((name, colour), values) in enumerate(lines.items()):
        xs = [counts.index(count) + shift * (number - 0.5) for count in values]
        axes.plot(xs, list(map(fmean, values.values())), color=colour, linewidth=1.8, label=name)
        for x, some in zip(xs, values.values(), strict=True):
            axes.scatter([x] * len(some), some, s=16, color=colour, zorder=4, clip_on=False)
    axes.set_xticks(range(len(counts)), ["all" if count == inf else f"{count:g}" for count in counts])
    set_levels(axes, xlim=(-0.3, len(counts) - 0.7), ylim=(0, 1.1 * top), xlabel=xlabel)


@figure_style()
def draw_explanations(results: Facts, graph: str) -> Drawing:
    """MRR after removing training triples and training again: a line per kind of triple, a dot per seed."""
    mrr: dict[tuple[str, int], list[float]] = {}
    for one in results:
        mrr.setdefault((one["removed"], one["count"]), []).append(one["metrics"]["mrr"])
    counts = sorted({count for _, count in mrr})
    lines = {line: {n: mrr.get((kind, n)) or mrr["nothing", 0] for n in counts} for kind, line in REMOVALS.items()}
    figure, [axes] = new_figure(3.7)
    set_titles(axes, "ComplEx-DURA", "trained again without some training triples per test triple")
    _plot_seeds(axes, lines, top=max(map(max, mrr.values())), xlabel="training triples removed per test triple")
    axes.set_ylabel("MRR of the test triples")
    axes.legend(loc="lower left")
    return Drawing(
        figure,
        f"{results[0]['num_triples']:,} test triples of {graph} without a common entity, ranked after training without "
        f"some training triples of their entities: those that support each most, those that oppose it most, or random "
        f"ones. A dot is a seed.",
    )


@figure_style()
def draw_inductive(results: Facts, graph: str) -> Drawing:
    """MRR over the triples per unseen entity: a panel per kind of query, a line per method, a dot per seed."""
    top = max(result[kind]["mrr"] for result in results for kind in QUERY_PANELS)
    figure, panels = new_figure(3.7, columns=len(QUERY_PANELS), gap=0.03, sharey=True)
    for axes, (kind, titles) in zip(panels, QUERY_PANELS.items(), strict=True):
        set_titles(axes, *titles)
        lines: dict[tuple[str, str], dict[float, list[float]]] = {line: {} for line in METHODS.values()}
        for one in results:
            if one["method"] in METHODS:
                count = inf if one["triples_given"] is None else one["triples_given"]
                lines[METHODS[one["method"]]].setdefault(count, []).append(one[kind]["mrr"])
        _plot_seeds(axes, lines, top=top, xlabel="triples per unseen entity", shift=0.1)
        if at_mean := [result[kind]["mrr"] for result in results if result["method"] == "mean"]:
            axes.axhline(fmean(at_mean), label="mean embedding", zorder=2, **DASHES)
    panels[0].set_ylabel("MRR")
    panels[0].locator_params(axis="y", nbins=6)
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


@figure_style()
def draw_quantization(results: Facts, graph: str) -> Drawing:
    """MRR against bytes: a dot per dense storage format, and a line along the shares of zeros."""
    from matplotlib.ticker import LogLocator

    figure, [axes] = new_figure(4.0)
    set_titles(axes, "ComplEx-DURA", "dots: dense tables; line: float32 with a share of zeros")
    dense = [one for one in results if one["storage"] != "sparse"]
    sparse = sorted((one for one in results if one["storage"] == "sparse"), key=lambda one: one["share"])
    dots, line = {"color": ACCENT, "linestyle": "", "markersize": 7}, {"color": CONTRAST, "markersize": 4}
    for some, style, above in ((dense, dots, 12), (sparse, line, -12)):
        points = [(one["bytes"], one["metrics"]["mrr"]) for one in some]
        axes.plot(*zip(*points, strict=True), linewidth=1.8, marker="o", **style)
        for one, point in zip(some, points, strict=True):
            name = f"{one['share']:.0%}" if some is sparse else one["storage"]
            text = {"textcoords": "offset points", "color": style["color"], "fontsize": 8.5, **CENTRED}
            axes.annotate(name, point, (0, above), **text)
    top = max(one["metrics"]["mrr"] for one in results)
    axes.set(xscale="log", xlabel="bytes of the entity tables", ylabel="MRR", ylim=(0, 1.15 * top))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.minorticks_off()
    axes.yaxis.grid(True)
    axes.margins(x=0.1)
    return Drawing(
        figure,
        f"MRR on {graph} against the bytes of the entity embeddings: dense float32, bf16 and int8, and float32 without "
        f"the smallest entries. Relations are float32 and not counted.",
    )


def format_bytes(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"

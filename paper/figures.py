"""MRR over the two weights of DURA, λ1 on the plain norms and λ2 on the mapped ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dualkg.analysis import figures
from dualkg.analysis.figures import Drawing
from dualkg.analysis.projection import METRICS, Projection, find_queries, project
from dualkg.analysis.sparsity import SHARES, CurvePoint, rotated, sparsity_curve
from dualkg.analysis.tsne import Vectors
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.extras import check_figure_packages, optional_import
from dualkg.inference.quantization import StoragePoint
from dualkg.training.api import load_recipe_graph, spread
from paper.explanation_study import LeftOut
from paper.inductive_study import InductiveResult, count_text
from paper.plan import Row, spaces_folder
from paper.plane import FEWEST, MOST, Plane, pick_query, plane_of
from paper.published import published
from paper.setting import Setting
from paper.sheets import Sheet, over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


LIGHT, DARK = (0.93, 0.96, 0.98), (0.07, 0.33, 0.54)


def draw_ablation(
    mrr: Mapping[tuple[float, float], float],
    *,
    chosen: tuple[float, float] | None = None,
    title: str = "",
) -> Drawing:
    """(λ1, λ2) → MRR as squares with their numbers; the best in bold, the `chosen` one framed, missing ones empty."""
    if not mrr:
        raise RequestError("A heat map needs the MRR of at least one pair of weights, and none came.")
    plain, mapped = (sorted({pair[side] for pair in mrr}) for side in (0, 1))
    low, high = min(mrr.values()), max(mrr.values())
    with figures.in_style():
        from matplotlib.patches import Rectangle

        figure, [axes] = figures.sheet(1.5 + 0.62 * len(plain))
        figures.entitle(axes, title, "MRR; the darker the better")
        for row, weight in enumerate(plain):
            for column, other in enumerate(mapped):
                value = mrr.get((weight, other))
                share = 0.0 if value is None or high == low else (value - low) / (high - low)
                colour = "#f6f7f8" if value is None else _between(share)
                corner = (column - 0.5, row - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor=figures.PAPER, linewidth=2))
                axes.text(
                    column,
                    row,
                    "–" if value is None else f"{value:.3f}",
                    color=figures.QUIET if value is None else figures.PAPER if share > 0.7 else figures.INK,
                    fontweight="bold" if value == high else "normal",
                    horizontalalignment="center",
                    verticalalignment="center",
                )
        if chosen and chosen in mrr:
            place = (mapped.index(chosen[1]) - 0.5, plain.index(chosen[0]) - 0.5)
            axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=figures.CONTRAST, linewidth=2.2, zorder=3))
        axes.set(xlim=(-0.5, len(mapped) - 0.5), ylim=(len(plain) - 0.5, -0.5))
        axes.set_xticks(range(len(mapped)), [f"{weight:g}" for weight in mapped])
        axes.set_yticks(range(len(plain)), [f"{weight:g}" for weight in plain])
        axes.set(xlabel="λ2, on the mapped norms", ylabel="λ1, on the plain norms")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return Drawing(figure, _ablation_caption(mrr, chosen))


def _between(share: float) -> tuple[float, float, float]:
    red, green, blue = (light + share * (dark - light) for light, dark in zip(LIGHT, DARK, strict=True))
    return red, green, blue


def _ablation_caption(mrr: Mapping[tuple[float, float], float], chosen: tuple[float, float] | None) -> str:
    (plain, mapped), best = max(mrr.items(), key=lambda item: item[1])
    framed = f" Framed: λ1 = {chosen[0]:g} and λ2 = {chosen[1]:g}." if chosen and chosen in mrr else ""
    return f"MRR over the two weights of DURA. Best is {best:.3f}, at λ1 = {plain:g} and λ2 = {mapped:g}.{framed}"


GREY, MANY = "#aab4bc", 2000
DOTS: dict[str, Any] = {"color": figures.ACCENT, "edgecolors": figures.PAPER, "linewidths": 0.6}
DASHES: dict[str, Any] = {"color": figures.QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}


def draw_planes(planes: Mapping[str, Plane], *, graph: str = "") -> Drawing:
    """Panels side by side on one scale, by the models' names: h R as an arrow, its tails, other entities grey."""
    if len({(one.query.head, one.query.relation) for one in planes.values()}) != 1:
        raise RequestError("The panels compare models on one query, so all of them show the same one.")
    frame = _frame(planes)
    with figures.in_style():
        figure, panels = figures.squares(len(planes), legend_rows=1)
        for axes, (title, plane) in zip(panels, planes.items(), strict=True):
            below = f"tails from their centroid {plane.lengths.scatter:.2f} · from hR {plane.lengths.gap:.2f}"
            figures.entitle(axes, title, below)
            figures.without_axes(axes)
            axes.set(xlim=frame[:, 0], ylim=frame[:, 1])
            _panel(axes, plane, frame)
        handles = _legend(next(iter(planes.values())).query.name)
        figure.legend(handles=handles, loc="lower center", ncols=3, handletextpad=0.5, columnspacing=2.5)
    return Drawing(figure, _plane_caption(planes, graph, frame))


def _panel(axes: Axes, plane: Plane, frame: Vectors) -> None:
    from matplotlib.patches import Circle

    axes.axhline(0, color=figures.FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=figures.FAINT, linewidth=0.8, zorder=0)
    # Of very many, density shows, and in the SVG they are one image and not a megabyte of dots.
    many = len(plane.others) > MANY
    grey: dict[str, Any] = {"s": 3 if many else 9, "alpha": 0.25 if many else 0.6, "rasterized": many}
    axes.scatter(plane.others[:, 0], plane.others[:, 1], color=GREY, linewidths=0, zorder=1, **grey)
    centre = plane.tails.mean(0)
    axes.add_patch(Circle(tuple(centre), plane.lengths.scatter, facecolor=figures.ACCENT, alpha=0.12, linewidth=0))
    if plane.mapped_head.any():
        _mapped_head(axes, plane.mapped_head, centre, frame)
    axes.scatter(plane.tails[:, 0], plane.tails[:, 1], s=26, zorder=3, **DOTS)


def _mapped_head(axes: Axes, mapped_head: Vectors, centre: Vectors, frame: Vectors) -> None:
    """h R as an arrow, and where scores are that of the tails' centroid: the line through it, across h R."""
    x, y = mapped_head
    axes.axline(tuple(centre), (centre[0] - y, centre[1] + x), zorder=1, **DASHES)
    tip = mapped_head * _share_inside(mapped_head, frame)
    arrow = {"arrowstyle": "-|>,head_width=0.22,head_length=0.5", "color": figures.CONTRAST, "linewidth": 1.8}
    axes.annotate("", tuple(tip), (0, 0), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0}, zorder=4)
    # Past the head of the arrow, or where the frame is near, beside it.
    along = mapped_head / np.linalg.norm(mapped_head)
    near = (np.abs(tip - frame) < 0.08 * (frame[1] - frame[0])).any()
    beyond = 12 * np.array([along[1], -along[0]]) - 14 * along if near else 11 * along
    middle: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center", "zorder": 4}
    bold: dict[str, Any] = {"color": figures.CONTRAST, "fontweight": "bold", **middle}
    axes.annotate("hR", tuple(tip), tuple(beyond), textcoords="offset points", **bold)


def _legend(query: str) -> list[Line2D]:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"linestyle": "", "marker": "o"}
    return [
        Line2D([], [], color=figures.ACCENT, markersize=5.5, label=f"answers to {query}", **dot),
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


def _plane_caption(planes: Mapping[str, Plane], graph: str, frame: Vectors) -> str:
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


EXPLANATION_WAYS = {
    "against": ("what speaks most against them", figures.CONTRAST),
    "any": ("any triples of their entities", figures.QUIET),
    "reasons": ("their best reasons", figures.ACCENT),
}


def draw_reasons(found: Sequence[LeftOut], *, title: str = "", graph: str = "") -> Drawing:
    """A line for each way over the number of triples left out, a dot for each seed."""
    if not any(one.way in EXPLANATION_WAYS for one in found):
        raise RequestError("A figure of reasons needs some that were left out, and none came.")
    before = [one.metrics.mrr for one in found if one.way == "nothing"]
    counts = sorted({one.count for one in found})
    with figures.in_style():
        figure, [axes] = figures.sheet(3.7)
        figures.entitle(axes, title or "Reasons left out", "trained again without some training triples of each answer")
        for way, (name, colour) in EXPLANATION_WAYS.items():
            after: dict[float, list[float]] = {
                place: _mrr(found, way, count) or before for place, count in enumerate(counts)
            }
            figures.line_of_seeds(axes, after, name=name, colour=colour)
        top = max(one.metrics.mrr for one in found)
        axes.set_xticks(range(len(counts)), [f"{count}" for count in counts])
        axes.set(xlim=(-0.2, len(counts) - 0.8), ylim=(0, 1.15 * top), ylabel="MRR of the answers")
        axes.set_xlabel("triples of each answer that are left out")
        axes.yaxis.grid(True)
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left")
    return Drawing(figure, _explanation_caption(found, graph))


def _mrr(found: Sequence[LeftOut], way: str, count: int) -> list[float]:
    return [one.metrics.mrr for one in found if one.way == way and one.count == count]


def _explanation_caption(found: Sequence[LeftOut], graph: str) -> str:
    return (
        f"{found[0].num_answers:,} test triples{' of ' * bool(graph)}{graph} without an entity in common, ranked after "
        f"training without some triples of train: those that support each most, those that speak most against it, or "
        f"any of its two entities. A dot is a seed."
    )


def draw_storage_formats(points: Sequence[StoragePoint], *, title: str = "", graph: str = "") -> Drawing:
    """A dot for each dense form, and a line along the shares of zeros; bytes on a logarithmic axis."""
    if not points:
        raise RequestError("A figure of forms needs a point, and none came.")
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.ticker import LogLocator
    dense = [point for point in points if point.storage != "sparse"]
    sparse = sorted((point for point in points if point.storage == "sparse"), key=lambda point: point.share)
    with figures.in_style():
        figure, [axes] = figures.sheet(4.0)
        figures.entitle(
            axes, title or "MRR against bytes", "dots: whole tables; line: float32 without so many of its entries"
        )
        axes.plot(*_places(sparse), color=figures.CONTRAST, linewidth=1.8, marker="o", markersize=4, zorder=3)
        axes.plot(*_places(dense), color=figures.ACCENT, linestyle="", marker="o", markersize=7, zorder=4)
        for group, colour, above in ((dense, figures.ACCENT, 12), (sparse, figures.CONTRAST, -12)):
            text: dict[str, Any] = {"color": colour, "ha": "center", "va": "center", "fontsize": 8.5}
            for point in group:
                place = (point.bytes, point.metrics.mrr)
                name = f"{point.share:.0%}" if group is sparse else point.name
                axes.annotate(name, place, (0, above), textcoords="offset points", **text)
        top = max(point.metrics.mrr for point in points)
        axes.set(xscale="log", xlabel="bytes of the entity tables", ylabel="MRR", ylim=(0, 1.15 * top))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.minorticks_off()
        axes.yaxis.grid(True)
        axes.margins(x=0.1)
    return Drawing(figure, _index_caption(graph))


def _places(points: Sequence[StoragePoint]) -> tuple[list[int], list[float]]:
    return [point.bytes for point in points], [point.metrics.mrr for point in points]


def short(num_bytes: float) -> str:
    """Bytes as people say them: 1.5 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _index_caption(graph: str) -> str:
    return (
        f"MRR{' on ' * bool(graph)}{graph} against the bytes that the entity embeddings take: float32, bf16 and int8 "
        f"whole, and float32 without the smallest entries. Relations are float32 and are not counted."
    )


PANELS = {
    "as_query": ("In the query", "queries that give an inductive entity"),
    "as_answer": ("The answer", "queries that it answers"),
    "known": ("Known entities", "queries without inductive entities"),
}
INDUCTIVE_METHODS = {
    "embedded": ("embedded", figures.ACCENT, -0.05),
    "retrained": ("retrained", figures.CONTRAST, 0.05),
}


def draw_inductive(found: Sequence[InductiveResult], *, graph: str = "") -> Drawing:
    """A line for each method over the number of triples, a dot for each seed; a panel for each kind of query."""
    if not any(one.method in INDUCTIVE_METHODS for one in found):
        raise RequestError("A figure of inductive entities needs results of embedding or retraining; there are none.")
    counts = sorted({_number(one) for one in found if one.method in INDUCTIVE_METHODS})
    top = max(getattr(one, view).mrr for one in found for view in PANELS)
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.ticker import MultipleLocator
    with figures.in_style():
        figure, panels = figures.sheet(3.7, columns=len(PANELS), gap=0.03, sharey=True)
        for axes, (view, titles) in zip(panels, PANELS.items(), strict=True):
            figures.entitle(axes, *titles)
            _lines(axes, found, view, counts)
            axes.set_xticks(range(len(counts)), ["all" if count == float("inf") else f"{count:g}" for count in counts])
            axes.set(xlim=(-0.3, len(counts) - 0.7), ylim=(0, 1.08 * top), xlabel="training triples per entity")
            axes.yaxis.grid(True)
            axes.spines["left"].set_visible(False)
        panels[0].set_ylabel("MRR")
        panels[0].yaxis.set_major_locator(MultipleLocator(0.1))
        panels[1].legend(loc="upper left")
    return Drawing(figure, _inductive_caption(found, graph))


def _lines(axes: Axes, found: Sequence[InductiveResult], view: str, counts: Sequence[float]) -> None:
    for method, (name, colour, aside) in INDUCTIVE_METHODS.items():
        seeds = {place + aside: list(_values(found, method, view, count)) for place, count in enumerate(counts)}
        seeds = {place: values for place, values in seeds.items() if values}
        figures.line_of_seeds(axes, seeds, name=name, colour=colour)
    if at_mean := [getattr(one, view).mrr for one in found if one.method == "mean"]:
        place = fmean(at_mean)
        axes.axhline(place, color=figures.QUIET, linewidth=0.8, linestyle=(0, (4, 3)), label="at the mean", zorder=2)


def _values(found: Sequence[InductiveResult], method: str, view: str, count: float) -> Iterator[float]:
    return (getattr(one, view).mrr for one in found if one.method == method and _number(one) == count)


def _number(one: InductiveResult) -> float:
    return float("inf") if one.triples_per_entity is None else one.triples_per_entity


def _inductive_caption(found: Sequence[InductiveResult], graph: str) -> str:
    return (
        f"{count_text(found)}{' of ' * bool(graph)}{graph} are withheld, then embedded by some of their triples, or the "
        f"model is retrained with those triples. A dot is a seed. Dashed: the mean of all rows for every entity."
    )


FIGURES_GRAPH = "FB15k-237"
CP, CP_N3, CP_DURA = Row("CP", "cp"), Row("CP-N3", "cp-n3"), Row("CP-DURA", "cp-dura")
RESCAL, RESCAL_DURA = Row("RESCAL", "rescal"), Row("RESCAL-DURA", "rescal-dura")
SPARSE_PANELS = {"CP": (CP, CP_N3, CP_DURA), "RESCAL": (RESCAL, RESCAL_DURA)}
TURNED, TURNED_FOR = "RESCAL-DURA, rotated", 0.8
ABOUT_TURNING = (
    f"A rotated model is the same one in the axes in which {100 * TURNED_FOR:.0f} % of zeros cost least: no score "
    f"differs while nothing is zero."
)
IN_THE_PLANE = (Row("CP", "cp-dim-2"), Row("CP-DURA", "cp-dura-dim-2"))


def tsne(setting: Setting) -> list[Sheet]:
    """The answers to the ten queries of Appendix D.3 in the plane, and the silhouettes of their queries."""
    from dualkg.analysis.figures import draw_projections

    check_figure_packages()
    graph = setting.graph(FIGURES_GRAPH)
    queries = find_queries(graph, published()["tsne_queries"])
    first: dict[str, Projection] = {}
    facts = []
    for row in (CP, CP_DURA):
        for seed in range(setting.seeds):
            found = project(setting.trained(row, graph, seed).model, queries)
            first.setdefault(row.name, found)
            facts.append({"row": row.name, "seed": seed, **found.as_dict()})
    rows = []
    for name in first:
        values = {metric: [one["silhouettes"][metric] for one in facts if one["row"] == name] for metric in METRICS}
        cells = [over_seeds(found) for found in values.values()]
        rows.append([name, *cells, str(setting.seeds)])
    sheet = Sheet(f"t-SNE: {graph.name}", ("silhouette of ten queries", *METRICS, "seeds"), rows, facts)
    return [setting.keep("tsne", sheet, facts, draw_projections(first, graph=graph.name), graph=graph)]


def plane(setting: Setting) -> list[Sheet]:
    """Figure 1 of models of dim 2: the tails of one query, with and without DURA."""

    check_figure_packages()
    graph = setting.graph(FIGURES_GRAPH)
    query = pick_query(graph)
    planes = {row.name: plane_of(setting.trained(row, graph, 0).model, graph, query) for row in IN_THE_PLANE}
    facts = {name: one.as_dict() for name, one in planes.items()}
    columns = ("distance of the tails", "from their centroid", "from hR", "median query: centroid", "median query: hR")
    rows = [
        [
            name,
            *(f"{one[key]:.3f}" for key in ("scatter", "gap")),
            *(f"{one['typical'][key]:.3f}" for key in ("scatter", "gap")),
        ]
        for name, one in facts.items()
    ]
    note = (
        "The paper draws tails that DURA brings into a small region near hR. How near they are to hR the second column "
        "says; how near to each other, in each model's own spread, the first: it need not follow."
    )
    sheet = Sheet(f"Figure 1 at dim 2: {graph.name}", columns, rows, [facts], [note])
    return [setting.keep("figure1", sheet, facts, draw_planes(planes, graph=graph.name), graph=graph)]


def sparsity(setting: Setting) -> list[Sheet]:
    """MRR against the share of zeros, and what tables without zeros take."""
    from dualkg.analysis.figures import draw_sparsity

    check_figure_packages()
    graph = setting.graph(FIGURES_GRAPH)
    found: dict[str, list[list[CurvePoint]]] = {}
    for row in (row for rows in SPARSE_PANELS.values() for row in rows):
        for seed in range(setting.seeds):
            model = setting.trained(row, graph, seed).model
            found.setdefault(row.name, []).append(sparsity_curve(model, graph))
            if row is RESCAL_DURA:
                found.setdefault(TURNED, []).append(sparsity_curve(rotated(model, share=TURNED_FOR), graph))
    facts = [
        {"row": name, "seed": seed, "points": [point.as_dict() for point in points]}
        for name, curves in found.items()
        for seed, points in enumerate(curves)
    ]
    panels = {
        panel: {
            name: [{one.wanted_share: one.metrics.mrr for one in curve} for curve in found[name]]
            for name in (*(row.name for row in rows), *([TURNED] if RESCAL_DURA in rows else []))
        }
        for panel, rows in SPARSE_PANELS.items()
    }
    drawing = draw_sparsity(panels, published=_published_points(graph.name), graph=graph.name)
    curves = setting.keep("sparsity", _mrr_sheet(found, graph.name), facts, drawing, graph=graph)
    return [curves, _storage(setting, graph, found)]


def lambdas(setting: Setting) -> list[Sheet]:
    """MRR on valid over λ1 and λ2, a grid of trainings; called again, it goes on where it was."""
    from dualkg.tuning.space import load_space
    from dualkg.tuning.tune import tune

    check_figure_packages()
    sheets = []
    for graph in setting.graphs:
        name = f"{graph.lower()}-complex-dura-weights"
        space = load_space(spaces_folder() / f"{name}.toml")
        setting.tell(f"{space.num_trials} trainings of {space.base.model.name} on {graph}.")
        kept = setting.records / "searches" / f"{graph.lower()}-complex-dura-weights"
        result = tune(
            space, out=setting.runs / "searches" / f"{graph.lower()}-complex-dura-weights", device=setting.device
        )
        result.write(kept)
        found = {
            (float(row.params["regularizer.plain"]), float(row.params["regularizer.mapped"])): row.mrr
            for row in result.ranked
            if row.mrr is not None
        }
        chosen = space.base.regularizer
        pair = None if chosen.plain is None or chosen.mapped is None else (chosen.plain, chosen.mapped)
        drawing = draw_ablation(found, chosen=pair, title=f"λ1 and λ2 of DURA: {space.base.model.name} on {graph}")
        mapped = sorted({other for _, other in found})
        rows = [
            [f"λ1 = {plain:g}", *(f"{found[plain, other]:.4f}" if (plain, other) in found else "–" for other in mapped)]
            for plain in sorted({plain for plain, _ in found})
        ]
        facts = [{"plain": plain, "mapped": other, "valid_mrr": mrr} for (plain, other), mrr in sorted(found.items())]
        columns = ("MRR on valid, filtered by train and valid", *(f"λ2 = {other:g}" for other in mapped))
        sheet = Sheet(f"λ1 and λ2 around the best: {graph}", columns, rows, facts)
        sheets.append(setting.keep("lambdas", sheet, facts, drawing, graph=load_recipe_graph(space.base)))
    return sheets


def _published_points(graph: str) -> dict[str, dict[float, float]]:
    """`mrr_at_60_percent` of a row → 0.6; of the graph that the paper has them of."""
    printed = published()["sparsity"]
    points: dict[str, dict[float, float]] = {}
    for name, row in printed.items() if printed["dataset"] == graph else ():
        if isinstance(row, dict):
            points[name] = {int(key.split("_")[2]) / 100: mrr for key, mrr in row.items()}
    return points


def _mrr_sheet(found: dict[str, list[list[CurvePoint]]], graph: str) -> Sheet:
    columns = ("entries set to zero", *(f"{share:.0%}" for share in SHARES), "seeds")
    rows, facts = [], []
    for name, curves in found.items():
        spreads = [spread([curve[place].metrics.mrr for curve in curves]) for place in range(len(SHARES))]
        rows.append([name, *(f"{mean:.4f}" for mean, _ in spreads), str(len(curves))])
        points = zip(SHARES, spreads, strict=True)
        facts.append({"row": name, "mrr": [{"share": share, "mean": mean, "sd": sd} for share, (mean, sd) in points]})
    return Sheet(f"MRR against sparsity: {graph}", columns, rows, facts, [ABOUT_TURNING])


def _storage(setting: Setting, graph: Graph, found: dict[str, list[list[CurvePoint]]]) -> Sheet:
    """How much less CSR takes than dense at some shares, as the paper counts and in bytes."""
    shares = (0.5, 0.6, 0.7, 0.8, 0.9)
    rows: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    for name in (CP_DURA.name, RESCAL_DURA.name):
        for point in (one for one in found[name][0] if one.wanted_share in shares):
            entity, whole = point.storage.entity_tables["CSR"], point.storage.whole_model["CSR"]
            saved = [entity.numbers_saved, entity.bytes_saved, whole.numbers_saved, whole.bytes_saved]
            rows.append([name, f"{point.share:.0%}", *(f"{one:.1%}" for one in saved)])
            facts.append({"row": name, "share": point.share, "saved": saved})
    columns = ("less than dense, as CSR", "zeros", "entity tables, numbers", "bytes", "whole model, numbers", "bytes")
    note = (
        "Numbers are the paper's 2a + n + 1; bytes have the narrowest indices that hold. The paper's 65 % less at 70 % "
        "zeros does not follow from its count, which saves 40 % there: 65 % takes 82.5 % zeros."
    )
    sheet = Sheet(f"Storage of sparse tables: {graph.name}", columns, rows, facts, [note])
    return setting.keep("storage", sheet, facts, graph=graph)

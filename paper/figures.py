"""The figures of the paper and of the studies, and the positions in the plane that Figures 1 and 2
show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import dualkg as kg
from dualkg.analysis.figures import (
    ACCENT,
    CONTRAST,
    FAINT,
    PAPER,
    QUIET,
    Drawing,
    figure_style,
    new_figure,
    set_titles,
)
from dualkg.analysis.projection import Vectors, default_perplexity, tail_embeddings, tsne
from dualkg.data.filters import Ids
from dualkg.extras import optional_import
from dualkg.models.diagonal import RealDiagonalModel
from paper.registry import TEXTS
from paper.tables import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with colour vision deficiency (Petroff, Accessible color sequences for data
# visualization, 2021).
TEN_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
CENTRED: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center"}
DASHES: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}
Facts = Sequence[Mapping[str, Any]]


def square_panels(columns: int, *, legend_rows: int) -> tuple[Figure, list[Axes]]:
    """Square panels with a faint frame and no numbers, for coordinates without a meaning, above a
    legend.
    """
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
    mrr: Mapping[tuple[float, float], float],
    *,
    chosen: tuple[float, float] | None = None,
    title: str = "",
) -> Drawing:
    """A heat map of (λ1, λ2) → MRR; the best is bold, the `chosen` pair framed, missing ones
    empty.
    """
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
        x = mapped.index(chosen[1])
        y = plain.index(chosen[0])
        axes.plot(
            [x, x + 1, x + 1, x, x],
            [y, y, y + 1, y + 1, y],
            color=CONTRAST,
            linewidth=2.2,
            clip_on=False,
        )
        caption += f" Framed: λ1 = {chosen[0]:g} and λ2 = {chosen[1]:g}."
    axes.set_xticks(np.arange(len(mapped)) + 0.5, [f"{weight:g}" for weight in mapped])
    axes.set_yticks(np.arange(len(plain)) + 0.5, [f"{weight:g}" for weight in plain])
    axes.set(xlabel="λ2, on the mapped norms", ylabel="λ1, on the plain norms")
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return Drawing(figure, caption)


@dataclass(frozen=True, eq=False)
class NamedQuery:
    """(head, relation, ?) by ids, its name for figures, and the tails that answer it, ordered by
    id.
    """

    head: int
    relation: int
    name: str
    answers: Ids


def short_relation(name: str) -> str:
    """The last part of a relation's path in words: /location/location/contains → contains."""
    return name.rstrip("/").rpartition("/")[2].replace("_", " ").strip() or name


# -- Figure 1: one query in the plane ----------------------------------------

GREY = "#aab4bc"
MANY = 2000
TAILS = (5, 20)  # fewest and most tails of a query


@dataclass(frozen=True, eq=False)
class Plane:
    """One query in a model of dim 2, in units of the mean distance of all entities from their
    centroid.

    `about` has its name, the mean distances of its tails, and the medians of these over all queries
    with 5 to 20 tails.
    """

    about: dict[str, Any]
    mapped_head: Vectors
    tails: Vectors
    others: Vectors


@torch.no_grad()
def compute_plane(model: kg.Model, graph: kg.Graph, query: NamedQuery) -> Plane:
    """The mapped head, the tails of a query and all other entities in a model of dim 2."""
    model.check_shape(graph.shape)
    bilinear = model.embedding
    if not isinstance(bilinear, RealDiagonalModel) or bilinear.dim != 2:
        raise kg.RequestError(
            f"Figure 1 needs a CP or DistMult model with dim 2; this is {type(bilinear).__name__} "
            f"with dim {bilinear.dim:,}. Train one: CP(graph.shape, dim=2)."
        )
    entities = tail_embeddings(model, np.arange(len(graph.entities)))
    spread = float(np.linalg.norm(entities - entities.mean(0), axis=1).mean())
    if not spread > 0:
        raise kg.RequestError(
            "All entities are at one point, so distances have no unit. Train the model first."
        )
    entities = entities / spread
    heads, relations, answers = zip(*_queries_for_figure(graph), strict=True)
    ids = torch.tensor([(query.head, *heads), (query.relation, *relations)], device=bilinear.device)
    mapped = bilinear.factors(*ids, None).mapped_head.double().cpu().numpy() / spread
    all_distances = [
        _distances(entities[tails], head) for tails, head in zip(answers, mapped[1:], strict=True)
    ]
    medians = {
        key: float(np.median([one[key] for one in all_distances])) for key in ("centroid", "hR")
    }
    tails = entities[query.answers]
    others = np.delete(entities, query.answers, axis=0)
    measured = {
        "distances": _distances(tails, mapped[0]),
        "medians": medians,
        "num_queries": len(all_distances),
    }
    return Plane(
        {"query": query.name, "num_tails": len(tails), **measured}, mapped[0], tails, others
    )


def pick_query(graph: kg.Graph) -> NamedQuery:
    """The query with 5 to 20 tails in train whose tails share the most other queries, before any
    model is trained.

    For every query that any of the tails answers, count how many of the tails answer it; the mean
    count is largest.
    """
    known = kg.KnownAnswers.of(graph, ["train"])
    keys = np.repeat(known.queries, np.diff(known.offsets))[
        np.argsort(known.answers, kind="stable")
    ]
    ends = np.cumsum(np.bincount(known.answers, minlength=len(graph.entities)))
    answered = np.split(keys, ends[:-1])  # the queries that an entity answers

    def overlap(query: tuple[int, int, Ids]) -> float:
        queries = np.concatenate([answered[tail] for tail in query[2]])
        return len(queries) / len(np.unique(queries))

    head, relation, answers = max(_queries_for_figure(graph), key=overlap)
    name = f"{graph.entities.label(head)} · {short_relation(graph.relations.label(relation))}"
    return NamedQuery(head, relation, name, answers)


def _queries_for_figure(graph: kg.Graph) -> Iterator[tuple[int, int, Ids]]:
    """Head, relation and tails of every query with 5 to 20 tails in train."""
    known = kg.KnownAnswers.of(graph, ["train"])
    heads, relations = np.divmod(known.queries, 2 * graph.shape.num_relations)
    counts = np.diff(known.offsets)
    chosen = (relations < graph.shape.num_relations) & (counts >= TAILS[0]) & (counts <= TAILS[1])
    if not chosen.any():
        low, high = TAILS
        raise kg.RequestError(
            f"Figure 1 needs a query with {low} to {high} tails, and {graph.name} has none in "
            "train."
        )
    for index in np.flatnonzero(chosen).tolist():
        tails = known.answers[known.offsets[index] : known.offsets[index + 1]]
        yield int(heads[index]), int(relations[index]), tails.astype(np.int64)


def _distances(tails: Vectors, mapped_head: Vectors) -> dict[str, float]:
    centres = {"centroid": tails.mean(0), "hR": mapped_head}
    return {
        name: float(np.linalg.norm(tails - centre, axis=1).mean())
        for name, centre in centres.items()
    }


@figure_style()
def draw_planes(planes: Mapping[str, Plane], *, graph: str = "") -> Drawing:
    """One panel per model on the same scale: h R as an arrow, the tails of the query, other
    entities grey.
    """
    frame = _frame(planes)
    figure, panels = square_panels(len(planes), legend_rows=1)
    for axes, (title, plane) in zip(panels, planes.items(), strict=True):
        subtitle = "tails from their centroid {centroid:.2f} · from hR {hR:.2f}"
        set_titles(axes, title, subtitle.format(**plane.about["distances"]))
        axes.set(xlim=frame[:, 0], ylim=frame[:, 1])
        handles = _plot_plane(axes, plane, frame)
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=3, markerscale=1.3, columnspacing=2.5
    )
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    return Drawing(figure, _plane_caption(planes, graph, frame))


def _plot_plane(axes: Axes, plane: Plane, frame: Vectors) -> list[Any]:
    from matplotlib.patches import Circle

    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    many = len(plane.others) > MANY  # then one image in the SVG instead of a megabyte of dots
    grey = {
        "s": 3 if many else 9,
        "alpha": 0.25 if many else 0.6,
        "rasterized": many,
        "linewidths": 0,
        "zorder": 1,
    }
    others = axes.scatter(*plane.others.T, color=GREY, label="other entities", **grey)
    dots = {"s": 26, "edgecolors": PAPER, "linewidths": 0.6, "zorder": 3}
    tails = axes.scatter(
        *plane.tails.T, color=ACCENT, label=f"answers to {plane.about['query']}", **dots
    )
    centre = plane.tails.mean(0)
    head = plane.mapped_head
    radius = plane.about["distances"]["centroid"]
    axes.add_patch(Circle(tuple(centre), radius, facecolor=ACCENT, alpha=0.12, linewidth=0))
    if not head.any():
        return [tails, others]
    equal = axes.axline(
        centre, (centre[0] - head[1], centre[1] + head[0]), zorder=1, label="equal scores", **DASHES
    )
    tip = head * _share_inside(head, frame)
    arrow = {
        "arrowstyle": "-|>,head_width=0.22,head_length=0.5",
        "color": CONTRAST,
        "linewidth": 1.8,
    }
    axes.annotate(
        "", tuple(tip), (0, 0), arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0}, zorder=4
    )
    # The label is beyond the tip of the arrow, or beside it where the frame is close.
    along = head / np.linalg.norm(head)
    near = (np.abs(tip - frame) < 0.08 * (frame[1] - frame[0])).any()
    offset = 12 * np.array([along[1], -along[0]]) - 14 * along if near else 11 * along
    bold = {"color": CONTRAST, "fontweight": "bold", "zorder": 4, **CENTRED}
    axes.annotate("hR", tuple(tip), tuple(offset), textcoords="offset points", **bold)
    return [tails, others, equal]


def _frame(planes: Mapping[str, Plane]) -> Vectors:
    """Lower and upper corner of the square that all panels show: tails, nearly all other entities,
    short arrows.
    """
    inside = [np.zeros((1, 2)), *(plane.tails for plane in planes.values())]
    inside += [
        np.quantile(plane.others, [0.01, 0.99], axis=0)
        for plane in planes.values()
        if len(plane.others)
    ]
    inside += [
        plane.mapped_head[None]
        for plane in planes.values()
        if np.linalg.norm(plane.mapped_head) < 3
    ]
    low = np.vstack(inside).min(0)
    high = np.vstack(inside).max(0)
    half = 1.16 * (high - low).max() / 2
    return (low + high) / 2 + np.array([[-half], [half]])


def _share_inside(arrow: Vectors, frame: Vectors) -> float:
    """The share of an arrow from the origin that is inside a frame."""
    limits = np.where(arrow > 0, frame[1], frame[0])
    return min(1.0, np.divide(limits, arrow, out=np.full(2, np.inf), where=arrow != 0).min())


def _plane_caption(planes: Mapping[str, Plane], graph: str, frame: Vectors) -> str:
    counts = {
        name: ((one.others < frame[0]) | (one.others > frame[1])).any(1).sum()
        for name, one in planes.items()
    }
    outside = [
        f"{n:,} {'entity' if n == 1 else 'entities'} of {name}" for name, n in counts.items() if n
    ]
    long = [name for name, plane in planes.items() if _share_inside(plane.mapped_head, frame) < 1]
    pair = "{} {centroid:.2f} and {hR:.2f}"
    pairs = "; ".join(pair.format(name, **plane.about["medians"]) for name, plane in planes.items())
    about = next(iter(planes.values())).about
    return (
        TEXTS["figure1"]["caption"].format(
            in_graph=" in " * bool(graph) + graph, pairs=pairs, **about
        )
        + (f" The arrow of {' and '.join(long)} is cut at the frame." if long else "")
        + (f" Outside the frame: {', '.join(outside)}." if outside else "")
    )


# -- Figure 2: t-SNE of answers ----------------------------------------------

METRICS = ("euclidean", "cosine")
SHARED = -1  # the group of an entity that answers several of the queries


@dataclass(frozen=True)
class Silhouette:
    """The silhouette coefficient: its mean over all vectors with a group, and over those of each
    group.
    """

    mean: float
    by_group: dict[int, float]


@dataclass(frozen=True, eq=False)
class Projection:
    """The answers of some queries: each entity once, the number of its query or SHARED, and its
    position.
    """

    queries: tuple[NamedQuery, ...]
    entities: Ids
    groups: Ids
    positions: Vectors
    perplexity: float
    silhouettes: dict[str, Silhouette]

    def as_dict(self) -> dict[str, Any]:
        queries = [
            {
                "head": query.head,
                "relation": query.relation,
                "name": query.name,
                "num_answers": len(query.answers),
            }
            | {
                "silhouettes": {
                    metric: one.by_group.get(number) for metric, one in self.silhouettes.items()
                }
            }
            for number, query in enumerate(self.queries)
        ]
        means = {metric: one.mean for metric, one in self.silhouettes.items()}
        counts = {
            "num_entities": len(self.entities),
            "num_shared": int((self.groups == SHARED).sum()),
        }
        return {**counts, "perplexity": self.perplexity, "silhouettes": means, "queries": queries}


def find_queries(graph: kg.Graph, pairs: Iterable[Sequence[str]]) -> list[NamedQuery]:
    """Look up queries given as (head, relation), the head by its label or name, and their answers
    in all splits.

    A label of several entities stands for the one with the most answers.
    """
    known = kg.KnownAnswers.of(graph)
    found = []
    for head, relation in pairs:
        relation_id = graph.relations.id(relation)
        heads = _entities_called(graph, head)
        owners, answers = known(heads, np.full(len(heads), relation_id))
        counts = np.bincount(owners, minlength=len(heads))
        best = np.flatnonzero(counts == counts.max())
        if not counts.any():
            several = f"None of the {len(heads)} entities called '{head}' has an"
            subject = several if len(heads) > 1 else f"'{head}' has no"
            raise kg.RequestError(f"{subject} answer to '{relation}' in {graph.name}.")
        if len(best) > 1:
            names = ", ".join(f"'{graph.entities[int(heads[index])]}'" for index in best[:5])
            raise kg.RequestError(
                f"'{head}' matches {len(best)} entities of {graph.name} with {counts.max():,} "
                f"answers each to '{relation}': {names}. Use one of these names."
            )
        name = f"{head} · {short_relation(graph.relations.label(relation_id))}"
        found.append(NamedQuery(int(heads[best[0]]), relation_id, name, answers[owners == best[0]]))
    return found


def _entities_called(graph: kg.Graph, head: str) -> Ids:
    """All entities with this name or label, ignoring case."""
    try:
        return np.array(graph.entities.ids_ignoring_case(head) or [graph.entities.id(head)])
    except kg.RequestError as error:
        hint = (
            f" {graph.name} was read without labels; load_graph(…, labels=…) reads a file of them."
        )
        raise kg.RequestError(f"{error}{hint if graph.entities.labels is None else ''}") from None


def group_answers(queries: Sequence[NamedQuery]) -> tuple[Ids, Ids]:
    """Each answer once, ordered by id, and the number of the query it answers, or SHARED."""
    joined = np.concatenate([query.answers for query in queries])
    owners = np.repeat(np.arange(len(queries)), [len(query.answers) for query in queries])
    entities, first, counts = np.unique(joined, return_index=True, return_counts=True)
    return entities, np.where(counts > 1, SHARED, owners[first])


def project(model: kg.Model, queries: Sequence[NamedQuery]) -> Projection:
    """t-SNE of the answers of queries, and the silhouettes of the queries in the embedding
    space.
    """
    entities, groups = group_answers(queries)
    vectors = tail_embeddings(model, entities)
    perplexity = default_perplexity(len(entities))
    silhouettes = {metric: silhouette(vectors, groups, metric=metric) for metric in METRICS}
    return Projection(
        tuple(queries),
        entities,
        groups,
        tsne(vectors, perplexity=perplexity),
        perplexity,
        silhouettes,
    )


def silhouette(vectors: Vectors, groups: Ids, *, metric: str = "euclidean") -> Silhouette:
    """How well groups are separated; vectors of SHARED have no single group and are left out."""
    with optional_import("scikit-learn", purpose="A silhouette"):
        from sklearn.metrics import silhouette_samples
    own = groups != SHARED
    vectors = vectors[own]
    groups = groups[own]
    present = np.unique(groups)
    if not 1 < len(present) < len(groups):
        raise kg.RequestError(
            "A silhouette needs at least two groups, and more vectors than groups; there are "
            f"{len(present):,} groups with {len(groups):,} vectors."
        )
    values = silhouette_samples(vectors, groups, metric=metric)
    by_group = {int(group): float(values[groups == group].mean()) for group in present}
    return Silhouette(float(values.mean()), by_group)


@figure_style()
def draw_projections(projections: Mapping[str, Projection], *, graph: str = "") -> Drawing:
    """One panel per model: a colour is a query, a ring an entity that answers several."""
    first = next(iter(projections.values()))
    text = TEXTS["tsne"]
    about = first.as_dict()
    names = [query.name for query in first.queries]
    rings = bool(about["num_shared"])
    figure, panels = square_panels(len(projections), legend_rows=(len(names) + rings + 1) // 2)
    for axes, (title, projection) in zip(panels, projections.items(), strict=True):
        set_titles(axes, title, f"silhouette {projection.silhouettes['euclidean'].mean:.3f}")
        axes.margins(0.04)
        styles = [
            {"color": colour, "linewidths": 0.3, "edgecolors": PAPER}
            for colour in TEN_COLOURS[: len(names)]
        ]
        groups = [(number, names[number], style) for number, style in enumerate(styles)]
        ring = {"facecolors": PAPER, "linewidths": 0.9, "edgecolors": "black"}
        for number, name, style in [
            *groups,
            *([(SHARED, "answers two or more", ring)] if rings else []),
        ]:
            axes.scatter(
                *projection.positions[projection.groups == number].T, s=15, label=name, **style
            )
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, markerscale=1.5, columnspacing=2.5
    )
    cosine = ", ".join(
        f"{name} {one.silhouettes['cosine'].mean:.3f}" for name, one in projections.items()
    )
    about |= {"num_queries": len(names), "of_graph": " of " * bool(graph) + graph, "cosine": cosine}
    about["rings"] = text["rings"].format(**about) if rings else ""
    return Drawing(figure, text["caption"].format(**about))


# -- Figure 3: sparsity ------------------------------------------------------

Curve = Mapping[float, float]  # share of zeros → MRR
Panels = Mapping[str, Mapping[str, Sequence[Curve]]]  # panel → line → one curve per seed
REGULARIZER_COLOURS = {
    "DURA": ACCENT,
    "N3": CONTRAST,
    "": "#7a8791",
}  # by the suffix of a line's name
OTHER_COLOURS = ("#3a9a7a", "#8a5aa8", "#b04a5a", "#5b6fc4", "#9a8330", "#2f3b46")


@figure_style()
def draw_sparsity(
    panels: Panels, *, published: Mapping[str, Curve] | None = None, graph: str = ""
) -> Drawing:
    """MRR against the share of zeros. A regularizer has the same colour in all panels.

    A line is the mean over the seeds, its band their range. `published` has points by the names of
    the lines.
    """
    curves_by_line = {name: curves for lines in panels.values() for name, curves in lines.items()}
    suffixes = {name: name.partition("-")[2] for name in curves_by_line}
    others = [
        suffix for suffix in dict.fromkeys(suffixes.values()) if suffix not in REGULARIZER_COLOURS
    ]
    colours = REGULARIZER_COLOURS | dict(zip(others, OTHER_COLOURS, strict=False))
    published = published or {}
    top = 1.12 * max(
        mrr for curves in curves_by_line.values() for curve in curves for mrr in curve.values()
    )
    figure, all_axes = new_figure(
        3.7 if len(panels) > 1 else 4.4, columns=len(panels), gap=0.06, sharey=True
    )
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        set_titles(axes, title)
        set_levels(axes, xlim=(0, 0.95), ylim=(0, top), xlabel="entity entries set to zero")
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 0.95])
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.locator_params(axis="y", nbins=5)
        diamonds = {
            "marker": "D",
            "s": 30,
            "linewidths": 1.3,
            "zorder": 4,
            "clip_on": False,
            "facecolors": PAPER,
        }
        for name, curves in sorted(
            lines.items(), key=lambda item: -sum(curve[max(curve)] for curve in item[1])
        ):
            colour = colours[suffixes[name]]
            shares = sorted(curves[0])
            values = np.array([[curve[share] for share in shares] for curve in curves])
            axes.plot(
                shares,
                values.mean(0),
                color=colour,
                linewidth=1.8,
                clip_on=False,
                zorder=3,
                label=name,
            )
            axes.fill_between(
                shares, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0
            )
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
        f"MRR{' on ' * bool(graph)}{graph} when the smallest entries of the entity embeddings are "
        "set to zero."
        + (
            f" A line is the mean of {seeds} seeds, its band their range."
            if max(counts) > 1
            else ""
        )
        + (
            " Diamonds are the numbers of the paper."
            if set(published) & set(curves_by_line)
            else ""
        ),
    )


# -- studies of inference ----------------------------------------------------

QUERY_PANELS: dict[str, list[str]] = TEXTS["inductive"]["panels"]
METHODS = {"embedded": ("embedded", ACCENT), "retrained": ("trained again", CONTRAST)}
REMOVALS = {
    "opposing": ("the most opposing triples", CONTRAST),
    "random": ("random triples of the two entities", QUIET),
    "supporting": ("the most supporting triples", ACCENT),
}
Lines = Mapping[
    tuple[str, str], Mapping[float, list[float]]
]  # name and colour → number of triples → MRR by seed


def _plot_seeds(axes: Axes, lines: Lines, *, top: float, xlabel: str, shift: float = 0.0) -> None:
    """A line through the means and a dot per seed, over numbers of triples at equal distances;
    `shift` parts lines.
    """
    counts = sorted({count for values in lines.values() for count in values})
    for number, ((name, colour), values) in enumerate(lines.items()):
        xs = [counts.index(count) + shift * (number - 0.5) for count in values]
        axes.plot(xs, list(map(fmean, values.values())), color=colour, linewidth=1.8, label=name)
        for x, some in zip(xs, values.values(), strict=True):
            axes.scatter([x] * len(some), some, s=16, color=colour, zorder=4, clip_on=False)
    axes.set_xticks(
        range(len(counts)), ["all" if count == inf else f"{count:g}" for count in counts]
    )
    set_levels(axes, xlim=(-0.3, len(counts) - 0.7), ylim=(0, 1.1 * top), xlabel=xlabel)


@figure_style()
def draw_explanations(results: Facts, graph: str) -> Drawing:
    """MRR after removing training triples and training again: a line per kind of triple, a dot per
    seed.
    """
    groups = grouped(results, "removed", "count")
    mrr = {key: [one["metrics"]["mrr"] for one in ones] for key, ones in groups.items()}
    counts = sorted({count for _, count in mrr})
    lines = {
        line: {n: mrr.get((kind, n)) or mrr["nothing", 0] for n in counts}
        for kind, line in REMOVALS.items()
    }
    figure, [axes] = new_figure(3.7)
    set_titles(axes, "ComplEx-DURA", "trained again without some training triples per test triple")
    _plot_seeds(
        axes,
        lines,
        top=max(map(max, mrr.values())),
        xlabel="training triples removed per test triple",
    )
    axes.set_ylabel("MRR of the test triples")
    axes.legend(loc="lower left")
    return Drawing(figure, TEXTS["explanations"]["caption"].format(graph=graph, results=results))


@figure_style()
def draw_inductive(results: Facts, graph: str) -> Drawing:
    """MRR over the triples per unseen entity: a panel per kind of query, a line per method, a dot
    per seed.
    """
    top = max(result[kind]["mrr"] for result in results for kind in QUERY_PANELS)
    figure, panels = new_figure(3.7, columns=len(QUERY_PANELS), gap=0.03, sharey=True)
    for axes, (kind, titles) in zip(panels, QUERY_PANELS.items(), strict=True):
        set_titles(axes, *titles)
        lines: dict[tuple[str, str], dict[float, list[float]]] = {
            line: {} for line in METHODS.values()
        }
        for (method, count), ones in grouped(results, "method", "triples_given").items():
            if method in METHODS:
                lines[METHODS[method]][inf if count is None else count] = [
                    one[kind]["mrr"] for one in ones
                ]
        _plot_seeds(axes, lines, top=top, xlabel="triples per unseen entity", shift=0.1)
        if at_mean := [result[kind]["mrr"] for result in results if result["method"] == "mean"]:
            axes.axhline(fmean(at_mean), label="mean embedding", zorder=2, **DASHES)
    panels[0].set_ylabel("MRR")
    panels[0].locator_params(axis="y", nbins=6)
    panels[1].legend(loc="upper left")
    return Drawing(
        figure, TEXTS["inductive"]["caption"].format(graph=graph, **inductive_fields(results))
    )


def inductive_fields(results: Facts) -> dict[str, str]:
    """The number of held-out entities in words; it may differ between seeds."""
    counts = [result["num_entities"] for result in results]
    return {
        "num_entities": " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
        + " entities"
    }


@figure_style()
def draw_quantization(results: Facts, graph: str) -> Drawing:
    """MRR against bytes: a dot per dense storage format, and a line along the shares of zeros."""
    from matplotlib.ticker import LogLocator

    figure, [axes] = new_figure(4.0)
    set_titles(axes, "ComplEx-DURA", "dots: dense tables; line: float32 with a share of zeros")
    dense = [one for one in results if one["storage"] != "sparse"]
    sparse = sorted(
        (one for one in results if one["storage"] == "sparse"), key=lambda one: one["share"]
    )
    dots = {"color": ACCENT, "linestyle": "", "markersize": 7}
    line = {"color": CONTRAST, "markersize": 4}
    for some, style, above in ((dense, dots, 12), (sparse, line, -12)):
        points = [(one["bytes"], one["metrics"]["mrr"]) for one in some]
        axes.plot(*zip(*points, strict=True), linewidth=1.8, marker="o", **style)
        for one, point in zip(some, points, strict=True):
            name = f"{one['share']:.0%}" if some is sparse else one["storage"]
            text = {
                "textcoords": "offset points",
                "color": style["color"],
                "fontsize": 8.5,
                **CENTRED,
            }
            axes.annotate(name, point, (0, above), **text)
    top = max(one["metrics"]["mrr"] for one in results)
    axes.set(xscale="log", xlabel="bytes of the entity tables", ylabel="MRR", ylim=(0, 1.15 * top))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.minorticks_off()
    axes.yaxis.grid(True)
    axes.margins(x=0.1)
    return Drawing(figure, TEXTS["quantization"]["caption"].format(graph=graph))


def format_bytes(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"

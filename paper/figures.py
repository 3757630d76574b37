"""Figures of the paper and of the studies, and the positions that Figures 1 and 2 show."""

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
from dualkg.errors import InvalidValue, RequestError
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
CENTRED: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center"}
DASHES: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}
Facts = Sequence[Mapping[str, Any]]


def square_panels(columns: int, *, legend_rows: int) -> tuple[Figure, list[Axes]]:
    """Square panels with a faint frame, above a legend.

    They have no numbers, because the coordinates have no meaning.
    """
    side = min(7.7 / columns, 5.5)
    figure, panels = new_figure(side + 0.85 + 0.2 * legend_rows, columns=columns)
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
    """A heat map of (λ1, λ2) → MRR.

    The best MRR is bold, the `chosen` pair is framed, and missing pairs are empty.
    """
    plain_weights = sorted({plain for plain, _ in mrr})
    mapped_weights = sorted({mapped for _, mapped in mrr})
    values = np.full((len(plain_weights), len(mapped_weights)), np.nan)
    for (plain, mapped), value in mrr.items():
        values[plain_weights.index(plain), mapped_weights.index(mapped)] = value

    figure, [axes] = new_figure(1.5 + 0.62 * len(plain_weights))
    set_titles(axes, title, "MRR; darker is better")
    mesh = axes.pcolormesh(values, cmap="Blues", edgecolors=PAPER, linewidth=2)
    for (row, column), value in np.ndenumerate(values):
        colour = PAPER if mesh.norm(value) > 0.55 else None
        weight = "bold" if value == np.nanmax(values) else "normal"
        text = "–" if np.isnan(value) else f"{value:.3f}"
        axes.text(column + 0.5, row + 0.5, text, color=colour, fontweight=weight, **CENTRED)

    (best_plain, best_mapped), best = max(mrr.items(), key=lambda item: item[1])
    caption = (
        f"MRR over the two weights of DURA. Best is {best:.3f}, at λ1 = {best_plain:g} and "
        f"λ2 = {best_mapped:g}."
    )
    if chosen and chosen in mrr:
        chosen_plain, chosen_mapped = chosen
        x = mapped_weights.index(chosen_mapped)
        y = plain_weights.index(chosen_plain)
        axes.plot(
            [x, x + 1, x + 1, x, x],
            [y, y, y + 1, y + 1, y],
            color=CONTRAST,
            linewidth=2.2,
            clip_on=False,
        )
        caption += f" Framed: λ1 = {chosen_plain:g} and λ2 = {chosen_mapped:g}."
    mapped_labels = [f"{weight:g}" for weight in mapped_weights]
    plain_labels = [f"{weight:g}" for weight in plain_weights]
    axes.set_xticks(np.arange(len(mapped_weights)) + 0.5, mapped_labels)
    axes.set_yticks(np.arange(len(plain_weights)) + 0.5, plain_labels)
    axes.set(xlabel="λ2, on the mapped norms", ylabel="λ1, on the plain norms")
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return Drawing(figure, caption)


@dataclass(frozen=True, eq=False)
class NamedQuery:
    """A query (head, relation, ?), its name for figures, and its answers ordered by id."""

    head: int
    relation: int
    name: str
    answers: Ids


def short_relation(name: str) -> str:
    """The last part of a relation's path in words: /location/location/contains → contains."""
    return name.rstrip("/").rpartition("/")[2].replace("_", " ").strip() or name


# -- Figure 1: one query in the plane ----------------------------------------

GREY = "#aab4bc"
MAX_VECTOR_DOTS = 2000  # more dots than this are one image in the SVG
MIN_TAILS = 5
MAX_TAILS = 20


@dataclass(frozen=True, eq=False)
class Plane:
    """One query in a model of dim 2.

    The unit of length is the mean distance of all entities from their centroid. `about` has the
    name of the query, the mean distances of its tails, and the medians of these over all queries
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
        raise RequestError(
            f"Figure 1 needs a CP or DistMult model with dim 2; this is {type(bilinear).__name__} "
            f"with dim {bilinear.dim:,}. Train one: CP(graph.shape, dim=2)."
        )
    entities = tail_embeddings(model, np.arange(len(graph.entities)))
    spread = float(np.linalg.norm(entities - entities.mean(0), axis=1).mean())
    if not spread > 0:
        raise RequestError(
            "Figure 1 needs distances, and all entities are at one point. Train the model first."
        )
    entities = entities / spread

    heads, relations, answers = zip(*_queries_for_figure(graph), strict=True)
    ids = torch.tensor([(query.head, *heads), (query.relation, *relations)], device=bilinear.device)
    mapped_heads = bilinear.factors(*ids, None).mapped_head.double().cpu().numpy() / spread
    own_mapped_head = mapped_heads[0]
    all_distances = []
    for tails, mapped_head in zip(answers, mapped_heads[1:], strict=True):
        all_distances.append(_distances(entities[tails], mapped_head))
    medians = {}
    for centre in ("centroid", "hR"):
        medians[centre] = float(np.median([distances[centre] for distances in all_distances]))

    own_tails = entities[query.answers]
    about = {
        "query": query.name,
        "num_tails": len(own_tails),
        "distances": _distances(own_tails, own_mapped_head),
        "medians": medians,
        "num_queries": len(all_distances),
    }
    others = np.delete(entities, query.answers, axis=0)
    return Plane(about, own_mapped_head, own_tails, others)


def pick_query(graph: kg.Graph) -> NamedQuery:
    """The query with 5 to 20 tails in train whose tails have the most other queries in common.

    It is chosen before any model is trained. For every query that any of the tails answers, count
    how many of the tails answer it; the query with the largest mean count is taken.
    """
    known = kg.KnownAnswers.of(graph, ["train"])
    by_answer = np.argsort(known.answers, kind="stable")
    query_of_answer = np.repeat(known.queries, np.diff(known.offsets))[by_answer]
    ends = np.cumsum(np.bincount(known.answers, minlength=len(graph.entities)))
    queries_by_entity = np.split(query_of_answer, ends[:-1])

    def overlap(query: tuple[int, int, Ids]) -> float:
        _, _, tails = query
        queries = np.concatenate([queries_by_entity[tail] for tail in tails])
        return len(queries) / len(np.unique(queries))

    head, relation, answers = max(_queries_for_figure(graph), key=overlap)
    name = f"{graph.entities.label(head)} · {short_relation(graph.relations.label(relation))}"
    return NamedQuery(head, relation, name, answers)


def _queries_for_figure(graph: kg.Graph) -> Iterator[tuple[int, int, Ids]]:
    """Head, relation and tails of every query with 5 to 20 tails in train."""
    known = kg.KnownAnswers.of(graph, ["train"])
    heads, relations = np.divmod(known.queries, 2 * graph.shape.num_relations)
    counts = np.diff(known.offsets)
    is_tail_query = relations < graph.shape.num_relations
    chosen = is_tail_query & (counts >= MIN_TAILS) & (counts <= MAX_TAILS)
    if not chosen.any():
        raise RequestError(
            f"Figure 1 needs a query with {MIN_TAILS} to {MAX_TAILS} tails, and {graph.name} has "
            "none in train."
        )
    for index in np.flatnonzero(chosen).tolist():
        tails = known.answers[known.offsets[index] : known.offsets[index + 1]]
        yield int(heads[index]), int(relations[index]), tails.astype(np.int64)


def _distances(tails: Vectors, mapped_head: Vectors) -> dict[str, float]:
    """The mean distances of tails from their centroid and from the mapped head."""

    def mean_distance(centre: Vectors) -> float:
        return float(np.linalg.norm(tails - centre, axis=1).mean())

    return {"centroid": mean_distance(tails.mean(0)), "hR": mean_distance(mapped_head)}


@figure_style()
def draw_planes(planes: Mapping[str, Plane], *, graph: str = "") -> Drawing:
    """One panel per model on the same scale: hR, the tails of the query, and other entities."""
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
    is_image = len(plane.others) > MAX_VECTOR_DOTS
    others = axes.scatter(
        *plane.others.T,
        color=GREY,
        label="other entities",
        s=3 if is_image else 9,
        alpha=0.25 if is_image else 0.6,
        rasterized=is_image,
        linewidths=0,
        zorder=1,
    )
    tails = axes.scatter(
        *plane.tails.T,
        color=ACCENT,
        label=f"answers to {plane.about['query']}",
        s=26,
        edgecolors=PAPER,
        linewidths=0.6,
        zorder=3,
    )
    centre = plane.tails.mean(0)
    radius = plane.about["distances"]["centroid"]
    axes.add_patch(Circle(tuple(centre), radius, facecolor=ACCENT, alpha=0.12, linewidth=0))

    head = plane.mapped_head
    if not head.any():
        return [tails, others]
    beside_centre = (centre[0] - head[1], centre[1] + head[0])
    equal_scores = axes.axline(centre, beside_centre, zorder=1, label="equal scores", **DASHES)
    _plot_mapped_head(axes, head, frame)
    return [tails, others, equal_scores]


def _plot_mapped_head(axes: Axes, mapped_head: Vectors, frame: Vectors) -> None:
    """An arrow from the origin, cut at the frame."""
    tip = mapped_head * _share_inside(mapped_head, frame)
    arrow = {
        "arrowstyle": "-|>,head_width=0.22,head_length=0.5",
        "color": CONTRAST,
        "linewidth": 1.8,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", tuple(tip), (0, 0), arrowprops=arrow, zorder=4)

    # The label is beyond the tip of the arrow, or beside it where the frame is close.
    direction = mapped_head / np.linalg.norm(mapped_head)
    is_near_frame = (np.abs(tip - frame) < 0.08 * (frame[1] - frame[0])).any()
    if is_near_frame:
        sideways = np.array([direction[1], -direction[0]])
        offset = 12 * sideways - 14 * direction
    else:
        offset = 11 * direction
    axes.annotate(
        "hR",
        tuple(tip),
        tuple(offset),
        textcoords="offset points",
        color=CONTRAST,
        fontweight="bold",
        zorder=4,
        **CENTRED,
    )


def _frame(planes: Mapping[str, Plane]) -> Vectors:
    """Lower and upper corner of the square that all panels show.

    It holds the origin, the tails, nearly all other entities, and short arrows.
    """
    inside = [np.zeros((1, 2))]
    for plane in planes.values():
        inside.append(plane.tails)
        if len(plane.others):
            inside.append(np.quantile(plane.others, [0.01, 0.99], axis=0))
        if np.linalg.norm(plane.mapped_head) < 3:
            inside.append(plane.mapped_head[None])
    low = np.vstack(inside).min(0)
    high = np.vstack(inside).max(0)
    half = 1.16 * (high - low).max() / 2
    return (low + high) / 2 + np.array([[-half], [half]])


def _share_inside(arrow: Vectors, frame: Vectors) -> float:
    """The share of an arrow from the origin that is inside a frame."""
    limits = np.where(arrow > 0, frame[1], frame[0])
    return min(1.0, np.divide(limits, arrow, out=np.full(2, np.inf), where=arrow != 0).min())


def _plane_caption(planes: Mapping[str, Plane], graph: str, frame: Vectors) -> str:
    pairs = []
    cut = []
    outside = []
    for name, plane in planes.items():
        medians = plane.about["medians"]
        pairs.append(f"{name} {medians['centroid']:.2f} and {medians['hR']:.2f}")
        if _share_inside(plane.mapped_head, frame) < 1:
            cut.append(name)
        is_outside = (plane.others < frame[0]) | (plane.others > frame[1])
        num_outside = is_outside.any(1).sum()
        if num_outside:
            noun = "entity" if num_outside == 1 else "entities"
            outside.append(f"{num_outside:,} {noun} of {name}")

    about = next(iter(planes.values())).about
    in_graph = f" in {graph}" if graph else ""
    caption = TEXTS["figure1"]["caption"].format(in_graph=in_graph, pairs="; ".join(pairs), **about)
    if cut:
        caption += f" The arrow of {' and '.join(cut)} is cut at the frame."
    if outside:
        caption += f" Outside the frame: {', '.join(outside)}."
    return str(caption)


# -- Figure 2: t-SNE of answers ----------------------------------------------

METRICS = ("euclidean", "cosine")
SHARED = -1  # the group of an entity that answers several of the queries


@dataclass(frozen=True)
class Silhouette:
    """Mean silhouette coefficients: over all vectors with a group, and over those of a group."""

    mean: float
    by_group: dict[int, float]


@dataclass(frozen=True, eq=False)
class Projection:
    """The answers of some queries, each entity once.

    `groups` has the number of the query that an entity answers, or SHARED.
    """

    queries: tuple[NamedQuery, ...]
    entities: Ids
    groups: Ids
    positions: Vectors
    perplexity: float
    silhouettes: dict[str, Silhouette]

    def as_dict(self) -> dict[str, Any]:
        queries = []
        for number, query in enumerate(self.queries):
            silhouettes = {}
            for metric, silhouette in self.silhouettes.items():
                silhouettes[metric] = silhouette.by_group.get(number)
            queries.append(
                {
                    "head": query.head,
                    "relation": query.relation,
                    "name": query.name,
                    "num_answers": len(query.answers),
                    "silhouettes": silhouettes,
                }
            )
        means = {metric: silhouette.mean for metric, silhouette in self.silhouettes.items()}
        return {
            "num_entities": len(self.entities),
            "num_shared": int((self.groups == SHARED).sum()),
            "perplexity": self.perplexity,
            "silhouettes": means,
            "queries": queries,
        }


def find_queries(graph: kg.Graph, pairs: Iterable[Sequence[str]]) -> list[NamedQuery]:
    """Look up queries given as (head, relation), and their answers in all splits.

    A head is given by its label or name. A label of several entities stands for the one with the
    most answers.
    """
    known = kg.KnownAnswers.of(graph)
    return [_find_query(graph, known, head, relation) for head, relation in pairs]


def _find_query(graph: kg.Graph, known: kg.KnownAnswers, head: str, relation: str) -> NamedQuery:
    relation_id = graph.relations.id(relation)
    heads = _entities_called(graph, head)
    owners, answers = known(heads, np.full(len(heads), relation_id))
    counts = np.bincount(owners, minlength=len(heads))
    if not counts.any():
        subject = f"'{head}' has no"
        if len(heads) > 1:
            subject = f"None of the {len(heads)} entities called '{head}' has an"
        raise RequestError(f"{subject} answer to '{relation}' in {graph.name}.")

    best, *ties = np.flatnonzero(counts == counts.max())
    if ties:
        names = ", ".join(f"'{graph.entities[int(heads[tied])]}'" for tied in [best, *ties][:5])
        raise RequestError(
            f"'{head}' matches {1 + len(ties)} entities of {graph.name} with {counts.max():,} "
            f"answers each to '{relation}': {names}. Use one of these names."
        )
    name = f"{head} · {short_relation(graph.relations.label(relation_id))}"
    return NamedQuery(int(heads[best]), relation_id, name, answers[owners == best])


def _entities_called(graph: kg.Graph, head: str) -> Ids:
    """All entities with this name or label, ignoring case."""
    try:
        return np.array(graph.entities.ids_ignoring_case(head) or [graph.entities.id(head)])
    except RequestError as error:
        if graph.entities.labels is not None:
            raise
        raise RequestError(
            f"{error} {graph.name} was read without labels; load_graph(…, labels=…) reads a file "
            "of them."
        ) from None


def group_answers(queries: Sequence[NamedQuery]) -> tuple[Ids, Ids]:
    """Each answer once, ordered by id, and the number of the query it answers, or SHARED."""
    joined = np.concatenate([query.answers for query in queries])
    owners = np.repeat(np.arange(len(queries)), [len(query.answers) for query in queries])
    entities, first, counts = np.unique(joined, return_index=True, return_counts=True)
    return entities, np.where(counts > 1, SHARED, owners[first])


def project(model: kg.Model, queries: Sequence[NamedQuery]) -> Projection:
    """t-SNE of the answers of queries; silhouettes are computed in the embedding space."""
    entities, groups = group_answers(queries)
    vectors = tail_embeddings(model, entities)
    perplexity = default_perplexity(len(entities))
    return Projection(
        queries=tuple(queries),
        entities=entities,
        groups=groups,
        positions=tsne(vectors, perplexity=perplexity),
        perplexity=perplexity,
        silhouettes={metric: silhouette(vectors, groups, metric=metric) for metric in METRICS},
    )


def silhouette(vectors: Vectors, groups: Ids, *, metric: str = "euclidean") -> Silhouette:
    """How well groups are separated; vectors of SHARED have no single group and are left out."""
    with optional_import("scikit-learn", purpose="A silhouette"):
        from sklearn.metrics import silhouette_samples
    has_group = groups != SHARED
    vectors = vectors[has_group]
    groups = groups[has_group]
    present = np.unique(groups)
    if not 1 < len(present) < len(groups):
        raise InvalidValue(
            "groups",
            expected="at least two groups, and fewer groups than vectors",
            found=f"{len(present):,} groups with {len(groups):,} vectors",
        )
    values = silhouette_samples(vectors, groups, metric=metric)
    by_group = {int(group): float(values[groups == group].mean()) for group in present}
    return Silhouette(float(values.mean()), by_group)


@figure_style()
def draw_projections(projections: Mapping[str, Projection], *, graph: str = "") -> Drawing:
    """One panel per model: a colour is a query, a ring an entity that answers several."""
    first = next(iter(projections.values()))
    num_queries = len(first.queries)
    has_rings = bool((first.groups == SHARED).any())
    num_labels = num_queries + has_rings
    figure, panels = square_panels(len(projections), legend_rows=(num_labels + 1) // 2)
    for axes, (title, projection) in zip(panels, projections.items(), strict=True):
        set_titles(axes, title, f"silhouette {projection.silhouettes['euclidean'].mean:.3f}")
        axes.margins(0.04)
        _plot_groups(axes, projection, with_rings=has_rings)
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, markerscale=1.5, columnspacing=2.5
    )

    text = TEXTS["tsne"]
    cosine = [
        f"{name} {projection.silhouettes['cosine'].mean:.3f}"
        for name, projection in projections.items()
    ]
    fields = {
        **first.as_dict(),
        "num_queries": num_queries,
        "of_graph": f" of {graph}" if graph else "",
        "cosine": ", ".join(cosine),
    }
    rings = text["rings"].format(**fields) if has_rings else ""
    return Drawing(figure, text["caption"].format(rings=rings, **fields))


def _plot_groups(axes: Axes, projection: Projection, *, with_rings: bool) -> None:
    def scatter(group: int, label: str, **style: Any) -> None:
        x, y = projection.positions[projection.groups == group].T
        axes.scatter(x, y, s=15, label=label, **style)

    # There may be fewer queries than colours.
    for number, (query, colour) in enumerate(zip(projection.queries, TEN_COLOURS, strict=False)):
        scatter(number, query.name, color=colour, linewidths=0.3, edgecolors=PAPER)
    if with_rings:
        ring = {"facecolors": PAPER, "linewidths": 0.9, "edgecolors": "black"}
        scatter(SHARED, "answers two or more", **ring)


# -- Figure 3: sparsity ------------------------------------------------------

Curve = Mapping[float, float]  # share of zeros → MRR
Panels = Mapping[str, Mapping[str, Sequence[Curve]]]  # panel → line → one curve per seed
# By the part of a line's name after the first hyphen.
REGULARIZER_COLOURS = {"DURA": ACCENT, "N3": CONTRAST, "": "#7a8791"}
OTHER_COLOURS = ("#3a9a7a", "#8a5aa8", "#b04a5a", "#5b6fc4", "#9a8330", "#2f3b46")
DIAMONDS: dict[str, Any] = {
    "marker": "D",
    "s": 30,
    "linewidths": 1.3,
    "zorder": 4,
    "clip_on": False,
    "facecolors": PAPER,
}


@figure_style()
def draw_sparsity(
    panels: Panels, *, published: Mapping[str, Curve] | None = None, graph: str = ""
) -> Drawing:
    """MRR against the share of zeros. A regularizer has the same colour in all panels.

    A line is the mean over the seeds, its band their range. `published` has points by the names of
    the lines.
    """
    published = published or {}
    curves_by_line: dict[str, Sequence[Curve]] = {}
    for lines in panels.values():
        curves_by_line.update(lines)
    colours = _line_colours(curves_by_line)
    largest = 0.0
    for curves in curves_by_line.values():
        largest = max(largest, *(max(curve.values()) for curve in curves))

    height = 3.7 if len(panels) > 1 else 4.4
    figure, all_axes = new_figure(height, columns=len(panels), gap=0.06, sharey=True)
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        set_titles(axes, title)
        limits = {"xlim": (0, 0.95), "ylim": (0, 1.12 * largest)}
        set_levels(axes, **limits, xlabel="entity entries set to zero")
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 0.95])
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.locator_params(axis="y", nbins=5)
        for name in _highest_end_first(lines):
            _plot_sparsity_line(axes, name, lines[name], colour=colours[name])
            points = published.get(name, {})
            axes.scatter(list(points), list(points.values()), edgecolors=colours[name], **DIAMONDS)
        if set(published) & set(lines):
            axes.scatter([], [], edgecolors=QUIET, label="published", **DIAMONDS)
        axes.legend(loc="lower left", handlelength=1.2)
    all_axes[0].set_ylabel("MRR")

    on_graph = f" on {graph}" if graph else ""
    caption = f"MRR{on_graph} when the smallest entries of the entity embeddings are set to zero."
    seed_counts = {len(curves) for curves in curves_by_line.values()}
    if max(seed_counts) > 1:
        up_to = "up to " if len(seed_counts) > 1 else ""
        caption += f" A line is the mean of {up_to}{max(seed_counts)} seeds, its band their range."
    if set(published) & set(curves_by_line):
        caption += " Diamonds are the numbers of the paper."
    return Drawing(figure, caption)


def _line_colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of each line, which is that of its regularizer."""
    suffixes = {name: name.partition("-")[2] for name in names}
    unnamed = [
        suffix for suffix in dict.fromkeys(suffixes.values()) if suffix not in REGULARIZER_COLOURS
    ]
    colours = REGULARIZER_COLOURS | dict(zip(unnamed, OTHER_COLOURS, strict=False))
    return {name: colours[suffix] for name, suffix in suffixes.items()}


def _highest_end_first(lines: Mapping[str, Sequence[Curve]]) -> list[str]:
    """The names of lines by their MRR at the largest share of zeros, as the legend lists them."""

    def end(name: str) -> float:
        return sum(curve[max(curve)] for curve in lines[name])

    return sorted(lines, key=lambda name: -end(name))


def _plot_sparsity_line(axes: Axes, name: str, curves: Sequence[Curve], *, colour: str) -> None:
    shares = sorted(curves[0])
    mrr = np.array([[curve[share] for share in shares] for curve in curves])
    axes.plot(shares, mrr.mean(0), color=colour, linewidth=1.8, clip_on=False, zorder=3, label=name)
    axes.fill_between(shares, mrr.min(0), mrr.max(0), color=colour, alpha=0.18, linewidth=0)


# -- studies of inference ----------------------------------------------------

QUERY_PANELS: dict[str, list[str]] = TEXTS["inductive"]["panels"]
METHODS = {"embedded": ("embedded", ACCENT), "retrained": ("trained again", CONTRAST)}
REMOVALS = {
    "opposing": ("the most opposing triples", CONTRAST),
    "random": ("random triples of the two entities", QUIET),
    "supporting": ("the most supporting triples", ACCENT),
}
# Name and colour → number of triples → MRR by seed.
Lines = Mapping[tuple[str, str], Mapping[float, list[float]]]


def _plot_seeds(axes: Axes, lines: Lines, *, top: float, xlabel: str, shift: float = 0.0) -> None:
    """A line through the means and a dot per seed.

    Numbers of triples are at equal distances. `shift` separates lines at the same numbers.
    """
    counts = sorted({count for mrr_by_count in lines.values() for count in mrr_by_count})
    for number, ((name, colour), mrr_by_count) in enumerate(lines.items()):
        xs = [counts.index(count) + shift * (number - 0.5) for count in mrr_by_count]
        means = [fmean(mrr) for mrr in mrr_by_count.values()]
        axes.plot(xs, means, color=colour, linewidth=1.8, label=name)
        for x, mrr in zip(xs, mrr_by_count.values(), strict=True):
            axes.scatter([x] * len(mrr), mrr, s=16, color=colour, zorder=4, clip_on=False)
    labels = ["all" if count == inf else f"{count:g}" for count in counts]
    axes.set_xticks(range(len(counts)), labels)
    set_levels(axes, xlim=(-0.3, len(counts) - 0.7), ylim=(0, 1.1 * top), xlabel=xlabel)


@figure_style()
def draw_explanations(results: Facts, graph: str) -> Drawing:
    """MRR after removing training triples and training again: a line per kind of triple."""
    mrr: dict[tuple[str, int], list[float]] = {}
    for (removed, count), runs in grouped(results, "removed", "count").items():
        mrr[removed, count] = [run["metrics"]["mrr"] for run in runs]
    counts = sorted({count for _, count in mrr})
    lines = {}
    for removed, line in REMOVALS.items():
        # All lines begin at the models that were trained on everything.
        lines[line] = {count: mrr.get((removed, count)) or mrr["nothing", 0] for count in counts}

    figure, [axes] = new_figure(3.7)
    set_titles(axes, "ComplEx-DURA", "trained again without some training triples per test triple")
    largest = max(max(values) for values in mrr.values())
    _plot_seeds(axes, lines, top=largest, xlabel="training triples removed per test triple")
    axes.set_ylabel("MRR of the test triples")
    axes.legend(loc="lower left")
    return Drawing(figure, TEXTS["explanations"]["caption"].format(graph=graph, results=results))


@figure_style()
def draw_inductive(results: Facts, graph: str) -> Drawing:
    """MRR over the triples per unseen entity: a panel per kind of query, a line per method."""
    top = max(result[kind]["mrr"] for result in results for kind in QUERY_PANELS)
    figure, panels = new_figure(3.7, columns=len(QUERY_PANELS), gap=0.03, sharey=True)
    for axes, (kind, titles) in zip(panels, QUERY_PANELS.items(), strict=True):
        set_titles(axes, *titles)
        lines: dict[tuple[str, str], dict[float, list[float]]] = {
            line: {} for line in METHODS.values()
        }
        for (method, triples_given), runs in grouped(results, "method", "triples_given").items():
            if method in METHODS:
                count = inf if triples_given is None else triples_given
                lines[METHODS[method]][count] = [run[kind]["mrr"] for run in runs]
        _plot_seeds(axes, lines, top=top, xlabel="triples per unseen entity", shift=0.1)
        at_mean = [result[kind]["mrr"] for result in results if result["method"] == "mean"]
        if at_mean:
            axes.axhline(fmean(at_mean), label="mean embedding", zorder=2, **DASHES)
    panels[0].set_ylabel("MRR")
    panels[0].locator_params(axis="y", nbins=6)
    panels[1].legend(loc="upper left")
    caption = TEXTS["inductive"]["caption"].format(graph=graph, **inductive_fields(results))
    return Drawing(figure, caption)


def inductive_fields(results: Facts) -> dict[str, str]:
    """The number of held-out entities in words; it may differ between seeds."""
    counts = [result["num_entities"] for result in results]
    extremes = sorted({min(counts), max(counts)})
    count_range = " to ".join(f"{count:,}" for count in extremes)
    return {"num_entities": f"{count_range} entities"}


@figure_style()
def draw_quantization(results: Facts, graph: str) -> Drawing:
    """MRR against bytes: a dot per dense storage format, and a line along the shares of zeros."""
    from matplotlib.ticker import LogLocator

    figure, [axes] = new_figure(4.0)
    set_titles(axes, "ComplEx-DURA", "dots: dense tables; line: float32 with a share of zeros")
    dense = {}
    sparse = {}
    for result in sorted(results, key=lambda result: result.get("share") or 0.0):
        point = (result["bytes"], result["metrics"]["mrr"])
        if result["storage"] == "sparse":
            sparse[f"{result['share']:.0%}"] = point
        else:
            dense[result["storage"]] = point
    _plot_labelled(axes, dense, 12, color=ACCENT, linestyle="", markersize=7)
    _plot_labelled(axes, sparse, -12, color=CONTRAST, markersize=4)
    top = max(result["metrics"]["mrr"] for result in results)
    axes.set(xscale="log", xlabel="bytes of the entity tables", ylabel="MRR", ylim=(0, 1.15 * top))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.minorticks_off()
    axes.yaxis.grid(True)
    axes.margins(x=0.1)
    return Drawing(figure, TEXTS["quantization"]["caption"].format(graph=graph))


def _plot_labelled(
    axes: Axes, points: Mapping[str, tuple[float, float]], label_offset: float, **style: Any
) -> None:
    """Points by their labels, which are written above or below them."""
    xs, ys = zip(*points.values(), strict=True)
    axes.plot(xs, ys, linewidth=1.8, marker="o", **style)
    for label, point in points.items():
        axes.annotate(
            label,
            point,
            (0, label_offset),
            textcoords="offset points",
            color=style["color"],
            fontsize=8.5,
            **CENTRED,
        )


def format_bytes(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"

"""Draw the pictures of docs/paths.md as PNG and SVG, and write the numbers into the page.

python scripts/path_pictures.py --run RUN    # of a trained run of the recipe world/path-network
python scripts/path_pictures.py              # train it first: some minutes on a CPU
python scripts/path_pictures.py --redraw     # from the numbers of docs/paths.json

The shares of pairs are counted in WN18RR and FB15k-237, too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch

import dualkg as kg
from dualkg.analysis.figures import (
    ACCENT,
    CONTRAST,
    FAINT,
    INK,
    PAPER,
    QUIET,
    Drawing,
    figure_style,
    new_figure,
    set_titles,
)
from dualkg.inference.supporting_paths import edges_without, find_paths
from dualkg.kernels import paths
from dualkg.models.paths import PathNetwork, _pair_keys

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "paths.md"
NUMBERS = DOCS / "paths.json"
RECIPE = ROOT / "paper" / "recipes" / "world" / "path-network.toml"

TRIPLE = ("Tsonga", "written_in", "Latin script")  # a test triple of `world`
NUM_SHOWN = 9  # entities of a step
NUM_ON_ROUTES = 6  # of these, at most
NUM_RANKED = 200  # training triples
PAIR_GRAPHS = ("WN18RR", "FB15k-237", "world")

# A training triple and some of its neighbours.
BATCH_TRIPLE = ("Ukraine", "spoken_language", "Ukrainian")
NEIGHBOURS = ("Slovakia", "Kyiv", "Romania", "Russian")

STEP_COLOURS = (CONTRAST, "#cfe3f2", "#8ec1e3", ACCENT)
TEXT_COLOURS = (PAPER, INK, INK, PAPER)
UNUSED = "#c3cbd2"  # edges that do not carry the prediction, or are removed
CENTRED: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center"}
Facts = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="folder of a trained run")
    parser.add_argument("--redraw", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if not arguments.redraw:
        if arguments.run:
            run = kg.load_run(arguments.run)
        else:
            run = kg.train_recipe(kg.load_recipe(RECIPE), device="cpu")
        text = json.dumps(measure(run), ensure_ascii=False, indent=1)
        NUMBERS.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    numbers = load_numbers()
    page = with_texts(PAGE.read_text(encoding="utf-8"), numbers)
    PAGE.write_text(page, encoding="utf-8", newline="\n")
    for name, drawing in drawings(numbers).items():
        drawing.save(DOCS / name)


def load_numbers() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8"))
    return numbers


def drawings(numbers: Facts) -> dict[str, Drawing]:
    return {
        "paths-spread": draw_spread(numbers),
        "paths-step": draw_step(),
        "paths-removed": draw_removed(numbers),
    }


def with_texts(page: str, numbers: Facts) -> str:
    """The page with the texts between its marks made from the numbers."""
    texts = {
        "example": _example_text(numbers),
        "pairs": _pairs_text(numbers),
        "neighbours": _neighbours_text(numbers),
    }
    for name, text in texts.items():
        begin = f"<!-- {name}, from paths.json: begin -->"
        end = f"<!-- {name}, from paths.json: end -->"
        lines = f"{begin}\n{text}\n{end}"
        page = re.sub(f"{begin}.*?{end}", lambda _, lines=lines: lines, page, flags=re.DOTALL)
    return page


def _example_text(numbers: Facts) -> str:
    head, relation, tail = numbers["query"]
    _, *counts, num_unreached = numbers["num_by_step"]
    steps = ", ".join(f"{count:,} in step {step}" for step, count in enumerate(counts, start=1))
    parts = [
        f"The query is ({head}, {relation}, ?) in `{numbers['graph']}`, and ({head}, {relation}, "
        f"{tail}) is a test triple. The network has dim {numbers['dim']} and {numbers['steps']} "
        f"steps, and a test MRR of {numbers['mrr']:.3f}. Entities are drawn in the step that "
        f"reaches them first: {steps}; {num_unreached:,} are not reached."
    ]
    for route in _labelled(numbers["routes"]):
        parts.append(
            f"{' – '.join(route['entities'])} carries {route['share']:.0%} of the prediction."
        )
    scores = {name: score for name, score in numbers["scores"].items() if name != tail}
    second = max(scores, key=lambda name: scores[name])
    parts.append(
        f"{tail} has the score {_signed(numbers['scores'][tail])}. Of the other entities that step "
        f"{numbers['steps']} reaches, {second} is the best, with {_signed(scores[second])}."
    )
    return _wrapped(" ".join(parts).replace("%", " %"))


def _neighbours_text(numbers: Facts) -> str:
    measured = numbers["neighbours"]
    return _wrapped(
        f"The network of the example, which was trained with `remove_pairs`, ranks the tails of "
        f"{measured['num_triples']} training triples to an MRR of {measured['without']:.2f} if all "
        f"edges between the two entities are removed, and of {measured['with']:.2f} if they are "
        "in the graph."
    )


def _wrapped(text: str) -> str:
    return fill(text, 120, break_on_hyphens=False)


def _pairs_text(numbers: Facts) -> str:
    lines = ["| graph | train | valid | test |", "|---|--:|--:|--:|"]
    for graph, shares in numbers["pairs"].items():
        cells = [
            f"{share:.1%}".replace("%", " %") if share else "none" for share in shares.values()
        ]
        lines.append(f"| {graph} | {' | '.join(cells)} |")
    return "\n".join(lines)


# -- what the pictures show ------------------------------------------------------


def measure(run: kg.TrainedRun) -> dict[str, Any]:
    network = run.model
    assert isinstance(network, PathNetwork)
    return {
        "graph": run.graph.name,
        "dim": network.dim,
        "steps": network.steps,
        "mrr": run.report.mrr,
        **_spread(network, run.graph),
        "removed": removed_triples(run.graph),
        "neighbours": _neighbour_ranking(network, run.graph),
        "pairs": {name: pair_shares(kg.load_graph(name)) for name in PAIR_GRAPHS},
    }


@torch.no_grad()
def _spread(network: PathNetwork, graph: kg.Graph) -> dict[str, Any]:
    """Which step reaches which entities, the routes that carry the prediction, and the scores."""
    head, relation, tail = _ids(TRIPLE, graph)
    edges = edges_without((head, relation, tail), network)
    reached = paths.reach(torch.tensor([head]), edges, network.steps)
    first_steps = torch.stack([~step[:, 0] for step in reached]).sum(0)
    scores = network.scores_over(torch.tensor([head]), torch.tensor([relation]), edges)[0]
    _, found = find_paths((head, relation, tail), network)

    # Paths along the same entities by different relations are one route.
    share_by_route: dict[tuple[int, ...], float] = defaultdict(float)
    relations_by_step: dict[tuple[int, ...], list[dict[int, float]]] = {}
    for path in found:
        route = (head, *edges.tails[list(path.edges)].tolist())
        share_by_route[route] += path.share
        of_steps = relations_by_step.setdefault(route, [defaultdict(float) for _ in path.edges])
        for of_step, edge in zip(of_steps, path.edges, strict=True):
            of_step[int(edges.relations[edge])] += path.share
    routes = sorted(share_by_route, key=lambda route: -share_by_route[route])

    second = _second_answer(scores, first_steps, tail, network.steps)
    columns = _columns(routes, second, first_steps, edges, network.steps)
    label = graph.entities.label
    shown = {entity for column in columns for entity in column}
    lines = set()
    for source, target in zip(edges.heads.tolist(), edges.tails.tolist(), strict=True):
        if {source, target} <= shown and first_steps[target] == first_steps[source] + 1:
            lines.add((label(source), label(target)))
    return {
        "query": TRIPLE,
        "num_by_step": torch.bincount(first_steps, minlength=network.steps + 2).tolist(),
        "columns": [[label(entity) for entity in column] for column in columns],
        "lines": sorted(lines),
        "routes": [
            {
                "entities": [label(entity) for entity in route],
                "relations": [
                    [_relation_words(number, graph) for number in of_step]
                    for of_step in relations_by_step[route]
                ],
                "share": share_by_route[route],
            }
            for route in routes
        ],
        "scores": {label(entity): float(scores[entity]) for entity in columns[-1]},
        "unreached_score": float(scores[first_steps > network.steps][0]),
    }


def _second_answer(scores: torch.Tensor, first_steps: torch.Tensor, tail: int, steps: int) -> int:
    """The entity of the last step with the best score beside the tail."""
    is_other = (first_steps == steps) & (torch.arange(len(scores)) != tail)
    return int(torch.where(is_other, scores, -torch.inf).argmax())


def _columns(
    routes: Sequence[tuple[int, ...]],
    second: int,
    first_steps: torch.Tensor,
    edges: paths.Edges,
    steps: int,
) -> list[list[int]]:
    """Entities of each step: those of routes and of ways to the second answer, and some others."""
    columns: list[list[int]] = []
    wanted = {second}
    for step in reversed(range(steps + 1)):
        on_routes = dict.fromkeys(route[step] for route in routes if len(route) > step)
        ways = [entity for entity in sorted(wanted) if first_steps[entity] == step]
        others = _others(step, first_steps, edges, columns[-1] if columns else [])
        chosen = [*list(on_routes)[:NUM_ON_ROUTES], *ways, *others]
        columns.append(list(dict.fromkeys(chosen))[:NUM_SHOWN])
        wanted = set(edges.heads[_enters(edges, sorted(wanted))].tolist())
    return columns[::-1]


def _others(
    step: int, first_steps: torch.Tensor, edges: paths.Edges, following: Sequence[int]
) -> list[int]:
    """Entities of a step that stand for all of it: those with most edges to the column after it.

    Those of the last column are taken at equal distances.
    """
    entities = (first_steps == step).nonzero().flatten()
    if not following:
        places = np.linspace(0, len(entities) - 1, NUM_SHOWN).astype(int)
        return entities[places].tolist()
    sources = edges.heads[_enters(edges, following)]
    counts = torch.bincount(sources, minlength=len(first_steps))[entities]
    return entities[counts.argsort(descending=True, stable=True)].tolist()


def _enters(edges: paths.Edges, entities: Sequence[int]) -> torch.Tensor:
    """Whether each edge enters one of some entities."""
    enters = torch.isin(edges.tails, torch.tensor(entities))
    return enters if edges.kept is None else enters & edges.kept


def removed_triples(graph: kg.Graph) -> list[dict[str, Any]]:
    """The training triples among some entities, and in which ways of training each is removed."""
    shown = {*BATCH_TRIPLE[::2], *NEIGHBOURS}
    head, relation, tail = (torch.tensor([id]) for id in _ids(BATCH_TRIPLE, graph))
    kept = {}
    for pairs in (False, True):
        network = PathNetwork(graph, dim=1, steps=1, remove_pairs=pairs)
        kept[pairs] = network.training_edges(head, relation, tail).kept
        assert kept[pairs] is not None
    triples = []
    for number, (source, relation_id, target) in enumerate(graph.train.tolist()):
        names = (graph.entities.label(source), graph.entities.label(target))
        if set(names) <= shown:
            triples.append(
                {
                    "triple": [names[0], graph.relations.label(relation_id), names[1]],
                    "removed": not kept[False][number],
                    "removed_with_pairs": not kept[True][number],
                }
            )
    return triples


@torch.no_grad()
def _neighbour_ranking(network: PathNetwork, graph: kg.Graph) -> dict[str, float]:
    """The MRR of tails of training triples with the edges between their entities, and without."""
    tails_of = defaultdict(list)
    for head, relation, tail in np.concatenate([graph.train, graph.valid, graph.test]).tolist():
        tails_of[head, relation].append(tail)
    edges = network.edges
    reciprocal_ranks = defaultdict(list)
    rows = np.linspace(0, len(graph.train) - 1, NUM_RANKED).astype(int)
    for head, relation, tail in graph.train[rows].tolist():
        joins = (edges.heads == head) & (edges.tails == tail)
        joins |= (edges.heads == tail) & (edges.tails == head)
        for name, some_edges in (("with", edges), ("without", edges.keep(~joins))):
            query = (torch.tensor([head]), torch.tensor([relation]))
            scores = network.scores_over(*query, some_edges)[0]
            score = scores[tail].clone()
            scores[tails_of[head, relation]] = -torch.inf
            # Entities with the same score share their mean rank.
            rank = 1 + (scores > score).sum() + 0.5 * (scores == score).sum()
            reciprocal_ranks[name].append(1 / float(rank))
    means = {name: float(np.mean(values)) for name, values in reciprocal_ranks.items()}
    return {"num_triples": NUM_RANKED, **means}


def pair_shares(graph: kg.Graph) -> dict[str, float]:
    """The share of triples whose two entities are joined by another training triple."""
    joined, counts = np.unique(
        _pair_keys(graph.train, graph.shape.num_entities), return_counts=True
    )
    shares = {"train": float(counts[counts > 1].sum() / counts.sum())}
    for split in ("valid", "test"):
        keys = _pair_keys(getattr(graph, split), graph.shape.num_entities)
        shares[split] = float(np.isin(keys, joined).mean())
    return shares


def _ids(triple: Sequence[str], graph: kg.Graph) -> tuple[int, int, int]:
    head, relation, tail = triple
    return graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail)


def _relation_words(number: int, graph: kg.Graph) -> str:
    """The relation of an edge, with an arrow from the head of the triple to its tail."""
    num_relations = graph.shape.num_relations
    name = graph.relations.label(number % num_relations).replace("_", " ")
    return f"{name} →" if number < num_relations else f"← {name}"


# -- step by step from the head ----------------------------------------------------

COLUMN_CENTRES = (0.62, 2.62, 4.82, 6.78)
ROW_HEIGHT = 0.34
BOX_WIDTH = 1.26
BOX_HEIGHT = 0.25
MIN_LABELLED_SHARE = 0.1


@figure_style()
def draw_spread(numbers: Facts) -> Drawing:
    """Columns of entities by the step that reaches them first, and the routes to the answer."""
    columns = numbers["columns"]
    num_rows = max(map(len, columns))
    height = ROW_HEIGHT * (num_rows + 1) + 1.35
    figure, [axes] = new_figure(height)
    axes.set(xlim=(0, 8), ylim=(0, height), aspect="equal")
    axes.axis("off")
    middle = 0.62 + ROW_HEIGHT * (num_rows + 1) / 2

    places = {}
    for centre, names in zip(COLUMN_CENTRES, columns, strict=True):
        for name, offset in zip(names, _from_the_middle(len(names)), strict=True):
            places[name] = (centre, middle + ROW_HEIGHT * offset)
    for source, target in numbers["lines"]:
        _plot_line(axes, places[source], places[target], edgecolor=UNUSED, linewidth=0.8, zorder=1)
    for route in reversed(numbers["routes"]):
        _plot_route(axes, route, places)

    counts = numbers["num_by_step"]
    for step, (centre, names) in enumerate(zip(COLUMN_CENTRES, columns, strict=True)):
        _write_header(axes, step, counts[step], centre, height)
        for name in names:
            is_answer = name == numbers["query"][2]
            _plot_entity(axes, name, places[name], step=step, is_answer=is_answer)
        num_others = counts[step] - len(names)
        if num_others:
            lowest = min(places[name][1] for name in names)
            text = f"and {num_others:,} more"
            axes.text(centre, lowest - ROW_HEIGHT, text, color=QUIET, fontsize=8, **CENTRED)
    for name in columns[-1]:
        x, y = places[name]
        axes.text(
            x + BOX_WIDTH / 2 + 0.08,
            y,
            _signed(numbers["scores"][name]),
            color=INK if name == numbers["query"][2] else QUIET,
            fontweight="bold" if name == numbers["query"][2] else "normal",
            fontsize=8,
            verticalalignment="center",
        )
    axes.text(
        COLUMN_CENTRES[-1] + BOX_WIDTH / 2 + 0.08, height - 0.22, "score", color=QUIET, fontsize=8.5
    )
    _write_relations(axes, numbers["routes"], height)
    unreached = (
        f"{counts[-1]:,} entities are not reached in {len(columns) - 1} steps. All of them have "
        f"the score {_signed(numbers['unreached_score'])}."
    )
    axes.text(8, 0.16, unreached, color=QUIET, fontsize=8.5, horizontalalignment="right")
    head, relation, tail = numbers["query"]
    shares = " and ".join(f"{route['share']:.0%}" for route in _labelled(numbers["routes"]))
    caption = (
        f"How a path network with {numbers['steps']} steps answers ({head}, {relation}, ?) in "
        f"{numbers['graph']}: entities by the step that reaches them first. Routes to {tail} are "
        f"blue; the labelled ones carry {shares} of the prediction."
    )
    return Drawing(figure, caption)


def _from_the_middle(count: int) -> list[float]:
    """Vertical offsets 0, 1, −1, 2, … of so many entities: the first is in the middle."""
    return [(index + 1) // 2 * (1 if index % 2 else -1) for index in range(count)]


def _labelled(routes: Sequence[Facts]) -> list[Facts]:
    return [route for route in routes if route["share"] >= MIN_LABELLED_SHARE]


def _signed(score: float) -> str:
    return f"{score:.1f}".replace("-", "−")


def _plot_line(axes: Any, start: Any, end: Any, **style: Any) -> None:
    """A line from the right side of a box to the left side of another one, level at both ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    left = start[0] + BOX_WIDTH / 2
    right = end[0] - BOX_WIDTH / 2
    half = (left + right) / 2
    points = [(left, start[1]), (half, start[1]), (half, end[1]), (right, end[1])]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    axes.add_patch(PathPatch(Curve(points, codes), facecolor="none", capstyle="round", **style))


def _plot_route(axes: Any, route: Facts, places: Mapping[str, Any]) -> None:
    is_labelled = route["share"] >= MIN_LABELLED_SHARE
    width = 1.0 + 9 * route["share"]
    entities = route["entities"]
    if not set(entities) <= set(places):
        return
    for source, target in pairwise(entities):
        style = {"edgecolor": ACCENT, "linewidth": width, "alpha": 1.0 if is_labelled else 0.45}
        _plot_line(axes, places[source], places[target], zorder=2, **style)
    if is_labelled:
        start = places[entities[1]]
        end = places[entities[2]]
        x = (start[0] + end[0]) / 2 - 0.2
        share = (x - start[0] - BOX_WIDTH / 2) / (end[0] - start[0] - BOX_WIDTH)
        y = start[1] + (end[1] - start[1]) * share**2 * (3 - 2 * share)
        box = {"facecolor": PAPER, "edgecolor": ACCENT, "boxstyle": "round,pad=0.22"}
        text = f"{route['share']:.0%}".replace("%", " %")
        axes.text(x, y, text, fontsize=8, color=ACCENT, bbox=box, zorder=5, **CENTRED)


def _write_header(axes: Any, step: int, count: int, centre: float, height: float) -> None:
    axes.text(centre, height - 0.18, f"step {step}", fontweight="bold", fontsize=10, **CENTRED)
    noun = "entity" if count == 1 else "entities"
    words = "the head" if step == 0 else f"{count:,} more {noun}"
    axes.text(centre, height - 0.41, words, color=QUIET, fontsize=8.5, **CENTRED)


def _write_relations(axes: Any, routes: Sequence[Facts], height: float) -> None:
    """The relations of the routes above the gaps between columns."""
    for step, (left, right) in enumerate(pairwise(COLUMN_CENTRES)):
        names: dict[str, None] = {}
        for route in _labelled(routes):
            names.update(dict.fromkeys(route["relations"][step]))
        text = "\n".join(sorted(names))
        axes.text((left + right) / 2, height - 0.78, text, color=ACCENT, fontsize=7.5, **CENTRED)


def _plot_entity(axes: Any, name: str, place: Any, *, step: int, is_answer: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = place
    box = FancyBboxPatch(
        (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2),
        BOX_WIDTH,
        BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.1",
        facecolor=STEP_COLOURS[step],
        edgecolor=CONTRAST if is_answer else PAPER,
        linewidth=2.2 if is_answer else 0.8,
        zorder=3,
    )
    axes.add_patch(box)
    axes.text(x, y, _short(name), color=TEXT_COLOURS[step], fontsize=8, zorder=4, **CENTRED)


def _short(name: str, num_letters: int = 19) -> str:
    return name if len(name) <= num_letters else f"{name[: num_letters - 1]}…"


# -- one step ------------------------------------------------------------------------


@figure_style()
def draw_step() -> Drawing:
    """What a step computes for one entity, as boxes and arrows."""
    height = 3.65
    figure, [axes] = new_figure(height)
    axes.set(xlim=(0, 8), ylim=(0, height), aspect="equal")
    axes.axis("off")

    rows = (3.05, 2.47, 1.89)
    middle = rows[1]
    edge_colours = ("#7fb8a4", CONTRAST, "#8a6fb0")
    for number, (y, colour) in enumerate(zip(rows, edge_colours, strict=True)):
        low = "₁₂₃"[number]
        _plot_box(axes, (0.5, y), f"x(u{low})", width=0.78, colour="#cfe3f2")
        _plot_arrow(axes, (0.89, y), (1.33, y), color=colour, linewidth=2)
        _plot_box(axes, (1.75, y), f"∘ w(q{low}, r)", width=0.84, colour=PAPER, edge=colour)
        _plot_arrow(axes, (2.17, y), (2.66, middle + 0.4 * (1 - number)), color=colour)
    _plot_box(axes, (2.7, 1.15), "a message of zeros, at the head x₀(r)", width=2.3, colour=FAINT)
    _plot_arrow(axes, (3.22, 1.3), (3.22, 1.56))

    _plot_box(axes, (3.22, middle), "", width=1.08, tall=1.8, colour=PAPER, edge="#8ec1e3")
    names = ("mean", "maximum", "minimum", "deviation")
    for number, name in enumerate(names):
        y = middle + 0.43 * (1.5 - number)
        _plot_box(axes, (3.22, y), name, width=0.9, colour="#8ec1e3")
    _plot_arrow(axes, (3.77, middle), (3.99, middle))
    scalers = "× 1\n× log degree\n÷ log degree"
    _plot_box(axes, (4.5, middle), scalers, width=0.98, tall=0.8, colour="#8ec1e3")
    _plot_arrow(axes, (5.0, middle), (5.2, middle))
    dark = {"tall": 0.56, "colour": ACCENT, "text": PAPER}
    _plot_box(axes, (5.52, middle), "linear\nmap", width=0.62, **dark)
    _plot_arrow(axes, (5.84, middle), (6.04, middle))
    _plot_box(axes, (6.44, middle), "normalize,\nrectify", width=0.78, **dark)
    _plot_arrow(axes, (6.84, middle), (7.0, middle))
    _plot_box(axes, (7.12, middle), "+", width=0.24, tall=0.28, colour=PAPER, edge=INK)
    _plot_arrow(axes, (7.25, middle), (7.39, middle))
    _plot_box(axes, (7.67, middle), "new\nx(v)", width=0.54, tall=0.56, colour="#cfe3f2")

    # The entity's own vector goes into the map, and is added to the result.
    _plot_box(axes, (4.5, 1.35), "x(v)", width=0.78, colour="#cfe3f2")
    axes.plot([4.89, 7.12], [1.35, 1.35], color=QUIET, linewidth=1.1)
    _plot_arrow(axes, (7.12, 1.35), (7.12, middle - 0.15))
    _plot_arrow(axes, (5.52, 1.35), (5.52, middle - 0.29))
    axes.text(6.32, 1.45, "residual", color=QUIET, fontsize=8, horizontalalignment="center")

    # The query decides how relations are read, and takes part in the score.
    _plot_box(axes, (0.5, 0.25), "x₀(r)", width=0.78, colour=CONTRAST, text=PAPER)
    _plot_arrow(axes, (0.89, 0.25), (1.33, 0.25))
    words = "linear map: w(q, r) of all relations q"
    _plot_box(axes, (2.55, 0.25), words, width=2.4, colour=ACCENT, text=PAPER)
    _plot_arrow(axes, (1.45, 0.41), (1.45, 1.73), linestyle=(0, (3, 2)))
    words = "score: two layers over x(v) and x₀(r)"
    _plot_box(axes, (6.72, 0.25), words, width=2.44, colour=ACCENT, text=PAPER)
    titles = {0.5: "neighbours", 1.75: "messages", 3.22: "statistics", 4.5: "scalers"}
    for x, title in titles.items():
        axes.text(x, height - 0.1, title, color=QUIET, fontsize=8.5, **CENTRED)
    axes.text(0.11, 0.54, "vector of r", color=QUIET, fontsize=8.5)
    axes.text(5.5, 0.54, "after the last step", color=QUIET, fontsize=8.5)
    caption = (
        "One step of a path network at an entity v: messages of its neighbours, their statistics, "
        "and the new vector."
    )
    return Drawing(figure, caption)


def _plot_box(
    axes: Any,
    centre: tuple[float, float],
    words: str,
    *,
    width: float,
    tall: float = 0.3,
    colour: str = PAPER,
    edge: str = PAPER,
    text: str = INK,
) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = centre
    box = FancyBboxPatch(
        (x - width / 2, y - tall / 2),
        width,
        tall,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=colour,
        edgecolor=edge,
        linewidth=1.4,
        zorder=3,
    )
    axes.add_patch(box)
    axes.text(x, y, words, color=text, fontsize=8, zorder=4, linespacing=1.35, **CENTRED)


def _plot_arrow(axes: Any, start: Any, end: Any, **style: Any) -> None:
    arrow = {
        "arrowstyle": "-|>,head_width=0.18,head_length=0.36",
        "color": QUIET,
        "linewidth": 1.1,
        "shrinkA": 0,
        "shrinkB": 0,
        **style,
    }
    axes.annotate("", end, start, arrowprops=arrow, zorder=2)


# -- what is removed in training -------------------------------------------------------

POSITIONS = {
    "Ukraine": (0.1, 0.5),
    "Ukrainian": (0.88, 0.5),
    "Slovakia": (0.52, 0.93),
    "Romania": (0.02, 0.93),
    "Kyiv": (0.02, 0.07),
    "Russian": (0.52, 0.07),
}


@figure_style()
def draw_removed(numbers: Facts) -> Drawing:
    """The edges that are left for a training triple, in both ways, and shares of joined pairs."""
    figure, panels = new_figure(3.1, columns=3, gap=0.06, width_ratios=(1, 1, 0.86))
    for axes, key, title in zip(
        panels,
        ("removed", "removed_with_pairs"),
        ("remove_pairs = false", "remove_pairs = true"),
        strict=False,
    ):
        set_titles(axes, title, "dashed edges are removed")
        axes.set(xlim=(-0.12, 1.06), ylim=(0, 1))
        axes.axis("off")
        _plot_graph(axes, numbers["removed"], key)
    _plot_pairs(panels[2], numbers["pairs"])
    caption = (
        f"What is removed from the graph when ({', '.join(BATCH_TRIPLE)}) is to be predicted. "
        "Right: the share of triples whose entities another training triple joins."
    )
    return Drawing(figure, caption)


def _plot_graph(axes: Any, triples: Sequence[Facts], key: str) -> None:
    by_pair: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for about in triples:
        head, _, tail = about["triple"]
        by_pair[min(head, tail), max(head, tail)].append(about)
    for about_pair in by_pair.values():
        for number, about in enumerate(about_pair):
            head, relation, tail = about["triple"]
            # Edges between the same two entities bend to different sides.
            is_parallel = {head, tail} == set(BATCH_TRIPLE[::2])
            bend = 0.0 if len(about_pair) == 1 else 0.32 if is_parallel else 0.2
            if number % 2 and about["triple"][0] == about_pair[0]["triple"][0]:
                bend = -bend
            is_of_batch = tuple(about["triple"]) == BATCH_TRIPLE
            colour = CONTRAST if is_of_batch else ACCENT
            style = {
                "color": UNUSED if about[key] and not is_of_batch else colour,
                "linewidth": 1.2 if about[key] else 1.6,
                "linestyle": (0, (2, 2)) if about[key] else "solid",
                "arrowstyle": "-|>,head_width=0.16,head_length=0.34",
                "connectionstyle": f"arc3,rad={bend}",
                "shrinkA": 25 if is_parallel else 13,
                "shrinkB": 29 if is_parallel else 14,
            }
            axes.annotate("", POSITIONS[tail], POSITIONS[head], arrowprops=style, zorder=1)
            if is_parallel:
                y = 0.5 - np.sign(bend) * 0.05
                text = relation.replace("_", " ")
                colour = QUIET if style["color"] == UNUSED else colour
                axes.text(0.5, y, text, color=colour, fontsize=7.5, **CENTRED)
    for name, (x, y) in POSITIONS.items():
        is_of_batch = name in BATCH_TRIPLE
        face = CONTRAST if is_of_batch else "#cfe3f2"
        box = {"facecolor": face, "edgecolor": PAPER, "boxstyle": "round,pad=0.3"}
        colour = PAPER if is_of_batch else INK
        axes.text(x, y, name, color=colour, fontsize=8, bbox=box, zorder=3, **CENTRED)


def _plot_pairs(axes: Any, pairs: Mapping[str, Mapping[str, float]]) -> None:
    set_titles(axes, "Joined otherwise", "share of triples")
    colours = {"train": FAINT, "valid": "#9cc3df", "test": ACCENT}
    for offset, (split, colour) in enumerate(colours.items()):
        positions = [row + 0.28 * (offset - 1) for row in range(len(pairs))]
        shares = [of_graph[split] for of_graph in pairs.values()]
        bars = axes.barh(positions, shares, height=0.25, color=colour, label=split)
        labels = [f"{share:.0%}".replace("%", " %") if share else "0" for share in shares]
        axes.bar_label(bars, labels, padding=4, fontsize=8, color=QUIET)
    axes.set_yticks(range(len(pairs)), list(pairs))
    axes.set_xticks([])
    axes.set_xlim(0, 0.5)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.4, 0), ncols=3, handlelength=1, handleheight=1
    )


if __name__ == "__main__":
    main()

"""What a training starts from: a recipe file, a recipe that ships with dualkg, or a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualkg.data.decisions import with_decisions
from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph, stem
from dualkg.errors import InvalidValue, UnknownName, close_matches
from dualkg.losses import LOSSES
from dualkg.training.api import data_of, default_recipe, load_recipe_graph
from dualkg.training.classes import name_of
from dualkg.training.recipe import Recipe, list_recipes, load_recipe
from dualkg.workflows.events import DefaultsDiffer, GraphChecked, GraphRead, OnEvent

# Settings with defaults of their own where no recipe is given.
GRAPH_DEFAULTS = (
    "regularizer.name",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "training.batch_size",
)


@dataclass(frozen=True)
class TrainingSource:
    """A recipe and its graph, which were read.

    `changes` are the settings that the caller has set. Unless it `is_recipe`, the other values are
    those of `default_recipe`.
    """

    recipe: Recipe
    graph: Graph
    changes: Mapping[str, Any]
    is_recipe: bool


def find_recipe(source: str | Path) -> str | Path | None:
    """The file or the name of the recipe that a source stands for; None if it is a graph.

    A file or a folder takes precedence over the name of a recipe, whose case does not matter.
    """
    path = Path(source)
    if path.suffix == ".toml":
        return path
    if path.exists():
        return None
    shipped = {name.casefold(): name for name in list_recipes()}
    name = shipped.get(str(source).casefold())
    if name is None and "/" in str(source):
        suggestions = close_matches(str(source), shipped)
        if suggestions:
            raise UnknownName("file, folder or recipe", str(source), suggestions=suggestions)
    return name


def run_name(source: str | Path) -> str:
    """The name of the run of a source: `umls-complex-dura` of the recipe umls/complex-dura."""
    recipe = find_recipe(source)
    if recipe is None:
        return stem(Path(source))
    if isinstance(recipe, str):
        return recipe.replace("/", "-")
    folder = recipe.absolute().parent
    # A file recipes/umls/complex-dura.toml is named as if it shipped with dualkg.
    if folder.parent.name == "recipes":
        return f"{folder.name}-{recipe.stem}"
    return recipe.stem


def read_source(
    source: str | Path | Graph, changes: Mapping[str, Any] | None = None, *, on_event: OnEvent
) -> TrainingSource:
    """Read the recipe and the graph of a source, and check the graph.

    `changes` are settings that replace those of the recipe, or of the default recipe.
    """
    changes = dict(changes or {})
    recipe = find_recipe(source) if isinstance(source, (str, Path)) else None
    if recipe is not None:
        return _read_recipe(recipe, changes, title=str(source), on_event=on_event)
    return read_graph(source, changes, on_event=on_event)


def _read_recipe(
    path: str | Path, changes: Mapping[str, Any], *, title: str, on_event: OnEvent
) -> TrainingSource:
    recipe = load_recipe(path, changes=changes)
    graph = load_recipe_graph(recipe)
    difference = _other_defaults(recipe, graph, title=title)
    if difference is not None:
        on_event(difference)
    report_graph(graph, on_event)
    return TrainingSource(recipe, graph, changes, is_recipe=True)


def read_graph(data: Any, changes: Mapping[str, Any], *, on_event: OnEvent) -> TrainingSource:
    """Read and check a graph; its recipe is the default one with some settings changed.

    `data` may also be a table of pandas, polars or Arrow.
    """
    if "data.graph" in changes:
        raise InvalidValue(
            "data.graph",
            expected="left out, because the graph is given",
            found=changes["data.graph"],
            advice="Name the other graph instead.",
        )
    of_data = {key: value for key, value in changes.items() if key.startswith("data.")}
    if isinstance(data, (str, Path)):
        base = Recipe().with_changes({**of_data, "data.graph": str(data)})
        graph = load_recipe_graph(base)
        table = base.data
    elif isinstance(data, Graph):
        graph = data
        if "data.decisions" in changes:
            graph = with_decisions(graph, changes["data.decisions"])
        table = data_of(graph)
    else:
        settings = Recipe().with_changes(of_data).data
        options = settings.model_dump(exclude={"graph", "split_seed", "decisions"})
        graph = load_graph(data, seed=settings.split_seed, **options)
        if settings.decisions is not None:
            graph = with_decisions(graph, settings.decisions)
        table = data_of(graph)
    report_graph(graph, on_event)
    recipe = default_recipe(table, graph, changes)
    return TrainingSource(recipe, graph, changes, is_recipe=False)


def report_graph(graph: Graph, on_event: OnEvent) -> None:
    """Report what the reader of a graph has noted, and what a check of the graph finds."""
    on_event(GraphRead(graph, graph.notes))
    on_event(GraphChecked(graph, check_graph(graph)))


def check_graph(graph: Graph) -> Sequence[str]:
    """Warnings of leakage and of unseen entities, and others that no note of the graph gives.

    A large graph is not checked: comparing its splits takes 114 bytes for each triple.
    """
    if graph.is_large:
        return []
    notes = graph.notes
    return [warning for warning in graph.inspect().warnings() if warning not in notes]


def _other_defaults(recipe: Recipe, graph: Graph, *, title: str) -> DefaultsDiffer | None:
    """Settings that a recipe leaves out and that have other values without a recipe."""
    names = {
        "model.name": recipe.model.name,
        "optimizer.name": recipe.optimizer.name,
        "loss.name": name_of(recipe.loss, LOSSES),
    }
    usual = default_recipe(recipe.data, graph, names)
    of_recipe = {}
    without_recipe = {}
    for key in GRAPH_DEFAULTS:
        section, _, setting = key.partition(".")
        is_set = setting in getattr(recipe, section).model_fields_set
        if not is_set and recipe.value_of(key) != usual.value_of(key):
            of_recipe[key] = recipe.value_of(key)
            without_recipe[key] = usual.value_of(key)
    if not of_recipe:
        return None
    return DefaultsDiffer(title, of_recipe, without_recipe)

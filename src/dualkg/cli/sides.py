"""The two sides of a comparison: runs, or records of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from dualkg.cli import show
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.data.graph import Graph, Split, Triples
    from dualkg.evaluation.comparison import Floats
    from dualkg.evaluation.ranking import Ranks
    from dualkg.training import RunFolder
    from dualkg.training.recipe import Recipe


@dataclass(frozen=True)
class Side:
    """One of the two: what it is called, the runs that it is the mean of, and their ranks."""

    path: Path
    name: str
    seeds: list[int]
    graph: Graph
    triples: Triples
    ranks: Floats

    def as_dict(self) -> dict[str, Any]:
        return {"run": str(self.path), "name": self.name, "seeds": self.seeds}


def load_sides(run_a: Path, run_b: Path, split: Split) -> tuple[Side, Side]:
    """Both sides; refused where they are not of the same triples of the same graph."""
    from dualkg.evaluation.comparison import check_comparable

    a, b = load_side(run_a, split), load_side(run_b, split)
    check_comparable((str(run_a), a.graph, a.triples), (str(run_b), b.graph, b.triples))
    if a.name == b.name:  # then what they are kept in tells them apart
        a, b = (replace(side, name=str(side.path)) for side in (a, b))
    return a, b


def load_side(path: Path, split: Split) -> Side:
    return recorded_side(path, split) if (path / "record.json").exists() else trained_side(path, split)


def recorded_side(path: Path, split: Split) -> Side:
    """The runs of a record, whose ranks of the test split it keeps; its triples are those of the graph that is here."""
    from dualkg.reproduce.records import load_record
    from dualkg.training.start import load_recipe_graph

    record = load_record(path)
    ranks, graph = record.ranks(), load_recipe_graph(record.recipe)
    if split != "test" or ranks is None:
        kept = "none" if ranks is None else "those of test alone"
        raise RequestError(
            f"A record keeps the ranks of test queries, and {path} has {kept}. Compare the runs instead."
        )
    if graph.fingerprint != record.data:
        raise RequestError(
            f"{path} was recorded on other data than {graph.name} is here, so its triples are not known."
        )
    return Side(path, name_of(record.recipe), record.seeds, graph, graph.test, ranks)


def trained_side(path: Path, split: Split) -> Side:
    from dualkg.evaluation.comparison import of_seeds
    from dualkg.reproduce.records import whatever_seed
    from dualkg.training import load_recipe

    folders = finished_runs(path)
    recipes = [load_recipe(folder.recipe) for folder in folders]
    if len({whatever_seed(recipe) for recipe in recipes}) > 1:
        raise RequestError(f"The runs in {path} are not of one recipe, so they have no mean. Name one of them.")
    if len({folder.saved_environment.get("data") for folder in folders}) > 1:
        raise RequestError(f"The runs in {path} are not of the same data, so they have no mean. Name one of them.")
    graph = folders[0].load_graph()
    if not len(graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to compare by.")
    ranks = [saved_ranks(folder, split) for folder in folders]
    return Side(
        path=path,
        name=name_of(recipes[0]),
        seeds=[recipe.training.seed for recipe in recipes],
        graph=graph,
        triples=ranks[0].triples,
        ranks=of_seeds(ranks),
    )


def name_of(recipe: Recipe) -> str:
    """ComplEx-DURA, say."""
    choice, kept_small = recipe.model, recipe.regularizer.name
    dual = "" if choice.dual == "none" else f"-dual-{choice.dual}"
    return choice.name + dual + ("" if kept_small == "none" else f"-{kept_small}")


def finished_runs(path: Path) -> list[RunFolder]:
    """The run that a folder is, or the finished ones that lie in it."""
    from dualkg.reproduce.records import find_runs
    from dualkg.training import RunFolder

    own = RunFolder(path)
    inside = [own] if own.recipe.exists() else [RunFolder(found.parent) for found in path.glob("seed-*/recipe.toml")]
    if not inside:
        own.check_is_run()
    unfinished = [folder for folder in inside if not folder.finished]
    if len(unfinished) == len(inside):
        raise RequestError(f"{path} holds no finished run. {unfinished[0].how_to_go_on()}")
    if unfinished:
        count = f"{len(unfinished)} of the {len(inside)} runs in {path}"
        show.err.print(f"[dim]{escape(count)} are not finished, and left out.[/dim]", soft_wrap=True)
    return [RunFolder(found) for found in find_runs([path])]


def saved_ranks(folder: RunFolder, split: Split) -> Ranks:
    """The ranks that are kept with the run, or where they are not, as for train, those of its model."""
    from dualkg.evaluation import load_ranks
    from dualkg.training import load_run

    kept = folder.ranks(split)
    return load_ranks(kept) if kept.exists() else load_run(folder.path).report_on(split).ranks

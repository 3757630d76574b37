"""Runs of one recipe with different seeds, in a folder or as a record, and the ranks of their
queries.

A record documents the runs behind a published number: recipe.toml, record.json (costs, environment
and validation metrics of each seed) and ranks.parquet (the rank of every test query, one column per
seed).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dualkg.data.archives import read_parquet
from dualkg.data.graph import Graph, Split, Triples
from dualkg.errors import RequestError
from dualkg.evaluation.comparison import Floats, stack_mean_ranks
from dualkg.files import read_json
from dualkg.training.api import load_recipe_graph
from dualkg.training.ensemble import load_run
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import RunFolder

RUN_KEYS = {"seed", "epochs", "costs", "environment", "valid", "test_bounds"}


def read_record(folder: Path) -> dict[str, Any]:
    """record.json: the graph, the fingerprint of its `data`, and the `runs`, one per seed."""
    path = folder / "record.json"
    saved: dict[str, Any] = read_json(path)
    runs = (
        saved["runs"]
        if isinstance(saved, dict) and saved.keys() >= {"graph", "data", "runs"}
        else None
    )
    if not runs or not all(isinstance(run, dict) and run.keys() >= RUN_KEYS for run in runs):
        raise RequestError(
            f"{path} is not a record in the current format. Move it away and record the runs again."
        )
    return saved


def load_recorded_ranks(folder: Path, seeds: Sequence[int]) -> Floats:
    """The rank of every test query, `(num_seeds, 2, num_triples)`, tail queries first."""
    path = folder / "ranks.parquet"
    try:
        table = read_parquet(path)
        columns = [table[f"seed-{seed}"].to_numpy() for seed in seeds]
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise RequestError(
            f"{path} cannot be read: {error}. Move the record away and record the runs again."
        ) from None
    ranks: Floats = (
        np.stack(columns).reshape(len(columns), 2, -1) / 2
    )  # twice the rank is saved, an integer
    return ranks


@dataclass(frozen=True, eq=False)
class RankedRuns:
    """Runs that differ only in their seed, and their mean ranks of one split, `(num_seeds, 2,
    num_triples)`.
    """

    path: Path
    name: str  # such as ComplEx-DURA
    seeds: list[int]
    graph: Graph
    triples: Triples
    ranks: Floats
    num_unfinished: int = 0  # runs in the folder that are left out


def load_ranked_runs(path: Path, split: Split) -> RankedRuns:
    """The ranks of a run or ensemble, of finished runs `seed-*` in a folder, or of a record;
    computed if not saved.
    """
    if (path / "record.json").exists():
        return _load_recorded(path, split)
    if RunFolder(path).ensemble.exists():
        return _load_ensemble(path, split)
    folders = run_folders(path)
    finished = [folder for folder in folders if folder.finished]
    if not finished:
        folders[0].check_finished()
    recipes = load_recipes(finished)
    graph = finished[0].load_graph()
    if not len(graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to compare.")
    ranks = [
        folder.load_ranks(split)
        if folder.ranks(split).exists()
        else load_run(folder.path).report_on(split).ranks
        for folder in finished
    ]
    seeds = [recipe.training.seed for recipe in recipes]
    num_unfinished = len(folders) - len(finished)
    stacked = stack_mean_ranks(ranks)
    return RankedRuns(
        path, _name(recipes[0]), seeds, graph, ranks[0].triples, stacked, num_unfinished
    )


def _load_ensemble(path: Path, split: Split) -> RankedRuns:
    run = load_run(path)
    if not len(run.graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to compare.")
    ranks = run.report_on(split).ranks
    return RankedRuns(
        path, run.model_name, [0], run.graph, ranks.triples, stack_mean_ranks([ranks])
    )


def _load_recorded(path: Path, split: Split) -> RankedRuns:
    """A record has ranks but no triples: they are those of the graph as it is loaded now."""
    record = read_record(path)
    recipe = load_recipe(path / "recipe.toml")
    if split != "test":
        raise RequestError(
            f"A record has the ranks of the test split only, not of {split}. Compare the runs "
            "instead."
        )
    graph = load_recipe_graph(recipe)
    if graph.fingerprint != record["data"]:
        raise RequestError(
            f"{path} was recorded with different data than {graph.name} has here. Compare runs "
            "instead."
        )
    seeds = [run["seed"] for run in record["runs"]]
    return RankedRuns(
        path, _name(recipe), seeds, graph, graph.test, load_recorded_ranks(path, seeds)
    )


def run_folders(path: Path) -> list[RunFolder]:
    """A run, or the runs `seed-*` in a folder, finished or not."""
    run = RunFolder(path)
    folders = (
        [run]
        if run.recipe.exists()
        else [RunFolder(file.parent) for file in sorted(path.glob("seed-*/recipe.toml"))]
    )
    if not folders:
        run.check_is_run()
    return folders


def load_recipes(folders: Sequence[RunFolder]) -> list[Recipe]:
    """The recipes of runs; refused if they differ in more than the seed, or if the data differ."""
    recipes = [load_recipe(folder.recipe) for folder in folders]
    names = ", ".join(str(folder.path) for folder in folders)
    if len({recipe.with_changes({"training.seed": 0}).as_toml() for recipe in recipes}) > 1:
        raise RequestError(
            f"The runs {names} have different recipes; runs that differ only in the seed were "
            "expected."
        )
    if len({str(folder.saved_environment.get("data")) for folder in folders}) > 1:
        raise RequestError(f"The runs {names} were trained on different data.")
    return recipes


def _name(recipe: Recipe) -> str:
    dual = "" if recipe.model.dual == "none" else f"-dual-{recipe.model.dual}"
    return (
        recipe.model.name
        + dual
        + ("" if recipe.regularizer.name == "none" else f"-{recipe.regularizer.name}")
    )

"""Runs of one recipe with different seeds, in a folder or as a record, and their ranks.

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

from dualkg.data.graph import Graph, Split, Triples
from dualkg.data.parquet_files import read_parquet
from dualkg.errors import DamagedFile, RequestError
from dualkg.evaluation.comparison import Floats, stack_mean_ranks
from dualkg.evaluation.ranking import Ranks
from dualkg.files import read_json
from dualkg.training.api import load_recipe_graph
from dualkg.training.ensemble import load_run
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run_folder import RunFolder

RECORD_KEYS = {"graph", "data", "runs"}
RUN_KEYS = {"seed", "epochs", "costs", "environment", "valid", "test_bounds"}
RECORD_AGAIN = "Move it away and record the runs again."


def read_record(folder: Path) -> dict[str, Any]:
    """Read record.json: the graph, the fingerprint of its `data`, and the `runs`, one per seed."""
    path = folder / "record.json"
    record: dict[str, Any] = read_json(path)
    if not _is_record(record):
        raise RequestError(f"{path} is not a record in the current format. {RECORD_AGAIN}")
    return record


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not record.keys() >= RECORD_KEYS or not record["runs"]:
        return False
    return all(isinstance(run, dict) and run.keys() >= RUN_KEYS for run in record["runs"])


def load_recorded_ranks(folder: Path, seeds: Sequence[int]) -> Floats:
    """The rank of every test query, `(num_seeds, 2, num_triples)`, tail queries first."""
    path = folder / "ranks.parquet"
    if not path.exists():
        # Records of graphs that train in seconds are kept without ranks.
        raise RequestError(
            f"This record has no ranks: {path} does not exist. Its test metrics are in "
            f"{folder / 'record.json'}. To compare it query by query, train "
            f"{folder / 'recipe.toml'} and name that run."
        )
    try:
        table = read_parquet(path)
        columns = [table[f"seed-{seed}"].to_numpy() for seed in seeds]
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise DamagedFile(path, str(error), advice=RECORD_AGAIN) from None
    # Twice the rank is saved, which is an integer: a rank is the mean over ties.
    doubled = np.stack(columns).reshape(len(columns), 2, -1)
    ranks: Floats = doubled / 2
    return ranks


@dataclass(frozen=True, eq=False)
class RankedRuns:
    """Runs that differ only in their seed, and their ranks of one split.

    The shape of `ranks` is `(num_seeds, 2, num_triples)`, tail queries first.
    """

    path: Path
    name: str  # such as ComplEx-DURA
    seeds: list[int]
    graph: Graph
    triples: Triples
    ranks: Floats
    num_unfinished: int = 0  # runs in the folder that are left out


def load_ranked_runs(path: Path, split: Split) -> RankedRuns:
    """The ranks of a run or ensemble, of finished runs `seed-*` in a folder, or of a record.

    Ranks that were not saved are computed.
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
    _check_split(graph, path, split)
    ranks = [_load_or_compute_ranks(folder, split) for folder in finished]
    return RankedRuns(
        path=path,
        name=_name(recipes[0]),
        seeds=[recipe.training.seed for recipe in recipes],
        graph=graph,
        triples=ranks[0].triples,
        ranks=stack_mean_ranks(ranks),
        num_unfinished=len(folders) - len(finished),
    )


def _check_split(graph: Graph, path: Path, split: Split) -> None:
    if not len(graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to compare.")


def _load_or_compute_ranks(folder: RunFolder, split: Split) -> Ranks:
    if folder.ranks(split).exists():
        return folder.load_ranks(split)
    return load_run(folder.path).report_on(split).ranks


def _load_ensemble(path: Path, split: Split) -> RankedRuns:
    run = load_run(path)
    _check_split(run.graph, path, split)
    ranks = run.report_on(split).ranks
    return RankedRuns(
        path=path,
        name=run.model_name,
        seeds=[0],
        graph=run.graph,
        triples=ranks.triples,
        ranks=stack_mean_ranks([ranks]),
    )


def _load_recorded(path: Path, split: Split) -> RankedRuns:
    """Load a record, which has ranks but no triples; these are of the graph as it is now."""
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
        path=path,
        name=_name(recipe),
        seeds=seeds,
        graph=graph,
        triples=graph.test,
        ranks=load_recorded_ranks(path, seeds),
    )


def run_folders(path: Path) -> list[RunFolder]:
    """A run, or the runs `seed-*` in a folder, finished or not."""
    run = RunFolder(path)
    if run.recipe.exists():
        return [run]
    folders = [RunFolder(recipe.parent) for recipe in sorted(path.glob("seed-*/recipe.toml"))]
    if not folders:
        run.check_is_run()
    return folders


def load_recipes(folders: Sequence[RunFolder]) -> list[Recipe]:
    """The recipes of runs; refused if they differ in more than the seed, or if the data differ."""
    recipes = [load_recipe(folder.recipe) for folder in folders]
    without_seeds = {recipe.with_changes({"training.seed": 0}).as_toml() for recipe in recipes}
    if len(without_seeds) > 1:
        raise _unrelated(folders, "have different recipes")
    fingerprints = {str(folder.saved_environment.get("data")) for folder in folders}
    if len(fingerprints) > 1:
        raise _unrelated(folders, "were trained on different data")
    return recipes


def _unrelated(folders: Sequence[RunFolder], difference: str) -> RequestError:
    names = ", ".join(str(folder.path) for folder in folders)
    return RequestError(
        f"The runs {names} {difference}; runs that differ only in the seed were expected."
    )


def _name(recipe: Recipe) -> str:
    """The name of a model in a comparison, such as ComplEx-DURA."""
    name = recipe.model.name
    if recipe.model.dual != "none":
        name += f"-dual-{recipe.model.dual}"
    if recipe.regularizer.name != "none":
        name += f"-{recipe.regularizer.name}"
    return name

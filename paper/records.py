"""Records: what is saved of the runs behind a published number, and the training of runs that are
missing.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import dualkg as kg
from dualkg.analysis.records import load_recipes, load_recorded_ranks, read_record, run_folders
from dualkg.evaluation.comparison import Floats
from dualkg.files import atomic_folder, locks, read_json, write_text
from dualkg.inference.api import open_run
from dualkg.training.api import OnProgress, choose_device, load_recipe_graph, spread
from dualkg.training.run import RunFolder, environment
from dualkg.workflows import train_seeds
from paper import registry
from paper.registry import FOLDER, ResultTable, Row, recipe_of, rows_with_recipes

RECORDS = FOLDER / "records"
RUNS = Path("runs/paper")


@dataclass(frozen=True)
class Record:
    """One recipe and its runs, one per seed."""

    folder: Path
    recipe: kg.Recipe
    graph: str
    data: str  # the fingerprint of the graph that the runs were trained on
    runs: list[dict[str, Any]]

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @cached_property
    def ranks(self) -> Floats:
        return load_recorded_ranks(self.folder, self.seeds)

    @cached_property
    def test_metrics(self) -> list[kg.Metrics]:
        """One per seed; as saved in record.json where the ranks were not saved."""
        if not (self.folder / "ranks.parquet").exists():
            return [kg.Metrics(**run["test"]) for run in self.runs]
        return [kg.Metrics.of(ranks) for ranks in self.ranks]

    def values(self, name: str) -> list[float]:
        """A test metric, one per seed."""
        return [getattr(metrics, name) for metrics in self.test_metrics]

    def cost(self, name: str) -> float | None:
        """The mean of a cost over the seeds that were trained alone on their device; over all if
        none was.
        """
        runs = [run for run in self.runs if not run["costs"].get("shared_device")] or self.runs
        values = [run["costs"][name] for run in runs if run["costs"].get(name) is not None]
        return spread(values)[0] if values else None

    @property
    def times_are_bounds(self) -> bool:
        """Whether all runs shared their device with other work, so that their times are upper
        bounds.
        """
        return all(run["costs"].get("shared_device") for run in self.runs)


def load_record(folder: Path) -> Record:
    record = read_record(folder)  # before the recipe, whose absence says less
    return Record(folder, kg.load_recipe(folder / "recipe.toml"), **record)


@locks("folder")
def record_runs(
    runs: Sequence[Path],
    folder: Path,
    *,
    earlier: Record | None = None,
    shared_device: bool = False,
) -> Record:
    """Write a record of runs of one recipe, one per seed; those of an `earlier` record of it are
    taken over.

    `shared_device` marks the times as upper bounds, because other work ran on the same device.
    """
    folders = [run for path in runs for run in run_folders(path) if run.finished]
    if not folders:
        raise kg.RequestError("There is no finished run to record.")
    recipes = load_recipes(folders)
    seeds = [recipe.training.seed for recipe in recipes]
    if len(set(seeds)) < len(seeds):
        raise kg.RequestError(
            f"A record has each seed once; the seeds of the runs are {', '.join(map(str, seeds))}."
        )
    ranks = dict(zip(earlier.seeds, earlier.ranks, strict=True)) if earlier else {}
    summaries = dict(zip(earlier.seeds, earlier.runs, strict=True)) if earlier else {}
    for seed, run in zip(seeds, folders, strict=True):
        _check_unchanged(run)
        ranks[seed] = run.load_ranks("test").mean
        summaries[seed] = _summary(run, seed, shared_device=shared_device)
    record = {
        "graph": folders[0].saved_reports()["test"]["graph"],
        "data": folders[0].saved_environment["data"],
    }
    record["runs"] = [summaries[seed] for seed in sorted(summaries)]
    # Twice the rank is an integer: a rank is the mean over ties.
    columns = {
        f"seed-{seed}": (2 * ranks[seed]).reshape(-1).astype("int32") for seed in sorted(ranks)
    }
    with atomic_folder(
        folder, existing="replace"
    ) as fresh:  # ranks, recipe and record always belong together
        small = {"compression": "zstd", "compression_level": 19, "use_dictionary": False}
        pq.write_table(pa.table(columns), fresh / "ranks.parquet", **small)
        write_text(fresh / "recipe.toml", recipe_without_seed(recipes[0]))
        write_text(
            fresh / "record.json",
            json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        )
    return load_record(folder)


def _check_unchanged(run: RunFolder) -> None:
    if run.sparsity.exists():
        raise kg.RequestError(
            f"{run.path} was sparsified after training; only runs as they were trained are "
            "recorded."
        )
    if is_uncommitted(run.saved_environment):
        raise kg.RequestError(
            f"{run.path} was trained from a source tree with uncommitted changes "
            f"({run.saved_environment['commit']}), so nobody could train it again. Commit the "
            "changes, train again, and record that run."
        )


def _summary(run: RunFolder, seed: int, *, shared_device: bool) -> dict[str, Any]:
    reports = run.saved_reports()
    history = read_json(run.history)
    costs = {"training_seconds": round(sum(entry["seconds"] for entry in history), 3)}
    costs |= read_json(run.costs) if run.costs.exists() else {}
    bounds = {f"{side}_mrr": reports["test"][side]["mrr"] for side in ("optimistic", "pessimistic")}
    return {
        "seed": seed,
        "epochs": len(history),
        "costs": costs | ({"shared_device": True} if shared_device else {}),
        "environment": {
            key: value for key, value in run.saved_environment.items() if key != "data"
        },
        "valid": reports["valid"]["metrics"],
        "test_bounds": bounds,
    }


def load_records(root: Path) -> dict[str, Record]:
    """All records below a folder, by their path in it."""
    folders = [path.parent for path in sorted(root.rglob("record.json"))]
    return {folder.relative_to(root).as_posix(): load_record(folder) for folder in folders}


def recipe_without_seed(recipe: kg.Recipe) -> str:
    """A recipe as text with its seed set to 0: equal for runs that differ in their seeds alone."""
    return recipe.with_changes({"training.seed": 0}).as_toml()


def is_uncommitted(environment: dict[str, Any]) -> bool:
    """Whether a run was trained from a source tree with uncommitted changes."""
    return str(environment.get("commit")).endswith("-dirty")


@dataclass(frozen=True)
class Config:
    """Which graph, seeds and rows to reproduce, on which device, and where to save records and
    runs.
    """

    dataset: str | None = None  # None: the graphs of the paper
    seeds: int = 3
    rows: tuple[str, ...] = ()  # all if empty
    records: Path = RECORDS
    runs: Path = RUNS
    device: str | None = None
    shared_device: bool = False
    log: Callable[[str], None] = lambda text: None
    on_progress: OnProgress | None = None

    def graphs(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the graphs: the one of `--dataset`, ignoring case, or the default ones."""
        if self.dataset is None:
            return default
        error = f"'{self.dataset}' is not a graph of these tables."
        return (registry.spelled(self.dataset, (*registry.GRAPHS, *default), error, "The graphs"),)

    def trained_run(self, row: Row, graph: kg.Graph, seed: int) -> Path:
        """The folder of a finished run with its weights, trained if it is missing."""
        folder = self.runs / row.record_name(graph.name) / f"seed-{seed}"
        recipe = recipe_of(row, graph.name).with_changes({"training.seed": seed})
        saved = RunFolder(folder).recipe
        if saved.exists() and kg.load_recipe(saved) != recipe:
            raise kg.RequestError(
                f"{folder} has an older recipe of {row.name}. Move it away, or use another --runs."
            )
        train_seeds(
            recipe,
            1,
            out=folder.parent,
            graph=graph,
            device=self.device,
            on_progress=self.on_progress,
        )
        return folder

    def load_trained(self, row: Row, graph: kg.Graph, seed: int) -> kg.Run:
        """A trained run with its model on the device."""
        self.log(f"{row.name} on {graph.name}, seed {seed}.")
        return open_run(self.trained_run(row, graph, seed), device=self.device)

    def train_table(self, table: ResultTable, graph: str) -> dict[str, Record]:
        """Train and record the missing seeds of the rows of a table on one graph; all records by
        name.
        """
        rows = rows_with_recipes(table.rows, graph)
        missing = [row.name for row in table.rows if row.recipe and row not in rows]
        if not any(
            row.name in pair for row in rows for pair in table.pairs if not set(pair) & set(missing)
        ):
            raise kg.RequestError(
                f"The table {table.name} compares rows, and on {graph} no pair has both recipes."
            )
        if missing:
            self.log(f"Left out, because there is no recipe on {graph}: {', '.join(missing)}.")
        selected = [table.row(name) for name in self.rows]
        records = {}
        data = None
        for row in [row for row in rows if not selected or row in selected]:
            recipe = recipe_of(row, graph)
            name = row.record_name(graph)
            data = data or load_recipe_graph(recipe)
            record = find_record(self.records / name, recipe, data)
            seeds = sorted(set(range(self.seeds)) - set(record.seeds if record else ()))
            if record is None or seeds:
                check_committed()
                self.log(
                    f"{row.name} on {graph}: {recipe.training.epochs} epochs, seed "
                    f"{', '.join(map(str, seeds))}."
                )
                runs = [self.trained_run(row, data, seed) for seed in seeds]
                record = record_runs(
                    runs, self.records / name, earlier=record, shared_device=self.shared_device
                )
            records[name] = record
        return records


def find_record(folder: Path, recipe: kg.Recipe, graph: kg.Graph) -> Record | None:
    """The record of this recipe on this data, if there is one with its ranks."""
    record = load_record(folder) if (folder / "record.json").exists() else None
    same = record and recipe_without_seed(record.recipe) == recipe_without_seed(recipe)
    return (
        record
        if same and record.data == graph.fingerprint and (folder / "ranks.parquet").exists()
        else None
    )


def check_committed() -> None:
    """Refuse to train for a record from a source tree with uncommitted changes, before any time is
    spent.
    """
    found = environment(choose_device("cpu"), fingerprint="")
    if is_uncommitted(found):
        raise kg.RequestError(
            f"The source tree has uncommitted changes ({found['commit']}), so its numbers could "
            "not be reproduced. Commit or stash them first."
        )

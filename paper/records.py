"""Records: what is saved of the runs behind a published number, and what is computed from it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.analysis.records import load_recipes, load_recorded_ranks, read_record, run_folders
from dualkg.errors import RequestError
from dualkg.evaluation.comparison import Floats
from dualkg.evaluation.report import Metrics
from dualkg.files import atomic_folder, locks, read_json, write_text
from dualkg.training.api import spread
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import RunFolder


@dataclass(frozen=True)
class Record:
    """One recipe and its runs, one per seed."""

    folder: Path
    recipe: Recipe
    graph: str
    data: str  # the fingerprint of the graph that the runs were trained on
    runs: list[dict[str, Any]]

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @property
    def ranks_path(self) -> Path:
        return self.folder / "ranks.parquet"

    @cached_property
    def ranks(self) -> Floats:
        return load_recorded_ranks(self.folder, self.seeds)

    @cached_property
    def test_metrics(self) -> list[Metrics]:
        """One per seed; as saved in record.json where the ranks were not saved."""
        if not self.ranks_path.exists():
            return [Metrics(**run["test"]) for run in self.runs]
        return [Metrics.of(ranks) for ranks in self.ranks]

    def values(self, name: str) -> list[float]:
        """A test metric, one per seed."""
        return [getattr(metrics, name) for metrics in self.test_metrics]

    def metric(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a test metric over the seeds."""
        return spread(self.values(name))

    def cost(self, name: str) -> float | None:
        """The mean of a cost over the seeds that were trained alone on their device; over all if none was."""
        runs = [run for run in self.runs if not run["costs"].get("shared_device")] or self.runs
        values = [run["costs"][name] for run in runs if run["costs"].get(name) is not None]
        return spread(values)[0] if values else None

    @property
    def times_are_bounds(self) -> bool:
        """Whether all runs shared their device with other work, so that their times are upper bounds."""
        return all(run["costs"].get("shared_device") for run in self.runs)


def load_record(folder: Path) -> Record:
    record = read_record(folder)  # before the recipe, whose absence says less
    return Record(folder, load_recipe(folder / "recipe.toml"), **record)


@locks("folder")
def record_runs(
    runs: Sequence[Path], folder: Path, *, earlier: Record | None = None, shared_device: bool = False
) -> Record:
    """Write a record of runs of one recipe, one per seed; those of an `earlier` record of it are taken over.

    `shared_device` marks the times as upper bounds, because other work ran on the same device.
    """
    folders = [run for path in runs for run in run_folders(path) if run.finished]
    if not folders:
        raise RequestError("There is no finished run to record.")
    recipes = load_recipes(folders)
    seeds = [recipe.training.seed for recipe in recipes]
    if len(set(seeds)) < len(seeds):
        raise RequestError(f"A record has each seed once; the seeds of the runs are {', '.join(map(str, seeds))}.")
    for run in folders:
        _check_unchanged(run)
    by_seed = dict(zip(seeds, folders, strict=True))
    ranks = {seed: run.load_ranks("test").mean for seed, run in by_seed.items()}
    summaries = {seed: _summary(run, seed, shared_device=shared_device) for seed, run in by_seed.items()}
    if earlier is not None:
        ranks = dict(zip(earlier.seeds, earlier.ranks, strict=True)) | ranks
        summaries = dict(zip(earlier.seeds, earlier.runs, strict=True)) | summaries
    record = {
        "graph": folders[0].saved_reports()["test"]["graph"],
        "data": folders[0].saved_environment["data"],
        "runs": [summaries[seed] for seed in sorted(summaries)],
    }
    # Twice the rank is an integer: a rank is the mean over ties.
    columns = {f"seed-{seed}": (2 * ranks[seed]).reshape(-1).astype("int32") for seed in sorted(ranks)}
    with atomic_folder(folder, existing="replace") as fresh:  # ranks, recipe and record always belong together
        small = {"compression": "zstd", "compression_level": 19, "use_dictionary": False}
        pq.write_table(pa.table(columns), fresh / "ranks.parquet", **small)
        write_text(fresh / "recipe.toml", recipe_without_seed(recipes[0]))
        write_text(fresh / "record.json", json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return load_record(folder)


def _check_unchanged(run: RunFolder) -> None:
    if run.sparsity.exists():
        raise RequestError(f"{run.path} was sparsified after training; only runs as they were trained are recorded.")
    if is_uncommitted(run.saved_environment):
        raise RequestError(
            f"{run.path} was trained from a source tree with uncommitted changes ({run.saved_environment['commit']}), "
            f"so nobody could train it again. Commit the changes, train again, and record that run."
        )


def _summary(run: RunFolder, seed: int, *, shared_device: bool) -> dict[str, Any]:
    reports, history = run.saved_reports(), read_json(run.history)
    costs = {"training_seconds": round(sum(entry["seconds"] for entry in history), 3)}
    costs |= read_json(run.costs) if run.costs.exists() else {}
    bounds = {f"{side}_mrr": reports["test"][side]["mrr"] for side in ("optimistic", "pessimistic")}
    return {
        "seed": seed,
        "epochs": len(history),
        "costs": costs | ({"shared_device": True} if shared_device else {}),
        "environment": {key: value for key, value in run.saved_environment.items() if key != "data"},
        "valid": reports["valid"]["metrics"],
        "test_bounds": bounds,
    }


def load_records(root: Path) -> dict[str, Record]:
    """All records below a folder, by their path in it."""
    folders = [path.parent for path in sorted(root.rglob("record.json"))]
    return {folder.relative_to(root).as_posix(): load_record(folder) for folder in folders}


def recipe_without_seed(recipe: Recipe) -> str:
    """A recipe as text with its seed set to 0: equal for runs that differ in their seeds alone."""
    return recipe.with_changes({"training.seed": 0}).as_toml()


def is_uncommitted(environment: dict[str, Any]) -> bool:
    """Whether a run was trained from a source tree with uncommitted changes."""
    return str(environment.get("commit")).endswith("-dirty")

"""Record finished runs: recipe, costs, environment, validation metrics and the rank of every test query."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.analysis.records import Record, is_uncommitted, load_record
from dualkg.errors import RequestError
from dualkg.evaluation.report import load_ranks
from dualkg.files import atomic_folder, read_json, write_text
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import RunFolder


def record_runs(
    runs: Sequence[Path], folder: Path, *, earlier: Record | None = None, shared_device: bool = False
) -> Record:
    """Write a record of runs of one recipe, one per seed.

    Seeds of an `earlier` record of the same recipe and data are taken over. `shared_device` marks the times as upper
    bounds, because other work ran on the same device.
    """
    folders = [RunFolder(path) for path in find_finished_runs(runs)]
    recipes = [load_recipe(run.recipe) for run in folders]
    seeds = [recipe.training.seed for recipe in recipes]
    _check(runs, folders, seeds, {recipe_without_seed(recipe) for recipe in recipes})
    ranks = {seed: load_ranks(run.ranks("test")).mean for run, seed in zip(folders, seeds, strict=True)}
    summaries = {
        seed: _summary(run, seed, shared_device=shared_device) for run, seed in zip(folders, seeds, strict=True)
    }
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
        pq.write_table(
            pa.table(columns), fresh / "ranks.parquet", compression="zstd", compression_level=19, use_dictionary=False
        )
        write_text(fresh / "recipe.toml", recipe_without_seed(recipes[0]))
        write_text(fresh / "record.json", json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return load_record(folder)


def _check(runs: Sequence[Path], folders: Sequence[RunFolder], seeds: Sequence[int], recipes: set[str]) -> None:
    names = ", ".join(map(str, runs))
    if len(recipes) != 1:
        raise RequestError(f"The runs {names} have different recipes; a record has one.")
    if len(set(seeds)) < len(seeds):
        raise RequestError(f"A record has each seed once; the seeds of the runs are {', '.join(map(str, seeds))}.")
    if len({run.saved_environment.get("data") for run in folders}) > 1:
        raise RequestError(f"The runs {names} were trained on different data.")
    for run in folders:
        if run.sparsity.exists():
            raise RequestError(
                f"{run.path} was sparsified after training; only runs as they were trained are recorded."
            )
        if is_uncommitted(run.saved_environment):
            raise RequestError(
                f"{run.path} was trained from a source tree with uncommitted changes "
                f"({run.saved_environment['commit']}), so nobody could train it again. Commit the changes, train "
                f"again, and record that run."
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


def find_finished_runs(paths: Iterable[Path]) -> list[Path]:
    """The finished runs among these folders and their `seed-*` folders."""
    found = []
    for path in paths:
        candidates = [path] if RunFolder(path).recipe.exists() else sorted(path.glob("seed-*"))
        found += [run for run in candidates if RunFolder(run).finished]
    if not found:
        raise RequestError("There is no finished run to record.")
    return found

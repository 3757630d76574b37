"""Record finished runs: recipe, seeds, costs, environment and the rank of every test query."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.analysis.records import Record, find_runs, load_record, whatever_seed
from dualkg.errors import RequestError
from dualkg.evaluation.report import load_ranks
from dualkg.files import atomic_folder, read_json, write_text
from dualkg.training.recipe import load_recipe
from dualkg.training.run import RunFolder


def record(runs: Sequence[Path], folder: Path, *, beside: Record | None = None, beside_others: bool = False) -> Record:
    """Keep what runs of one recipe came to: recipe, environment, seeds, costs, reports, and their ranks.

    `beside` is an earlier record of the same recipe and data, whose other seeds are taken over. With `beside_others`
    it is kept that other work shared the device, so that times are no more than bounds.
    """
    folders = [RunFolder(path) for path in find_runs(runs)]
    recipes = [load_recipe(found.recipe) for found in folders]
    if len({whatever_seed(recipe) for recipe in recipes}) != 1:
        raise RequestError(f"The runs {', '.join(str(path) for path in runs)} are not of one recipe.")
    sparse = [str(found.path) for found in folders if found.sparsity.exists()]
    if sparse:
        raise RequestError(f"{sparse[0]} was made sparse after its training; a record is of runs as they were trained.")
    seeds = [recipe.training.seed for recipe in recipes]
    if len(set(seeds)) < len(seeds):
        raise RequestError(f"A record has each seed once; those of the runs are {', '.join(map(str, seeds))}.")
    if len({found.saved_environment.get("data") for found in folders}) > 1:
        raise RequestError(f"The runs {', '.join(str(path) for path in runs)} were not trained on the same data.")
    ranks = {seed: load_ranks(found.ranks("test")).mean for found, seed in zip(folders, seeds, strict=True)}
    summaries = {seed: _summary(found, seed) for found, seed in zip(folders, seeds, strict=True)}
    if beside_others:
        for summary in summaries.values():
            summary["costs"]["beside_others"] = True
    if beside is not None and (earlier := beside.ranks()) is not None:
        ranks = dict(zip(beside.seeds, earlier, strict=True)) | ranks
        summaries = dict(zip(beside.seeds, beside.runs, strict=True)) | summaries
    kept = {
        "graph": folders[0].saved_reports()["test"]["graph"],
        "runs": [summaries[seed] for seed in sorted(summaries)],
    }
    with atomic_folder(folder, existing="replace") as fresh:  # never the ranks of one and the recipe of another
        _write_ranks(ranks, fresh / "ranks.parquet")
        write_text(fresh / "recipe.toml", whatever_seed(recipes[0]))
        write_text(fresh / "record.json", json.dumps(kept, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return load_record(folder)


def load_records(root: Path) -> dict[str, Record]:
    """All records under a folder, by their path in it."""
    return {
        path.parent.relative_to(root).as_posix(): load_record(path.parent) for path in sorted(root.rglob("record.json"))
    }


def _summary(folder: RunFolder, seed: int) -> dict[str, Any]:
    reports = folder.saved_reports()
    slim = {
        split: {key: value for key, value in report.items() if key != "by_relation"}
        for split, report in reports.items()
    }
    history = read_json(folder.history)
    costs = read_json(folder.costs) if folder.costs.exists() else {}
    return {
        "seed": seed,
        "costs": {"training_seconds": round(sum(entry["seconds"] for entry in history), 3)} | costs,
        "epochs": len(history),
        "environment": folder.saved_environment,
        "ranks_sha256": {split: hashlib.sha256(folder.ranks(split).read_bytes()).hexdigest() for split in reports},
        "reports": slim,
    }


def _write_ranks(ranks: Mapping[int, npt.NDArray[np.float64]], path: Path) -> None:
    """Twice the mean rank, by seed, for the mean of ties may lie between two places."""
    columns = {f"seed-{seed}": (2 * ranks[seed]).reshape(-1).astype(np.int32) for seed in sorted(ranks)}
    pq.write_table(pa.table(columns), path, compression="zstd", compression_level=19, use_dictionary=False)

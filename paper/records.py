"""Records: what is kept of the runs behind a published number.

recipe.toml  record.json  ranks.parquet (of every test query, a column for each seed)"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.errors import RequestError
from dualkg.evaluation.report import load_ranks
from dualkg.files import read_json, replacing_folder, write_text
from dualkg.training.api import spread
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import RunFolder


@dataclass(frozen=True)
class Record:
    """One recipe, and what its runs came to, one a seed."""

    folder: Path
    recipe: Recipe
    graph: str
    runs: list[dict[str, Any]]

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @property
    def data(self) -> str:
        """The hash of the data that the first run was trained on."""
        return str(self.runs[0]["environment"]["data"])

    def metric(self, name: str, *, split: str = "test") -> tuple[float, float]:
        """Mean and standard deviation over the seeds."""
        return spread([run["reports"][split]["metrics"][name] for run in self.runs])

    def cost(self, name: str) -> float | None:
        """The mean over the seeds of one of the costs, where it was kept: over those trained alone, if any was."""
        alone = [run["costs"] for run in self.runs if not run["costs"].get("beside_others")]
        kept = [costs[name] for costs in alone or (run["costs"] for run in self.runs) if costs.get(name) is not None]
        return spread(kept)[0] if kept else None

    @property
    def times_are_bounds(self) -> bool:
        """Whether all runs were trained beside others, so that alone they would have taken less."""
        return all(run["costs"].get("beside_others") for run in self.runs)

    def ranks(self) -> npt.NDArray[np.float64] | None:
        """The rank of every test query, `(seeds, 2, triples)`, tails first; none where they were not kept."""
        path = self.folder / "ranks.parquet"
        if not path.exists():
            return None
        try:
            table = pq.read_table(path)
            columns = [table[f"seed-{seed}"].to_numpy() for seed in self.seeds]
        except (pa.ArrowInvalid, OSError, KeyError) as error:
            raise RequestError(f"{path} cannot be read: {error}. Move the record away, and record again.") from None
        return np.stack(columns).reshape(len(columns), 2, -1) / 2


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
    with replacing_folder(folder, existing="replace") as fresh:  # never the ranks of one and the recipe of another
        _write_ranks(ranks, fresh / "ranks.parquet")
        write_text(fresh / "recipe.toml", whatever_seed(recipes[0]))
        write_text(fresh / "record.json", json.dumps(kept, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return load_record(folder)


def whatever_seed(recipe: Recipe) -> str:
    """What two runs of one recipe have in common."""
    return recipe.with_changes({"training.seed": 0}).as_toml()


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The finished runs that are, or lie in, these folders."""
    found = []
    for path in paths:
        inside = sorted(path.glob("seed-*")) if not RunFolder(path).recipe.exists() else [path]
        found += [run for run in inside if RunFolder(run).finished]
    if not found:
        raise RequestError("There is no finished run to record.")
    return found


def load_record(folder: Path) -> Record:
    kept = read_json(folder / "record.json")
    try:
        runs = [
            run for run in kept["runs"] if {"seed", "costs", "environment"} <= run.keys() and run["reports"]["test"]
        ]
        whole = bool(runs) and len(runs) == len(kept["runs"]) and isinstance(kept["graph"], str)
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise RequestError(
            f"{folder / 'record.json'} is not a record as it is kept now. Move it away, and record again."
        )
    return Record(folder, load_recipe(folder / "recipe.toml"), kept["graph"], kept["runs"])


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

"""Records: what is saved of the runs behind a published number.

A record is a folder with recipe.toml, record.json (costs, environment and validation metrics of each seed) and
ranks.parquet (the rank of every test query, one column per seed), from which the test metrics are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.errors import RequestError
from dualkg.evaluation.report import Metrics
from dualkg.files import read_json
from dualkg.training.api import spread
from dualkg.training.recipe import Recipe, load_recipe

RUN_KEYS = {"seed", "epochs", "costs", "environment", "valid", "test_bounds"}


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
    def ranks(self) -> npt.NDArray[np.float64]:
        """The rank of every test query, `(seeds, 2, triples)`, tail queries first."""
        try:
            table = pq.read_table(self.ranks_path)
            columns = [table[f"seed-{seed}"].to_numpy() for seed in self.seeds]
        except (pa.ArrowInvalid, OSError, KeyError) as error:
            raise RequestError(
                f"{self.ranks_path} cannot be read: {error}. Move the record away and record the runs again."
            ) from None
        return np.stack(columns).reshape(len(columns), 2, -1) / 2

    @cached_property
    def test_metrics(self) -> list[Metrics]:
        """One per seed; as saved in record.json where the ranks were not saved."""
        if not self.ranks_path.exists():
            return [Metrics(**run["test"]) for run in self.runs]
        return [Metrics.of(ranks) for ranks in self.ranks]

    def metric(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a test metric over the seeds."""
        return spread([getattr(metrics, name) for metrics in self.test_metrics])

    @property
    def valid_mrr(self) -> tuple[float, float]:
        """Mean and standard deviation over the seeds."""
        return spread([run["valid"]["mrr"] for run in self.runs])

    def cost(self, name: str) -> float | None:
        """The mean of a cost over the seeds that were trained alone on their device; over all if none was."""
        alone = [run["costs"] for run in self.runs if not run["costs"].get("shared_device")]
        values = [costs[name] for costs in alone or (run["costs"] for run in self.runs) if costs.get(name) is not None]
        return spread(values)[0] if values else None

    @property
    def times_are_bounds(self) -> bool:
        """Whether all runs shared their device with other work, so that their times are upper bounds."""
        return all(run["costs"].get("shared_device") for run in self.runs)

    @property
    def num_uncommitted(self) -> int:
        """Number of runs trained from a tree with uncommitted changes."""
        return sum(is_uncommitted(run["environment"]) for run in self.runs)


def load_record(folder: Path) -> Record:
    path = folder / "record.json"
    saved = read_json(path)
    try:
        runs = saved["runs"]
        valid = bool(runs) and all(run.keys() >= RUN_KEYS for run in runs)
        graph, data = str(saved["graph"]), str(saved["data"])
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise RequestError(f"{path} is not a record in the current format. Move it away and record the runs again.")
    return Record(folder, load_recipe(folder / "recipe.toml"), graph, data, runs)


def is_uncommitted(environment: dict[str, Any]) -> bool:
    """Whether a run was trained from a source tree with uncommitted changes."""
    return str(environment.get("commit")).endswith("-dirty")

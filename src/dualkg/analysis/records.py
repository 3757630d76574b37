"""Records: what is saved of the runs behind a published number.

recipe.toml  record.json  ranks.parquet (the rank of every test query, a column for each seed)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.errors import RequestError
from dualkg.files import read_json
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

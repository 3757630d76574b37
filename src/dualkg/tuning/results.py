"""Results of tuning: the trials, the best recipe, and the files they are written to."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualkg.files import atomic_write, write_text
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import ProgressEvent
from dualkg.tuning.space import SearchSpace, Value

DONE = ("finished", "pruned", "failed")


@dataclass(frozen=True)
class TuningProgress:
    """Progress of a search; `training` is the progress of the trial that runs in this process, if any."""

    num_done: int
    num_trials: int
    best: float | None
    training: ProgressEvent | None = None

    @property
    def text(self) -> str:
        best = "" if self.best is None else f"  best valid MRR {self.best:.4f}"
        now = f"  {self.training.text}" if self.training else ""
        return f"{self.num_done:,} of {self.num_trials:,} trials{best}{now}"


@dataclass(frozen=True)
class TrialResult:
    """One trial; `mrr` is measured on the validation split, for a pruned trial at its last report."""

    number: int
    state: str
    mrr: float | None
    seconds: float | None
    params: dict[str, Value]
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"number": self.number, "mrr": self.mrr, "seconds": self.seconds, "params": self.params}


@dataclass(frozen=True)
class TuningResult:
    """The trials of a study in the order of their numbers.

    `importance` is None with fewer than 8 finished trials; `per_minute` counts the trials of this call only.
    """

    space: SearchSpace
    graph: str
    trials: tuple[TrialResult, ...]
    importance: dict[str, float] | None
    per_minute: float | None = None

    @property
    def num_done(self) -> int:
        return sum(trial.state in DONE for trial in self.trials)

    @property
    def ranked(self) -> list[TrialResult]:
        """Finished trials, best first."""
        finished = [trial for trial in self.trials if trial.state == "finished" and trial.mrr is not None]
        return sorted(finished, key=lambda trial: (-(trial.mrr or 0.0), trial.number))

    @property
    def best(self) -> TrialResult | None:
        return next(iter(self.ranked), None)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the best trial."""
        return self.space.recipe(self.best.params) if self.best else None

    def as_dict(self) -> dict[str, Any]:
        states = [trial.state for trial in self.trials]
        return {
            "search": self.space.name,
            "graph": self.graph,
            "method": self.space.settings.method,
            "split": "valid",
            "trials": self.space.num_trials,
            **{state: states.count(state) for state in DONE},
            "seconds": round(sum(trial.seconds or 0.0 for trial in self.trials), 3),
            "trials_per_minute": self.per_minute,
            "best": self.best.as_dict() if self.best else None,
            "top": [trial.as_dict() for trial in self.ranked[:10]],
            "importance": self.importance,
        }

    def write(self, out: Path) -> None:
        """Write best.toml, trials.csv and summary.json."""
        if self.recipe and self.best:
            title = f"# Trial {self.best.number} of the search {self.space.name}: validation MRR {self.best.mrr:.4f}.\n"
            write_text(out / "best.toml", title + self.recipe.as_toml())
        columns = ["number", "state", "mrr", "seconds", *self.space.dimensions, "error"]
        with atomic_write(out / "trials.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**vars(trial), **trial.params} for trial in self.trials)
        write_text(out / "summary.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False))

"""Progress and results of a search."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualkg.files import write_text
from dualkg.logs import describe_time_left
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import ProgressEvent
from dualkg.tuning.space import SearchSpace, Value

DONE = ("finished", "pruned", "failed")  # states of trials that are not repeated
NUM_TOP_TRIALS = 10


@dataclass(frozen=True)
class TuningProgress:
    """Progress of a search; `training` is the progress of the trial in this process, if any."""

    num_done: int
    num_trials: int
    best: float | None
    training: ProgressEvent | None = None
    seconds_left: float | None = None  # of all trials

    @property
    def num_parts_done(self) -> float:
        """Trials that are done, with the part of the trial that runs."""
        if self.training is None:
            return self.num_done
        return self.num_done + self.training.share_done

    @property
    def time_left(self) -> str:
        """`about 3 min left`, or nothing."""
        return describe_time_left(self.seconds_left)

    @property
    def text(self) -> str:
        text = f"{self.num_done:,} of {self.num_trials:,} trials"
        if self.best is not None:
            text += f"  best valid MRR {self.best:.4f}"
        if self.training:
            text += f"  {self.training.text}"
        return text


OnProgress = Callable[[TuningProgress], None]


@dataclass(frozen=True)
class TrialResult:
    """One trial and its validation MRR; a pruned trial has the MRR of its last report."""

    number: int
    state: str
    mrr: float | None
    seconds: float | None
    params: dict[str, Value]
    error: str = ""


@dataclass(frozen=True)
class TuningResult:
    """The trials of a study in the order of their numbers.

    `importance` is None before 8 trials have finished, and `per_minute` counts the trials of this
    call only.
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
        finished = [
            trial for trial in self.trials if trial.state == "finished" and trial.mrr is not None
        ]
        return sorted(finished, key=lambda trial: (-(trial.mrr or 0.0), trial.number))

    @property
    def best(self) -> TrialResult | None:
        ranked = self.ranked
        return ranked[0] if ranked else None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the best trial."""
        best = self.best
        return self.space.recipe(best.params) if best else None

    def as_dict(self) -> dict[str, Any]:
        states = [trial.state for trial in self.trials]
        num_by_state = {state: states.count(state) for state in DONE}
        seconds = sum(trial.seconds or 0.0 for trial in self.trials)
        top = [_summary_of(trial) for trial in self.ranked[:NUM_TOP_TRIALS]]
        return {
            "search": self.space.name,
            "graph": self.graph,
            "method": self.space.settings.method,
            "split": "valid",
            "trials": self.space.num_trials,
            **num_by_state,
            "seconds": round(seconds, 3),
            "trials_per_minute": self.per_minute,
            "best": top[0] if top else None,
            "top": top,
            "importance": self.importance,
        }

    def write(self, out: Path) -> None:
        """Write best.toml, trials.csv and summary.json."""
        if self.recipe and self.best:
            title = (
                f"# Trial {self.best.number} of the search {self.space.name}: "
                f"validation MRR {self.best.mrr:.4f}.\n"
            )
            write_text(out / "best.toml", title + self.recipe.as_toml())
        write_text(out / "trials.csv", self._table())
        write_text(out / "summary.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False))

    def _table(self) -> str:
        """All trials as CSV."""
        columns = ["number", "state", "mrr", "seconds", *self.space.dimensions, "error"]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for trial in self.trials:
            writer.writerow({**vars(trial), **trial.params})
        return text.getvalue()


def _summary_of(trial: TrialResult) -> dict[str, Any]:
    return {
        "number": trial.number,
        "mrr": trial.mrr,
        "seconds": trial.seconds,
        "params": trial.params,
    }

"""What a search found: its trials, its winner, and what mattered."""

from __future__ import annotations

import csv
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualkg.files import write_text
from dualkg.search.space import Space, Value
from dualkg.training.recipe import Recipe

if TYPE_CHECKING:
    import optuna

DONE = ("finished", "pruned", "failed")
ENOUGH_TO_WEIGH = 8  # finished trials, below which the importance of a choice is hearsay


@dataclass(frozen=True)
class TrialRow:
    """One trial; `mrr` is of the validation split, of a pruned trial the last that was seen."""

    number: int
    outcome: str
    mrr: float | None
    seconds: float | None
    values: dict[str, Value]
    why: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search in the order they were made.

    `importance` is None where too few came to their end; `per_minute` is of the call that made this result.
    """

    space: Space
    graph: str
    trials: tuple[TrialRow, ...]
    importance: dict[str, float] | None
    per_minute: float | None = None

    @property
    def num_done(self) -> int:
        return sum(row.outcome in DONE for row in self.trials)

    @property
    def ranked(self) -> list[TrialRow]:
        """The trials that came to their end, best first."""
        finished = [row for row in self.trials if row.outcome == "finished" and row.mrr is not None]
        return sorted(finished, key=lambda row: (-(row.mrr or 0.0), row.number))

    @property
    def best(self) -> TrialRow | None:
        return next(iter(self.ranked), None)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the winner."""
        return self.space.recipe(self.best.values) if self.best else None

    def as_dict(self) -> dict[str, Any]:
        outcomes = [row.outcome for row in self.trials]
        return {
            "search": self.space.name,
            "graph": self.graph,
            "method": self.space.choice.method,
            "split": "valid",
            "trials": self.space.num_trials,
            **{name: outcomes.count(name) for name in DONE},
            "seconds": round(sum(row.seconds or 0.0 for row in self.trials), 3),
            "trials_per_minute": self.per_minute,
            "best": _told(self.best) if self.best else None,
            "top": [_told(row) for row in self.ranked[:10]],
            "importance": self.importance,
        }

    def write(self, out: Path) -> None:
        """best.toml, trials.csv and summary.json."""
        if self.recipe and self.best:
            about = f"# Trial {self.best.number} of the search {self.space.name}: MRR {self.best.mrr:.4f} on valid.\n"
            write_text(out / "best.toml", about + self.recipe.as_toml())
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["number", "outcome", "mrr", "seconds", *self.space.dimensions, "why"])
        for row in self.trials:
            values = [row.values.get(name, "") for name in self.space.dimensions]
            writer.writerow([row.number, row.outcome, row.mrr, row.seconds, *values, row.why])
        write_text(out / "trials.csv", table.getvalue())
        write_text(out / "summary.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False))


def _told(row: TrialRow) -> dict[str, Any]:
    return {"number": row.number, "mrr": row.mrr, "seconds": row.seconds, "values": row.values}


def collect(study: optuna.Study, space: Space, *, graph: str) -> SearchResult:
    """Read what a study holds."""
    from dualkg.search.study import WHY, Ledger, outcome

    trials = sorted(Ledger(study, space.num_trials).rows().values(), key=lambda trial: trial.number)
    rows = tuple(
        TrialRow(
            trial.number,
            outcome(trial),
            trial.value if trial.values else None,
            round(trial.duration.total_seconds(), 3) if trial.duration else None,
            trial.params,
            trial.user_attrs.get(WHY, ""),
        )
        for trial in trials
    )
    return SearchResult(space, graph, rows, _importance(study, rows))


def _importance(study: optuna.Study, rows: tuple[TrialRow, ...]) -> dict[str, float] | None:
    """The share of each choice in reaching the best tenth of the trials (PED-ANOVA)."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    finished = [row.values for row in rows if row.outcome == "finished"]
    names = [name for name in (finished[0] if finished else {}) if len({values[name] for values in finished}) > 1]
    if len(finished) < ENOUGH_TO_WEIGH or not names:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of too few trials, which is told otherwise
        found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), params=names)
    return {name: round(share, 4) for name, share in found.items()}

"""What a search found: its trials, its winner, and what mattered."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from dualkg.errors import RequestError
from dualkg.files import write_text
from dualkg.training.recipe import Recipe
from dualkg.tuning.space import Space, Value

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


BEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 40.0
AGAIN, WHY, BEAT = "again", "why", "beat"


def open_study(space: Space, url: str, *, data: str, where: str) -> optuna.Study:
    """The study of this space, made or found; one of another space in its place is refused."""
    storage = _open_storage(url)
    study = optuna.create_study(
        storage=storage,
        study_name=space.name,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=space.warm_up)
        if space.choice.prune
        else optuna.pruners.NopPruner(),
    )
    ours = {**space.as_dict(), "data": data}
    if "dualkg" not in study.user_attrs:
        study.set_user_attr("dualkg", ours)
    theirs: dict[str, Any] = study.user_attrs["dualkg"]
    differing = [f"[{key}]" if key != "data" else "the data" for key in ours if ours[key] != theirs.get(key)]
    if differing:
        raise RequestError(
            f"{where} holds a search named '{space.name}' of another space: {' and '.join(differing)} "
            f"{'is' if len(differing) == 1 else 'are'} not the same. Use another --out, or another name in [search]."
        )
    return study


def url_of(path: Path) -> str:
    """The URL of an SQLite file, whatever characters its name has."""
    return sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()


def _open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open a database; several processes may be making its tables at this event."""
    arguments: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    problem: Exception | None = None
    for _ in range(5):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=arguments)
        except sqlalchemy.exc.ArgumentError:
            raise RequestError(f"A storage is a database's URL, as sqlite:///study.db; '{url}' came.") from None
        except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
            raise RequestError(f"The storage needs a driver that is not installed here: {error}") from None
        except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
            problem = error
            time.sleep(0.3)
        else:
            _lock_before_reading(storage.engine)
            return storage
    raise RequestError(f"The storage cannot be opened: {getattr(problem, 'orig', None) or problem}.")


def _lock_before_reading(engine: sqlalchemy.Engine) -> None:
    """SQLite locks no rows: two processes could both read that a trial waits, and both take it."""
    if engine.dialect.name != "sqlite":
        return

    def connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # or Python would begin transactions by itself, and later

    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()
    sqlalchemy.event.listen(engine, "connect", connect)
    sqlalchemy.event.listen(engine, "begin", begin)


@contextmanager
def beating(trial: Trial) -> Iterator[None]:
    """Let others see that a trial is at work."""
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(BEAT_SECONDS):
            number += 1
            with suppress(StorageInternalError, UpdateFinishedTrialError):  # told to the trial itself, if it lasts
                trial.set_user_attr(BEAT, number)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def slots(trials: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The newest trial of every slot, from what never changes: numbers, and context a trial follows."""
    newest: dict[int, FrozenTrial] = {}
    slot_of: dict[int, int] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        followed = trial.user_attrs.get(AGAIN)
        slot = len(newest) if followed is None else slot_of.get(followed, -1)
        if followed is not None and (slot < 0 or newest[slot].number != followed):
            continue  # two processes let the same trial be followed; the first counts
        newest[slot] = trial
        slot_of[trial.number] = slot
    return newest


def outcome(trial: FrozenTrial) -> str:
    """finished, pruned, failed, running, waiting; or lost, where its process ended before it did."""
    if trial.state == TrialState.FAIL:
        return "failed" if WHY in trial.user_attrs else "lost"
    return {TrialState.COMPLETE: "finished"}.get(trial.state, trial.state.name.lower())


@dataclass(frozen=True)
class Standing:
    """How far a search is; `work` is open, or busy where others are at the last of it, or done."""

    num_done: int
    num_trials: int
    best: float | None
    work: Literal["open", "busy", "done"]


class Ledger:
    """Which slots of a study are done, and which are still to be taken."""

    def __init__(self, study: optuna.Study, num_slots: int) -> None:
        self.study = study
        self.num_slots = num_slots
        self._seen: dict[int, tuple[int, float]] = {}

    def rows(self) -> dict[int, FrozenTrial]:
        """The newest trial of each slot of this search; a process that came too late made one beyond."""
        found = slots(self.study.get_trials(deepcopy=False))
        return {slot: trial for slot, trial in found.items() if slot < self.num_slots}

    def bury_the_dead(self) -> None:
        """Let trials be done again whose process was stopped, or killed."""
        for trial in self.rows().values():
            if outcome(trial) == "lost":
                self.study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
            elif outcome(trial) == "running" and self._is_dead(trial):
                with suppress(UpdateFinishedTrialError):  # another process may bury it, too
                    self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        """Whether its beat has stood still for long, by the clock of this process alone: others' may be wrong."""
        now, beat = time.monotonic(), trial.user_attrs.get(BEAT, 0)
        seen, since = self._seen.get(trial.number, (-1, now))
        if seen != beat:
            self._seen[trial.number] = (beat, now)
            return False
        return now - since > DEAD_AFTER_SECONDS

    def standing(self) -> Standing:
        rows = self.rows().values()
        outcomes = [outcome(trial) for trial in rows]
        values = [trial.value for trial in rows if outcome(trial) == "finished" and trial.value is not None]
        work: Literal["open", "busy", "done"] = "busy" if "running" in outcomes else "done"
        if len(rows) < self.num_slots or {"waiting", "lost"} & set(outcomes):
            work = "open"
        return Standing(sum(told in DONE for told in outcomes), self.num_slots, max(values, default=None), work)

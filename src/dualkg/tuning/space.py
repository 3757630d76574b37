"""Search spaces, as validated TOML: a base recipe, values to try for some of its keys, a method;
and their results.
"""

import csv
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from dualkg.errors import RequestError, did_you_mean
from dualkg.files import atomic_write, write_text
from dualkg.settings import Settings, validation_error
from dualkg.training.recipe import (
    InvalidRecipe,
    Recipe,
    load_recipe,
    read_tables,
    recipe_from,
)
from dualkg.training.trainer import ProgressEvent

Value = bool | int | float | str
TableT = TypeVar("TableT", bound="SpaceTable")
DONE = ("finished", "pruned", "failed")
TABLES = ("recipe", "space", "search", *Recipe.model_fields)


class SpaceTable(BaseModel):
    """A table of a search space, whose keys are named by where it stands."""

    model_config = Settings.model_config


class Range(SpaceTable, title="ranges"):
    """Numbers from `low` to `high` inclusive, in steps of `step` or on a log scale."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)


class SearchSettings(SpaceTable, title="searches"):
    """The search method. A grid has one trial per point, unless `trials` is smaller."""

    method: Literal["grid", "tpe", "random"] = "grid"
    trials: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=2**32)
    prune: bool = True
    prune_after: int | None = Field(None, ge=1)
    validate_every: int | None = Field(None, ge=1)
    name: str | None = Field(None, min_length=1)


@dataclass(frozen=True)
class SearchSpace:
    """A base recipe, the values of its keys to try (by dotted name), and how to search them."""

    name: str
    base: Recipe
    dimensions: dict[str, tuple[Value, ...] | Range]
    settings: SearchSettings

    @property
    def folder(self) -> Path:
        """Where a search is saved unless another folder is named."""
        return Path("runs") / f"tune-{self.name}"

    @property
    def num_points(self) -> int | None:
        """Number of different recipes, or None if a dimension is a range."""
        sizes = [len(values) for values in self.dimensions.values() if isinstance(values, tuple)]
        return math.prod(sizes) if len(sizes) == len(self.dimensions) else None

    @property
    def num_trials(self) -> int:
        numbers = [
            self.settings.trials,
            self.num_points if self.settings.method == "grid" else None,
        ]
        return min(number for number in numbers if number is not None)

    @cached_property
    def _order(self) -> list[int]:
        """A grid is searched in random order, so that its first trials are a fair baseline for
        pruning.
        """
        assert self.num_points is not None
        return random.Random(self.settings.seed).sample(range(self.num_points), self.num_points)

    def point(self, number: int) -> dict[str, Value]:
        """The hyperparameters of a trial of a grid; every point belongs to one number."""
        choices = [values for values in self.dimensions.values() if isinstance(values, tuple)]
        places = np.unravel_index(
            self._order[number], [len(values) for values in choices], order="F"
        )
        return {
            name: values[place]
            for name, values, place in zip(self.dimensions, choices, places, strict=True)
        }

    def recipe(self, params: Mapping[str, Value]) -> Recipe:
        """The recipe with these hyperparameters, as it is written for the best trial."""
        if self.base.validation.every:  # validation may decide when training ends
            return self.trial_recipe(params)
        return self.base.with_changes(params)

    def trial_recipe(self, params: Mapping[str, Value]) -> Recipe:
        """The same, validated often enough for pruning, and at the end."""
        epochs = self.base.with_changes(params).training.epochs
        every = self.base.validation.every or (
            max(1, epochs // 10) if self.settings.prune else epochs
        )
        return self.base.with_changes(
            {**params, "validation.every": self.settings.validate_every or every}
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything that the result of a trial depends on; the number of trials may grow later."""
        dimensions = {
            name: list(values)
            if isinstance(values, tuple)
            else values.model_dump(exclude_none=True)
            for name, values in self.dimensions.items()
        }
        search = self.settings.model_dump(exclude={"trials", "name"})
        tables = {
            "recipe": self.base.model_dump(exclude_none=True),
            "space": dimensions,
            "search": search,
        }
        return dict(json.loads(json.dumps(tables)))


@dataclass(frozen=True)
class TuningProgress:
    """Progress of a search; `training` is the progress of the trial that runs in this process, if
    any.
    """

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
    """One trial; `mrr` is measured on the validation split, for a pruned trial at its last
    report.
    """

    number: int
    state: str
    mrr: float | None
    seconds: float | None
    params: dict[str, Value]
    error: str = ""


@dataclass(frozen=True)
class TuningResult:
    """The trials of a study in the order of their numbers."""

    space: SearchSpace
    graph: str
    trials: tuple[TrialResult, ...]
    importance: dict[str, float] | None  # with at least 8 finished trials
    per_minute: float | None = None  # trials of this call only

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
        return next(iter(self.ranked), None)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the best trial."""
        return self.space.recipe(self.best.params) if self.best else None

    def as_dict(self) -> dict[str, Any]:
        states = [trial.state for trial in self.trials]
        top = [
            {key: getattr(trial, key) for key in ("number", "mrr", "seconds", "params")}
            for trial in self.ranked
        ]
        return {
            "search": self.space.name,
            "graph": self.graph,
            "method": self.space.settings.method,
            "split": "valid",
            "trials": self.space.num_trials,
            **{state: states.count(state) for state in DONE},
            "seconds": round(sum(trial.seconds or 0.0 for trial in self.trials), 3),
            "trials_per_minute": self.per_minute,
            "best": top[0] if top else None,
            "top": top[:10],
            "importance": self.importance,
        }

    def write(self, out: Path) -> None:
        """Write best.toml, trials.csv and summary.json."""
        if self.recipe and self.best:
            title = f"# Trial {self.best.number} of the search {self.space.name}: validation MRR {self.best.mrr:.4f}.\n"
            write_text(out / "best.toml", title + self.recipe.as_toml())
        columns = ["number", "state", "mrr", "seconds", *self.space.dimensions, "error"]
        with (
            atomic_write(out / "trials.csv") as path,
            path.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**vars(trial), **trial.params} for trial in self.trials)
        write_text(out / "summary.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False))


def load_space(path: str | Path) -> SearchSpace:
    """Read and validate a search space; the path of its `recipe` is relative to the file."""
    path = Path(path)
    return space_from(read_tables(path), source=str(path), name=path.stem, folder=path.parent)


def space_from(
    tables: Mapping[str, Any], *, source: str, name: str = "search", folder: Path = Path()
) -> SearchSpace:
    """Validate tables as a search space; raise `RequestError` for the first mistake."""
    if unknown := [table for table in tables if table not in TABLES]:
        hint = did_you_mean(unknown[0], TABLES) or f" Known tables: {', '.join(TABLES)}."
        raise RequestError(f"{source}: {unknown[0]} is not a table of a search space.{hint}")
    base = _base_recipe(tables, source, folder)
    settings = _validate(SearchSettings, tables.get("search", {}), name="search", source=source)
    space = tables.get("space", {})
    if not isinstance(space, dict) or not space:
        raise RequestError(
            f'{source}: [space] is empty; it should list values to try, as "model.dim" = [100, 200].'
        )
    dimensions = {
        key: _dimension(base, key, value, source=source) for key, value in _flatten(space)
    }
    ranges = [key for key, values in dimensions.items() if isinstance(values, Range)]
    if ranges and settings.method == "grid":
        raise RequestError(
            f"{source}: {ranges[0]} is a range, and a grid needs a list of values. List them, or search with "
            f'method = "tpe" or "random".'
        )
    if settings.method != "grid" and settings.trials is None:
        method = f'method = "{settings.method}"'
        raise RequestError(
            f"{source}: {method} needs a number of trials: set trials = 50 in [search]."
        )
    return SearchSpace(settings.name or name, base, dimensions, settings)


def _base_recipe(tables: Mapping[str, Any], source: str, folder: Path) -> Recipe:
    """The recipe that the file names, if any, changed by the recipe tables of the file itself."""
    inline = {key: value for key, value in tables.items() if key in Recipe.model_fields}
    path = tables.get("recipe")
    if path is None or not all(isinstance(section, dict) for section in inline.values()):
        return recipe_from(inline, source=source)
    if not isinstance(path, str):
        raise RequestError(
            f'{source}: recipe should be a path, as recipe = "mine.toml"; got {path!r}.'
        )
    changes = {
        f"{table}.{key}": value
        for table, section in inline.items()
        for key, value in section.items()
    }
    return load_recipe(folder / path).with_changes(changes, source=source)


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names with their values, whether the TOML quotes the dots or nests tables."""
    pairs: list[tuple[str, Any]] = []
    for key, value in tables.items():
        nested = isinstance(value, dict) and value and not {"low", "high"} & value.keys()
        pairs += _flatten(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return pairs


def _dimension(base: Recipe, name: str, value: Any, *, source: str) -> tuple[Value, ...] | Range:
    table = name.partition(".")[0]
    if table in ("data", "validation"):
        raise RequestError(
            f"{source}: {name} cannot be searched, because trials are compared by the MRR of one "
            f"validation split. Set it in [{table}] instead."
        )
    if isinstance(value, dict) and value:
        return _range(base, name, value, source=source)
    if (
        not isinstance(value, list)
        or not value
        or any(isinstance(one, (dict, list)) for one in value)
    ):
        raise RequestError(
            f"{source}: {name} should be a list of values, [1, 2], or a range, {{ low = 1, high = "
            f"2 }}; got {value!r}."
        )
    values = tuple(_convert(base, name, one, source=source) for one in value)
    if repeated := [one for one in values if values.count(one) > 1]:
        raise RequestError(f"{source}: {name} lists {repeated[0]!r} twice; list each value once.")
    return values


def _range(base: Recipe, name: str, value: dict[str, Any], *, source: str) -> Range:
    if not {"low", "high"} <= value.keys():
        raise RequestError(
            f"{source}: {name} should have both ends, {{ low = 1, high = 2 }}; got {value!r}."
        )
    limits = _validate(Range, value, name=name, source=source)
    low, high = (
        _convert(base, name, number, source=source) for number in (limits.low, limits.high)
    )
    if isinstance(low, (bool, str)) or isinstance(high, (bool, str)) or low >= high:
        raise RequestError(f"{source}: {name} should have low < high; got {low} and {high}.")
    if limits.log and (low <= 0 or limits.step):
        wrong = f"low = {low}" if low <= 0 else f"step = {limits.step}"
        raise RequestError(
            f"{source}: {name} with log = true should have low > 0 and no step; got {wrong}."
        )
    return limits.model_copy(update={"low": low, "high": high})


def _convert(base: Recipe, name: str, value: Any, *, source: str) -> Value:
    """Validate a value and convert it to the type of the recipe: a weight of 0 becomes 0.0."""
    return cast("Value", base.with_changes({name: value}, source=source).value_of(name))


def _validate(section: type[TableT], value: Any, *, name: str, source: str) -> TableT:
    try:
        return section.model_validate(value)
    except ValidationError as error:
        problem = validation_error(error, section.model_fields, table=name)
        raise InvalidRecipe(source, problem) from None

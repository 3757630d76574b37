"""Search spaces as validated TOML: a base recipe, values to try for some of its keys, a method."""

from __future__ import annotations

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

from dualkg.errors import RequestError, close_matches, one_of, unmarked
from dualkg.settings import Settings, validation_error
from dualkg.training.recipe import (
    Recipe,
    list_recipes,
    load_recipe,
    read_tables,
    recipe_from,
)

Value = bool | int | float | str
TableT = TypeVar("TableT", bound="SpaceTable")
TABLES = ("recipe", "space", "search", *Recipe.model_fields)
FIXED_TABLES = ("data", "validation")  # the same for all trials, so that their MRRs compare
NUM_VALIDATIONS = 10  # of a trial that may be pruned


class SpaceTable(BaseModel):
    """A table of a search space, whose keys are named by where it stands."""

    model_config = Settings.model_config


class Range(SpaceTable, title="ranges"):
    """Numbers from `low` to `high` inclusive, in steps of `step` or on a log scale."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)


Dimension = tuple[Value, ...] | Range


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
    dimensions: dict[str, Dimension]
    settings: SearchSettings

    @property
    def folder(self) -> Path:
        """Where a search is saved unless another folder is named."""
        return Path("runs") / f"tune-{self.name}"

    @property
    def _lists(self) -> list[tuple[Value, ...]]:
        return [values for values in self.dimensions.values() if isinstance(values, tuple)]

    @property
    def num_points(self) -> int | None:
        """Number of different recipes, or None if a dimension is a range."""
        if len(self._lists) < len(self.dimensions):
            return None
        return math.prod(len(values) for values in self._lists)

    @property
    def num_trials(self) -> int:
        limits = [self.settings.trials]
        if self.settings.method == "grid":
            limits.append(self.num_points)
        return min(limit for limit in limits if limit is not None)

    @cached_property
    def _order(self) -> list[int]:
        """The order of the points of a grid.

        It is random, so that the first trials are a fair baseline for pruning.
        """
        assert self.num_points is not None
        return random.Random(self.settings.seed).sample(range(self.num_points), self.num_points)

    def point(self, number: int) -> dict[str, Value]:
        """The hyperparameters of a trial of a grid; every point belongs to one number."""
        sizes = [len(values) for values in self._lists]
        indices = np.unravel_index(self._order[number], sizes, order="F")
        point = {}
        for name, values, index in zip(self.dimensions, self._lists, indices, strict=True):
            point[name] = values[index]
        return point

    def recipe(self, params: Mapping[str, Value]) -> Recipe:
        """The recipe with these hyperparameters, as it is written for the best trial."""
        if self.base.validation.every:
            # Validation may decide when a training ends, so it stays as it was in the trial.
            return self.trial_recipe(params)
        return self.base.with_changes(params)

    def trial_recipe(self, params: Mapping[str, Value]) -> Recipe:
        """The same, validated at the end, and before it often enough for pruning."""
        epochs = self.base.with_changes(params).training.epochs
        every = epochs
        if self.settings.validate_every:
            every = self.settings.validate_every
        elif self.base.validation.every:
            every = self.base.validation.every
        elif self.settings.prune:
            every = max(1, epochs // NUM_VALIDATIONS)
        return self.base.with_changes({**params, "validation.every": every})

    def as_dict(self) -> dict[str, Any]:
        """Everything that the result of a trial depends on; the number of trials may grow later."""
        dimensions: dict[str, Any] = {}
        for name, values in self.dimensions.items():
            if isinstance(values, tuple):
                dimensions[name] = list(values)
            else:
                dimensions[name] = values.model_dump(exclude_none=True)
        tables = {
            "recipe": self.base.model_dump(exclude_none=True),
            "space": dimensions,
            "search": self.settings.model_dump(exclude={"trials", "name"}),
        }
        # As it is loaded from a storage: tuples become lists.
        return dict(json.loads(json.dumps(tables)))


def load_space(path: str | Path) -> SearchSpace:
    """Read and validate a search space; the path of its `recipe` is relative to the file."""
    name = str(path)
    path = Path(path)
    if path.suffix != ".toml" and not path.is_file():
        # No recipe that ships with dualkg has a search space.
        graph = load_recipe(name).data.graph if name in list_recipes() else name
        raise RequestError(
            f"{name} is not a search space, a .toml file with values to try in its table [space]. "
            f"To tune a graph without one: dualkg train {graph}"
        )
    return space_from(read_tables(path), source=str(path), name=path.stem, folder=path.parent)


def space_from(
    tables: Mapping[str, Any], *, source: str, name: str = "search", folder: Path = Path()
) -> SearchSpace:
    """Validate tables as a search space; raise `RequestError` for the first mistake."""
    _check_tables(tables, source)
    base = _base_recipe(tables, source, folder)
    settings = _validate(SearchSettings, tables.get("search", {}), name="search", source=source)
    space = tables.get("space", {})
    if not isinstance(space, dict) or not space:
        problem = 'is empty; it should list values to try, as "model.dim" = [100, 200].'
        raise _mistake(source, "[space]", problem)
    dimensions = {}
    for key, value in _flatten(space):
        dimensions[key] = _dimension(base, key, value, source=source)
    _check_method(settings, dimensions, source)
    return SearchSpace(settings.name or name, base, dimensions, settings)


def _mistake(source: str, key: str, problem: str) -> RequestError:
    """The error for a key of a search space; `problem` completes the sentence about it."""
    return RequestError(f"{source}: {key} {problem}")


def _check_tables(tables: Mapping[str, Any], source: str) -> None:
    for table in tables:
        if table not in TABLES:
            known = f" Known tables: {', '.join(TABLES)}."
            advice = one_of(close_matches(table, TABLES)) or known
            raise _mistake(source, table, f"is not a table of a search space.{advice}")


def _check_method(
    settings: SearchSettings, dimensions: Mapping[str, Dimension], source: str
) -> None:
    if settings.method == "grid":
        for key, values in dimensions.items():
            if isinstance(values, Range):
                problem = (
                    "is a range, and a grid needs a list of values. List them, or search with "
                    'method = "tpe" or "random".'
                )
                raise _mistake(source, key, problem)
    elif settings.trials is None:
        problem = "needs a number of trials: set trials = 50 in [search]."
        raise _mistake(source, f'method = "{settings.method}"', problem)


def _base_recipe(tables: Mapping[str, Any], source: str, folder: Path) -> Recipe:
    """The recipe that the file names, if any, changed by the recipe tables of the file itself."""
    inline = {key: value for key, value in tables.items() if key in Recipe.model_fields}
    path = tables.get("recipe")
    if path is None or not all(isinstance(section, dict) for section in inline.values()):
        return recipe_from(inline, source=source)
    if not isinstance(path, str):
        problem = f'should be a path, as recipe = "mine.toml"; got {path!r}.'
        raise _mistake(source, "recipe", problem)
    changes = {}
    for table, section in inline.items():
        for key, value in section.items():
            changes[f"{table}.{key}"] = value
    return load_recipe(folder / path).with_changes(changes, source=source)


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names with their values, whether the TOML quotes the dots or nests tables."""
    pairs: list[tuple[str, Any]] = []
    for key, value in tables.items():
        is_nested = isinstance(value, dict) and value and not {"low", "high"} & value.keys()
        if is_nested:
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _dimension(base: Recipe, name: str, value: Any, *, source: str) -> Dimension:
    table = name.partition(".")[0]
    if table in FIXED_TABLES:
        problem = (
            "cannot be searched, because trials are compared by the MRR of one validation split. "
            f"Set it in [{table}] instead."
        )
        raise _mistake(source, name, problem)
    if isinstance(value, dict) and value:
        return _range(base, name, value, source=source)
    if not _is_list_of_values(value):
        problem = (
            "should be a list of values, [1, 2], or a range, { low = 1, high = 2 }; "
            f"got {value!r}."
        )
        raise _mistake(source, name, problem)

    values: list[Value] = []
    for item in value:
        converted = _convert(base, name, item, source=source)
        if converted in values:
            problem = f"lists {converted!r} twice; list each value once."
            raise _mistake(source, name, problem)
        values.append(converted)
    return tuple(values)


def _is_list_of_values(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return not any(isinstance(item, (dict, list)) for item in value)


def _range(base: Recipe, name: str, value: dict[str, Any], *, source: str) -> Range:
    if not {"low", "high"} <= value.keys():
        problem = f"should have both ends, {{ low = 1, high = 2 }}; got {value!r}."
        raise _mistake(source, name, problem)
    limits = _validate(Range, value, name=name, source=source)
    low = _convert(base, name, limits.low, source=source)
    high = _convert(base, name, limits.high, source=source)
    if isinstance(low, (bool, str)) or isinstance(high, (bool, str)) or low >= high:
        raise _mistake(source, name, f"should have low < high; got {low} and {high}.")
    if limits.log and (low <= 0 or limits.step):
        wrong = f"low = {low}" if low <= 0 else f"step = {limits.step}"
        problem = f"with log = true should have low > 0 and no step; got {wrong}."
        raise _mistake(source, name, problem)
    return limits.model_copy(update={"low": low, "high": high})


def _convert(base: Recipe, name: str, value: Any, *, source: str) -> Value:
    """Validate a value and convert it to the type of the recipe: a weight of 0 becomes 0.0."""
    return cast("Value", base.with_changes({name: value}, source=source).value_of(name))


def _validate(section: type[TableT], value: Any, *, name: str, source: str) -> TableT:
    try:
        return section.model_validate(value)
    except ValidationError as error:
        problem = validation_error(error, section.model_fields, table=name)
        raise RequestError(unmarked(f"{source}: {problem}")) from None

"""A space: a recipe, and what may be chosen otherwise in it, as validated TOML."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from dualkg.errors import RequestError, did_you_mean
from dualkg.training.recipe import Recipe, Section, load_recipe, put, read_tables, recipe_from

Value = bool | int | float | str
SectionT = TypeVar("SectionT", bound=Section)
OWN_TABLES = ("recipe", "space", "search")


class Range(Section):
    """Numbers from `low` to `high`, both included; `step` keeps to a raster, `log` draws magnitudes alike."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)


class SearchChoice(Section):
    """How the space is searched. A grid has as many trials as points, unless `trials` says fewer."""

    method: Literal["grid", "tpe", "random"] = "grid"
    trials: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=2**32)
    prune: bool = True
    prune_after: int | None = Field(None, ge=1)
    validate_every: int | None = Field(None, ge=1)
    name: str | None = Field(None, min_length=1)


@dataclass(frozen=True)
class Space:
    """A base recipe, the choices to be made by their dotted names, and how to search them."""

    name: str
    base: Recipe
    dimensions: dict[str, tuple[Value, ...] | Range]
    choice: SearchChoice

    @property
    def num_points(self) -> int | None:
        """How many different recipes there are; None where some choice is a range."""
        sizes = [len(values) for values in self.dimensions.values() if isinstance(values, tuple)]
        return math.prod(sizes) if len(sizes) == len(self.dimensions) else None

    @property
    def num_trials(self) -> int:
        if self.choice.method == "grid":
            assert self.num_points is not None
            return min(self.num_points, self.choice.trials or self.num_points)
        assert self.choice.trials is not None
        return self.choice.trials

    @cached_property
    def _order(self) -> list[int]:
        """A grid is gone through in a drawn order: its first trials are then fair to be pruned by."""
        assert self.num_points is not None
        return random.Random(self.choice.seed).sample(range(self.num_points), self.num_points)

    def point(self, slot: int) -> dict[str, Value]:
        """The choices of a grid's trial; each point belongs to one slot."""
        rest, values = self._order[slot], {}
        for name, choices in self.dimensions.items():
            assert isinstance(choices, tuple)
            rest, place = divmod(rest, len(choices))
            values[name] = choices[place]
        return values

    def recipe(self, values: Mapping[str, Value]) -> Recipe:
        """The recipe with these choices: what is written down for a winner."""
        if self.base.validation.every:  # then it may decide when training ends
            return self.trial_recipe(values)
        return self.base.with_changes(values)

    def trial_recipe(self, values: Mapping[str, Value]) -> Recipe:
        """The same, ranked on the validation split often enough to be pruned, and at its end."""
        epochs = self.base.with_changes(values).training.epochs
        every = self.base.validation.every or (max(1, epochs // 10) if self.choice.prune else epochs)
        return self.base.with_changes({**values, "validation.every": self.choice.validate_every or every})

    @property
    def warm_up(self) -> int:
        """Epochs before which nothing is pruned."""
        return self.choice.prune_after or max(1, self.base.training.epochs // 4)

    def as_dict(self) -> dict[str, Any]:
        """All that a trial's result depends on; more trials may be asked for later."""
        dimensions = {
            name: list(values) if isinstance(values, tuple) else values.model_dump(exclude_none=True)
            for name, values in self.dimensions.items()
        }
        search = self.choice.model_dump(exclude={"trials", "name"})
        found: dict[str, Any] = json.loads(
            json.dumps({"recipe": self.base.model_dump(exclude_none=True), "space": dimensions, "search": search})
        )
        return found


def load_space(path: str | Path) -> Space:
    """Read and validate a space; a recipe that it names is looked for beside it."""
    path = Path(path)
    tables = read_tables(path)
    return space_from(tables, source=str(path), name=_name_of(path), folder=path.parent)


def space_from(tables: Mapping[str, Any], *, source: str, name: str = "search", folder: Path = Path()) -> Space:
    """Validate tables as a space; the first thing wrong is told in a sentence."""
    for table in tables:
        if table not in (known := (*OWN_TABLES, *Recipe.model_fields)):
            near = did_you_mean(table, known) or f" There are: {', '.join(known)}."
            raise RequestError(f"{source}: {table} is not a table of a space.{near}")
    base = _base(tables, source, folder)
    choice = _validated(SearchChoice, tables.get("search", {}), name="search", source=source)
    asked = tables.get("space", {})
    if not isinstance(asked, dict) or not asked:
        raise RequestError(f'{source}: [space] should name what to search, as "model.dim" = [100, 200]; it is empty.')
    dimensions = {key: _dimension(base, key, value, source=source) for key, value in _flat(asked)}
    for key, values in dimensions.items():
        if isinstance(values, Range) and choice.method == "grid":
            raise RequestError(
                f"{source}: {key} is a range, and a grid needs a list of values. List them, or search with "
                f'method = "tpe" or "random".'
            )
    if choice.method != "grid" and choice.trials is None:
        raise RequestError(
            f"{source}: {choice.method} draws without end, so [search] should say how often: trials = 50."
        )
    return Space(choice.name or name, base, dimensions, choice)


def _base(tables: Mapping[str, Any], source: str, folder: Path) -> Recipe:
    """The recipe that is named, if one is, with the choices that stand beside it."""
    inline = {key: value for key, value in tables.items() if key in Recipe.model_fields}
    named = tables.get("recipe")
    if named is None:
        return recipe_from(inline, source=source)
    if not isinstance(named, str):
        came = json.dumps(named, default=str)
        raise RequestError(f'{source}: recipe should be the path of a recipe, as recipe = "mine.toml"; {came} came.')
    merged = load_recipe(folder / named).model_dump(exclude_none=True)
    for table, section in inline.items():
        if not isinstance(section, dict):
            return recipe_from(inline, source=source)  # which refuses it
        for key, value in section.items():
            put(merged, f"{table}.{key}", value)
    return recipe_from(merged, source=source)


def _flat(tables: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Dotted names with their choices, whether the dots were quoted or not."""
    found: list[tuple[str, Any]] = []
    for key, value in tables.items():
        nested = isinstance(value, dict) and value and not {"low", "high"} & value.keys()
        found += _flat(value, f"{above}{key}.") if nested else [(f"{above}{key}", value)]
    return found


def _dimension(base: Recipe, name: str, asked: Any, *, source: str) -> tuple[Value, ...] | Range:
    if name.startswith(("data.", "validation.")):
        table = name.partition(".")[0]
        raise RequestError(
            f"{source}: {name} cannot be searched: trials are compared by their MRR on one validation split, "
            f"ranked alike. Set it in [{table}] instead."
        )
    if isinstance(asked, dict) and asked:
        return _range(base, name, asked, source=source)
    if not isinstance(asked, list) or not asked or any(isinstance(value, (dict, list)) for value in asked):
        came = json.dumps(asked, ensure_ascii=False, default=str)
        raise RequestError(
            f"{source}: {name} should be a list of values, [1, 2], or a range, {{ low = 1, high = 2 }}; {came} came."
        )
    values = tuple(_checked(base, name, value, source=source) for value in asked)
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise RequestError(f"{source}: {name} lists {json.dumps(twice)} twice; each value should stand there once.")
    return values


def _range(base: Recipe, name: str, asked: dict[str, Any], *, source: str) -> Range:
    found = _validated(Range, asked, name=name, source=source)
    low, high = (_checked(base, name, value, source=source) for value in (found.low, found.high))
    if isinstance(low, (bool, str)) or isinstance(high, (bool, str)) or low >= high:
        raise RequestError(f"{source}: {name} should go from low up to a larger high; {low} to {high} came.")
    if found.log and (low <= 0 or found.step):
        wrong = f"{low} came" if low <= 0 else f"step = {found.step} came beside it"
        raise RequestError(f"{source}: {name} with log = true should have a low above 0 and no step; {wrong}.")
    return found.model_copy(update={"low": low, "high": high})


def _checked(base: Recipe, name: str, value: Any, *, source: str) -> Value:
    """A value as the recipe takes it: 0 of a weight becomes 0.0, so a range knows what numbers it is of."""
    tables = base.model_dump(exclude_none=True)
    put(tables, name, value)
    found: Any = recipe_from(tables, source=source).model_dump()
    for part in name.split("."):
        found = found[part]
    checked: Value = found
    return checked


def _validated(kind: type[SectionT], asked: Any, *, name: str, source: str) -> SectionT:
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    where = f"{name}.{key}" if key else name
    if first["type"] == "extra_forbidden":
        near = did_you_mean(key, kind.model_fields) or f" There are: {', '.join(kind.model_fields)}."
        raise RequestError(f"{source}: {where} is not a choice of {name}.{near}")
    if first["type"] == "missing":
        raise RequestError(f"{source}: {name} has no {key}; a range is written {{ low = 1, high = 2 }}.")
    came = json.dumps(first["input"], ensure_ascii=False, default=str)
    raise RequestError(f"{source}: {where} should be {first['msg'].removeprefix('Input should be ')}; {came} came.")


def _name_of(path: Path) -> str:
    """`spaces/paper/wn18rr-cp.toml` → paper-wn18rr-cp."""
    folders = path.resolve().parts[:-1]
    below = folders[len(folders) - folders[::-1].index("spaces") :] if "spaces" in folders else ()
    return "-".join([*below, path.stem])

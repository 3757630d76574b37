"""A recipe: every choice of a run, as validated TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from dualkg.errors import RequestError, did_you_mean
from dualkg.training.sections import (
    Data,
    Loss,
    ModelChoice,
    Optimizer,
    RegularizerChoice,
    Section,
    Training,
    Validation,
)


class Recipe(Section):
    """Every choice of a run."""

    data: Data = Data()
    model: ModelChoice = ModelChoice()
    regularizer: RegularizerChoice = RegularizerChoice()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    validation: Validation = Validation()

    @model_validator(mode="after")
    def _one_choice_of_weights(self) -> Recipe:
        if self.optimizer.average_from < 1 and self.validation.keep == "best":
            raise ValueError(
                "a mean of weights is kept by optimizer.average_from, or the best by validation.keep; not both"
            )
        return self

    @model_validator(mode="after")
    def _questions_are_of_tails(self) -> Recipe:
        if self.training.order == "questions" and not self.model.reciprocal:
            raise ValueError(
                "without reciprocal relations every triple is asked for its head too, so training.order = 'questions' "
                "is for model.reciprocal = true; it is false"
            )
        return self

    @model_validator(mode="after")
    def _questions_are_examples(self) -> Recipe:
        if self.loss.kind != "all answers":
            return self
        if not self.model.reciprocal:
            raise ValueError("all answers are those of questions for tails, so model.reciprocal should be true")
        if self.training.order == "questions":
            raise ValueError("all answers of a question come together as it is; leave training.order out")
        if self.regularizer.name != "none":
            raise ValueError(
                f"a regularizer is of triples, and loss.kind = 'all answers' goes over questions, so regularizer.name "
                f"should be 'none'; it is '{self.regularizer.name}'"
            )
        return self

    @model_validator(mode="after")
    def _negatives_can_be_drawn(self) -> Recipe:
        if not self.loss.samples:
            return self
        if self.training.batch_size < 2:
            raise ValueError(
                "negatives are drawn by what a batch holds, and a triple alone would draw the same in every epoch, so "
                "training.batch_size should be at least 2; it is 1"
            )
        if self.loss.sides != "uniform" and self.model.reciprocal:
            raise ValueError(
                f"with reciprocal relations tails alone are corrupted, so loss.sides = '{self.loss.sides}' is for "
                f"model.reciprocal = false; it is true"
            )
        return self

    def with_changes(self, changes: Mapping[str, Any]) -> Recipe:
        """Another recipe with some choices changed, named as `training.epochs`."""
        tables = self.model_dump(exclude_none=True)
        for name, value in changes.items():
            put(tables, name, value)
        return recipe_from(tables, source="--set")

    def as_toml(self) -> str:
        """The recipe as it is read again; choices left to the model or the regularizer are left out."""
        parts = []
        for name, section in self.model_dump(exclude_none=True).items():
            lines = [f"{key} = {_toml(value)}" for key, value in section.items() if value != {}]
            parts.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(parts) + "\n"


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, not yet validated."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not TOML: {error}.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None


def load_recipe(path: str | Path, *, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Read and validate a recipe, with some choices changed."""
    tables = read_tables(path)
    for name, value in (changes or {}).items():
        put(tables, name, value)
    return recipe_from(tables, source=str(path))


def recipe_from(tables: Mapping[str, Any], *, source: str) -> Recipe:
    """Validate tables as a recipe; the first thing wrong is told in a sentence."""
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        raise RequestError(f"{source}: {_sentence(error)}") from None


def parse_changes(settings: Sequence[str]) -> dict[str, Any]:
    """`training.epochs=5` → {"training.epochs": 5}; values are TOML, or text where they are not."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or "." not in name:
            raise RequestError(f"A change is written section.key=value, as in training.epochs=5; '{setting}' came.")
        try:
            changes[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            changes[name.strip()] = text
    return changes


def put(tables: dict[str, Any], name: str, value: Any) -> None:
    """Set `section.key`, or `model.options.key`, in nested tables."""
    *path, key = name.split(".")
    for part in path:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise RequestError(f"{name} cannot be set: {part} is not a table of the recipe.")
    tables[key] = value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        section = Recipe.model_fields[where[0]].annotation if len(where) > 1 else Recipe
        known = list(getattr(section, "model_fields", ()))
        kind = f"a choice of [{where[0]}]" if len(where) > 1 else "a table of a recipe"
        near = did_you_mean(where[-1], known) or f" There are: {', '.join(known)}."
        return f"{name} is not {kind}.{near}"
    if first["type"] == "value_error":
        said = first["msg"].removeprefix("Value error, ")
        return f"{name}: {said}." if name else f"{said}."
    came = json.dumps(first["input"], ensure_ascii=False, default=str)
    rule = first["msg"].removeprefix("Input should be ")
    return f"{name} should be {rule}; {came} came."


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings are TOML's, but for the delete character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

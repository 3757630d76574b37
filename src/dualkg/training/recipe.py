"""A recipe: every choice of a run, as validated TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from dualkg.errors import RequestError, did_you_mean


class Section(BaseModel):
    """A table of a recipe: unknown keys are refused, and nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
    """Which graph: a name of the catalogue, `world`, or a path; the rest is for one's own files."""

    graph: str = "world"
    columns: tuple[str | int, str | int, str | int] | None = None
    split: str = "80/10/10"
    split_seed: int = 0
    labels: str | None = None


class ModelConfig(Section):
    """A model of dualkg by its name, or one's own as `package.module:Class`; `options` go to that class."""

    name: str = "ComplEx"
    dim: int = Field(100, ge=1)
    reciprocal: bool = True
    init_scale: float | Literal["xavier"] | None = None
    dual: Literal["none", "tail", "head"] = "none"
    options: dict[str, Any] = {}


class RegularizerConfig(Section):
    """`weight` is the paper's λ; `plain` and `mapped` are DURA's λ1 and λ2."""

    name: str = "none"
    weight: float | None = Field(None, ge=0)
    plain: float | None = Field(None, ge=0)
    mapped: float | None = Field(None, ge=0)
    options: dict[str, Any] = {}


OF_TRIPLES = ("frequency_weight", "relation_weight")
OF_CROSS_ENTROPY = (*OF_TRIPLES, "dropout", "head_dropout", "label_smoothing")
OF_SAMPLING = ("num_negatives", "negatives", "sides", "margin", "temperature", "subsampling", "known")


class Loss(Section):
    """Cross entropy over all entities, or a loss over negatives that are sampled; each kind has keys of its own.

    `cross entropy` has one answer at a time, `all answers` all those of a question together. `frequency_weight` is w0
    of Appendix D.1, `relation_weight` adds relation prediction, `dropout` is the share of each query's image that is
    set to zero while it is scored, `head_dropout` that of its head. `margin` is γ; left out, the loss's own.
    """

    kind: Literal["cross entropy", "all answers", "negative sampling", "margin"] = "cross entropy"
    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    count_power: float = Field(0.0, ge=0, le=1)
    num_negatives: int = Field(64, ge=1)
    negatives: Literal["uniform", "shared", "batch"] = "uniform"
    sides: Literal["uniform", "bernoulli", "both"] = "uniform"
    margin: float | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0)
    subsampling: bool = False
    known: bool = False

    @property
    def samples(self) -> bool:
        """Whether scores are of negatives that are drawn, not of all entities."""
        return self.kind in ("negative sampling", "margin")

    def _idle(self) -> dict[str, str]:
        """The keys that this choice has no use for, and why, as the middle of a sentence."""
        sampling = dict.fromkeys(OF_SAMPLING, f"is for a loss that samples negatives, and loss.kind is '{self.kind}'")
        counting = {"count_power": f"is for all answers of a question, and loss.kind is '{self.kind}'"}
        entropy = f"is for cross entropy, and loss.kind is '{self.kind}'"
        if self.kind == "cross entropy":
            return sampling | counting
        if self.kind == "all answers":
            return sampling | dict.fromkeys(OF_TRIPLES, entropy)
        idle = dict.fromkeys(OF_CROSS_ENTROPY, entropy) | counting
        if self.kind == "margin":
            idle["temperature"] = "is for negative sampling, and loss.kind is 'margin'"
        if self.negatives == "batch":
            idle["num_negatives"] = "says how many are drawn, and loss.negatives = 'batch' draws none"
        return idle

    def _is_default(self, key: str) -> bool:
        return bool(getattr(self, key) == type(self).model_fields[key].default)

    @model_validator(mode="after")
    def _all_is_of_use(self) -> Loss:
        for key, why in self._idle().items():
            if not self._is_default(key):
                raise ValueError(f"{key} {why}; leave {key} out")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Where choices left open are left out, so are keys of another kind: cross entropy is written as it was."""
        found: dict[str, Any] = write(self)
        if not info.exclude_none:
            return found
        silent = {"kind", "label_smoothing", "head_dropout"} if self.kind == "cross entropy" else set()
        left_out = {*self._idle(), *(key for key in silent if self._is_default(key))}
        return {key: value for key, value in found.items() if key not in left_out}


class Optimizer(Section):
    """The learning rate falls to zero, linearly or as a cosine, from the share `decay_from` of training on.

    From the share `average_from` on, the weights at the end of each epoch are averaged, and their mean is kept.

    Adagrad and Adam divide a gradient by its usual size; where that is far below `epsilon`, they step as SGD does.
    Left out, `epsilon` is 1e-10 for Adagrad and 1e-8 for Adam.
    """

    name: Literal["Adagrad", "Adam", "SGD"] = "Adagrad"
    learning_rate: float = Field(0.1, gt=0)
    epsilon: float | None = Field(None, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_from: float = Field(0.0, ge=0, lt=1)
    average_from: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _epsilon_is_of_use(self) -> Optimizer:
        if self.epsilon is not None and self.name == "SGD":
            raise ValueError("epsilon is for Adagrad and Adam, and optimizer.name is 'SGD'; leave epsilon out")
        return self


class Validation(Section):
    """Rank the validation split every so many epochs; stop after `patience` without a better MRR; 0 is never."""

    every: int = Field(0, ge=0)
    patience: int = Field(0, ge=0)
    keep: Literal["last", "best"] = "last"

    @model_validator(mode="after")
    def _every_is_needed(self) -> Validation:
        if not self.every and (self.patience or self.keep == "best"):
            raise ValueError("patience and keep look at the validation split, so every should be at least 1; it is 0")
        return self


class Training(Section):
    """`checkpoint_seconds` is by the clock, so that short epochs do not drown in writing.

    Every epoch has an order of its own; with `queries` the answers of the same query, up to 16, come together, and
    the fused engine scores that question once.

    The fused engine and the plain one take the same steps; `auto` is fused where it applies. `bf16` is for the
    fused engine's products with the entity tables, which stay float32; `auto` is that where it is faster. With `tf32`
    all products are that on a GPU, by either engine, and float32 elsewhere.
    """

    epochs: int = Field(20, ge=1)
    batch_size: int = Field(500, ge=1)
    order: Literal["triples", "queries"] = "triples"
    seed: int = Field(0, ge=0, lt=2**32)
    checkpoint_seconds: float = Field(60.0, ge=0)
    engine: Literal["auto", "reference", "fast"] = "auto"
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Where choices left open are left out, so is the usual order: recipes are written as they were."""
        found: dict[str, Any] = write(self)
        if info.exclude_none and self.order == "triples":
            del found["order"]
        return found


class Recipe(Section):
    """Every choice of a run."""

    data: Data = Data()
    model: ModelConfig = ModelConfig()
    regularizer: RegularizerConfig = RegularizerConfig()
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
        if self.training.order == "queries" and not self.model.reciprocal:
            raise ValueError(
                "without reciprocal relations every triple is asked for its head too, so training.order = 'queries' "
                "is for model.reciprocal = true; it is false"
            )
        return self

    @model_validator(mode="after")
    def _questions_are_examples(self) -> Recipe:
        if self.loss.kind != "all answers":
            return self
        if not self.model.reciprocal:
            raise ValueError("all answers are those of questions for tails, so model.reciprocal should be true")
        if self.training.order == "queries":
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


def list_recipes() -> list[str]:
    """Names of the recipes that ship with dualkg, such as `wn18rr/complex-dura`."""
    folders = [folder for folder in (files("dualkg") / "recipes").iterdir() if folder.is_dir()]
    return sorted(f"{folder.name}/{file.name[:-5]}" for folder in folders for file in folder.iterdir())


def read_tables(path: str | Path) -> dict[str, Any]:
    """Tables of a TOML file, or of a recipe that ships with dualkg by its name; not yet validated."""
    file: Traversable = Path(path)
    if not str(path).endswith(".toml") and not file.is_file():
        names = list_recipes()
        if str(path) not in names:
            near = did_you_mean(str(path), names) or " dualkg recipes lists those that ship with dualkg."
            raise RequestError(f"{path} is neither a file nor the name of a recipe.{near}")
        file = files("dualkg").joinpath("recipes", f"{path}.toml")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not TOML: {error}.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None


def load_recipe(path: str | Path, *, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Read and validate a recipe by its path or its name, such as `wn18rr/complex-dura`, with some values changed."""
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

"""A recipe: all settings of a run, as validated TOML, and the objects that it names."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError, close_settings, did_you_mean, one_of
from dualkg.extras import check_trusted, trusted_code
from dualkg.losses import LOSSES, Loss, OneVsAll
from dualkg.losses.base import validation_sentence
from dualkg.models import MODELS, Dual
from dualkg.models.base import EmbeddingModel, Model
from dualkg.regularizers import REGULARIZERS, Regularizer
from dualkg.tables import EntityTables, LocalTables

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

MAX_DEPTH = 20  # of nested tables and lists
RENAMED_KEYS = {
    "loss.kind": "loss.name, which is OneVsAll, KvsAll, SampledSoftmax, NegativeSampling or MarginRanking",
    "loss.count_power": "loss.count_exponent",
    "loss.negatives": "loss.sampler",
    "loss.sides": "loss.corruption",
    "loss.temperature": "loss.adversarial_temperature",
    "loss.known": "loss.filtered, with the opposite meaning",
}


def name_of(instance: object, known: Mapping[str, type]) -> str:
    """The short name of a class that is registered, `package.module:Class` of any other."""
    kind = type(instance)
    return next(
        (name for name, listed in known.items() if listed is kind),
        f"{kind.__module__}:{kind.__qualname__}",
    )


def known_name(name: Any, known: Iterable[str]) -> Any:
    """The known name that is written so but for case and hyphens (`complex`, `1-vs-all`), or the
    value as it is.
    """

    def folded(text: str) -> str:
        return (
            "".join(text.casefold().split())
            .replace("-", "")
            .replace("_", "")
            .replace("1vs", "onevs")
        )

    return next(
        (one for one in known if isinstance(name, str) and folded(one) == folded(name)), name
    )


def _in_any_case(known: Iterable[str]) -> BeforeValidator:
    return BeforeValidator(lambda name: known_name(name, known))


def find_class(name: str, known: Mapping[str, type], base: type) -> Any:
    """The class of a short name in any case, or of `package.module:Class` on the Python path or in
    this folder.
    """
    name = known_name(name, known)
    if name in known:
        return known[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        near = did_you_mean(name, known) or f" There are {', '.join(known)}."
        kind = base.__name__.removeprefix("Embedding").lower()
        raise RequestError(
            f"No {kind} is named '{name}'.{near} Your own class is named package.module:Class."
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)  # a console script does not have the working folder on its path
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # a user's module may raise anything
        raise RequestError(
            f"'{name}' cannot be imported: {type(error).__name__}: {error}."
        ) from None
    finally:
        sys.path.remove(here)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RequestError(
            f"'{name}' should be a subclass of dualkg's {base.__name__}; it is {found!r}."
        )
    return found


class _Sentences(ModelMetaclass):
    """Raises a sentence where a user constructs a table with wrong settings; tables of a recipe are
    not called.
    """

    def __call__(self, *args: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            known = getattr(self, "model_fields", ())
            raise RequestError(
                validation_sentence(error, known, prefix=f"{self.__name__.lower()}.")
            ) from None


class Section(BaseModel, metaclass=_Sentences):
    """A table of a recipe: unknown keys are refused, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def _with_options(cls, name: str, config: Mapping[str, object]) -> Self:
        """The table of a class by its keywords; those that the table does not have are its
        `options`.
        """
        own = {key: value for key, value in config.items() if key in cls.model_fields}
        options = {key: value for key, value in config.items() if key not in own}
        return cls.model_validate({"name": name, **own, "options": options})


class Data(Section):
    """The graph: a name of the catalogue, `world`, or a path. The other keys are for files of your
    own.
    """

    graph: str = "world"
    columns: tuple[str | int, str | int, str | int] | None = None
    split: str = "80/10/10"
    split_seed: int = 0
    labels: str | None = None
    delimiter: str | None = None
    max_size: int | str | None = None


class ModelConfig(Section):
    """A model of dualkg by name, or your own as `package.module:Class`; `options` are passed to
    that class.
    """

    name: Annotated[str, _in_any_case(MODELS)] = "ComplEx"
    dim: int = Field(100, ge=1, lt=2**31)
    reciprocal: bool = True
    init_scale: float | Literal["xavier"] | None = None
    dual: Literal["none", "tail", "head"] = "none"
    options: dict[str, Any] = {}

    @classmethod
    def of(cls, model: Model) -> ModelConfig:
        """The config that builds a model like this one."""
        return cls._with_options(name_of(model.embedding, MODELS), model.config)

    def build(self, shape: GraphShape, *, seed: int, tables: EntityTables | None = None) -> Model:
        """The model with new parameters, whose entity rows are kept by `tables`."""
        kind = find_class(self.name, MODELS, EmbeddingModel)
        keywords = (
            self.model_dump(include={"dim", "reciprocal", "init_scale"}, exclude_none=True)
            | self.options
        )
        try:
            tables = tables or LocalTables(shape.num_entities)
            model: Model = kind.with_tables(tables, shape, seed=seed, **keywords)
        except TypeError as error:
            raise RequestError(f"{self.name} cannot be made from [model]: {error}.") from None
        return model if self.dual == "none" else Dual(model, self.dual)  # type: ignore[arg-type]


class RegularizerConfig(Section):
    """`weight` is the paper's λ; `plain` and `mapped` are DURA's λ1 and λ2."""

    name: Annotated[str, _in_any_case(REGULARIZERS)] = "none"
    weight: float | None = Field(None, ge=0)
    plain: float | None = Field(None, ge=0)
    mapped: float | None = Field(None, ge=0)
    options: dict[str, Any] = {}

    @classmethod
    def of(cls, regularizer: Regularizer) -> RegularizerConfig:
        """The config that builds a regularizer like this one."""
        return cls._with_options(name_of(regularizer, REGULARIZERS), regularizer.config)

    def build(self) -> Regularizer:
        """The regularizer; `plain` and `mapped` are refused by those that have none."""
        kind = find_class(self.name, REGULARIZERS, Regularizer)
        keywords = (
            self.model_dump(include={"weight", "plain", "mapped"}, exclude_none=True) | self.options
        )
        if self.weight is None and self.name != "none":
            raise RequestError(
                f"{self.name} needs a weight, the paper's λ: set regularizer.weight."
            )
        try:
            regularizer: Regularizer = kind(**keywords)
        except TypeError:
            extra = " and ".join(key for key in ("plain", "mapped") if key in keywords)
            whose = (
                f"{extra}: those are DURA's" if extra else f"such setting: {', '.join(keywords)}"
            )
            raise RequestError(f"{self.name} has no {whose}.") from None
        return regularizer


class Optimizer(Section):
    """The optimizer and its learning rate, which may decay to zero from the share `decay_from` of
    training on.

    From the share `average_from` on, the weights at the end of each epoch are averaged, and the run
    keeps the mean. `epsilon` is 1e-10 for Adagrad and 1e-8 for Adam if it is left out. Adagrad's
    `sums` of squared gradients are of single `elements`, or of whole `rows` of the entity tables,
    which take less memory.
    """

    name: Annotated[Literal["Adagrad", "Adam", "SGD"], _in_any_case(("Adagrad", "Adam", "SGD"))] = (
        "Adagrad"
    )
    learning_rate: float = Field(0.1, gt=0)
    epsilon: float | None = Field(None, gt=0)
    sums: Literal["elements", "rows"] = "elements"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_from: float = Field(0.0, ge=0, lt=1)
    average_from: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _settings_are_used(self) -> Optimizer:
        if self.epsilon is not None and self.name == "SGD":
            raise ValueError(
                "epsilon is for Adagrad and Adam, and optimizer.name is 'SGD'; leave epsilon out"
            )
        if self.sums == "rows" and self.name != "Adagrad":
            raise ValueError(
                f"sums are Adagrad's, and optimizer.name is '{self.name}'; leave sums out"
            )
        return self


class Validation(Section):
    """Rank the validation split every `every` epochs; stop after `patience` without a better MRR; 0
    is never.
    """

    every: int = Field(0, ge=0, lt=2**31)
    patience: int = Field(0, ge=0, lt=2**31)
    keep: Literal["last", "best"] = "last"

    @model_validator(mode="after")
    def _every_is_needed(self) -> Validation:
        if not self.every and (self.patience or self.keep == "best"):
            raise ValueError(
                "patience and keep use the validation split, so every should be at least 1; it is 0"
            )
        return self


class Training(Section):
    """Epochs, batches and engine. The triples are shuffled in every epoch.

    With `order = "queries"`, up to 16 answers of a query are neighbours, and the fast engine scores
    that query once. Both engines take the same steps; `auto` is the fast one where it applies.
    `bf16` is the precision of the fast engine's products with the entity tables, which stay
    float32; `auto` is that where it is faster. With `tf32` all products are TensorFloat-32 on a
    GPU, and float32 elsewhere. Checkpoints are written every `checkpoint_seconds`.
    """

    epochs: int = Field(20, ge=1, lt=2**31)
    batch_size: int = Field(500, ge=1, lt=2**31)
    order: Literal["triples", "queries"] = "triples"
    seed: int = Field(0, ge=0, lt=2**32)
    checkpoint_seconds: float = Field(60.0, ge=0)
    engine: Literal["auto", "reference", "fast"] = "auto"
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"


def _loss_of_table(table: Any) -> Loss:
    if isinstance(table, Loss):
        return table
    if not isinstance(table, Mapping):
        raise ValueError("a table with name and settings was expected")
    name = table.get("name", "OneVsAll")
    if not isinstance(name, str):
        raise ValueError(f"name should be text; it is {name!r}")
    settings = {key: value for key, value in table.items() if key != "name"}
    kind = find_class(name, LOSSES, Loss)
    for key in settings.keys() - kind.model_fields.keys():
        if owners := [known for known, listed in LOSSES.items() if key in listed.model_fields]:
            raise ValueError(
                f"{key} is a setting of {' and '.join(owners)}; loss.name is '{name}'; leave it out"
            )
    loss: Loss = kind(**settings)
    return loss


class Recipe(Section, title="recipes"):
    """All settings of a run."""

    data: Data = Data()
    model: ModelConfig = ModelConfig()
    regularizer: RegularizerConfig = RegularizerConfig()
    loss: Annotated[Loss, BeforeValidator(_loss_of_table)] = OneVsAll()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    validation: Validation = Validation()

    @field_serializer("loss")
    def _table_of_loss(self, loss: Loss, info: Any) -> dict[str, Any]:
        """Name and settings; without defaults if None is left out, so that `with_changes` can
        change the name.
        """
        return {
            "name": name_of(loss, LOSSES),
            **loss.model_dump(exclude_defaults=bool(info.exclude_none)),
        }

    @model_validator(mode="after")
    def _combinations(self) -> Recipe:
        if self.optimizer.average_from < 1 and self.validation.keep == "best":
            raise ValueError(
                "the run keeps the mean of weights by optimizer.average_from, or the best by "
                "validation.keep; not both"
            )
        if self.training.order == "queries" and not self.model.reciprocal:
            raise ValueError(
                "without reciprocal relations heads are predicted too, so training.order = "
                "'queries' is for model.reciprocal = true; it is false"
            )
        name = type(self.loss).__name__
        of_queries = self.loss.examples == "queries"
        if of_queries and not self.model.reciprocal:
            raise ValueError(
                f"{name} is a loss of tail queries, so model.reciprocal should be true; it is false"
            )
        if of_queries and self.training.order == "queries":
            raise ValueError(
                f"{name} groups the answers of a query anyway; leave training.order out"
            )
        if of_queries and self.regularizer.name != "none":
            raise ValueError(
                f"a regularizer is a mean over triples, and {name} trains on queries, so "
                f"regularizer.name should be 'none'; it is '{self.regularizer.name}'"
            )
        self.loss.check_training(
            reciprocal=self.model.reciprocal, batch_size=self.training.batch_size
        )
        return self

    def with_changes(self, changes: Mapping[str, Any], *, source: str = "--set") -> Recipe:
        """Another recipe with some values changed, named as `training.epochs`."""
        return recipe_from(changed(self.model_dump(exclude_none=True), changes), source=source)

    @property
    def own_classes(self) -> list[str]:
        """The classes that it names and that are not part of dualkg, as `package.module:Class`."""
        return [
            name
            for name in (self.model.name, self.regularizer.name, name_of(self.loss, LOSSES))
            if ":" in name
        ]

    def check_importable(self) -> None:
        """Refuse to save a run with a class that another process could not import."""
        for name in self.own_classes:
            module, _, kind = name.partition(":")
            if module == "__main__" or "<locals>" in kind:
                raise RequestError(
                    f"{kind} cannot be imported by its name, so a run with it cannot be saved: "
                    "define it at the top level of a module and import it from there."
                )

    def value_of(self, key: str) -> Any:
        """The value of `section.key`; settings of the loss are among them."""
        return reduce(getitem, key.split("."), self.model_dump())

    def as_toml(self) -> str:
        """The recipe as TOML; values left to the model or the regularizer are left out."""
        parts = []
        for name, section in self.model_dump().items():
            lines = [
                f"{key} = {_toml(value)}"
                for key, value in section.items()
                if value is not None and value != {}
            ]
            parts.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(parts) + "\n"


def list_recipes() -> list[str]:
    """Names of the recipes that ship with dualkg, such as `wn18rr/complex-dura`."""
    folders = [folder for folder in (files("dualkg") / "recipes").iterdir() if folder.is_dir()]
    return sorted(
        f"{folder.name}/{file.name[:-5]}" for folder in folders for file in folder.iterdir()
    )


def read_tables(path: str | Path) -> dict[str, Any]:
    """Tables of a TOML file, or of a recipe that ships with dualkg, not yet validated; their
    classes are trusted.
    """
    file: Traversable = Path(path)
    try:
        if not str(path).endswith(".toml") and not file.is_file():
            names = list_recipes()
            if str(path) not in names:
                near = (
                    did_you_mean(str(path), names)
                    or " dualkg recipes lists those that ship with dualkg."
                )
                raise RequestError(f"{path} is neither a file nor the name of a recipe.{near}")
            file = files("dualkg").joinpath("recipes", f"{path}.toml")
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        if _nested(tables):
            raise RecursionError
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise RequestError(
            f"{path} is no recipe: its tables or lists are nested too deeply."
        ) from None
    # Also text that is not UTF-8, a number with thousands of digits, a null in the path.
    except ValueError as error:
        raise RequestError(f"{path} is not TOML: {error}.") from None
    check_trusted(named_classes(tables), source=path)
    return tables


def _nested(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether tables and lists are nested deeper than any recipe needs."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_nested(one, depth - 1) for one in inside)


def named_classes(tables: Any, place: str = "") -> Iterator[object]:
    """Values of `model.name`, `loss.name` and `regularizer.name`, also in lists of values to
    search.
    """
    for key, value in (
        tables.items() if isinstance(tables, dict) and place.count(".") < MAX_DEPTH else ()
    ):
        yield from named_classes(value, f"{place}.{key}")
        if f"{place}.{key}".endswith((".model.name", ".loss.name", ".regularizer.name")):
            yield from value if isinstance(value, list) else [value]


def load_recipe(
    path: str | Path, *, changes: Mapping[str, Any] | None = None, trust_code: bool = False
) -> Recipe:
    """Read and validate a recipe by its path or its name, such as `wn18rr/complex-dura`, with some
    values changed.

    A class of your own, `package.module:Class`, is imported if the recipe may name it: with
    `trust_code`.
    """
    with trusted_code(trust_code):
        return recipe_from(changed(read_tables(path), changes or {}), source=str(path))


def changed(tables: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with some values changed; a patience alone also turns validation on, and keeps the
    best weights.
    """
    tables = deepcopy(tables)
    for name, value in changes.items():
        put(tables, name, value)
    validation = tables.get("validation", {})
    if (
        changes.get("validation.patience")
        and "validation.every" not in changes
        and not validation.get("every")
    ):
        put(tables, "validation.every", 1)
        if "validation.keep" not in changes:
            put(tables, "validation.keep", "best")
    return tables


def recipe_from(tables: Mapping[str, Any], *, source: str) -> Recipe:
    """Validate tables as a recipe; the error is a sentence on the first problem."""
    for name, renamed in RENAMED_KEYS.items():
        section, _, key = name.partition(".")
        if isinstance(table := tables.get(section), Mapping) and key in table:
            raise RequestError(f"{source}: {name} is now {renamed}.")
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]["loc"]
        table = Recipe.model_fields[str(first[0])].annotation if len(first) > 1 else Recipe
        known = getattr(table, "model_fields", ())
        elsewhere = keys_like(str(first[-1])) if first else ()
        raise RequestError(
            f"{source}: {validation_sentence(error, known, elsewhere=elsewhere)}"
        ) from None
    except RequestError as error:
        raise RequestError(f"{source}: {error}") from None


def keys_like(key: str) -> list[str]:
    """Keys of all tables that are named so, or mean the same: `lr` →
    [`optimizer.learning_rate`].
    """
    keys = {
        name: list(getattr(field.annotation, "model_fields", ()))
        for name, field in Recipe.model_fields.items()
    }
    keys["loss"] = list(
        dict.fromkeys(setting for loss in LOSSES.values() for setting in loss.model_fields)
    )
    return [
        f"{name}.{near}" for name, table in keys.items() for near in close_settings(key, table)
    ][:3]


def parse_changes(settings: Sequence[str]) -> dict[str, Any]:
    """`training.epochs=5` → {"training.epochs": 5}; values are TOML, or text where they are not."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or "." not in name:
            near = one_of(f"{key}={text}" for key in keys_like(name.strip())) if equals else ""
            raise RequestError(
                "A change is written section.key=value, as in training.epochs=5; it is "
                f"'{setting}'.{near}"
            )
        try:
            changes[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # no TOML, or a number or brackets without end
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


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + " }"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings are TOML's, but for the delete character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

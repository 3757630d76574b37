"""A recipe: all settings of a run, as validated TOML, and the objects that it names."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib.resources import files
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError, close_matches, close_settings, one_of, unmarked
from dualkg.extras import check_trusted, trusted_code
from dualkg.files import read_text
from dualkg.losses import LOSSES, Loss, OneVsAll
from dualkg.models import MODELS, Dual
from dualkg.models.base import Model
from dualkg.regularizers import REGULARIZERS, Regularizer
from dualkg.settings import Settings
from dualkg.tables.base import EntityTables, local_tables
from dualkg.training.classes import find_class, known_name, name_of
from dualkg.training.optimizers import OPTIMIZERS, Adagrad, Optimizer

MAX_RECIPE = 1 << 20  # bytes of a file
MAX_SUGGESTIONS = 3


# -- tables ------------------------------------------------------------------


def _in_any_case(known: Iterable[str]) -> BeforeValidator:
    return BeforeValidator(lambda name: known_name(name, known))


class Section(Settings):
    """A table of a recipe."""

    owner: ClassVar[str] = "recipes"

    @classmethod
    def keys_elsewhere(cls, key: str) -> Sequence[str]:
        return keys_like(key)

    @classmethod
    def _with_options(cls, name: str, config: Mapping[str, object]) -> Self:
        """The table of a class by its keywords; those without a field are its `options`."""
        fields: dict[str, object] = {}
        options: dict[str, object] = {}
        for key, value in config.items():
            target = fields if key in cls.model_fields else options
            target[key] = value
        return cls.model_validate({"name": name, **fields, "options": options})


class Data(Section):
    """The graph: a name of the catalogue, `world`, or a path.

    The other keys are for files of your own.
    """

    table: ClassVar[str] = "data"

    graph: str = "world"
    columns: tuple[str | int, str | int, str | int] | None = None
    split: str = "80/10/10"
    split_seed: int = 0
    labels: str | None = None
    delimiter: str | None = None
    max_size: int | str | None = None
    decisions: str | None = None


class ModelConfig(Section):
    """A model of dualkg by name, or your own as `package.module:Class`.

    `options` are passed to that class.
    """

    table: ClassVar[str] = "model"

    name: Annotated[str, _in_any_case(MODELS)] = "ComplEx"
    dim: int = Field(100, ge=1, lt=2**31)
    reciprocal: bool = True
    init_scale: float | Literal["xavier"] | None = None
    dual: Literal["none", "tail", "head"] = "none"
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, model: Model) -> ModelConfig:
        """The config that builds a model like this one."""
        return cls._with_options(name_of(model.named, MODELS), model.config)

    def build(self, shape: GraphShape, *, seed: int, tables: EntityTables | None = None) -> Model:
        """The model with new parameters, whose entity rows are kept by `tables`."""
        kind = find_class(self.name, MODELS, Model)
        keywords = self.model_dump(include={"dim", "reciprocal", "init_scale"}, exclude_none=True)
        try:
            tables = tables or local_tables(shape.num_entities)
            keywords |= self.options
            model: Model = kind.with_tables(tables, shape, seed=seed, **keywords)
        except TypeError as error:
            raise RequestError(f"{self.name} cannot be made from [model]: {error}.") from None
        if self.dual == "none":
            return model
        return Dual(model, self.dual)  # type: ignore[arg-type]


class RegularizerConfig(Section):
    """`weight` is the paper's λ; `plain` and `mapped` are DURA's λ1 and λ2."""

    table: ClassVar[str] = "regularizer"

    name: Annotated[str, _in_any_case(REGULARIZERS)] = "none"
    weight: float | None = Field(None, ge=0)
    plain: float | None = Field(None, ge=0)
    mapped: float | None = Field(None, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, regularizer: Regularizer) -> RegularizerConfig:
        """The config that builds a regularizer like this one."""
        return cls._with_options(name_of(regularizer, REGULARIZERS), regularizer.config)

    def build(self) -> Regularizer:
        """The regularizer; `plain` and `mapped` are refused by those that have none."""
        kind = find_class(self.name, REGULARIZERS, Regularizer)
        if self.weight is None and self.name != "none":
            raise RequestError(
                f"{self.name} needs a weight, the paper's λ: set `regularizer.weight`."
            )
        keywords = self.model_dump(include={"weight", "plain", "mapped"}, exclude_none=True)
        keywords |= self.options
        try:
            regularizer: Regularizer = kind(**keywords)
        except TypeError:
            raise RequestError(f"{self.name} has no {_refused_keywords(keywords)}.") from None
        return regularizer


def _refused_keywords(keywords: Mapping[str, object]) -> str:
    of_dura = [key for key in ("plain", "mapped") if key in keywords]
    if of_dura:
        return f"{' and '.join(of_dura)}: those are DURA's"
    return f"such setting: {', '.join(keywords)}"


class Validation(Section):
    """Rank the validation split every `every` epochs; 0 is never.

    Training stops after `patience` of these without a better MRR. With `queries`, a sample of so
    many queries is ranked, the same each time. The ranking after training is of all triples, or
    with `final = "sample"` of a sample of each split.

    Attributes:
        every: Epochs between rankings of the validation split; 0 is never.
        patience: Training stops after so many rankings without a better MRR; 0 is never.
        keep: The weights to keep: "last", or "best" on the validation split.
        queries: Rank a sample of so many queries, the same each time.
        final: The ranking after training is of "all" triples, or of a "sample" of each split.

    Examples:
        >>> often = kg.Validation(every=1, patience=2, keep="best")
        >>> run = kg.train("ComplEx", graph, validation=often, epochs=1)
    """

    table: ClassVar[str] = "validation"

    every: int = Field(0, ge=0, lt=2**31)
    patience: int = Field(0, ge=0, lt=2**31)
    keep: Literal["last", "best"] = "last"
    queries: int | None = Field(None, ge=1, lt=2**31)
    final: Literal["all", "sample"] = "all"

    @property
    def final_queries(self) -> int | None:
        """The queries of each split that are ranked after training; None are all."""
        return self.queries if self.final == "sample" else None

    @model_validator(mode="after")
    def _every_is_needed(self) -> Validation:
        if not self.every and (self.patience or self.keep == "best"):
            raise ValueError(
                "patience and keep use the validation split, so every should be at least 1; it is 0"
            )
        if self.final == "sample" and self.queries is None:
            raise ValueError(
                "final = 'sample' ranks a sample after training, so queries should be its size"
            )
        return self


class Training(Section):
    """Epochs, batches and engine. The triples are shuffled in every epoch.

    With `order = "queries"`, up to 16 answers of a query are neighbours, and the fast engine scores
    that query once. Both engines take the same steps; `auto` is the fast one where it applies.
    `bf16` is the precision of the fast engine's products with the entity tables, which stay
    float32; `auto` is that where it is faster. With `tf32` all products are TensorFloat-32 on a
    GPU, and float32 elsewhere. Checkpoints are written every `checkpoint_seconds`, or less often
    where they would take more than 5 % of the time.

    With `batches_per_epoch`, an epoch ends after so many batches; the next one has others.

    `entity_tables` are on the device that computes, or in the memory of the host, from which the
    rows of each batch are copied; `auto` is the host where they do not fit a GPU.
    """

    table: ClassVar[str] = "training"

    epochs: int = Field(20, ge=1, lt=2**31)
    # That of a recipe file which names none; see `default_batch_size` for a graph without recipe.
    batch_size: int = Field(500, ge=1, lt=2**31)
    batches_per_epoch: int | None = Field(None, ge=1, lt=2**31)
    order: Literal["triples", "queries"] = "triples"
    seed: int = Field(0, ge=0, lt=2**32)
    checkpoint_seconds: float = Field(60.0, ge=0)
    engine: Literal["auto", "reference", "fast"] = "auto"
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    entity_tables: Literal["auto", "device", "host"] = "auto"

    def num_steps(self, num_examples: int) -> int:
        """The steps of an epoch over some examples."""
        num_batches = -(-num_examples // self.batch_size)
        if self.batches_per_epoch is None:
            return num_batches
        return min(num_batches, self.batches_per_epoch)


# Batch sizes by the number of training triples below which they are used. A small graph needs many
# steps; larger batches are efficient matrix products.
BATCH_SIZES = {20_000: 100, 200_000: 500}
LARGEST_BATCH_SIZE = 1000


def default_batch_size(num_triples: int) -> int:
    """The batch size for a graph without a recipe.

    Path networks have smaller batches: see `PathNetwork.recipe_defaults`, and for a CPU
    `dualkg.tuning.starting_recipe`.
    """
    for limit, batch_size in BATCH_SIZES.items():
        if num_triples < limit:
            return batch_size
    return LARGEST_BATCH_SIZE


# -- losses and optimizers by name -------------------------------------------


def _loss_of_table(table: Any) -> Loss:
    if isinstance(table, Loss):
        return table
    name, settings = _name_and_settings(table, default="OneVsAll")
    kind = find_class(name, LOSSES, Loss)
    for key in settings.keys() - kind.model_fields.keys():
        owners = [known for known, loss in LOSSES.items() if key in loss.model_fields]
        if owners:
            raise RequestError(
                f"loss: {key} is a setting of {' and '.join(owners)}; loss.name is '{name}'; leave "
                "it out."
            )
    loss: Loss = kind(**settings)
    return loss


def _optimizer_of_table(table: Any) -> Optimizer:
    if isinstance(table, Optimizer):
        return table
    name, settings = _name_and_settings(table, default="Adagrad")
    kind = find_class(name, OPTIMIZERS, Optimizer)
    optimizer: Optimizer = kind(**settings)
    return optimizer


def _name_and_settings(table: Any, *, default: str) -> tuple[str, dict[str, Any]]:
    """The name in a table, and its other keys."""
    if not isinstance(table, Mapping):
        raise ValueError("a table with name and settings was expected")
    name = table.get("name", default)
    if not isinstance(name, str):
        raise ValueError(f"name should be text; it is {name!r}")
    return name, {key: value for key, value in table.items() if key != "name"}


# -- the recipe --------------------------------------------------------------


class Recipe(Section):
    """All settings of a run.

    Attributes:
        data: The graph, its columns and its split.
        model: Name and arguments of the model.
        regularizer: Name and arguments of the regularizer.
        loss: The loss.
        optimizer: The optimizer.
        training: Epochs, batches, seed and engine.
        validation: When the validation split is ranked.

    Examples:
        >>> kg.load_recipe("umls/complex-dura").regularizer.name
        'DURA'
    """

    data: Data = Data()
    model: ModelConfig = ModelConfig()
    regularizer: RegularizerConfig = RegularizerConfig()
    loss: Annotated[Loss, BeforeValidator(_loss_of_table)] = OneVsAll()
    optimizer: Annotated[Optimizer, BeforeValidator(_optimizer_of_table)] = Adagrad()
    training: Training = Training()
    validation: Validation = Validation()

    @field_serializer("loss")
    def _table_of_loss(self, loss: Loss, info: Any) -> dict[str, Any]:
        """Name and settings.

        Where None is left out, so are defaults, so that `with_changes` can change the name.
        """
        settings = loss.model_dump(exclude_defaults=bool(info.exclude_none))
        return {"name": name_of(loss, LOSSES), **settings}

    @field_serializer("optimizer")
    def _table_of_optimizer(self, optimizer: Optimizer, info: Any) -> dict[str, Any]:
        """Name and settings; where None is left out, so are defaults that not all optimizers have.

        `with_changes` can then change the name.
        """
        table = {"name": optimizer.name}
        for key, value in optimizer.model_dump().items():
            is_shared = key in Optimizer.model_fields
            is_default = value == type(optimizer).model_fields[key].default
            if is_shared or not is_default or not info.exclude_none:
                table[key] = value
        return table

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
        if self.loss.examples == "queries":
            self._check_loss_of_queries()
        self.loss.check_training(
            reciprocal=self.model.reciprocal, batch_size=self.training.batch_size
        )
        return self

    def _check_loss_of_queries(self) -> None:
        loss = type(self.loss).__name__
        if not self.model.reciprocal:
            raise ValueError(
                f"{loss} is a loss of tail queries, so model.reciprocal should be true; it is false"
            )
        if self.training.order == "queries":
            raise ValueError(
                f"{loss} groups the answers of a query anyway; leave training.order out"
            )
        if self.regularizer.name != "none":
            raise ValueError(
                f"a regularizer is a mean over triples, and {loss} trains on queries, so "
                f"regularizer.name should be 'none'; it is '{self.regularizer.name}'"
            )

    def with_changes(self, changes: Mapping[str, Any], *, source: str = "") -> Recipe:
        """Another recipe with some values changed, named as `training.epochs`."""
        return recipe_from(changed(self.model_dump(exclude_none=True), changes), source=source)

    @property
    def own_classes(self) -> list[str]:
        """The classes that it names and that are not registered, as `package.module:Class`."""
        names = (
            self.model.name,
            self.regularizer.name,
            name_of(self.loss, LOSSES),
            self.optimizer.name,
        )
        return [name for name in names if ":" in name]

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
            lines = [f"[{name}]"]
            for key, value in section.items():
                if value is not None and value != {}:
                    lines.append(f"{key} = {_toml(value)}")
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"


# -- files -------------------------------------------------------------------


def list_recipes() -> list[str]:
    """Names of the recipes that ship with dualkg, such as `wn18rr/complex-dura`.

    Returns:
        The names, sorted.

    Examples:
        >>> "umls/complex-dura" in kg.list_recipes()
        True
    """
    names = []
    for folder in (files("dualkg") / "recipes").iterdir():
        if folder.is_dir():
            names += [f"{folder.name}/{file.name[:-5]}" for file in folder.iterdir()]
    return sorted(names)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Tables of a TOML file, or of a recipe that ships with dualkg, not yet validated.

    Classes that the tables name are checked: they must be trusted, or imported already.
    """
    try:
        tables = tomllib.loads(_read(path))
        names = list(named_classes(tables))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        # Also text that is not UTF-8, a number with thousands of digits, or a null in the path.
        raise RequestError(f"{path} is not TOML: {error}.") from None
    check_trusted(names, source=path)
    return tables


def _read(path: str | Path) -> str:
    """The text of a file, or of a recipe that ships with dualkg."""
    name = str(path)
    file = Path(path)
    if name.endswith(".toml") or file.is_file():
        return read_text(file, max_bytes=MAX_RECIPE)
    names = list_recipes()
    if name not in names:
        similar = one_of(close_matches(name, names))
        listed = similar or " `dualkg recipes` lists those that ship with dualkg."
        raise RequestError(f"{name} is neither a file nor the name of a recipe.{listed}")
    return files("dualkg").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")


CLASS_KEYS = (".model.name", ".loss.name", ".regularizer.name", ".optimizer.name")


def named_classes(tables: Any, path: str = "") -> Iterator[object]:
    """Values of `model.name`, `loss.name` and so on, also in lists of values to search."""
    if not isinstance(tables, dict):
        return
    for key, value in tables.items():
        key_path = f"{path}.{key}"
        yield from named_classes(value, key_path)
        if key_path.endswith(CLASS_KEYS):
            yield from value if isinstance(value, list) else [value]


def load_recipe(
    path: str | Path, *, changes: Mapping[str, Any] | None = None, trust_code: bool = False
) -> Recipe:
    """Read and validate a recipe by its path or its name, such as `wn18rr/complex-dura`.

    `changes` are values by their keys. A class of your own, `package.module:Class`, is imported if
    the recipe may name it: with `trust_code`.

    Args:
        path: A file, or the name of a recipe of the package.
        changes: Values by their keys, such as `model.dim`.
        trust_code: Whether the recipe may name classes that are not part of dualkg.

    Returns:
        The recipe.

    Examples:
        >>> kg.load_recipe("umls/complex-dura", changes={"model.dim": 8}).model.dim
        8
    """
    with trusted_code(trust_code):
        return recipe_from(changed(read_tables(path), changes or {}), source=str(path))


def checksum(text: str) -> str:
    """The sha256 of what a recipe says, as TOML; comments and spaces do not count.

    It is that of the text, because a later version of dualkg has more keys.
    """
    return hashlib.sha256(json.dumps(tomllib.loads(text), sort_keys=True).encode()).hexdigest()


def changed(tables: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with some values changed.

    A patience alone also turns validation on, and keeps the best weights.
    """
    tables = deepcopy(tables)
    for name, value in changes.items():
        put(tables, name, value)
    if not changes.get("validation.patience"):
        return tables
    validation = tables["validation"]
    if "validation.every" not in changes and not validation.get("every"):
        put(tables, "validation.every", 1)
        if "validation.keep" not in changes:
            put(tables, "validation.keep", "best")
    return tables


def recipe_from(tables: Mapping[str, Any], *, source: str) -> Recipe:
    """Validate tables as a recipe; the error is about the first problem."""
    try:
        return Recipe.model_validate(tables)
    except RequestError as error:
        raise invalid_recipe(source, error) from None


def invalid_recipe(source: str, problem: RequestError) -> RequestError:
    """A problem of a recipe, with the file or the argument that it comes from.

    A file has keys, so that they are not marked as options.
    """
    if not source:
        return problem
    return RequestError(unmarked(f"{source}: {problem}"))


def keys_like(key: str) -> list[str]:
    """Keys of all tables that are named so, or mean the same.

    `lr` gives [`optimizer.learning_rate`].
    """
    keys: dict[str, dict[str, None]] = {}
    for name, field in Recipe.model_fields.items():
        keys[name] = dict.fromkeys(getattr(field.annotation, "model_fields", ()))
    for table, registered in (("loss", LOSSES), ("optimizer", OPTIMIZERS)):
        for kind in registered.values():
            keys[table] |= dict.fromkeys(kind.model_fields)

    similar = []
    for table, settings in keys.items():
        similar += [f"{table}.{setting}" for setting in close_settings(key, settings)]
    return similar[:MAX_SUGGESTIONS]


def parse_changes(settings: Sequence[str]) -> dict[str, Any]:
    """`training.epochs=5` → {"training.epochs": 5}; values are TOML, or text where they are not."""
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise invalid_change(setting)
        if "." not in key:
            raise invalid_change(setting, [f"{similar}={text}" for similar in keys_like(key)])
        try:
            changes[key] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # no TOML, or a number or brackets without end
            changes[key] = text
    return changes


def invalid_change(change: str, suggestions: Sequence[str] = ()) -> RequestError:
    """The error of a change that is not written `section.key=value`."""
    return RequestError(
        "A change is written section.key=value, as in training.epochs=5; it is "
        f"'{change}'.{one_of(suggestions)}"
    )


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
        pairs = [f"{_toml(key)} = {_toml(item)}" for key, item in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings are TOML's, but for the delete character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

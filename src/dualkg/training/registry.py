"""From the words of a recipe to the objects they name, and back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from dualkg.data.graph import Graph, GraphShape
from dualkg.errors import RequestError, did_you_mean
from dualkg.losses import AnyLoss
from dualkg.losses.dropout import Dropouts
from dualkg.losses.negative_sampling import (
    BatchSampler,
    MarginRanking,
    NegativeSampling,
    Sampler,
    SharedSampler,
    Sides,
    UniformSampler,
)
from dualkg.losses.softmax import AllAnswers, CrossEntropy, TrainingAnswers, frequency_weights
from dualkg.models import MODELS
from dualkg.models.base import EmbeddingModel, Model
from dualkg.models.dual import Dual
from dualkg.regularizers import REGULARIZERS, Regularizer
from dualkg.training.recipe import Loss, ModelConfig, Recipe, RegularizerConfig, Section


def build_model(choice: ModelConfig, shape: GraphShape, *, seed: int) -> Model:
    """The model that a recipe names, with fresh parameters."""
    kind = find_class(choice.name, MODELS, EmbeddingModel)
    keywords: dict[str, Any] = {"dim": choice.dim, "reciprocal": choice.reciprocal, **choice.options}
    if choice.init_scale is not None:
        keywords["init_scale"] = choice.init_scale
    try:
        model = kind(shape, seed=seed, **keywords)
    except TypeError as error:
        raise RequestError(f"{choice.name} cannot be made from [model]: {error}.") from None
    return model if choice.dual == "none" else Dual(model, choice.dual)


def build_regularizer(choice: RegularizerConfig) -> Regularizer:
    """The regularizer that a recipe names; `plain` and `mapped` are refused by those that have none."""
    kind = find_class(choice.name, REGULARIZERS, Regularizer)
    keywords = choice.model_dump(exclude_none=True, exclude={"name", "options"}) | choice.options
    if choice.weight is None and choice.name != "none":
        raise RequestError(f"{choice.name} needs a weight, the paper's λ: set regularizer.weight.")
    try:
        regularizer: Regularizer = kind(**keywords)
    except TypeError:
        extra = " and ".join(key for key in ("plain", "mapped") if key in keywords)
        whose = f"{extra}: those are DURA's" if extra else f"such choice: {', '.join(keywords)}"
        raise RequestError(f"{choice.name} has no {whose}.") from None
    return regularizer


def describe_model(model: Model) -> ModelConfig:
    """The choice that makes a model like this one again."""
    own, options = _apart(model.config, ModelConfig)
    return ModelConfig.model_validate({"name": name_of(model.embedding, MODELS), **own, "options": options})


def describe_regularizer(regularizer: Regularizer) -> RegularizerConfig:
    own, options = _apart(regularizer.config, RegularizerConfig)
    return RegularizerConfig.model_validate({"name": name_of(regularizer, REGULARIZERS), **own, "options": options})


def _apart(choices: dict[str, object], table: type[Section]) -> tuple[dict[str, object], dict[str, object]]:
    """Choices that are keys of a recipe's table, and those that are a class's own."""
    own = {key: value for key, value in choices.items() if key in table.model_fields}
    return own, {key: value for key, value in choices.items() if key not in own}


def check_can_be_named(name: str) -> None:
    """Refuse to keep a run of a class that no other program could find."""
    module, _, kind = name.partition(":")
    if module == "__main__" or "<locals>" in kind:
        raise RequestError(
            f"{kind} cannot be found again by its name, so a run of it cannot be kept: define it at the top of a "
            f"module and import it from there."
        )


def name_of(thing: object, known: dict[str, Any]) -> str:
    """The short name of one of ours, `package.module:Class` of anyone else's."""
    kind = type(thing)
    ours = (name for name, listed in known.items() if listed is kind)
    return next(ours, f"{kind.__module__}:{kind.__qualname__}")


def find_class(name: str, known: dict[str, Any], base: type) -> Any:
    """One of ours by its short name, or `package.module:Class` from the path or the working folder."""
    if name in known:
        return known[name]
    module_name, colon, class_name = name.partition(":")
    kind = "model" if base is EmbeddingModel else base.__name__.lower()
    if not colon:
        near = did_you_mean(name, known) or f" There are {', '.join(known)}."
        raise RequestError(f"No {kind} is named '{name}'.{near} One's own is named package.module:Class.")
    found = getattr(_import(module_name, name), class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RequestError(f"'{name}' should be a subclass of dualkg's {base.__name__}; it is {found!r}.")
    return found


def _import(module_name: str, name: str) -> Any:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # a command is not started from the working folder's Python path, but people mean it
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # someone else's module may raise anything
        raise RequestError(f"'{name}' cannot be imported: {type(error).__name__}: {error}.") from None
    finally:
        if added:
            sys.path.remove(here)


def build_loss(recipe: Recipe, model: Model, graph: Graph) -> AnyLoss:
    """The loss of a recipe, with all that it knows of a graph where the model is."""
    choice, seed = recipe.loss, recipe.training.seed
    if choice.kind == "cross entropy":
        return _cross_entropy(recipe, model, graph)
    answers = TrainingAnswers(graph.train, graph.shape, device=model.device)
    if choice.kind == "all answers":
        return AllAnswers(
            answers,
            batch_size=recipe.training.batch_size,
            count_power=choice.count_power,
            dropouts=_dropouts(recipe, model),
            label_smoothing=choice.label_smoothing,
        )
    bernoulli = choice.sides == "bernoulli" and not model.reciprocal
    keywords: dict[str, Any] = {
        "sides": Sides(answers.head_chances() if bernoulli else None, both=choice.sides == "both"),
        "subsampling": answers if choice.subsampling else None,
        "seed": seed,
    }
    if choice.margin is not None:
        keywords["margin"] = choice.margin
    sampler = _sampler(choice, graph.shape.num_entities, known=None if choice.known else answers)
    if choice.kind == "margin":
        return MarginRanking(sampler, **keywords)
    return NegativeSampling(sampler, temperature=choice.temperature, **keywords)


def _cross_entropy(recipe: Recipe, model: Model, graph: Graph) -> CrossEntropy:
    choice, weights = recipe.loss, None
    if choice.frequency_weight:
        weights = frequency_weights(graph.train, graph.shape.num_entities, choice.frequency_weight)
        weights = weights.to(model.device, next(model.parameters()).dtype)
    return CrossEntropy(
        entity_weights=weights,
        relation_weight=choice.relation_weight,
        dropouts=_dropouts(recipe, model),
        label_smoothing=choice.label_smoothing,
        grouped_by_query=recipe.training.order == "queries",
    )


def _dropouts(recipe: Recipe, model: Model) -> Dropouts:
    shares = {"dropout": recipe.loss.dropout, "head_dropout": recipe.loss.head_dropout}
    for key, share in shares.items():
        if share and not model.embedding.euclidean:
            raise RequestError(
                f"Dropout sets coordinates to zero, and the numbers of {type(model).__name__} are not coordinates of a "
                f"vector space. Set loss.{key} to 0."
            )
    return Dropouts(images=shares["dropout"], heads=shares["head_dropout"], seed=recipe.training.seed)


def _sampler(choice: Loss, num_entities: int, *, known: TrainingAnswers | None) -> Sampler:
    if choice.negatives == "batch":
        return BatchSampler(known=known)
    kind = {"uniform": UniformSampler, "shared": SharedSampler}[choice.negatives]
    return kind(num_entities, num_negatives=choice.num_negatives, known=known)

"""From the words of a recipe to the objects they name, and back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError, did_you_mean
from dualkg.models import MODELS, BilinearModel, Dual, Model
from dualkg.regularizers import REGULARIZERS, Regularizer
from dualkg.training.recipe import ModelChoice, RegularizerChoice


def build_model(choice: ModelChoice, shape: GraphShape, *, seed: int) -> Model:
    """The model that a recipe names, with fresh parameters."""
    kind = find_class(choice.name, MODELS, BilinearModel)
    keywords: dict[str, Any] = {"dim": choice.dim, "reciprocal": choice.reciprocal, **choice.options}
    if choice.init_scale is not None:
        keywords["init_scale"] = choice.init_scale
    try:
        model = kind(shape, seed=seed, **keywords)
    except TypeError as error:
        raise RequestError(f"{choice.name} cannot be made from [model]: {error}.") from None
    return model if choice.dual == "none" else Dual(model, choice.dual)


def build_regularizer(choice: RegularizerChoice) -> Regularizer:
    """The regularizer that a recipe names; `plain` and `mapped` are refused by those that have none."""
    kind = find_class(choice.name, REGULARIZERS, Regularizer)
    keywords = choice.model_dump(exclude_none=True, exclude={"name"})
    if choice.weight is None and choice.name != "none":
        raise RequestError(f"{choice.name} needs a weight, the paper's λ: set regularizer.weight.")
    try:
        regularizer: Regularizer = kind(**keywords)
    except TypeError:
        extra = " and ".join(key for key in ("plain", "mapped") if key in keywords)
        raise RequestError(f"{choice.name} has no {extra or 'such choice'}: those are DURA's.") from None
    return regularizer


def describe_model(model: Model) -> ModelChoice:
    """The choice that makes a model like this one again."""
    known = set(ModelChoice.model_fields)
    choices = model.choices
    options = {key: value for key, value in choices.items() if key not in known}
    return ModelChoice.model_validate(
        {
            "name": name_of(model.bilinear, MODELS),
            **{k: v for k, v in choices.items() if k in known},
            "options": options,
        }
    )


def describe_regularizer(regularizer: Regularizer) -> RegularizerChoice:
    return RegularizerChoice.model_validate({"name": name_of(regularizer, REGULARIZERS), **regularizer.choices})


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
    kind = "model" if base is BilinearModel else base.__name__.lower()
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
    except ImportError as error:
        raise RequestError(f"'{name}' cannot be imported: {error}.") from None
    finally:
        if added:
            sys.path.remove(here)

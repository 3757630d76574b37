"""The recipe at which automatic tuning begins, and the values of its hyperparameters to try."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from dualkg.data.graph import Graph
from dualkg.models import MODELS
from dualkg.models.base import EmbeddingModel
from dualkg.training import api
from dualkg.training.classes import known_name
from dualkg.training.costs import count_query_groups
from dualkg.training.recipe import Data, Recipe

Value = bool | int | float | str
Params = dict[str, Value]  # hyperparameters by the dotted names of their recipe keys
# Hyperparameters and their values in order; the search moves between neighbours.
Dimensions = dict[str, tuple[Value, ...]]

EPOCHS = "training.epochs"
# Recipe keys that name or concern embeddings and how they are trained.
CHOICES_OF_MODEL = ("model.", "loss.", "regularizer.", "optimizer.", "training.batch_size")
SMALL_GRAPH = 20_000  # training triples; the final training takes seconds below that
# Up to this number of training triples × entities, a training has more epochs, as it is cheap.
CHEAP_PRODUCTS = {"cpu": 5e7, "cuda": 2e10}
# On a GPU: the dimension of graphs with up to this number of entities. The paper has 2000 for
# WN18RR and FB15k-237, and 1000 for YAGO3-10.
DIMS_BY_ENTITIES = {50_000: 2000, 250_000: 1000, 10**6: 400}
MIN_GPU_DIM = 200
# On a CPU: up to this number of training triples × entities, every triple is scored against all
# entities. Beyond it, triples are grouped by query or entities sampled, which costs some MRR.
MAX_EXACT_PRODUCT = 2e8
# The softmax is sampled from this number of entities on, over this number of negatives.
MIN_SAMPLED_ENTITIES = {"cpu": 5_000, "cuda": 250_000}
NUM_SAMPLED = {"cpu": 2_000, "cuda": 10_000}
# On a CPU, triples are grouped by query if the number of queries is at most this share of the
# number of triples, as groups then save most of the work. Otherwise they save little, and sampled
# softmax is less exact with them.
MAX_GROUPED_SHARE = 0.4
MATRIX_MODELS = ("RESCAL", "TuckER", "SE")  # a relation has dim² parameters
MAX_MATRIX_DIM = 256
MAX_DIM_OF_STARTS = 500  # of the models in `STARTS`
MAX_NEGATIVES = 1024  # of negative sampling, shared by a batch
# A path network is trained for this number of steps, but for no fewer and no more epochs than
# these: more epochs would overfit a small graph.
NETWORK_STEPS = {"cpu": 1_000, "cuda": 24_000}
MIN_NETWORK_EPOCHS = 3
MAX_NETWORK_EPOCHS = 8

# A path network on a CPU: fewer and smaller vectors, and the answers of a query at once.
CPU_NETWORK = {
    "model.dim": 16,
    "model.options.steps": 3,
    "training.order": "queries",
    "training.batch_size": 64,
}

# Near the settings of Sun et al. (2019).
DISTANCE_LOSS = {
    "regularizer.name": "none",
    "loss.name": "NegativeSampling",
    "loss.sampler": "shared",
    "loss.margin": 6.0,
    "loss.adversarial_temperature": 1.0,
    "optimizer.name": "Adam",
    "optimizer.learning_rate": 0.0005,
    "optimizer.decay_from": 0.0,
}
# Relations that are matrices: the paper has λ1 = λ2 for RESCAL on WN18RR.
EQUAL_WEIGHTS = {
    "regularizer.plain": 1.0,
    "regularizer.mapped": 1.0,
    "optimizer.learning_rate": 0.1,
}
# Models whose search does not begin at the values of `default_recipe`.
STARTS: dict[str, dict[str, Any]] = {
    "RESCAL": EQUAL_WEIGHTS,
    "TuckER": EQUAL_WEIGHTS,
    "MuRP": {
        **DISTANCE_LOSS,
        "loss.margin": 0.0,
        "optimizer.learning_rate": 0.002,
        "optimizer.epsilon": 1e-4,
    },
    "TransE": DISTANCE_LOSS,
    "RotatE": DISTANCE_LOSS,
    "ModE": DISTANCE_LOSS,
    "HAKE": DISTANCE_LOSS,
}


def is_small(graph: Graph) -> bool:
    """Whether the final training takes seconds, so that trials may be as long."""
    return len(graph.train) < SMALL_GRAPH


def starting_recipe(
    data: Data,
    graph: Graph,
    device: torch.device,
    changes: Mapping[str, Any],
    *,
    starts: Mapping[str, Mapping[str, Any]] = STARTS,
) -> Recipe:
    """The recipe at which automatic tuning begins."""
    model = str(known_name(changes.get("model.name", "ComplEx"), MODELS))
    settings_of_model = starts.get(model, {})
    if model in MODELS and MODELS[model].recipe_defaults:
        settings_of_model = MODELS[model].recipe_defaults
    if model == "PathNetwork" and device.type == "cpu":
        settings_of_model = {**settings_of_model, **CPU_NETWORK}
    has_own_loss = any(key.startswith("loss.") for key in settings_of_model)
    softmax = {} if has_own_loss else fast_softmax(graph, device, changes)
    is_grouped = softmax.get("training.order") == "queries"
    start = {"optimizer.decay_from": 0.5, **softmax}
    start |= _default_size(graph, device, model, has_own_loss=has_own_loss, is_grouped=is_grouped)
    if not is_small(graph) and "optimizer.name" not in changes:
        start["optimizer.learning_rate"] = 0.1
        if device.type == "cpu" and not has_own_loss:
            start["optimizer.learning_rate"] = 0.2  # there are few epochs
    usual = api.default_recipe(data, graph, changes)
    start |= _applicable(settings_of_model, usual, changes)
    if is_small(graph) and start.get("optimizer.name") == "Adam":
        start["optimizer.learning_rate"] = 0.01  # there are few steps
    start |= changes
    if start.get("loss.sampler") == "shared":
        start.setdefault("loss.num_negatives", min(MAX_NEGATIVES, len(graph.entities)))
    if model in MODELS and "loss.margin" in start and model != "MuRP":
        init_scale = init_scale_of_margin(start["loss.margin"], start["model.dim"])
        start.setdefault("model.init_scale", init_scale)
    return api.default_recipe(data, graph, start)


def _applicable(
    settings_of_model: Mapping[str, Any], usual: Recipe, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a model that the changes of its user leave applicable.

    A loss or a regularizer that the user names comes without our settings, and an option or a loss
    that the user names may leave DURA undefined.
    """
    has_dura = usual.regularizer.plain is not None
    applicable = {}
    for key, value in settings_of_model.items():
        table = key.partition(".")[0]
        is_defined = has_dura or key not in ("regularizer.plain", "regularizer.mapped")
        is_named = table != "model" and f"{table}.name" in changes
        if is_defined and not is_named:
            applicable[key] = value
    return applicable


def fast_softmax(graph: Graph, device: torch.device, changes: Mapping[str, Any]) -> dict[str, Any]:
    """How the softmax of a large graph is computed faster: by query, and over sampled entities.

    A loss that the user chose is left as it is.
    """
    start: dict[str, Any] = {}
    has_own_loss = any(key.startswith("loss.") for key in changes)
    if has_own_loss or "training.order" in changes or is_exact(graph, device):
        return start
    is_sampled = len(graph.entities) >= MIN_SAMPLED_ENTITIES[device.type]
    if is_sampled:
        start["loss.name"] = "SampledSoftmax"
        start["loss.num_negatives"] = NUM_SAMPLED[device.type]
    if device.type == "cpu" and changes.get("model.reciprocal", True):
        share = count_query_groups(graph) / max(1, 2 * len(graph.train))
        if share <= MAX_GROUPED_SHARE or not is_sampled:
            start["training.order"] = "queries"
    return start


def is_exact(graph: Graph, device: torch.device) -> bool:
    """Whether every triple is scored against all entities, as is best where it can be afforded."""
    num_entities = len(graph.entities)
    if device.type == "cuda":
        return num_entities < MIN_SAMPLED_ENTITIES["cuda"]
    return is_small(graph) or num_entities * len(graph.train) <= MAX_EXACT_PRODUCT


def other_start(
    start: Recipe, graph: Graph, device: torch.device, fixed: Collection[str]
) -> Recipe | None:
    """A second recipe at which the search may begin, or None.

    A distance model on a small graph may also be trained 1-vs-all, as without tuning.
    """
    has_own_loss = "loss.name" in STARTS.get(start.model.name, {})
    if not is_small(graph) or not has_own_loss:
        return None
    if any(key.startswith(("loss.", "regularizer.", "optimizer.")) for key in fixed):
        return None
    given = {key: start.value_of(key) for key in fixed}
    if start != starting_recipe(start.data, graph, device, given):
        return None  # the search begins at a recipe of the user's
    return starting_recipe(start.data, graph, device, given, starts={})


def network_start(
    start: Recipe, graph: Graph, device: torch.device, fixed: Collection[str]
) -> Recipe | None:
    """The recipe of a path network that embeddings are compared with, or None.

    It is tried on a GPU, and for small graphs on a CPU, where the user chose nothing of the model
    and its training.
    """
    is_chosen = any(key.startswith(CHOICES_OF_MODEL) for key in fixed)
    on_gpu = device.type == "cuda"
    if is_chosen or graph.is_large or not (on_gpu or is_small(graph)):
        return None
    given = {key: start.value_of(key) for key in fixed}
    if start != starting_recipe(start.data, graph, device, given):
        return None  # the search begins at a recipe of the user's
    given["model.name"] = "PathNetwork"
    if on_gpu:
        network = api.default_recipe(start.data, graph, given)
    else:
        network = starting_recipe(start.data, graph, device, given)
    if EPOCHS in fixed:
        return network
    steps_of_epoch = -(-2 * len(graph.train) // network.training.batch_size)
    num_steps = NETWORK_STEPS["cuda" if on_gpu else "cpu"]
    epochs = round(num_steps / max(1, steps_of_epoch))
    changes: Params = {EPOCHS: min(max(epochs, MIN_NETWORK_EPOCHS), MAX_NETWORK_EPOCHS)}
    if epochs < MIN_NETWORK_EPOCHS:
        changes["training.batches_per_epoch"] = num_steps // MIN_NETWORK_EPOCHS
    return network.with_changes(changes)


def dimensions_of(
    recipe: Recipe, fixed: Collection[str] = (), *, weight_factor: float = 10**0.5
) -> Dimensions:
    """What matters for the model and the loss of a recipe, most important first.

    Keys in `fixed` are left out. `weight_factor` is the factor between neighbouring values of λ.
    """
    dimensions: Dimensions = {}
    weight = recipe.regularizer.weight
    if recipe.regularizer.name != "none" and weight:
        dimensions["regularizer.weight"] = values_around(weight, weight_factor, below=4, above=2)
    has_embeddings = issubclass(MODELS.get(recipe.model.name, EmbeddingModel), EmbeddingModel)
    for key, values in recipe.loss.tuned.items():
        # A path network would answer a query for every relation.
        if has_embeddings or key != "relation_weight":
            dimensions[f"loss.{key}"] = values
    learning_rate = recipe.optimizer.learning_rate
    dimensions["optimizer.learning_rate"] = values_around(learning_rate, 2, below=3, above=2)
    batch_sizes = values_around(recipe.training.batch_size, 2, below=2, above=2)
    dimensions["training.batch_size"] = tuple(int(size) for size in batch_sizes)
    return {key: values for key, values in dimensions.items() if key not in fixed}


def values_around(value: float, factor: float, *, below: int, above: int) -> tuple[float, ...]:
    """`value` times powers of `factor`, rounded to two digits."""
    powers = range(-below, above + 1)
    return tuple(float(f"{value * factor**power:.2g}") for power in powers)


def init_scale_of_margin(margin: float, dim: int) -> float:
    """The standard deviation of numbers that are uniform within (γ + 2) / dim.

    This is the initialization of Sun et al. (2019).
    """
    return round((margin + 2) / dim / 3**0.5, 5)


def _default_size(
    graph: Graph, device: torch.device, model: str, *, has_own_loss: bool, is_grouped: bool
) -> dict[str, int]:
    """`model.dim` and `training.epochs`: larger where training is cheap, as on a GPU."""
    num_entities = len(graph.entities)
    is_cheap = num_entities * len(graph.train) <= CHEAP_PRODUCTS[device.type]
    if device.type == "cpu" and (is_small(graph) or has_own_loss):
        dim = 200
        epochs = 50 if is_cheap else 20
    elif device.type == "cpu":
        # A graph with few triples overfits.
        dim = 300 if is_grouped else 200
        epochs = 20
        if is_exact(graph, device):
            dim = 400
            epochs = 15
    elif is_small(graph):
        dim = 500
        epochs = 50
    else:
        fitting = [dim for limit, dim in DIMS_BY_ENTITIES.items() if num_entities <= limit]
        dim = fitting[0] if fitting else MIN_GPU_DIM
        epochs = 100 if is_cheap else 50
    if is_small(graph) and not has_own_loss:
        epochs = 20  # 1-vs-all overfits soon
    if model in STARTS:
        dim = min(dim, MAX_DIM_OF_STARTS)
    if model in MATRIX_MODELS:
        dim = min(dim, MAX_MATRIX_DIM)
    return {"model.dim": dim, "training.epochs": epochs}

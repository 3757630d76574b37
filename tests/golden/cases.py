"""The trainings that are recorded: settings of recipes, for everything that is registered.

A new model, regularizer, loss or optimizer gets its trainings without an entry here. Settings that
only one class has are listed below, and more may be added for a new class.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from . import adapter

Settings = Mapping[str, Any]

DEFAULTS: Settings = {
    "model.dim": 8,
    "training.epochs": 2,
    "training.batch_size": 32,
    "training.seed": 0,
    "training.engine": "reference",
    "training.precision": "float32",
}

FAST: Settings = {"training.engine": "fast"}
ENGINES: tuple[Settings, ...] = ({"training.engine": "reference"}, FAST)

RECIPROCAL: Settings = {"model.reciprocal": True}
NOT_RECIPROCAL: Settings = {"model.reciprocal": False}

DURA: Settings = {
    "regularizer.name": "DURA",
    "regularizer.weight": 0.1,
    "regularizer.plain": 0.5,
    "regularizer.mapped": 1.5,
}
UNIFORM: Settings = {"loss.sampler": "uniform", "loss.num_negatives": 8}
SHARED: Settings = {"loss.sampler": "shared", "loss.num_negatives": 8}
IN_BATCH: Settings = {"loss.sampler": "in-batch"}
NEGATIVE_SAMPLING: Settings = {"loss.name": "NegativeSampling"}

# The models that every regularizer, optimizer and precision is trained with: one table of entities,
# two tables, and matrices.
COMPLEX: Settings = {"model.name": "ComplEx"}
CP: Settings = {"model.name": "CP"}
RESCAL: Settings = {"model.name": "RESCAL"}
FACTORIZATIONS = (COMPLEX, CP, RESCAL)
TRANSE: Settings = {"model.name": "TransE"}

MODEL_OPTIONS: tuple[Settings, ...] = (
    *(
        {"model.name": name, "model.options.norm": norm}
        for name, norm in product(("TransE", "RotatE", "ModE", "SE"), (2, "squared"))
    ),
    {"model.name": "QuatE", "model.options.normalized": False},
    {"model.name": "TuckER", "model.options.relation_dim": 3},
    {"model.name": "TuckER", "model.options.batch_norm": True},
    {"model.name": "MuRP", "model.options.signs": True},
    {"model.name": "HAKE", "model.options.modulus_weight": 2.0, "model.options.phase_weight": 0.25},
)

LOSS_SETTINGS: Mapping[str, Settings] = {
    "SampledSoftmax": {"loss.num_negatives": 8},
    "NegativeSampling": UNIFORM,
    "MarginRanking": UNIFORM,
}

ONE_VS_ALL: tuple[Settings, ...] = (
    {"loss.frequency_weight": 0.9},
    {"loss.relation_weight": 0.5},
    {"loss.dropout": 0.3},
    {"loss.head_dropout": 0.3},
    {"loss.label_smoothing": 0.1},
    {
        "loss.dropout": 0.2,
        "loss.head_dropout": 0.2,
        "loss.label_smoothing": 0.1,
        "loss.frequency_weight": 0.5,
    },
)

OPTIMIZER_SETTINGS: Mapping[str, Settings] = {
    "Adam": {"optimizer.learning_rate": 0.01},
    "SGD": {"optimizer.learning_rate": 0.5},
}

SCHEDULES: tuple[Settings, ...] = (
    {"optimizer.schedule": "linear"},
    {"optimizer.schedule": "cosine", "optimizer.decay_from": 0.3},
    {"optimizer.epsilon": 0.001},
    {"optimizer.average_from": 0.3},
    {"validation.every": 1, "validation.patience": 1, "validation.keep": "best"},
)

PATH_NETWORK: Settings = {
    "model.name": "PathNetwork",
    "model.options.steps": 3,
    "model.options.edge_dropout": 0.1,
    "loss.exclude_known": True,
    "optimizer.name": "Adam",
    "optimizer.learning_rate": 0.005,
}
NETWORKS: tuple[Settings, ...] = (
    {},
    {"model.options.remove_pairs": True},
    {"optimizer.warm_up": 0.25, "optimizer.decay_from": 0.5, "training.seed": 7},
)


def cases() -> dict[str, Settings]:
    """All recorded trainings: settings by an id that is made of them."""
    return {_id(settings): settings for settings in _all_settings()}


def network_cases() -> dict[str, Settings]:
    """The recorded trainings of path networks, in float64, by their ids."""
    settings_by_id = {}
    for changes in NETWORKS:
        id = _id({"model.name": PATH_NETWORK["model.name"]} | changes)
        settings_by_id[id] = PATH_NETWORK | changes
    return settings_by_id


def _id(settings: Settings) -> str:
    """`ComplEx loss.name=KvsAll`: the model, and what differs from the defaults."""
    parts = [settings["model.name"]]
    for key, value in settings.items():
        if key != "model.name" and DEFAULTS.get(key) != value:
            parts.append(f"{key}={value}")
    return " ".join(parts)


def _all_settings() -> Iterator[Settings]:
    """One training of each class, and of each setting that changes how a step is computed."""
    for name, engine in product(adapter.MODELS, ENGINES):
        yield {"model.name": name} | RECIPROCAL | engine
    yield from MODEL_OPTIONS
    for model in FACTORIZATIONS:
        yield model | {"model.dual": "tail"} | RECIPROCAL | FAST
        yield model | NOT_RECIPROCAL | FAST

    for name, engine in product(adapter.REGULARIZERS, ENGINES):
        if name != "none":
            yield COMPLEX | {"regularizer.name": name, "regularizer.weight": 0.1} | engine

    for name in adapter.LOSSES:
        yield COMPLEX | RECIPROCAL | {"loss.name": name} | LOSS_SETTINGS.get(name, {})
    for sampler in (SHARED, IN_BATCH):
        sampling = NOT_RECIPROCAL | sampler | {"loss.corruption": "both"}
        yield {"model.name": "RotatE"} | NEGATIVE_SAMPLING | sampling
    for settings, engine in product(ONE_VS_ALL, ENGINES):
        yield COMPLEX | settings | engine
    for model, engine in product((COMPLEX, RESCAL), ENGINES):
        yield model | DURA | engine | {"training.order": "queries"}

    for name in adapter.OPTIMIZERS:
        yield COMPLEX | {"optimizer.name": name} | OPTIMIZER_SETTINGS.get(name, {}) | DURA
    for settings in SCHEDULES:
        yield COMPLEX | settings | {"training.epochs": 3}
    for model in FACTORIZATIONS:
        yield model | DURA | FAST | {"training.precision": "bf16"}


def depends_on_processor(settings: Settings) -> bool:
    """Whether another processor chooses another precision, or rounds it differently."""
    return settings.get("training.precision") in ("auto", "bf16")

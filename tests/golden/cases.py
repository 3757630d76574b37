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
DIRECTIONS: tuple[Settings, ...] = ({"model.reciprocal": True}, {"model.reciprocal": False})

DURA: Settings = {
    "regularizer.name": "DURA",
    "regularizer.weight": 0.1,
    "regularizer.plain": 0.5,
    "regularizer.mapped": 1.5,
}
K_VS_ALL: Settings = {"loss.name": "KvsAll"}
UNIFORM: Settings = {"loss.sampler": "uniform", "loss.num_negatives": 8}
SHARED: Settings = {"loss.sampler": "shared", "loss.num_negatives": 8}
IN_BATCH: Settings = {"loss.sampler": "in-batch"}
NEGATIVE_SAMPLING: Settings = {"loss.name": "NegativeSampling"}
MARGIN_RANKING: Settings = {"loss.name": "MarginRanking"}

# The models that every regularizer, optimizer and precision is trained with: one table of entities,
# two tables, and matrices.
COMPLEX: Settings = {"model.name": "ComplEx"}
CP: Settings = {"model.name": "CP"}
RESCAL: Settings = {"model.name": "RESCAL"}
FACTORIZATIONS = (COMPLEX, CP, RESCAL)
TRANSE: Settings = {"model.name": "TransE"}
TRANSE_SQUARED: Settings = TRANSE | {"model.options.norm": "squared"}

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
    {"loss.frequency_weight": 0.5, "loss.relation_weight": 0.25, "loss.dropout": 0.2},
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
    {"model.options.steps": 1, "model.options.edge_dropout": 0.0},
    {"model.options.steps": 6, "model.options.edge_dropout": 0.5, "model.dim": 5},
    {"loss.exclude_known": False, "optimizer.name": "SGD", "optimizer.learning_rate": 0.5},
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
    for name in adapter.MODELS:
        yield from _of_model({"model.name": name})
    for model, dual in product(FACTORIZATIONS, ("tail", "head")):
        yield from _of_model(model | {"model.dual": dual})

    for options, engine in product(MODEL_OPTIONS, ENGINES):
        yield options | engine
    yield TRANSE_SQUARED | {"model.reciprocal": False} | FAST

    for name in adapter.REGULARIZERS:
        yield from _of_regularizer(name)
    yield from _of_losses()
    yield from _of_optimizers()
    yield from _of_sizes_and_precisions()


def _of_model(model: Settings) -> Iterator[Settings]:
    for direction, engine in product(DIRECTIONS, ENGINES):
        yield model | direction | engine
    yield model | K_VS_ALL
    yield model | NEGATIVE_SAMPLING | UNIFORM | {"loss.subsampling": True}
    yield model | NEGATIVE_SAMPLING | IN_BATCH
    yield (
        model
        | {"model.reciprocal": False}
        | MARGIN_RANKING
        | SHARED
        | {"loss.corruption": "bernoulli"}
    )
    yield model | {"loss.relation_weight": 0.5}
    for engine in ENGINES:
        yield model | DURA | engine


def _of_regularizer(name: str) -> Iterator[Settings]:
    if name == "none":
        return
    regularizer = {"regularizer.name": name, "regularizer.weight": 0.1}
    for model, engine in product(FACTORIZATIONS, ENGINES):
        yield model | regularizer | engine
    yield COMPLEX | {"model.reciprocal": False} | regularizer | FAST
    yield TRANSE_SQUARED | regularizer


def _of_losses() -> Iterator[Settings]:
    for name, direction in product(adapter.LOSSES, DIRECTIONS):
        loss = {"loss.name": name} | LOSS_SETTINGS.get(name, {})
        yield COMPLEX | direction | loss

    for settings, engine in product(ONE_VS_ALL, ENGINES):
        yield COMPLEX | settings | engine
        yield RESCAL | {"model.reciprocal": False} | settings | DURA | engine
    yield TRANSE_SQUARED | ONE_VS_ALL[-2] | FAST
    yield TRANSE | {"loss.dropout": 0.2}

    for model, engine in product((COMPLEX, RESCAL), ENGINES):
        grouped = model | DURA | engine | {"training.order": "queries"}
        yield grouped
        yield grouped | {"loss.dropout": 0.3}

    yield COMPLEX | K_VS_ALL | {"loss.count_exponent": 0.5}
    yield COMPLEX | K_VS_ALL | {"loss.label_smoothing": 0.1}
    yield COMPLEX | K_VS_ALL | {"loss.dropout": 0.2, "loss.head_dropout": 0.3}

    corruptions = ("uniform", "bernoulli", "both")
    for sampler, corruption in product((UNIFORM, SHARED, IN_BATCH), corruptions):
        sampling = {"model.reciprocal": False} | sampler | {"loss.corruption": corruption}
        yield COMPLEX | MARGIN_RANKING | sampling
        yield {"model.name": "RotatE"} | NEGATIVE_SAMPLING | sampling

    transe = TRANSE | {"model.reciprocal": False} | NEGATIVE_SAMPLING | UNIFORM
    yield transe | {"loss.adversarial_temperature": 0.5}
    yield transe | {"loss.adversarial_temperature": 0.0}
    yield transe | {"loss.margin": 3.0}
    yield transe | {"loss.filtered": False}
    yield RESCAL | MARGIN_RANKING | SHARED | {"loss.margin": 2.0, "loss.subsampling": True} | DURA


def _of_optimizers() -> Iterator[Settings]:
    for name in adapter.OPTIMIZERS:
        optimizer = {"optimizer.name": name} | OPTIMIZER_SETTINGS.get(name, {})
        for model, engine in product(FACTORIZATIONS, ENGINES):
            yield model | optimizer | DURA | engine
        yield TRANSE | optimizer | MARGIN_RANKING | UNIFORM
        yield {"model.name": "HAKE"} | optimizer | NEGATIVE_SAMPLING | SHARED

    for settings, engine in product(SCHEDULES, ENGINES):
        yield COMPLEX | settings | engine | {"training.epochs": 3}
    yield CP | {"optimizer.name": "Adam", "optimizer.epsilon": 1e-4, "training.epochs": 3}
    yield (
        COMPLEX
        | LOSS_SETTINGS["SampledSoftmax"]
        | {
            "loss.name": "SampledSoftmax",
            "optimizer.sums": "rows",
        }
    )


def _of_sizes_and_precisions() -> Iterator[Settings]:
    for model in FACTORIZATIONS:
        yield model | DURA | {"training.engine": "auto", "training.precision": "auto"}
        yield model | DURA | FAST | {"training.precision": "bf16"}
    yield TRANSE_SQUARED | {"training.engine": "auto", "training.precision": "auto"}
    yield COMPLEX | {"training.precision": "tf32"}

    yield COMPLEX | {"model.init_scale": "xavier", "training.seed": 7}
    yield RESCAL | {"model.dim": 5, "model.init_scale": 0.1, "training.batch_size": 50} | FAST
    yield TRANSE | {"model.dim": 13, "model.init_scale": "xavier", "training.batch_size": 1000}
    yield {"model.name": "DistMult", "model.dim": 1, "training.batch_size": 7} | FAST
    yield CP | {"model.init_scale": 0.0}


def depends_on_processor(settings: Settings) -> bool:
    """Whether another processor chooses another precision, or rounds it differently."""
    return settings.get("training.precision") in ("auto", "bf16")

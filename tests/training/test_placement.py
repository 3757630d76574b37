"""Where entity tables are: chosen by what fits a GPU, requested, or refused."""

import re

import pytest
import torch

import dualkg as kg
from dualkg.data.graph import GraphShape
from dualkg.tables.base import DeviceTables
from dualkg.tables.host import HostTables
from dualkg.training.memory import (
    RANKING_BYTES,
)
from dualkg.training.placement import bytes_of_weights, choose_tables
from dualkg.training.trainer import Trainer
from tests.conftest import graph_of

GPU = torch.device("cuda")
CPU = torch.device("cpu")
SAMPLED = {"loss.name": "SampledSoftmax", "loss.num_negatives": 10, "training.batch_size": 20}
SHAPE = GraphShape(1000, 7)
LARGE = GraphShape(10_000_000, 7)


def recipe_of(**changes: object) -> kg.Recipe:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return kg.Recipe().with_changes({"model.dim": 3, **SAMPLED, **settings})


def chosen(recipe: kg.Recipe, available: float) -> type:
    return type(choose_tables(recipe, LARGE, device=GPU, available=available))


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        # 6 numbers of 1,000 entities and 14 relations, twice: weights and sums of squares.
        ({}, 2 * 6 * (1000 + 14)),
        ({"model__reciprocal": False}, 2 * 6 * (1000 + 7)),
        # One sum for each entity; those of relations are of single numbers.
        ({"optimizer__sums": "rows"}, 6 * 1000 + 1000 + 2 * 6 * 14),
        ({"model__name": "CP"}, 2 * (2 * 3 * 1000 + 3 * 14)),
        ({"model__name": "RESCAL"}, 2 * (3 * 1000 + 9 * 14)),
        ({"optimizer__name": "Adam"}, 3 * 6 * (1000 + 14)),
        # A second set of weights.
        ({"optimizer__average_from": 0.5}, 3 * 6 * (1000 + 14)),
    ],
)
def test_bytes_of_weights_by_hand(changes, numbers):
    recipe = recipe_of(**changes)
    small = recipe.model.build(GraphShape(2, 1), seed=0)
    assert bytes_of_weights(recipe, small, SHAPE) == 4 * numbers + RANKING_BYTES


def test_host_memory_is_chosen_where_weights_and_sums_do_not_fit_the_gpu():
    needed = 4 * 2 * 6 * (LARGE.num_entities + 14) + RANKING_BYTES
    assert chosen(recipe_of(), needed / 0.94) is DeviceTables
    assert chosen(recipe_of(), needed / 0.96) is HostTables
    # Smaller sums fit again.
    assert chosen(recipe_of(optimizer__sums="rows"), needed / 0.96) is DeviceTables
    assert chosen(recipe_of(training__entity_tables="device"), 0) is DeviceTables
    assert chosen(recipe_of(training__entity_tables="host"), 2 * needed) is HostTables


def test_what_host_memory_cannot_train_is_left_on_the_gpu():
    assert chosen(recipe_of(optimizer__name="Adam"), 0) is DeviceTables
    options = {"device": GPU, "available": 0, "has_rejected": True}
    assert type(choose_tables(recipe_of(), SHAPE, **options)) is DeviceTables
    full = kg.Recipe().with_changes({"model.dim": 3})
    assert chosen(full, 0) is DeviceTables
    assert type(choose_tables(recipe_of(), SHAPE, device=CPU, available=0)) is DeviceTables


REFUSED = {
    "OneVsAll": (
        {"loss": {"name": "OneVsAll"}},
        "are for losses over sampled entities, which read few rows; OneVsAll reads all",
    ),
    "KvsAll": (
        {"loss": {"name": "KvsAll"}},
        "are for losses over sampled entities, which read few rows; KvsAll reads all",
    ),
    "Adam": (
        {"optimizer": {"name": "Adam"}, "loss": SAMPLED},
        "are for Adagrad, which leaves rows without a gradient as they are; `optimizer.name` is "
        "Adam",
    ),
    "UnweightedDURA": (
        {"regularizer": {"name": "UnweightedDURA", "weight": 0.1}, "loss": SAMPLED},
        "are for regularizers of the rows of a batch, and UnweightedDURA reads whole tables",
    ),
    "PathNetwork": (
        {"model": {"name": "PathNetwork"}},
        "are for models with embeddings, and PathNetwork has none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_host_memory_cannot_train_is_refused(name):
    tables, reason = REFUSED[name]
    changes = {"training.entity_tables": "host"}
    for section, table in tables.items():
        for key, value in table.items():
            changes[key if "." in key else f"{section}.{key}"] = value
    graph = graph_of([(0, 0, 1), (1, 0, 2)])
    sentence = f"Entity tables in host memory {reason}. Use `training.entity_tables=device`."
    with pytest.raises(kg.RequestError, match=re.escape(sentence)):
        Trainer.of_recipe(kg.Recipe().with_changes(changes), graph, device=CPU)


def test_the_engine_says_where_tables_are():
    graph = graph_of([(i, 0, i + 1) for i in range(30)])
    trainer = Trainer.of_recipe(recipe_of(training__entity_tables="host"), graph, device=CPU)
    assert trainer.describe_engine().startswith("fast step, float32, ")
    assert trainer.describe_engine().endswith(", entity tables in host memory")
    ordinary = Trainer.of_recipe(recipe_of(), graph, device=CPU)
    assert "host memory" not in ordinary.describe_engine()

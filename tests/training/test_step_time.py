"""The time of a step, estimated by hand and measured."""

import math

import pytest
import torch

import dualkg as kg
from dualkg.training import step_time
from dualkg.training.engines import Engine
from dualkg.training.recipe import Recipe
from dualkg.training.step_time import (
    Rates,
    estimate_step,
    measure_gradients,
    measure_rates,
    step_seconds,
)
from dualkg.training.trainer import Trainer

CPU = torch.device("cpu")


def test_the_time_of_a_step_by_hand():
    """2 triples, 5 candidates, 3 numbers: 180 operations; 4 passes over 10 scores of 2 bytes, 6
    over 7 rows of 12.
    """
    seconds = step_seconds(
        Rates(180.0, 584.0, 100.0), batch_size=2, candidates=5, rows=7, width=3, score_bytes=2
    )
    assert seconds == pytest.approx(1 + 1 + 2)


def test_rates_are_measured_for_products_of_any_shape(monkeypatch):
    monkeypatch.setitem(step_time.PROBES, "cpu", step_time.Probe(2**14, 1, 4))
    for batch_size, width in ((1, 1), (100_000, 3), (7, 50_000)):
        assert all(
            0 < rate < math.inf
            for rate in measure_rates(CPU, torch.float32, batch_size=batch_size, width=width)
        )


def test_gradients_are_timed_without_a_change() -> None:
    graph = kg.load_graph("world")
    changes = {"data.graph": "world", "model.dim": 4, "loss.name": "SampledSoftmax"}
    recipe = Recipe().with_changes({**changes, "training.engine": "reference"})
    trainer = Trainer.of_recipe(recipe, graph, device=torch.device("cpu"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert measure_gradients(trainer.step, trainer.examples[:50]) > 0
    assert all(
        torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()
    )
    assert all(table.grad is None for table in trainer.model.parameters())


@pytest.mark.parametrize(
    ("loss", "candidates", "rows"),
    [({}, 10, 10), ({"loss.name": "SampledSoftmax", "loss.num_negatives": 4}, 4, 10)],
)
def test_the_formula_of_a_step_by_hand(loss, candidates, rows):
    """Rates of 1 operation, and of 1 byte, a second; 3 triples, rows of 6 numbers.

    Of 10 entities, 3 heads, 3 tails and 4 negatives are read.
    """
    model = kg.ComplEx(kg.GraphShape(10, 2), dim=3)
    recipe = kg.Recipe().with_changes({**loss, "training.batch_size": 3})
    engine = Engine("autograd", "float32", CPU)
    of_products = estimate_step(recipe, model, engine, rates=Rates(1.0, math.inf))
    assert of_products == 6 * 3 * candidates * 6
    of_memory = estimate_step(recipe, model, engine, rates=Rates(math.inf, 1.0))
    assert of_memory == 4 * (4 * 3 * candidates + 6 * rows * 6)
    twice_as_fast = estimate_step(recipe, model, engine, rates=Rates(2.0, 2.0, 400.0))
    assert twice_as_fast == (of_products + of_memory + 1.0) / 2

"""What is told before a training starts."""

import pytest
import torch

import dualkg as kg
from dualkg.training.api import data_of, default_recipe
from dualkg.training.costs import WorkEstimate, count_query_groups
from dualkg.tuning.automatic import AutomaticTuner
from dualkg.workflows.expectation import (
    Expectation,
    expect_training,
    expect_tuning,
)
from tests.conftest import graph_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph() -> kg.Graph:
    return kg.load_graph("world")


def recipe_of(graph: kg.Graph, **changes) -> kg.Recipe:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return default_recipe(data_of(graph), graph, {"model.dim": 16, **given})


def test_groups_of_answers_by_hand():
    """(0, r, ?) has 17 answers, in two groups; (?, r, t) has one answer for each t."""
    graph = graph_of([(0, 0, tail) for tail in range(1, 18)])
    assert count_query_groups(graph) == 2 + 17


def test_work_grows_with_what_is_computed(graph):
    work = WorkEstimate.of(graph, CPU)
    plain = recipe_of(graph)
    assert work.epoch(recipe_of(graph, model__dim=32)) > work.epoch(plain)
    assert work.epoch(recipe_of(graph, loss__relation_weight=0.5)) > work.epoch(plain)
    assert work.epoch(recipe_of(graph, training__order="queries")) < work.epoch(plain)
    sampled = recipe_of(graph, loss__name="SampledSoftmax", loss__num_negatives=100)
    assert work.epoch(sampled) < work.epoch(plain)
    assert work.ranking(plain, 200) == pytest.approx(2 * work.ranking(plain, 100))
    twice = recipe_of(graph, training__epochs=2)
    once = recipe_of(graph, training__epochs=1)
    assert work.training(twice) - work.training(once) == pytest.approx(work.epoch(plain))


def test_work_is_the_same_for_every_machine(graph):
    """No clock and no core is asked."""
    recipe = recipe_of(graph)
    threads = torch.get_num_threads()
    before = WorkEstimate.of(graph, CPU).epoch(recipe)
    torch.set_num_threads(threads + 1)
    try:
        assert WorkEstimate.of(graph, CPU).epoch(recipe) == before
    finally:
        torch.set_num_threads(threads)


def test_a_training_is_announced_with_time_and_memory(graph):
    expectation = expect_training(recipe_of(graph, training__epochs=2), graph, CPU)
    assert expectation.training > 0
    assert expectation.memory > 2**20
    assert expectation.text.startswith("Training about ")
    assert expectation.text.endswith("GiB of memory.")


def test_a_search_is_announced_with_its_trials(graph):
    tuner = AutomaticTuner(recipe_of(graph), graph, device=CPU, seconds=10)
    expectation = expect_tuning(tuner)
    assert expectation.num_trials >= 1
    assert expectation.tuning <= 10
    assert expectation.text.startswith("Tuning of λ, relation weight, frequency weight")
    assert expectation.seconds == pytest.approx(
        expectation.tuning + expectation.training + expectation.ranking
    )


def test_large_tables_are_not_made_to_be_measured():
    text = Expectation(tuning=0, training=7200, ranking=60, memory=None).text
    assert "this one was not measured" in text

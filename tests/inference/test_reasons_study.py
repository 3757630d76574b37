"""What reasons are worth: which triples are left out, and what is made of the training without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import dualkg as kg
from dualkg.evaluation.report import Metrics
from dualkg.inference.explanation import Influence
from paper.explanation_study import LeftOut, apart, chosen, rank_correlation, study
from paper.figures import draw_reasons
from tests.conftest import graph_of


@pytest.fixture(scope="module")
def twins() -> kg.Graph:
    """Twins 2 n and 2 n + 1 have the same liking, of one of four; the liking of some twins is asked for in test."""
    likes = [(one, 0, 40 + one // 2 % 4) for one in range(40)]
    twins = [(2 * n, 1, 2 * n + 1) for n in range(20)] + [(2 * n + 1, 1, 2 * n) for n in range(20)]
    ids = np.array([*likes, *twins], dtype=np.int32)
    held = np.zeros(len(ids), dtype=bool)
    held[[0, 4, 8, 12, 18, 22]] = True
    return replace(graph_of(ids[~held], num_entities=44, num_relations=2), test=ids[held])


def test_without_its_reasons_an_answer_falls(twins):
    recipe = kg.Recipe().with_changes(
        {"model.name": "ComplEx", "model.dim": 16, "training.epochs": 40, "training.batch_size": 20}
    )
    found = study(twins, recipe, counts=(1,), seeds=(0, 1), device="cpu")
    assert [(one.way, one.count, one.seed) for one in found] == [
        (way, count, seed)
        for seed in (0, 1)
        for way, count in (("nothing", 0), ("reasons", 1), ("any", 1), ("against", 1))
    ]
    nothing, reasons, _, against = found[:4]
    assert nothing.num_answers == reasons.num_answers == 4  # one of each liking
    assert nothing.num_left_out == 0
    assert 1 <= reasons.num_left_out <= 4
    assert reasons.fall > against.fall
    assert reasons.expected > 0 >= against.expected
    assert set(nothing.as_dict()["metrics"]) >= {"mrr", "hits_at_1"}


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 5))
def test_answers_that_are_asked_for_have_no_entity_in_common(seed, least, most):
    random = np.random.default_rng(seed)
    triples = np.stack([random.integers(0, n, 60) for n in (20, 2, 20)], axis=1).astype(np.int32)
    graph = replace(graph_of(triples[:40], num_entities=20, num_relations=2), test=triples[40:])
    try:
        asked = apart(graph, random, least=least, most=most)
    except kg.RequestError:
        reject()
    ends = asked[:, [0, 2]].ravel()
    assert 2 <= len(asked) <= most
    assert len(set(ends.tolist())) == len(ends)
    assert all(int((graph.train[:, [0, 2]] == entity).sum()) >= least for entity in ends.tolist())
    assert {tuple(row) for row in asked.tolist()} <= {tuple(row) for row in graph.test.tolist()}


def test_a_graph_without_such_answers_is_refused(small_graph):
    with pytest.raises(kg.RequestError, match="too few test triples of entities with 99 training triples"):
        apart(small_graph, np.random.default_rng(0), least=99, most=5)


def test_what_is_left_out():
    one = Influence(np.array([10, 11, 12, 13]), np.array([0.5, -1.0, 0.0, 2.0]), np.array([0.1, 0.0, 0.0, -3.0]))
    found = chosen([one], 2, np.random.default_rng(0))
    assert {way: [some.tolist() for some in places] for way, places in found.items() if way != "any"} == {
        "reasons": [[10, 12]],
        "against": [[11, 13]],
    }
    assert set(found["any"][0].tolist()) <= {10, 11, 12, 13}
    assert len(found["any"][0]) == 2


def test_rank_correlation():
    assert rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([-3.0, 0.0, 0.1])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert rank_correlation(np.array([1.0, 1.0, 1.0]), np.array([3.0, 2.0, 1.0])) == 0
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: 4.5 / √(4.5 · 5).
    found = rank_correlation(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0, 4.0]))
    assert found == pytest.approx(4.5 / np.sqrt(4.5 * 5))


def test_a_figure_of_nothing_is_refused():
    before = LeftOut("nothing", 0, 0, 5, 0, Metrics.of(np.ones(3)), 0.0, 0.0, 1.0)
    with pytest.raises(kg.RequestError, match="needs some that were left out"):
        draw_reasons([before])

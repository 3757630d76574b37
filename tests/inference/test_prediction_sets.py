"""Prediction sets: coverage, thresholds and contents."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.filters import KnownAnswers
from dualkg.inference.prediction_sets import PredictionSets, min_triples_for, quantile
from dualkg.inference.reliability import evaluate_coverage
from tests.conftest import graph_of

COVERAGES = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99])


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=60), coverage=COVERAGES)
def test_coverage_of_exchangeable_values(values, coverage):
    """Each of n + 1 values is equally likely to be the new one, and within the quantile of the
    others.
    """
    within = [
        value <= quantile(np.array(values[:place] + values[place + 1 :]), coverage)
        for place, value in enumerate(values)
    ]
    assert np.mean(within) >= coverage - 1e-9


def test_coverage_of_random_scores_is_close_to_the_target():
    random = np.random.default_rng(0)
    drawn = random.gumbel(size=(3000, 101))
    covered = [row[-1] <= quantile(row[:-1], 0.9) for row in drawn]
    assert 0.9 - 0.017 < np.mean(covered) < 0.9 + 1 / 101 + 0.017  # three standard errors


@pytest.mark.parametrize(
    ("num", "coverage", "place"), [(9, 0.9, 9), (10, 0.9, 10), (19, 0.9, 18), (99, 0.95, 95)]
)
def test_rank_of_the_quantile(num, coverage, place):
    assert quantile(np.arange(1.0, num + 1)[::-1], coverage) == place


def test_too_few_values_have_an_infinite_quantile():
    assert quantile(np.arange(8.0), 0.9) == math.inf
    assert min_triples_for(0.9) == 50
    assert min_triples_for(0.99) == 99


def test_rare_relations_share_a_threshold():
    relations = np.repeat([0, 1, 2, 3], [60, 60, 30, 30])
    nonconformity = np.stack([10.0 * relations, 10.0 * relations + 1])
    sets = PredictionSets(nonconformity, relations, 5)
    assert [sets.has_own_threshold(relation) for relation in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert [sets.threshold(relation, "tail") for relation in range(5)] == [0, 10, 30, 30, 30]
    assert sets.threshold(1, "head") == 11
    assert not sets.has_own_threshold(0, coverage=0.99)
    few = PredictionSets(nonconformity[:, :130], relations[:130], 5)
    assert (
        few.threshold(2, "tail", coverage=0.5) == 10
    )  # ten rare ones are too few, so it is made from all


@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_set_contains_entities_with_nonconformity_up_to_the_threshold(
    small_graph, side, reciprocal
):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7, reciprocal=reciprocal)
    sets = PredictionSets.fit(model, small_graph)
    known = KnownAnswers.of(small_graph)
    head, relation_id, tail = small_graph.train[0].tolist()
    entity = head if side == "tail" else tail
    given_ = torch.tensor([entity])
    relation = torch.tensor([relation_id])
    with torch.no_grad():
        scores = (
            model.predict_tails(given_, relation)
            if side == "tail"
            else model.predict_heads(relation, given_)
        )[0]
    _, there = known(np.array([entity]), np.array([relation_id + (0 if side == "tail" else 4)]))
    assert len(there)
    scores[there] = -torch.inf
    found = sets.of(model, known, entity, relation_id, side=side, coverage=0.6)
    likely = scores.log_softmax(-1) >= -sets.threshold(relation_id, side, coverage=0.6)
    assert set(found.entities.tolist()) == set(torch.nonzero(likely)[:, 0].tolist())
    assert not set(found.entities.tolist()) & set(there.tolist())
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
    assert found.scores == pytest.approx(scores[found.entities].numpy())


def test_sets_grow_with_coverage(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7)
    sets = PredictionSets.fit(model, small_graph)
    known = KnownAnswers.of(small_graph)
    small, large = (
        sets.of(model, known, 3, 1, coverage=coverage).entities.tolist() for coverage in (0.4, 0.9)
    )
    assert large[: len(small)] == small
    assert len(large) > len(small)
    everything = sets.of(
        model, known, 3, 1, coverage=0.99
    ).entities  # 20 triples of valid cannot promise 99 %
    assert len(everything) == 30 - len(known(np.array([3]), np.array([1]))[1])


def test_other_known_answers_are_excluded_before_the_softmax():
    """Valid and test answers of one query do not compete with each other."""
    graph = graph_of([(0, 0, 1)], [(0, 0, 2), (0, 0, 3)], [(0, 0, 4)], num_entities=6)
    model = kg.DistMult(graph.shape, dim=1, reciprocal=False)
    model.load_state_dict(
        {
            "entities": torch.tensor([[1.0], [9.0], [2.0], [3.0], [8.0], [0.5]]),
            "relations": torch.tensor([[1.0]]),
        }
    )
    sets = PredictionSets.fit(model, graph)
    others = {2: [1.0, 0.5], 3: [1.0, 0.5]}
    expected = [math.log(sum(math.exp(s) for s in (own, *others[own]))) - own for own in (2, 3)]
    assert sets.nonconformity[0] == pytest.approx(expected, abs=2e-5)


def test_coverage_on_valid_is_the_target(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7)
    sets = PredictionSets.fit(model, small_graph)
    report = evaluate_coverage(sets, model, small_graph, split="valid", coverage=0.8)
    assert report.by_direction["tail"].coverage == pytest.approx(17 / 20)  # ⌈21 · 0.8⌉ of 20
    assert report.overall.num_queries == 40


def test_coverage_report_agrees_with_single_sets(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7)
    sets = PredictionSets.fit(model, small_graph)
    report = evaluate_coverage(sets, model, small_graph, coverage=0.8)
    sizes = []
    hits = []
    for head, relation, tail in small_graph.test.tolist():
        others = [
            graph_of(small_graph.train),
            graph_of(small_graph.valid),
            graph_of(small_graph.test),
        ]
        rest = np.concatenate([one.train for one in others])
        rest = rest[(rest != [head, relation, tail]).any(1)]
        known = KnownAnswers([rest], small_graph.shape)
        for side, given_, answer in (("tail", head, tail), ("head", tail, head)):
            found = sets.of(model, known, given_, relation, side=side, coverage=0.8).entities
            sizes.append(len(found))
            hits.append(answer in found)
    assert report.overall.coverage == pytest.approx(np.mean(hits))
    assert report.overall.mean_size == pytest.approx(np.mean(sizes))
    facts = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert facts["by_relation"]["r1"]["relation_specific"] is False
    assert facts["target_coverage"] == 0.8


def test_round_trip(small_graph):
    sets = PredictionSets.fit(kg.CP(small_graph.shape, dim=2, init_scale=1.0), small_graph)
    again = PredictionSets.from_dict(json.loads(json.dumps(sets.as_dict())), 4)
    assert np.allclose(again.nonconformity, sets.nonconformity, atol=1e-9)
    assert (again.relations == sets.relations).all()


def test_invalid_arguments(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    without = graph_of(small_graph.train, num_entities=30, num_relations=4)
    with pytest.raises(
        kg.RequestError,
        match="Prediction sets need held-out triples, and made has no valid triples",
    ):
        PredictionSets.fit(model, without)
    sets = PredictionSets.fit(model, small_graph)
    with pytest.raises(
        kg.RequestError, match="coverage must be between 0 and 1, such as 0.9; got 90"
    ):
        sets.threshold(0, "tail", coverage=90)
    with pytest.raises(
        kg.RequestError, match="made has no test triples to evaluate prediction sets on"
    ):
        evaluate_coverage(sets, model, without)
    with torch.no_grad():
        model.entities[0] = torch.inf
    with pytest.raises(kg.DivergedError, match="NaN or infinity"):
        PredictionSets.fit(model, small_graph)

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
from dualkg.errors import InvalidValue
from dualkg.inference.prediction_sets import PredictionSets, min_triples_for, quantile
from dualkg.inference.reliability import evaluate_coverage
from dualkg.inference.scoring import MissingTriples
from tests.conftest import graph_of

COVERAGES = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99])


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=60), coverage=COVERAGES)
def test_coverage_of_exchangeable_values(values, coverage):
    """Each of n + 1 values is equally likely to be the new one, and within the quantile of the
    others.
    """
    is_within = []
    for place, value in enumerate(values):
        others = np.delete(values, place)
        is_within.append(value <= quantile(others, coverage))
    assert np.mean(is_within) >= coverage - 1e-9


def test_coverage_of_random_scores_is_close_to_the_target():
    random = np.random.default_rng(0)
    rows = random.gumbel(size=(3000, 101))
    covered = [row[-1] <= quantile(row[:-1], 0.9) for row in rows]
    three_standard_errors = 0.017
    assert 0.9 - three_standard_errors < np.mean(covered)
    assert np.mean(covered) < 0.9 + 1 / 101 + three_standard_errors


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
    has_own = [sets.has_own_threshold(relation) for relation in range(5)]
    assert has_own == [True, True, False, False, False]
    assert [sets.threshold(relation, "tail") for relation in range(5)] == [0, 10, 30, 30, 30]
    assert sets.threshold(1, "head") == 11
    assert not sets.has_own_threshold(0, coverage=0.99)


def test_rare_relations_with_too_few_triples_together_use_all_triples():
    relations = np.repeat([0, 1, 2], [60, 60, 10])
    nonconformity = np.stack([10.0 * relations, 10.0 * relations])
    sets = PredictionSets(nonconformity, relations, 3)
    assert sets.threshold(2, "tail", coverage=0.5) == 10


@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_set_contains_entities_with_nonconformity_up_to_the_threshold(
    small_graph, side, reciprocal
):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7, reciprocal=reciprocal)
    sets = PredictionSets.fit(model, small_graph)
    known = KnownAnswers.of(small_graph)
    head, relation, tail = small_graph.train[0].tolist()
    with torch.no_grad():
        if side == "tail":
            entity = head
            scores = model.predict_tails(torch.tensor([head]), torch.tensor([relation]))[0]
            _, known_answers = known(np.array([head]), np.array([relation]))
        else:
            entity = tail
            scores = model.predict_heads(torch.tensor([relation]), torch.tensor([tail]))[0]
            _, known_answers = known(np.array([tail]), np.array([relation + 4]))
    assert len(known_answers)
    scores[known_answers] = -torch.inf

    entities, set_scores = sets.of(model, known, entity, relation, side=side, coverage=0.6)
    threshold = sets.threshold(relation, side, coverage=0.6)
    likely = torch.nonzero(scores.log_softmax(-1) >= -threshold)[:, 0]
    assert set(entities.tolist()) == set(likely.tolist())
    assert not set(entities.tolist()) & set(known_answers.tolist())
    assert set_scores.tolist() == sorted(set_scores.tolist(), reverse=True)
    assert set_scores == pytest.approx(scores[entities].numpy())


def test_sets_grow_with_coverage(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7)
    sets = PredictionSets.fit(model, small_graph)
    known = KnownAnswers.of(small_graph)
    small = sets.of(model, known, 3, 1, coverage=0.4).entities.tolist()
    large = sets.of(model, known, 3, 1, coverage=0.9).entities.tolist()
    assert large[: len(small)] == small
    assert len(large) > len(small)

    # Twenty valid triples cannot promise 99 %, so the set has all new answers.
    complete = sets.of(model, known, 3, 1, coverage=0.99).entities
    _, known_answers = known(np.array([3]), np.array([1]))
    assert len(complete) == 30 - len(known_answers)


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
    # The answers 2 and 3 each compete with the entities 0 and 5 alone, which score 1 and 0.5.
    expected = []
    for score in (2, 3):
        normalizer = math.exp(score) + math.exp(1.0) + math.exp(0.5)
        expected.append(math.log(normalizer) - score)
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
    triples = np.concatenate([small_graph.train, small_graph.valid, small_graph.test])
    sizes = []
    hits = []
    for triple in small_graph.test:
        head, relation, tail = triple.tolist()
        other_triples = triples[(triples != triple).any(1)]
        known = KnownAnswers([other_triples], small_graph.shape)
        for side, entity, answer in (("tail", head, tail), ("head", tail, head)):
            entities = sets.of(model, known, entity, relation, side=side, coverage=0.8).entities
            sizes.append(len(entities))
            hits.append(answer in entities)
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


def test_a_coverage_that_is_no_share_is_refused(small_graph):
    sets = PredictionSets.fit(kg.CP(small_graph.shape, dim=2), small_graph)
    with pytest.raises(InvalidValue) as error:
        sets.threshold(0, "tail", coverage=90)
    assert (error.value.setting, error.value.found) == ("coverage", 90)
    assert str(error.value) == "`coverage` should be between 0 and 1, such as 0.9; 90 was given."


def test_splits_without_triples_are_refused(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    without = graph_of(small_graph.train, num_entities=30, num_relations=4)
    with pytest.raises(MissingTriples) as error:
        PredictionSets.fit(model, without)
    assert error.value.split == "valid"
    assert str(error.value) == (
        "Fitting prediction sets needs valid triples, and made has none. Split the graph so that "
        "valid has some."
    )
    with pytest.raises(MissingTriples) as error:
        evaluate_coverage(PredictionSets.fit(model, small_graph), model, without)
    assert (error.value.split, error.value.purpose) == ("test", "Evaluating prediction sets")


def test_a_diverged_model_is_refused(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    with torch.no_grad():
        model.entities[0] = torch.inf
    with pytest.raises(kg.DivergedError, match="scores NaN or infinity"):
        PredictionSets.fit(model, small_graph)

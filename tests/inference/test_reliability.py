"""Reliability: ECE, sampling noise and Brier score."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.calibration import Calibration, calibrate
from dualkg.inference.reliability import LIKELY, Reliability, evaluate_calibration


@given(
    num_true=st.lists(st.integers(0, 20), min_size=10, max_size=10, unique=True),
    weight=st.floats(0.1, 50),
)
def test_perfect_probabilities_have_no_error(num_true, weight):
    """Ten groups of twenty candidates, each with the share of true ones that its probability
    predicts.
    """
    probabilities = np.repeat(np.array(num_true) / 20, 20)
    true = np.concatenate([np.arange(20) < count for count in num_true])
    found = Reliability.of(probabilities, true, np.full(200, weight))
    assert found.ece == pytest.approx(0, abs=1e-12)
    assert len(found.bins) == 10
    assert found.brier == pytest.approx((probabilities * (1 - probabilities)).mean())


@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_ece_of_constant_probabilities(predicted, share):
    true = np.array([True, False])
    found = Reliability.of(np.full(2, predicted), true, np.array([share, 1 - share]), num_bins=1)
    assert found.ece == pytest.approx(abs(predicted - share))


def test_a_weight_counts_like_repeated_candidates():
    random = np.random.default_rng(0)
    probabilities = random.random(50)
    true = random.random(50) < 0.3
    weights = random.integers(1, 5, 50)
    short = Reliability.of(probabilities, true, weights.astype(float), num_bins=1)
    long = Reliability.of(
        *(np.repeat(values, weights) for values in (probabilities, true)), np.ones(weights.sum())
    )
    assert short.brier == pytest.approx(long.brier)
    assert short.num_candidates == long.num_candidates
    assert short.bins[0].predicted == pytest.approx(np.repeat(probabilities, weights).mean())


def test_noise_is_the_ece_of_correct_probabilities():
    """Labels drawn by the probabilities, each twice, as a triple is a candidate in both
    directions.
    """
    errors = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        probabilities = random.random(500)
        true = random.random(500) < probabilities
        found = Reliability.of(np.tile(probabilities, 2), np.tile(true, 2), np.ones(1000))
        errors.append(found.ece)
    assert np.mean(errors) == pytest.approx(found.noise, rel=0.15)


def test_no_candidates():
    found = Reliability.of(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0))
    assert math.isnan(found.ece)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["ece"] is None


def test_the_report(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    report = evaluate_calibration(calibrate(model, small_graph), model, small_graph)
    assert report.split == "test"
    assert report.overall.num_true == 40
    assert sum(counts.num_true for counts in report.by_relation.values()) == 40
    assert report.likely.num_candidates <= report.overall.num_candidates
    facts = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert facts["likely"]["min_probability"] == LIKELY
    assert set(facts["by_relation"]) == {"r0", "r1", "r2", "r3"}
    expected = sum(counts.expected for counts in report.by_relation.values())
    assert expected == pytest.approx(
        sum(one.predicted * one.num_candidates for one in report.overall.bins)
    )


def test_expected_counts_on_valid_are_the_actual_ones(small_graph):
    """A logistic fit with an offset predicts as many true candidates as there were, but for the
    pull of its prior.
    """
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    report = evaluate_calibration(calibrate(model, small_graph), model, small_graph, split="valid")
    assert sum(counts.expected for counts in report.by_relation.values()) == pytest.approx(
        40, rel=0.05
    )


def test_a_graph_without_test_triples_is_refused(small_graph):
    from tests.conftest import graph_of

    graph = graph_of(small_graph.train, small_graph.valid, num_entities=30, num_relations=4)
    sure = Calibration(torch.ones(4), torch.zeros(4, 4), torch.zeros(4, dtype=torch.bool))
    with pytest.raises(kg.RequestError, match="made has no test triples"):
        evaluate_calibration(sure, kg.CP(graph.shape, dim=2), graph)

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
from dualkg.inference.errors import MissingTriples
from dualkg.inference.reliability import LIKELY, Reliability, evaluate_calibration
from tests.conftest import graph_of


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
    reliability = Reliability.of(probabilities, true, np.full(200, weight))
    assert reliability.ece == pytest.approx(0, abs=1e-12)
    assert len(reliability.bins) == 10
    assert reliability.brier == pytest.approx((probabilities * (1 - probabilities)).mean())


@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_ece_of_constant_probabilities(predicted, share):
    true = np.array([True, False])
    weights = np.array([share, 1 - share])
    reliability = Reliability.of(np.full(2, predicted), true, weights, num_bins=1)
    assert reliability.ece == pytest.approx(abs(predicted - share))


def test_a_weight_counts_like_repeated_candidates():
    random = np.random.default_rng(0)
    probabilities = random.random(50)
    true = random.random(50) < 0.3
    weights = random.integers(1, 5, 50)
    weighted = Reliability.of(probabilities, true, weights.astype(float), num_bins=1)

    repeated_probabilities = np.repeat(probabilities, weights)
    repeated = Reliability.of(
        repeated_probabilities, np.repeat(true, weights), np.ones(weights.sum())
    )
    assert weighted.brier == pytest.approx(repeated.brier)
    assert weighted.num_candidates == repeated.num_candidates
    assert weighted.bins[0].predicted == pytest.approx(repeated_probabilities.mean())


def test_noise_is_the_ece_of_correct_probabilities():
    """Labels drawn by the probabilities, each twice, as a triple is a candidate in both
    directions.
    """
    errors = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        probabilities = random.random(500)
        true = random.random(500) < probabilities
        reliability = Reliability.of(np.tile(probabilities, 2), np.tile(true, 2), np.ones(1000))
        errors.append(reliability.ece)
    assert np.mean(errors) == pytest.approx(reliability.noise, rel=0.15)


def test_no_candidates():
    reliability = Reliability.of(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0))
    assert math.isnan(reliability.ece)
    content = json.loads(json.dumps(reliability.as_dict(), allow_nan=False))
    assert content["ece"] is None


def test_the_report(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    report = evaluate_calibration(calibrate(model, small_graph), model, small_graph)
    assert report.split == "test"
    assert report.overall.num_true == 40
    assert sum(counts.num_true for counts in report.by_relation.values()) == 40
    assert report.likely.num_candidates <= report.overall.num_candidates

    content = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert content["likely"]["min_probability"] == LIKELY
    assert set(content["by_relation"]) == {"r0", "r1", "r2", "r3"}

    by_relation = sum(counts.expected for counts in report.by_relation.values())
    by_bin = sum(bin.predicted * bin.num_candidates for bin in report.overall.bins)
    assert by_relation == pytest.approx(by_bin)


def test_expected_counts_on_valid_are_the_actual_ones(small_graph):
    """A logistic fit with an offset predicts as many true candidates as there are, but for the
    effect of its prior.
    """
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    report = evaluate_calibration(calibrate(model, small_graph), model, small_graph, split="valid")
    expected = sum(counts.expected for counts in report.by_relation.values())
    assert expected == pytest.approx(40, rel=0.05)


def test_a_graph_without_test_triples_is_refused(small_graph):
    graph = graph_of(small_graph.train, small_graph.valid, num_entities=30, num_relations=4)
    calibration = Calibration(torch.ones(4), torch.zeros(4, 4), torch.zeros(4, dtype=torch.bool))
    with pytest.raises(MissingTriples) as error:
        evaluate_calibration(calibration, kg.CP(graph.shape, dim=2), graph)
    assert (error.value.graph, error.value.split) == ("made", "test")

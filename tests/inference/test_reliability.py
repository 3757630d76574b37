"""Reliability: ECE, sampling noise and Brier score."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.probability import Calibration
from dualkg.inference.reliability import (
    LIKELY,
    TABLE_EDGES,
    Reliability,
    effective_size,
    evaluate_calibration,
    reliability_table,
    share_interval,
)
from dualkg.inference.scoring import MissingTriples
from tests.conftest import graph_of
from tests.inference.calibrations import calibration_on


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


# -- the table of fixed ranges -----------------------------------------------


def test_the_table_by_hand():
    """Bins 0.1 to 0.2 and 0.9 to 1; a probability of 0.1 is in the bin above it."""
    probabilities = np.array([0.1, 0.15, 0.95, 1.0])
    true = np.array([False, True, True, True])
    first, last = reliability_table(probabilities, true, np.array([3.0, 1.0, 1.0, 1.0]))
    assert (first.lower, first.upper) == (0.1, 0.2)
    assert (first.num_candidates, first.num_true) == (4.0, 1)
    assert first.predicted == pytest.approx((3 * 0.1 + 0.15) / 4)
    assert first.observed == 0.25
    assert (last.lower, last.upper) == (0.9, 1.0)
    assert (last.num_candidates, last.observed) == (2.0, 1.0)


def test_an_effective_size_by_hand():
    """Both directions of a triple count as one, and a weight of 3 makes a share less certain."""
    true = np.arange(8) < 2
    assert effective_size(true, np.ones(8)) == 4
    # Two of eight are true, and each false candidate represents three.
    weights = np.array([1.0, 1.0, 3.0, 3.0])
    assert effective_size(np.arange(4) < 2, weights) == pytest.approx(8 / (2 * (0.75 + 0.25 * 3)))


def test_an_interval_by_hand():
    """Wilson's interval of no success in n trials is from 0 to z² / (n + z²)."""
    squared = 1.959964**2
    assert share_interval(0.0, 10) == pytest.approx((0, squared / (10 + squared)))
    assert share_interval(1.0, 10) == pytest.approx((10 / (10 + squared), 1))
    low, high = share_interval(0.5, 1e6)
    assert (low, high) == pytest.approx((0.5 - 0.00098, 0.5 + 0.00098), abs=1e-6)


def test_about_95_of_100_intervals_contain_the_probability():
    """Labels drawn by the probability, each twice; false candidates are sampled by a third."""
    num_covered = 0
    for seed in range(400):
        random = np.random.default_rng(seed)
        true = random.random(300) < 0.3
        drawn = true | (random.random(300) < 1 / 3)
        weights = np.where(true, 1.0, 3.0)[drawn]
        labels = np.tile(true[drawn], 2)
        [bin] = reliability_table(np.full(len(labels), 0.35), labels, np.tile(weights, 2))
        low, high = bin.interval
        num_covered += low <= 0.3 <= high
    assert 0.92 <= num_covered / 400 <= 0.98


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=50))
def test_every_candidate_is_in_one_bin(rows):
    probabilities = np.array([probability for probability, _ in rows])
    true = np.array([is_true for _, is_true in rows])
    table = reliability_table(probabilities, true, np.ones(len(rows)))
    assert sum(bin.num_candidates for bin in table) == len(rows)
    assert sum(bin.num_true for bin in table) == true.sum()
    for bin in table:
        assert bin.num_candidates > 0
        assert bin.lower in TABLE_EDGES
        assert bin.lower - 1e-12 <= bin.predicted <= bin.upper + 1e-12
        assert 0 <= bin.interval[0] <= bin.observed <= bin.interval[1] <= 1


def test_no_candidates():
    reliability = Reliability.of(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0))
    assert math.isnan(reliability.ece)
    content = json.loads(json.dumps(reliability.as_dict(), allow_nan=False))
    assert content["ece"] is None


def test_the_report(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    report = evaluate_calibration(Calibration.fit(model, small_graph), model, small_graph)
    assert report.split == "test"
    assert report.overall.num_true == 40
    assert sum(counts.num_true for counts in report.by_relation.values()) == 40
    assert report.likely.num_candidates <= report.overall.num_candidates

    content = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert content["likely"]["min_probability"] == LIKELY
    assert set(content["by_relation"]) == {"r0", "r1", "r2", "r3"}

    by_relation = sum(counts.expected for counts in report.by_relation.values())
    for bins in (report.overall.bins, report.table):
        by_bin = sum(bin.predicted * bin.num_candidates for bin in bins)
        assert by_relation == pytest.approx(by_bin)
    assert len(content["table"]) == len(report.table)
    assert content["table"][0]["interval"] == list(report.table[0].interval)
    assert content["log_loss"] > 0


def test_expected_counts_on_valid_are_the_actual_ones(small_graph):
    """A logistic fit with an offset predicts as many true candidates as there are, but for the
    effect of its prior.
    """
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    report = evaluate_calibration(
        Calibration.fit(model, small_graph), model, small_graph, split="valid"
    )
    expected = sum(counts.expected for counts in report.by_relation.values())
    assert expected == pytest.approx(40, rel=0.05)


def test_a_graph_without_test_triples_is_refused(small_graph):
    graph = graph_of(small_graph.train, small_graph.valid, num_entities=30, num_relations=4)
    calibration = calibration_on(graph)
    with pytest.raises(MissingTriples) as error:
        evaluate_calibration(calibration, kg.CP(graph.shape, dim=2), graph)
    assert (error.value.graph, error.value.split) == ("made", "test")

"""Recalibration: maps worked out by hand, strictly increasing with an inverse, supported by
cross-fitting or not used.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.calibration import Calibration, calibrate, cross_fitted_log_odds
from dualkg.inference.recalibration import (
    CrossFit,
    Recalibration,
    RecalibrationSettings,
    cross_fit_recalibration,
    draw_folds,
    fit_recalibration,
)
from dualkg.inference.sampling import sample_candidates
from tests.inference.test_calibration import calibration_of_one_relation, examples_of, sigmoid

TWO_KNOTS = RecalibrationSettings(
    probabilities=(float(sigmoid(np.array(-1.0))), float(sigmoid(np.array(1.0)))),
    slope_spread=1e3,
    value_spread=1e3,
)


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def drawn_by_curve(curve, num: int = 20_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log odds, labels that are true by the log odds of a curve, and weights."""
    random = np.random.default_rng(0)
    log_odds = random.uniform(-8, 3, num)
    return log_odds, random.random(num) < sigmoid(curve(log_odds)), np.ones(num)


def cross_fit_of(
    log_odds: np.ndarray, true: np.ndarray, weights: np.ndarray, *, seed: int = 0
) -> CrossFit:
    triple_ids = np.arange(len(true))
    folds = draw_folds(triple_ids, num_folds=5, seed=seed)
    return cross_fit_recalibration(log_odds, true, weights, triple_ids=triple_ids, folds=folds)


# -- the map -----------------------------------------------------------------


def test_a_map_by_hand():
    """The slope is 2 between the knots 0 and 2, and 1 outside."""
    recalibration = Recalibration(doubles(0, 2), doubles(1, 5))
    log_odds = doubles(-math.inf, -1, 0, 1, 2, 3, math.inf)
    mapped = doubles(-math.inf, 0, 1, 3, 5, 6, math.inf)
    assert torch.equal(recalibration(log_odds), mapped)
    assert torch.equal(recalibration.inverse(mapped), log_odds)


@st.composite
def recalibrations(draw) -> Recalibration:
    rises = st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=1, max_size=8)
    lengths = torch.tensor(draw(rises), dtype=torch.float64)
    starts = torch.tensor([[draw(st.floats(-8, 2)), draw(st.floats(-8, 2))]], dtype=torch.float64)
    corners = torch.cat([starts, starts + lengths.cumsum(0)])
    return Recalibration(corners[:, 0], corners[:, 1])


@given(recalibrations(), st.lists(st.floats(-30, 30), min_size=2, max_size=20))
def test_a_map_increases_and_has_an_inverse(recalibration, numbers):
    log_odds = doubles(*sorted(numbers))
    mapped = recalibration(log_odds)
    assert (mapped.diff() >= 0).all()
    assert (mapped.diff()[log_odds.diff() > 1e-9] > 0).all()
    assert (mapped.diff()[log_odds.diff() == 0] == 0).all()
    torch.testing.assert_close(recalibration.inverse(mapped), log_odds, rtol=0, atol=1e-9)
    torch.testing.assert_close(recalibration(recalibration.inverse(log_odds)), log_odds)


@given(
    recalibration=recalibrations(),
    slope=st.floats(0.1, 5),
    offset=st.floats(-5, 5),
    pair=st.tuples(st.floats(-30, 0), st.floats(-30, 0)).map(sorted),
)
def test_probabilities_stay_between_0_and_1_in_the_same_order(recalibration, slope, offset, pair):
    of_lines = calibration_of_one_relation(slope, offset, 0.99)
    calibration = Calibration(
        of_lines.slopes, of_lines.offsets, of_lines.relation_specific, 0.99, recalibration
    )
    zeros = torch.tensor([0, 0])
    lower, higher = calibration.probability(doubles(*pair), zeros, zeros)
    assert 0 < lower <= higher <= 0.99


def test_single_precision_and_shape_are_kept():
    recalibration = Recalibration(doubles(-1, 1), doubles(-2, 1))
    mapped = recalibration(torch.zeros(2, 3))
    assert mapped.dtype == torch.float32
    assert torch.equal(mapped, torch.full((2, 3), -0.5))


# -- fit ---------------------------------------------------------------------


def test_a_fit_by_hand():
    """At the knots −1 and 1, one and three of four candidates are true: their log odds are −log 3
    and log 3, as the prior is flat.
    """
    log_odds = np.repeat([-1.0, 1.0], 4)
    true = np.array([True, False, False, False, True, True, True, False])
    fitted = fit_recalibration(log_odds, true, np.ones(8), settings=TWO_KNOTS)
    np.testing.assert_allclose(fitted.knots, [-1, 1])
    np.testing.assert_allclose(fitted.values, [-math.log(3), math.log(3)], atol=1e-4)

    # One candidate of weight 3 is three candidates.
    of_weights = fit_recalibration(
        np.repeat([-1.0, 1.0], 2),
        np.array([True, False, True, False]),
        np.array([1.0, 3.0, 3.0, 1.0]),
        settings=TWO_KNOTS,
    )
    np.testing.assert_allclose(of_weights.values, fitted.values, atol=1e-4)


def test_no_candidates_leave_the_log_odds_as_they_are():
    fitted = fit_recalibration(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0))
    torch.testing.assert_close(fitted.values, fitted.knots)


def test_a_map_increases_where_the_shares_do_not():
    log_odds = np.repeat([-1.0, 1.0], 400)
    true = np.concatenate([np.arange(400) < 300, np.arange(400) < 100])
    fitted = fit_recalibration(log_odds, true, np.ones(800), settings=TWO_KNOTS)
    assert (fitted.values.diff() > 0).all()


def test_a_curve_is_found_and_supported():
    """Log odds that are too small in the middle of the scale, as a line gives for a curve."""

    def curve(log_odds: np.ndarray) -> np.ndarray:
        return np.interp(log_odds, [-8, -3, -1, 3], [-8, -4, 0, 3])

    log_odds, true, weights = drawn_by_curve(curve)
    cross_fit = cross_fit_of(log_odds, true, weights)
    assert cross_fit.supported
    assert cross_fit.gain > 5 * cross_fit.standard_error

    fitted = fit_recalibration(log_odds, true, weights)
    middle = np.linspace(-4, 2, 13)
    mapped = fitted(torch.from_numpy(middle)).numpy()
    np.testing.assert_allclose(sigmoid(mapped), sigmoid(curve(middle)), atol=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_log_odds_that_are_right_are_left_alone(seed):
    log_odds, true, weights = drawn_by_curve(lambda log_odds: log_odds, num=4000)
    cross_fit = cross_fit_of(log_odds, true, weights, seed=seed)
    assert not cross_fit.supported
    assert cross_fit.log_loss > 0


def test_both_directions_of_a_triple_are_in_one_fold():
    triple_ids = np.tile(np.arange(50), 2)
    folds = draw_folds(triple_ids, num_folds=5, seed=1)
    assert folds[:50].tolist() == folds[50:].tolist()
    assert np.bincount(folds[:50]).tolist() == [10] * 5


def test_cross_fitted_log_odds_do_not_depend_on_their_own_fold():
    random = np.random.default_rng(0)
    log_probability = random.uniform(-6, 0, 200)
    true = random.random(200) < sigmoid(2 * log_probability + 1)
    folds = np.arange(200) % 5
    log_odds = cross_fitted_log_odds(examples_of(log_probability, true), folds, 1)

    other_labels = np.where(folds == 2, ~true, true)
    other = cross_fitted_log_odds(examples_of(log_probability, other_labels), folds, 1)
    assert log_odds[folds == 2].tolist() == other[folds == 2].tolist()
    assert (log_odds[folds != 2] != other[folds != 2]).all()


def test_test_triples_are_no_examples(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    candidates = sample_candidates(model, small_graph, "valid")
    test = set(map(tuple, small_graph.test.tolist()))
    assert test.isdisjoint(map(tuple, candidates.triples.tolist()))


def test_a_calibration_says_what_a_recalibration_gains(small_graph):
    calibration = calibrate(kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5), small_graph)
    assert calibration.cross_fit is not None
    assert (calibration.recalibration is not None) == calibration.cross_fit.supported

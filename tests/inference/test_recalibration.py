"""Recalibration: maps worked out by hand, strictly increasing with an inverse, supported by
cross-fitting or not used.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.inference.recalibration import (
    CrossFit,
    Recalibration,
    cross_fit_recalibration,
    cross_fitted_log_odds,
    draw_folds,
    fit_recalibration,
)
from tests.inference.calibrations import recalibration_of
from tests.inference.test_logistic import examples_of, sigmoid

# Knots at −1 and 1, and a flat prior.
TWO_KNOTS = {
    "probabilities": (float(sigmoid(np.array(-1.0))), float(sigmoid(np.array(1.0)))),
    "slope_spread": 1e3,
    "value_spread": 1e3,
}


def drawn_by_curve(curve, num: int = 20_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log odds, labels that are true by the log odds of a curve, and weights."""
    random = np.random.default_rng(0)
    log_odds = random.uniform(-8, 3, num)
    return log_odds, random.random(num) < sigmoid(curve(log_odds)), np.ones(num)


def cross_fit_of(
    log_odds: np.ndarray, true: np.ndarray, weights: np.ndarray, *, seed: int = 0
) -> CrossFit:
    triple_ids = np.arange(len(true))
    folds = draw_folds(triple_ids, seed=seed)
    return cross_fit_recalibration(log_odds, true, weights, triple_ids=triple_ids, folds=folds)


# -- the map -----------------------------------------------------------------


def test_a_map_by_hand():
    """The slope is 2 between the knots 0 and 2, and 1 outside."""
    recalibration = recalibration_of([0, 2], [1, 5])
    log_odds = np.array([-math.inf, -1, 0, 1, 2, 3, math.inf])
    mapped = np.array([-math.inf, 0, 1, 3, 5, 6, math.inf])
    assert recalibration(log_odds).tolist() == mapped.tolist()
    assert recalibration.inverse(mapped).tolist() == log_odds.tolist()


@st.composite
def recalibrations(draw) -> Recalibration:
    rises = st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=1, max_size=8)
    starts = np.array([[draw(st.floats(-8, 2)), draw(st.floats(-8, 2))]])
    corners = np.concatenate([starts, starts + np.cumsum(draw(rises), axis=0)])
    return Recalibration(corners[:, 0], corners[:, 1])


@given(recalibrations(), st.lists(st.floats(-30, 30), min_size=2, max_size=20))
def test_a_map_increases_and_has_an_inverse(recalibration, numbers):
    log_odds = np.array(sorted(numbers))
    mapped = recalibration(log_odds)
    rises = np.diff(mapped)
    assert (rises >= 0).all()
    assert (rises[np.diff(log_odds) > 1e-9] > 0).all()
    assert (rises[np.diff(log_odds) == 0] == 0).all()
    np.testing.assert_allclose(recalibration.inverse(mapped), log_odds, rtol=0, atol=1e-9)
    np.testing.assert_allclose(recalibration(recalibration.inverse(log_odds)), log_odds, atol=1e-9)


# -- fit ---------------------------------------------------------------------


def test_a_fit_by_hand():
    """At the knots −1 and 1, one and three of four candidates are true: their log odds are −log 3
    and log 3, as the prior is flat.
    """
    log_odds = np.repeat([-1.0, 1.0], 4)
    true = np.array([True, False, False, False, True, True, True, False])
    fitted = fit_recalibration(log_odds, true, np.ones(8), **TWO_KNOTS)
    np.testing.assert_allclose(fitted.knots, [-1, 1])
    np.testing.assert_allclose(fitted.values, [-math.log(3), math.log(3)], atol=1e-4)

    # One candidate of weight 3 is three candidates.
    of_weights = fit_recalibration(
        np.repeat([-1.0, 1.0], 2),
        np.array([True, False, True, False]),
        np.array([1.0, 3.0, 3.0, 1.0]),
        **TWO_KNOTS,
    )
    np.testing.assert_allclose(of_weights.values, fitted.values, atol=1e-4)


def test_no_candidates_leave_the_log_odds_as_they_are():
    fitted = fit_recalibration(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0))
    np.testing.assert_allclose(fitted.values, fitted.knots)


def test_a_map_increases_where_the_shares_do_not():
    log_odds = np.repeat([-1.0, 1.0], 400)
    true = np.concatenate([np.arange(400) < 300, np.arange(400) < 100])
    fitted = fit_recalibration(log_odds, true, np.ones(800), **TWO_KNOTS)
    assert (np.diff(fitted.values) > 0).all()


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
    mapped = fitted(middle)
    np.testing.assert_allclose(sigmoid(mapped), sigmoid(curve(middle)), atol=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_log_odds_that_are_right_are_left_alone(seed):
    log_odds, true, weights = drawn_by_curve(lambda log_odds: log_odds, num=4000)
    cross_fit = cross_fit_of(log_odds, true, weights, seed=seed)
    assert not cross_fit.supported
    assert cross_fit.log_loss > 0


def test_both_directions_of_a_triple_are_in_one_fold():
    triple_ids = np.tile(np.arange(50), 2)
    folds = draw_folds(triple_ids, seed=1)
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

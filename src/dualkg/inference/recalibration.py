"""Recalibration: a monotone map of the log odds of a calibration, shared by all relations.

A line of log odds over log-probabilities cannot follow every curve: probabilities of the middle of
the scale can be too low where small ones are too high. The map is fitted to log odds that are
cross-fitted, by lines that have not seen the candidate, and it is used only if cross-fitting
supports it too.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dualkg.inference.logistic import fit_logistic, log_loss
from dualkg.inference.scoring import Flags, Floats, Ids
from dualkg.without_torch.probabilities import interpolated, read_knots


@dataclass(frozen=True)
class RecalibrationSettings:
    """The knots of the map as probabilities, its prior, and the number of folds.

    A slope of the map is 1, times or divided by e^`slope_spread` (a standard deviation). The
    middle knot is moved by `value_spread` in log odds.
    """

    probabilities: tuple[float, ...] = (0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95)
    slope_spread: float = 0.25
    value_spread: float = 1.0
    num_folds: int = 5

    @property
    def knots(self) -> Floats:
        probabilities = np.array(self.probabilities)
        log_odds: Floats = np.log(probabilities / (1 - probabilities))
        return log_odds


RECALIBRATION = RecalibrationSettings()


@dataclass(frozen=True, eq=False)
class Recalibration:
    """A strictly increasing, piecewise linear map of log odds.

    It maps `knots` `(n,)` to `values` `(n,)`. Its slope is 1 below the first knot and above the
    last one.
    """

    knots: Tensor
    values: Tensor

    def __call__(self, log_odds: Tensor) -> Tensor:
        return _interpolate(log_odds, self.knots, self.values)

    def inverse(self, log_odds: Tensor) -> Tensor:
        """The log odds that are mapped to these."""
        return _interpolate(log_odds, self.values, self.knots)

    def as_dict(self) -> dict[str, list[float]]:
        return {"knots": self.knots.tolist(), "values": self.values.tolist()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Read a map; one that is not strictly increasing is a `ValueError`."""
        knots, values = read_knots(saved)
        return cls(torch.from_numpy(knots), torch.from_numpy(values))


def _interpolate(log_odds: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    mapped = interpolated(log_odds.double().cpu().numpy(), knots.numpy(), values.numpy())
    return torch.from_numpy(np.asarray(mapped)).to(log_odds)


# -- fit ---------------------------------------------------------------------


@dataclass(frozen=True)
class CrossFit:
    """What a recalibration gains in log loss on validation triples that it was not fitted to.

    `log_loss` is that of lines alone. All are sums over candidates, divided by the number of true
    ones.
    """

    log_loss: float
    gain: float
    standard_error: float

    @property
    def supported(self) -> bool:
        """Whether the gain is larger than its standard error."""
        return self.gain > self.standard_error

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Read a cross-fit; one with NaN or infinity is a `ValueError`."""
        log_loss = float(saved["log_loss"])
        gain = float(saved["gain"])
        standard_error = float(saved["standard_error"])
        if not np.isfinite([log_loss, gain, standard_error]).all():
            raise ValueError("the cross-fit of its recalibration is not finite")
        return cls(log_loss, gain, standard_error)


def draw_folds(triple_ids: Ids, *, num_folds: int, seed: int) -> Ids:
    """The folds of candidates `(n,)`; both directions of a triple are in the same fold."""
    num_triples = int(triple_ids.max()) + 1
    shuffled = np.random.default_rng(seed).permutation(num_triples)
    folds: Ids = shuffled[triple_ids] % num_folds
    return folds


def cross_fit_recalibration(
    log_odds: Floats,
    true: Flags,
    weights: Floats,
    *,
    triple_ids: Ids,
    folds: Ids,
) -> CrossFit:
    """Compare log odds with those of recalibrations that are fitted to the other folds.

    The log odds of candidates `(n,)` are cross-fitted themselves.
    """
    recalibrated = np.empty_like(log_odds)
    for fold in np.unique(folds).tolist():
        held_out = folds == fold
        fitted = fit_recalibration(log_odds[~held_out], true[~held_out], weights[~held_out])
        recalibrated[held_out] = fitted(torch.from_numpy(log_odds[held_out])).numpy()

    losses = weights * log_loss(log_odds, true)
    gains = losses - weights * log_loss(recalibrated, true)
    gains_of_triples = np.bincount(triple_ids, gains)
    num_true = int(true.sum())
    return CrossFit(
        log_loss=float(losses.sum()) / num_true,
        gain=float(gains.sum()) / num_true,
        standard_error=float(np.sqrt((gains_of_triples**2).sum())) / num_true,
    )


def fit_recalibration(
    log_odds: Floats,
    true: Flags,
    weights: Floats,
    *,
    settings: RecalibrationSettings = RECALIBRATION,
) -> Recalibration:
    """The most probable map of the log odds of weighted candidates `(n,)`.

    The parameters are the value of the middle knot and the logarithms of the slopes, so that every
    map increases.
    """
    knots = settings.knots
    middle = len(knots) // 2
    lengths = np.diff(knots)

    # The value of a knot is that of the middle one, plus or minus the rises of the pieces between.
    places = np.arange(len(knots))[:, None]
    pieces = np.arange(len(lengths))
    signs = 1.0 * ((middle <= pieces) & (pieces < places))
    signs -= (places <= pieces) & (pieces < middle)

    def values_of(parameters: Floats) -> tuple[Floats, Floats]:
        rises = lengths * np.exp(parameters[1:])
        values = knots[middle] + parameters[0] + signs @ rises
        return values, np.column_stack([np.ones(len(knots)), signs * rises])

    hats = [np.interp(log_odds, knots, unit) for unit in np.eye(len(knots))]
    interpolation = np.stack(hats, axis=1)
    outside = log_odds - np.clip(log_odds, knots[0], knots[-1])

    def logits_of(parameters: Floats) -> tuple[Floats, Floats]:
        values, derivatives = values_of(parameters)
        return interpolation @ values + outside, interpolation @ derivatives

    spreads = np.array([settings.value_spread, *[settings.slope_spread] * len(lengths)])
    parameters = fit_logistic(
        logits_of,
        true,
        weights / 2,  # Both directions of a triple count as one.
        centre=np.zeros(len(spreads)),
        precision=np.diag(spreads**-2.0),
    )
    values, _ = values_of(parameters)
    return Recalibration(torch.from_numpy(knots), torch.from_numpy(values))

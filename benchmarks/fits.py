"""The exponents with which time and memory grow."""

import math
from typing import NamedTuple

import numpy as np

AXES = ("entities", "triples", "dim", "batch")  # the sizes of a training that can grow
LAST = 3  # points that are also fitted alone: constant costs weigh least on them


class Fit(NamedTuple):
    """y ≈ scale · x^exponent, and how much of the variation of log y that explains."""

    exponent: float
    scale: float
    r_squared: float


def fit_exponent(x: list[float], y: list[float]) -> Fit:
    """Least squares on logarithms."""
    log_x = np.log(x)
    log_y = np.log(y)
    exponent, intercept = np.polyfit(log_x, log_y, 1)
    residuals = log_y - (exponent * log_x + intercept)
    variation = ((log_y - log_y.mean()) ** 2).sum()
    r_squared = 1 - float((residuals**2).sum() / variation) if variation > 0 else 1.0
    return Fit(float(exponent), math.exp(intercept), r_squared)


def fits_of(axis: str, points: list[dict[str, float]], measure: str) -> tuple[Fit, Fit]:
    """The fit to all points, and that to the last ones, where what is constant weighs least."""
    x = [point[axis] for point in points]
    y = [point[measure] for point in points]
    return fit_exponent(x, y), fit_exponent(x[-LAST:], y[-LAST:])

"""The least point of a smooth convex function, by L-BFGS."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

MOST_STEPS = 200
MOST_TRIALS = 10  # of a step's length
MEMORY = 20
Array = npt.NDArray[np.floating]
Function = Callable[[Array], tuple[float, Array]]  # its value and its gradient
Past = deque[tuple[Array, Array, float]]  # steps, how the gradient changed by each, and the product of the two


def least(
    value_and_slope: Function,
    start: Array,
    *,
    tolerance: float,
    at_start: tuple[float, Array] | None = None,
    past: Past | None = None,
) -> Array:
    """Descend from a point until no number of the gradient is above `tolerance`.

    Along a line a convex function has not passed its least point while it still falls, so that lengths are judged by
    slopes, which rounding hurts less than values. `at_start` is what is known there already. `past` may have steps of a
    function much alike, and gets more.
    """
    past = deque(maxlen=MEMORY) if past is None else past
    point = start
    value, slope = at_start or value_and_slope(point)
    for _ in range(MOST_STEPS):
        if np.abs(slope).max() <= tolerance:
            break
        direction = -_over_curvature(slope, past)
        falls = np.vdot(slope, direction)
        length = 1.0 if past else min(1.0, 1.0 / float(np.linalg.norm(slope)))
        for _ in range(MOST_TRIALS):
            there = point + length * direction
            there_value, there_slope = value_and_slope(there)
            rises = np.vdot(there_slope, direction)
            if rises <= 0 or there_value - value <= 1e-4 * length * falls:
                break
            # To where the slope would be 0 if it were a straight line; halfway at most, for beyond it may be flat.
            length *= min(0.5, max(0.1, float(falls / (falls - rises))))
        step, change = there - point, there_slope - slope
        past.append((step, change, max(float(np.vdot(step, change)), 1e-30)))
        point, value, slope = there, there_value, there_slope
    return point


def _over_curvature(slope: Array, past: Past) -> Array:
    """The gradient over the curvature that past steps have shown: the two loops of L-BFGS."""
    shares = []
    for step, change, product in reversed(past):
        shares.append(float(np.vdot(step, slope)) / product)
        slope = slope - shares[-1] * change
    if past:
        _, change, product = past[-1]
        slope = slope * (product / max(float(np.vdot(change, change)), 1e-30))
    for (step, change, product), share in zip(past, reversed(shares), strict=True):
        slope = slope + (share - float(np.vdot(change, slope)) / product) * step
    return slope

"""The least point of a smooth convex function, by L-BFGS."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

MOST_STEPS = 200
MOST_TRIALS = 10  # of a step's length
MEMORY = 20


def least(value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, *, tolerance: float) -> Tensor:
    """Descend from a point until no number of the gradient is above `tolerance`.

    Along a line a convex function has not passed its least point while it still falls, so that lengths are judged by
    slopes, which rounding hurts less than values.
    """
    point = start
    value, slope = value_and_slope(point)
    past: deque[tuple[Tensor, Tensor]] = deque(maxlen=MEMORY)
    for _ in range(MOST_STEPS):
        if float(slope.abs().max()) <= tolerance:
            break
        direction = -_over_curvature(slope, past)
        falls = float((slope * direction).sum())
        length = 1.0 if past else min(1.0, 1.0 / float(slope.norm()))
        for _ in range(MOST_TRIALS):
            there = point + length * direction
            there_value, there_slope = value_and_slope(there)
            rises = float((there_slope * direction).sum())
            if rises <= 0 or float(there_value - value) <= 1e-4 * length * falls:
                break
            # To where the slope would be 0 if it were a straight line; halfway at most, for beyond it may be flat.
            length *= min(0.5, max(0.1, falls / (falls - rises)))
        past.append((there - point, there_slope - slope))
        point, value, slope = there, there_value, there_slope
    return point


def _over_curvature(slope: Tensor, past: deque[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient over the curvature that past steps have shown: the two loops of L-BFGS."""
    kept = [(step, change, torch.clamp((step * change).sum(), min=1e-30)) for step, change in past]
    shares = []
    for step, change, product in reversed(kept):
        shares.append((step * slope).sum() / product)
        slope = slope - shares[-1] * change
    if kept:
        _, change, product = kept[-1]
        slope = slope * (product / torch.clamp((change * change).sum(), min=1e-30))
    for (step, change, product), share in zip(kept, reversed(shares), strict=True):
        slope = slope + step * (share - (change * slope).sum() / product)
    return slope

"""The least points of many smooth convex functions at once: the L-BFGS of `descent` for each, in step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from dualkg.answers.newcomers.descent import MEMORY, MOST_STEPS, MOST_TRIALS

Functions = Callable[[Tensor], tuple[Tensor, Tensor]]  # points `(n, size)` → values `(n,)` and gradients `(n, size)`
LEAST = 1e-30


@torch.no_grad()
def least_of_each(values_and_slopes: Functions, start: Tensor, *, tolerance: float) -> Tensor:
    """Descend from points `(n, size)` until no number of any gradient is above `tolerance`."""
    past: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)
    point = start
    values, slopes = values_and_slopes(point)
    for _ in range(MOST_STEPS):
        there_already = slopes.abs().amax(1) <= tolerance
        if bool(there_already.all()):
            break
        directions = -_over_curvature(slopes, past).masked_fill(there_already[:, None], 0.0)
        falls = _dots(slopes, directions)
        lengths = torch.ones_like(values)
        if not past:
            lengths = (1 / slopes.norm(dim=1).clamp(min=LEAST)).clamp(max=1.0)
        for _ in range(MOST_TRIALS):
            there = point + lengths[:, None] * directions
            there_values, there_slopes = values_and_slopes(there)
            rises = _dots(there_slopes, directions)
            short_enough = there_already | (rises <= 0) | (there_values - values <= 1e-4 * lengths * falls)
            if bool(short_enough.all()):
                break
            shorter = lengths * (falls / (falls - rises)).clamp(0.1, 0.5)
            lengths = torch.where(short_enough, lengths, shorter)
        step, change = there - point, there_slopes - slopes
        past.append((step, change, _dots(step, change).clamp(min=LEAST)))
        point, values, slopes = there, there_values, there_slopes
    return point


def _dots(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1)


def _over_curvature(slopes: Tensor, past: deque[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    shares = []
    for step, change, product in reversed(past):
        shares.append((_dots(step, slopes) / product)[:, None])
        slopes = slopes - shares[-1] * change
    if past:
        _, change, product = past[-1]
        slopes = slopes * (product / _dots(change, change).clamp(min=LEAST))[:, None]
    for (step, change, product), share in zip(past, reversed(shares), strict=True):
        slopes = slopes + (share - (_dots(change, slopes) / product)[:, None]) * step
    return slopes

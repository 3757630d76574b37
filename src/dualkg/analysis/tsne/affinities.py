"""How near points are to each other, as probabilities: each point has the same number of neighbours, in effect."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.analysis.tsne.neighbours import Neighbours, nearest

REACH = 3  # neighbours looked at, by perplexity; a Gaussian has next to nothing beyond
SHARPEST = 25.0  # of the logarithms that precisions are looked for between, where a mean distance is 1
HALVINGS = 34


@dataclass(frozen=True, eq=False)
class Affinities:
    """p of pairs of points, both ways, by the first: those of point i are `starts[i]` to `starts[i + 1]`.

    They add up to 1, and p of (i, j) is that of (j, i). Pairs that are not here have p = 0.
    """

    starts: Tensor
    rows: Tensor
    columns: Tensor
    weights: Tensor

    @property
    def num_points(self) -> int:
        return len(self.starts) - 1


def affinities_of(points: Tensor, *, perplexity: float) -> Affinities:
    """Of points `(n, width)`, two or more; at most n − 1 neighbours can be had."""
    found = nearest(points, min(len(points) - 1, math.ceil(REACH * max(perplexity, 1.0))))
    return symmetric(found, calibrated(found.squares, perplexity=perplexity))


def calibrated(squares: Tensor, *, perplexity: float) -> Tensor:
    """p of each neighbour given the point, `(n, k)`: Gaussian, as wide as makes exp(entropy) the perplexity.

    The width is found by bisection for all points at once. Where no width will do (more copies at one distance than
    the perplexity, or fewer neighbours), the nearest that can be had is taken.
    """
    target = math.log(min(max(perplexity, 1.0), squares.shape[1]))
    beyond = squares - squares.amin(1, keepdim=True)
    typical = beyond.mean(1, keepdim=True)
    beyond = beyond / torch.where(typical > 0, typical, 1.0)
    low = torch.full_like(typical, -SHARPEST)
    high = torch.full_like(typical, SHARPEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_wide = _entropy(beyond, middle.exp()) > target
        low, high = torch.where(too_wide, middle, low), torch.where(too_wide, high, middle)
    return (-beyond * ((low + high) / 2).exp()).softmax(1)


def _entropy(beyond: Tensor, precision: Tensor) -> Tensor:
    weights = (-beyond * precision).exp_()
    total = weights.sum(1, keepdim=True)
    return total.log() + precision * (weights * beyond).sum(1, keepdim=True) / total


def symmetric(found: Neighbours, given: Tensor) -> Affinities:
    """The mean of p of a neighbour given the point and of the point given the neighbour, as parts of 1."""
    num, k = given.shape
    points = torch.arange(num, device=given.device)[:, None].expand(num, k).flatten()
    others = found.ids.flatten()
    keys, order = torch.cat([points * num + others, others * num + points]).sort()
    values = (given.flatten() / (2 * num)).repeat(2)[order]
    again = torch.zeros_like(keys, dtype=torch.bool)  # a pair comes twice where each is a neighbour of the other
    again[1:] = keys[1:] == keys[:-1]
    values[:-1] += torch.where(again[1:], values[1:], 0.0)
    keys, values = keys[~again], values[~again]
    rows = keys // num
    starts = torch.searchsorted(rows, torch.arange(num + 1, device=rows.device))
    return Affinities(starts, rows.int(), (keys % num).int(), values)

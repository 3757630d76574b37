"""A softmax over blocks of candidates: each becomes exponentials while it is in the cache, and what is left is small.

With T the sum of the exponentials of all candidates but the target, and m = log T − the target's score:

    loss = log(1 + eᵐ)        softmax − one-hot = (e_1, …, −T at the target, …, e_n) · sigmoid(m) / T

So nothing is taken from one: a target that has nearly all keeps the digits of its small loss and gradient, although
the exponentials be bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compiling import HAS_NUMBA, bits_of, compiled, narrowed, widened
from dualkg.kernels.cpu.softmax import exp
from dualkg.kernels.cpu.threads import in_parallel

# Exponentials are relative to a score of their column, which need not be the largest: floats lose no digit for being
# large. Only a score this far above it becomes the new one, so that hardly a column is ever gone over again.
SLACK = 32.0
INFINITY = np.float32(np.inf)
SIXTEEN, MIDDLE = np.uint32(16), np.uint32(0x8000)


class Shares(NamedTuple):
    """Losses `(batch,)`, and weights `(batch, 1)` by which the columns become softmax − one-hot."""

    losses: Tensor
    weights: Tensor


class BlockedSoftmax:
    """The softmax of each column of scores `(candidates, batch)`, which are found, and overwritten, block by block."""

    def __init__(self, scores: Tensor, targets: Tensor) -> None:
        self.scores = scores
        self.targets = targets.contiguous()
        self.exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
        # The score that exponentials are relative to, their total, and the score of the target.
        self.tops = torch.full(targets.shape, torch.finfo(self.exact).min, dtype=torch.float64)
        self.totals = torch.zeros(targets.shape, dtype=torch.float64)
        self.chosen = torch.full(targets.shape, torch.nan, dtype=torch.float64)

    def take(self, first: int, last: int) -> None:
        """Overwrite rows of scores by exponentials, 0 for targets; the rows before have been taken already."""
        if not HAS_NUMBA or self.scores.dtype not in (torch.float32, torch.bfloat16):
            self._take(first, last)
            return
        scores = bits_of(self.scores)
        floats, halves = (None, scores) if scores.dtype == np.uint16 else (scores, None)
        columns = (tensor.numpy() for tensor in (self.targets, self.tops, self.totals, self.chosen))
        in_parallel(_take, len(self.targets), floats, halves, first, last, *columns)

    def finish(self) -> Shares:
        """Put what all others have in the place of each target."""
        margins = self.tops + self.totals.log() - self.chosen
        self.scores[self.targets, torch.arange(len(self.targets))] = -self.totals.to(self.scores.dtype)
        losses = torch.nn.functional.softplus(margins, threshold=40)  # from where on the 1 is less than a last digit
        weights = margins.sigmoid() / self.totals.clamp(min=1)  # less than 1 only where there are no others
        return Shares(losses.to(self.exact), weights.to(self.exact).unsqueeze(-1))

    def _take(self, first: int, last: int) -> None:
        """The same in PyTorch."""
        block = self.scores[first:last]
        columns = ((self.targets >= first) & (self.targets < last)).nonzero().squeeze(-1)
        places = self.targets[columns] - first, columns
        chosen = block[places]
        self.chosen[columns] = chosen.double()
        block[places] = torch.where(chosen < torch.inf, -torch.inf, chosen)
        values = block.to(self.exact)
        self._raise_tops(values.amax(dim=0).double(), first)
        values.sub_(self.tops.to(self.exact)).exp_()
        self.totals += values.sum(dim=0)
        block.copy_(values)

    def _raise_tops(self, highest: Tensor, first: int) -> None:
        """Where a block goes far above all before, write those anew."""
        columns = (highest > self.tops + SLACK).nonzero().squeeze(-1)
        if len(columns):
            factors = (self.tops[columns] - highest[columns]).exp()
            self.scores[:first, columns] = (self.scores[:first, columns] * factors).to(self.scores.dtype)
            self.totals[columns] *= factors
            self.tops[columns] = highest[columns]


# One of `floats` and `halves`, the bits of bfloat16, is None, so that numba compiles the other alone.


@compiled()
def _take(start, stop, floats, halves, first, last, targets, tops, totals, chosen):
    """Columns from `start` to `stop` of a block of rows."""
    _choose(start, stop, floats, halves, first, last, targets, chosen)
    highest = np.full(stop - start, -INFINITY)
    for row in range(first, last):
        if floats is not None:
            _raise(floats[row, start:stop], None, highest)
        if halves is not None:
            _raise(None, halves[row, start:stop], highest)
    for column in range(start, stop):
        if highest[column - start] > tops[column] + SLACK:
            _rewrite(column, floats, halves, first, np.float64(highest[column - start]), tops, totals)
    top, total = tops[start:stop].astype(np.float32), np.zeros(stop - start, np.float32)
    for row in range(first, last):
        if floats is not None:
            _exponentials(floats[row, start:stop], None, top, total)
        if halves is not None:
            _exponentials(None, halves[row, start:stop], top, total)
    for column in range(start, stop):
        totals[column] += total[column - start]


@compiled()
def _choose(start, stop, floats, halves, first, last, targets, chosen):
    """Keep the scores of targets, and take them out, but not one that is no number: it must show."""
    for column in range(start, stop):
        row = targets[column]
        if first <= row < last:
            score = _read(floats, halves, row, column)
            chosen[column] = score
            if score < INFINITY:
                _write(floats, halves, row, column, -INFINITY)


@compiled()
def _raise(floats, halves, highest):
    """The largest of each column so far; a NaN, which is passed over, will show in the total."""
    for place in range(len(highest)):
        if floats is not None:
            score = floats[place]
        if halves is not None:
            score = widened(halves[place])
        highest[place] = score if score > highest[place] else highest[place]


@compiled()
def _rewrite(column, floats, halves, first, highest, tops, totals):
    """Make what a column has before this block relative to another score."""
    factor = np.exp(tops[column] - highest)
    if totals[column] > 0:
        for row in range(first):
            _write(floats, halves, row, column, np.float32(_read(floats, halves, row, column) * factor))
    totals[column] *= factor
    tops[column] = highest


@compiled("contract")
def _exponentials(floats, halves, top, total):
    """Overwrite a row by exponentials, and add them to the total of each column."""
    for place in range(len(top)):
        if floats is not None:
            floats[place] = exponential = exp(floats[place] - top[place])
        if halves is not None:
            exponential = exp(widened(halves[place]) - top[place])
            # `narrowed` takes time for NaN and for the even one of two; but a NaN is in the total as well.
            halves[place] = np.uint16((np.float32(exponential).view(np.uint32) + MIDDLE) >> SIXTEEN)
        total[place] += exponential


@compiled()
def _read(floats, halves, row, column):
    if floats is not None:
        number = floats[row, column]
    if halves is not None:
        number = widened(halves[row, column])
    return number


@compiled()
def _write(floats, halves, row, column, number):
    if floats is not None:
        floats[row, column] = number
    if halves is not None:
        halves[row, column] = narrowed(number)

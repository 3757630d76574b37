"""Counts of the candidates that score higher than an answer, and equal to it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import compiled, in_parallel

CHUNK = 4096  # scores that stay in the nearest cache while all answers of a row are compared with them


def count_better_and_tied(scores: Tensor, known: Tensor, targets: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Counts `(num_targets, 2)` for `targets`: row, answer, and the start and end of the row's known answers.

    −1 where a score of the row is NaN or infinite.
    """
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()  # exact, from a narrower type
    counts = np.empty((len(targets[0]), 2), dtype=np.int32)
    arrays = (tensor.detach().contiguous().numpy() for tensor in (scores, known, *targets))
    in_parallel(_count_rows, len(counts), *arrays, counts)
    return torch.from_numpy(counts)


@compiled()
def _count_rows(start, stop, scores, known, rows, answers, first, last, counts):
    """Targets from `start` to `stop`, those of one row in one pass."""
    item = start
    while item < stop:
        end = item + 1
        while end < stop and rows[end] == rows[item]:
            end += 1
        row = scores[rows[item]]
        if _compare(row, answers[item:end], counts[item:end]):
            for one in range(item, end):
                _subtract_known(row, answers[one], known[first[one] : last[one]], counts[one])
        else:
            counts[item:end] = -1
        item = end


@compiled()
def _compare(row, answers, counts):
    """Count all candidates; return whether the row is finite."""
    counts[:] = 0
    num_nonfinite = 0
    for begin in range(0, len(row), CHUNK):
        chunk = row[begin : begin + CHUNK]
        num_nonfinite += _num_nonfinite(chunk)
        for item in range(len(answers)):
            better, tied = _count_chunk(chunk, row[answers[item]])
            counts[item, 0] += better
            counts[item, 1] += tied
    counts[:, 1] -= 1  # the answer itself
    return num_nonfinite == 0


# The next two loops must be vectorized: so they have no branches, use indices, and keep sums in 32 bits, where numba
# would add integers in 64 bits.


@compiled()
def _num_nonfinite(chunk):
    num_nonfinite = np.int32(0)
    for column in range(len(chunk)):
        # NaN compares as false, and infinity is not below itself.
        num_nonfinite = np.int32(num_nonfinite + np.int32(not abs(chunk[column]) < np.inf))
    return num_nonfinite


@compiled()
def _count_chunk(chunk, target):
    better, tied = np.int32(0), np.int32(0)
    for column in range(len(chunk)):
        better = np.int32(better + np.int32(chunk[column] > target))
        tied = np.int32(tied + np.int32(chunk[column] == target))
    return better, tied


@compiled()
def _subtract_known(row, answer, known, counts):
    for other in known:
        if other != answer:
            counts[0] -= row[other] > row[answer]
            counts[1] -= row[other] == row[answer]

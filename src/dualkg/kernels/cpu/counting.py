"""How many candidates stand above an answer, and how many beside it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import compiled, in_parallel

CHUNK = 4096  # scores that stay in the nearest cache while all answers of a row are compared with them


def count_better_and_tied(scores: Tensor, known: Tensor, asked: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Counts `(num_asked, 2)` for `asked`: row, answer, and where the row's known answers begin and end.

    −1 where a score of the row is NaN or infinite.
    """
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()  # from a narrower type, so that nothing is lost
    counts = np.empty((len(asked[0]), 2), dtype=np.int32)
    arrays = (tensor.detach().contiguous().numpy() for tensor in (scores, known, *asked))
    in_parallel(_count_rows, len(counts), *arrays, counts)
    return torch.from_numpy(counts)


@compiled()
def _count_rows(start, stop, scores, known, rows, answers, first, last, counts):
    """Answers from `start` to `stop`, those of one row together."""
    item = start
    while item < stop:
        end = item + 1
        while end < stop and rows[end] == rows[item]:
            end += 1
        row = scores[rows[item]]
        if _compare(row, answers[item:end], counts[item:end]):
            for one in range(item, end):
                _take_back(row, answers[one], known[first[one] : last[one]], counts[one])
        else:
            counts[item:end] = -1
        item = end


@compiled()
def _compare(row, answers, counts):
    """Count all candidates; and say whether the row is finite."""
    counts[:] = 0
    num_unfit = 0
    for begin in range(0, len(row), CHUNK):
        chunk = row[begin : begin + CHUNK]
        num_unfit += _num_unfit(chunk)
        for item in range(len(answers)):
            better, tied = _num_above(chunk, row[answers[item]])
            counts[item, 0] += better
            counts[item, 1] += tied
    counts[:, 1] -= 1  # the answer itself
    return num_unfit == 0


# The next two loops must become vector instructions. So they have no exits and no branches, go by index, and cut sums
# back to the width of the scores, since numba adds whole numbers in 64 bits.


@compiled()
def _num_unfit(chunk):
    num_unfit = np.int32(0)
    for column in range(len(chunk)):
        # NaN compares as false, and infinity is not below itself.
        num_unfit = np.int32(num_unfit + np.int32(not abs(chunk[column]) < np.inf))
    return num_unfit


@compiled()
def _num_above(chunk, target):
    better, tied = np.int32(0), np.int32(0)
    for column in range(len(chunk)):
        better = np.int32(better + np.int32(chunk[column] > target))
        tied = np.int32(tied + np.int32(chunk[column] == target))
    return better, tied


@compiled()
def _take_back(row, answer, known, counts):
    for other in known:
        if other != answer:
            counts[0] -= row[other] > row[answer]
            counts[1] -= row[other] == row[answer]

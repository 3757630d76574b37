"""numba form of the counts of better and tied candidates in `scores.py`."""

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu import compiled, in_parallel
from dualkg.kernels.scores import RankTargets

# Scores that stay in the nearest cache while all answers of a row are compared with them.
COUNT_CHUNK = 4096


def count_better_and_tied(scores: Tensor, known: Tensor, targets: RankTargets) -> Tensor:
    """`count_with_torch` in one pass over each row."""
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()  # exact, from a narrower type
    counts = np.empty((len(targets.rows), 2), dtype=np.int32)
    arrays = (tensor.detach().contiguous().numpy() for tensor in (scores, known, *targets))
    in_parallel(_count_rows, len(counts), *arrays, counts)
    return torch.from_numpy(counts)


@compiled()
def _count_rows(start, stop, scores, known, rows, answers, first, last, counts):
    """Targets from `start` to `stop` − 1, those of one row in one pass."""
    begin = start
    while begin < stop:
        end = begin + 1
        while end < stop and rows[end] == rows[begin]:
            end += 1

        row = scores[rows[begin]]
        if _compare(row, answers[begin:end], counts[begin:end]):
            for target in range(begin, end):
                known_answers = known[first[target] : last[target]]
                _subtract_known(row, answers[target], known_answers, counts[target])
        else:
            counts[begin:end] = -1
        begin = end


@compiled()
def _compare(row, answers, counts):
    """Count all candidates; return whether the row is finite."""
    counts[:] = 0
    num_nonfinite = 0
    for column in range(0, len(row), COUNT_CHUNK):
        chunk = row[column : column + COUNT_CHUNK]
        num_nonfinite += _num_nonfinite(chunk)
        for target in range(len(answers)):
            better, tied = _count_chunk(chunk, row[answers[target]])
            counts[target, 0] += better
            counts[target, 1] += tied
    counts[:, 1] -= 1  # the answer itself
    return num_nonfinite == 0


# The next two loops must be vectorized. So they have no branches, use indices, and keep sums in 32
# bits, where numba would add integers in 64 bits.


@compiled()
def _num_nonfinite(chunk):
    """The number of scores that are NaN or infinite."""
    num_nonfinite = np.int32(0)
    for column in range(len(chunk)):
        # NaN compares as false, and infinity is not below itself.
        num_nonfinite = np.int32(num_nonfinite + np.int32(not abs(chunk[column]) < np.inf))
    return num_nonfinite


@compiled()
def _count_chunk(chunk, target_score):
    """The numbers of scores above the target and equal to it."""
    better = np.int32(0)
    tied = np.int32(0)
    for column in range(len(chunk)):
        better = np.int32(better + np.int32(chunk[column] > target_score))
        tied = np.int32(tied + np.int32(chunk[column] == target_score))
    return better, tied


@compiled()
def _subtract_known(row, answer, known, counts):
    """Take known answers other than the target out of its counts."""
    for entity in known:
        if entity != answer:
            counts[0] -= row[entity] > row[answer]
            counts[1] -= row[entity] == row[answer]

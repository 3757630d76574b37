"""Counts of the candidates that score higher than an answer, and equal to it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
KNOWN_BLOCK = 256  # most queries have few known answers


# Blocks of targets have any alignment, and a kernel for each would be compiled for nothing.
@triton.jit(do_not_specialize_on_alignment=["rows", "answers", "firsts", "lasts"])
def _count_better_and_tied(
    scores,
    known,
    rows,
    answers,
    firsts,
    lasts,
    counts,
    stride,
    num_columns: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    KNOWN_BLOCK: tl.constexpr,
):
    """One program per target: compare it with its whole row, then subtract the known answers."""
    item = tl.program_id(0).to(tl.int64)
    start = scores + tl.load(rows + item) * stride
    answer = tl.load(answers + item)
    target = tl.load(start + answer).to(KIND)
    better = tl.zeros([BLOCK], tl.int32)
    tied = tl.zeros([BLOCK], tl.int32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    columns = tl.arange(0, BLOCK)
    for begin in range(0, num_columns, BLOCK):
        inside = begin + columns < num_columns
        values = tl.load(start + begin + columns, mask=inside, other=0.0).to(KIND)
        better += (inside & (values > target)).to(tl.int32)
        tied += (inside & (values == target)).to(tl.int32)
        # NaN compares as false, and infinity is not below itself.
        nonfinite += 1 - (tl.abs(values) < float("inf")).to(tl.int32)
    num_better = tl.sum(better, axis=0)
    num_tied = tl.sum(tied, axis=0) - 1  # without the answer itself
    position = tl.load(firsts + item)
    last = tl.load(lasts + item)
    lanes = tl.arange(0, KNOWN_BLOCK)
    while position < last:
        inside = position + lanes < last
        others = tl.load(known + position + lanes, mask=inside, other=0)
        known_scores = tl.load(start + others, mask=inside, other=0.0).to(KIND)
        is_other = inside & (others != answer)
        num_better -= tl.sum((is_other & (known_scores > target)).to(tl.int32), axis=0)
        num_tied -= tl.sum((is_other & (known_scores == target)).to(tl.int32), axis=0)
        position += KNOWN_BLOCK
    finite = tl.sum(nonfinite, axis=0) == 0
    tl.store(counts + 2 * item, tl.where(finite, num_better, -1))
    tl.store(counts + 2 * item + 1, tl.where(finite, num_tied, -1))


def count_better_and_tied(scores: Tensor, known: Tensor, targets: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Counts `(num_targets, 2)` for `targets`: row, answer, and the start and end of the row's known answers.

    −1 where a score of the row is NaN or infinite.
    """
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    rows, answers, first, last = (values.contiguous() for values in targets)
    counts = torch.empty(len(rows), 2, dtype=torch.int32, device=scores.device)
    arguments = (scores, known, rows, answers, first, last, counts, scores.stride(0), scores.shape[1])
    kind = tl.float64 if scores.dtype == torch.float64 else tl.float32
    if len(rows):
        with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
            _count_better_and_tied[(len(rows),)](*arguments, KIND=kind, BLOCK=BLOCK, KNOWN_BLOCK=KNOWN_BLOCK)
    return counts

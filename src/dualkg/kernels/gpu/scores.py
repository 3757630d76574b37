"""Rows of scores: the gradient of softmax cross entropy, and counts of the candidates that score
higher.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.scores import RankTargets, Targets

SOFTMAX_BLOCK = 16384  # a row of at most this many scores is read once and stays in registers


@triton.jit
def _softmax_gradient(
    scores,
    targets,
    target_stride,
    weights,
    starts,
    losses,
    num_columns: tl.constexpr,
    stride: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: find maximum and sum, then write Σ weight · (softmax − one-hot); padding
    becomes 0.
    """
    row = tl.program_id(0)
    start = scores + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    weight = 0.0
    of_targets = 0.0
    for index in range(begin, end):
        target_weight = tl.load(weights + index)
        weight += target_weight
        of_targets += target_weight * tl.load(start + tl.load(targets + index * target_stride)).to(
            tl.float32
        )
    if stride <= BLOCK:
        values = tl.load(start + columns, mask=columns < num_columns, other=float("-inf")).to(
            tl.float32
        )
        top = tl.max(values, axis=0)
        powers = tl.exp(values - top)
        summed = tl.sum(powers, axis=0)
        gradient = weight * powers / summed
        for index in range(begin, end):
            is_target = columns == tl.load(targets + index * target_stride)
            gradient -= tl.where(is_target, tl.load(weights + index), 0.0)
        tl.store(start + columns, gradient.to(scores.dtype.element_ty), mask=columns < stride)
    else:
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, num_columns, BLOCK):
            inside = first + columns < num_columns
            values = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(
                tl.float32
            )
            higher = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
            # A lane without a column yet holds −inf, and −inf − −inf is NaN.
            total = tl.where(
                higher == float("-inf"),
                0.0,
                total * tl.exp(highest - higher) + tl.exp(values - higher),
            )
            highest = higher
        top = tl.max(highest, axis=0)
        summed = tl.sum(
            tl.where(highest == float("-inf"), 0.0, total * tl.exp(highest - top)), axis=0
        )
        for first in range(0, stride, BLOCK):
            here = first + columns
            values = tl.load(start + here, mask=here < num_columns, other=float("-inf")).to(
                tl.float32
            )
            gradient = weight * tl.exp(values - top) / summed
            for index in range(begin, end):
                is_target = here == tl.load(targets + index * target_stride)
                gradient -= tl.where(is_target, tl.load(weights + index), 0.0)
            tl.store(start + here, gradient.to(scores.dtype.element_ty), mask=here < stride)
    tl.store(losses + row, weight * (top + tl.log(summed)) - of_targets)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int, losses: Tensor) -> None:
    """Overwrite scores `(queries, padded columns)` by the gradient of Σ weight · −log
    softmax(scores)[target].

    Only the first `num_columns` are scores; the rest become 0. `losses` `(queries,)` receives the
    loss of each.
    """
    if len(scores):
        stride = scores.stride(0)
        block = triton.next_power_of_2(stride) if stride <= SOFTMAX_BLOCK else SOFTMAX_BLOCK // 4
        arrays = (
            scores,
            targets.entities,
            targets.entities.stride(0),
            targets.weights,
            targets.starts,
            losses,
        )
        warps = 8 if block >= 4096 else 4
        _softmax_gradient[(len(scores),)](
            *arrays, num_columns, stride, BLOCK=block, num_warps=warps
        )


@triton.jit
def _corrected(start, entities, log_counts, at, num_columns, answer):
    """Some scores of a row, corrected by the counts; −∞ for padding and where the sample has the
    answer.
    """
    inside = at < num_columns
    negative = inside & (tl.load(entities + at, mask=inside, other=0) != answer)
    values = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(
        negative, values - tl.load(log_counts + at, mask=inside, other=0.0), float("-inf")
    )


@triton.jit
def _sampled_softmax_gradient(
    scores,
    of_answers,
    entities,
    log_counts,
    answers,
    answer_stride,
    weights,
    losses,
    to_answers,
    num_columns,
    stride,
    BLOCK: tl.constexpr,
):
    """One program per row: find maximum and sum, of which the answer is a part, then write the
    gradient.
    """
    row = tl.program_id(0)
    start = scores + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    answer = tl.load(answers + row * answer_stride)
    weight = tl.load(weights + row)
    of_answer = tl.load(of_answers + row)
    highest = tl.zeros([BLOCK], tl.float32) + of_answer
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_columns, BLOCK):
        at = first + columns
        values = _corrected(start, entities, log_counts, at, num_columns, answer)
        higher = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(highest - higher) + tl.exp(values - higher)
        highest = higher
    top = tl.max(highest, axis=0)
    summed = tl.sum(total * tl.exp(highest - top), axis=0) + tl.exp(of_answer - top)
    normalizer = top + tl.log(summed)
    for first in range(0, stride, BLOCK):
        at = first + columns
        gradient = weight * tl.exp(
            _corrected(start, entities, log_counts, at, num_columns, answer) - normalizer
        )
        tl.store(start + at, gradient.to(scores.dtype.element_ty), mask=at < stride)
    tl.store(losses + row, weight * (normalizer - of_answer))
    tl.store(to_answers + row, weight * (tl.exp(of_answer - normalizer) - 1.0))


def sampled_softmax_gradient_(
    scores: Tensor,
    of_answers: Tensor,
    sample: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    losses: Tensor,
) -> Tensor:
    """Overwrite scores of a sample `(batch, padded num)` by the gradient of Σ weight · −log softmax
    of the answer.

    The sample is negatives and the logarithms of their expected counts, by which scores are
    corrected, `(num,)` each, and the answers `(batch,)`, which do not count as negatives. `losses`
    `(batch,)` receives the loss of each. Returns the gradient of the scores of the answers.
    """
    to_answers = torch.empty_like(of_answers)
    if len(scores):
        block = min(triton.next_power_of_2(scores.stride(0)), SOFTMAX_BLOCK // 4)
        arrays = (scores, of_answers, *sample, sample[2].stride(0), weights, losses, to_answers)
        sizes = (len(sample[0]), scores.stride(0))
        warps = 8 if block >= 4096 else 4
        _sampled_softmax_gradient[(len(scores),)](*arrays, *sizes, BLOCK=block, num_warps=warps)
    return to_answers


COUNT_BLOCK = 2048
KNOWN_BLOCK = 256  # most queries have few known answers


# Blocks of targets have any alignment; a kernel compiled for each would be no faster.
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


def count_better_and_tied(scores: Tensor, known: Tensor, targets: RankTargets) -> Tensor:
    """`count_with_torch` in one kernel."""
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    rows, answers, first, last = (values.contiguous() for values in targets)
    counts = torch.empty(len(rows), 2, dtype=torch.int32, device=scores.device)
    arguments = (
        scores,
        known,
        rows,
        answers,
        first,
        last,
        counts,
        scores.stride(0),
        scores.shape[1],
    )
    kind = tl.float64 if scores.dtype == torch.float64 else tl.float32
    if len(rows):
        with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
            _count_better_and_tied[(len(rows),)](
                *arguments, KIND=kind, BLOCK=COUNT_BLOCK, KNOWN_BLOCK=KNOWN_BLOCK
            )
    return counts

"""Rows of scores: gradients of softmax cross entropy, and counts of better candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.scores import RankTargets, Targets

# -- softmax over all candidates -----------------------------------------------

SOFTMAX_BLOCK = 16384  # a row of at most this many scores is read once and stays in registers


@triton.jit
def _softmax_gradient(
    scores_ptr,
    targets_ptr,
    target_stride,
    weights_ptr,
    starts_ptr,
    losses_ptr,
    num_columns: tl.constexpr,
    stride: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a row by Σ weight · (softmax − one-hot) over its targets; padding becomes 0.

    A row that fits in one block is read once. A longer one is read twice: for the maximum and the
    sum of exponentials, and for the gradient.
    """
    row = tl.program_id(0)
    row_ptr = scores_ptr + row.to(tl.int64) * stride
    dtype = scores_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    first_target = tl.load(starts_ptr + row)
    last_target = tl.load(starts_ptr + row + 1)

    weight = 0.0
    weighted_scores = 0.0
    for index in range(first_target, last_target):
        target_weight = tl.load(weights_ptr + index)
        weight += target_weight
        target = tl.load(targets_ptr + index * target_stride)
        weighted_scores += target_weight * tl.load(row_ptr + target).to(tl.float32)

    if stride <= BLOCK:
        scores = tl.load(row_ptr + lanes, mask=lanes < num_columns, other=float("-inf"))
        scores = scores.to(tl.float32)
        top = tl.max(scores, axis=0)
        exponentials = tl.exp(scores - top)
        total = tl.sum(exponentials, axis=0)

        gradient = weight * exponentials / total
        for index in range(first_target, last_target):
            is_target = lanes == tl.load(targets_ptr + index * target_stride)
            gradient -= tl.where(is_target, tl.load(weights_ptr + index), 0.0)
        tl.store(row_ptr + lanes, gradient.to(dtype), mask=lanes < stride)
    else:
        # Each lane has the maximum of its columns, and the sum of exponentials relative to it.
        lane_tops = tl.full([BLOCK], float("-inf"), tl.float32)
        lane_totals = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            mask = start + lanes < num_columns
            scores = tl.load(row_ptr + start + lanes, mask=mask, other=float("-inf"))
            scores = scores.to(tl.float32)
            new_tops = tl.maximum(lane_tops, scores, propagate_nan=tl.PropagateNan.ALL)
            # A lane without a column yet holds −inf, and −inf − −inf is NaN.
            lane_totals = tl.where(
                new_tops == float("-inf"),
                0.0,
                lane_totals * tl.exp(lane_tops - new_tops) + tl.exp(scores - new_tops),
            )
            lane_tops = new_tops

        top = tl.max(lane_tops, axis=0)
        rescaled = tl.where(lane_tops == float("-inf"), 0.0, lane_totals * tl.exp(lane_tops - top))
        total = tl.sum(rescaled, axis=0)

        for start in range(0, stride, BLOCK):
            columns = start + lanes
            scores = tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf"))
            scores = scores.to(tl.float32)
            gradient = weight * tl.exp(scores - top) / total
            for index in range(first_target, last_target):
                is_target = columns == tl.load(targets_ptr + index * target_stride)
                gradient -= tl.where(is_target, tl.load(weights_ptr + index), 0.0)
            tl.store(row_ptr + columns, gradient.to(dtype), mask=columns < stride)

    tl.store(losses_ptr + row, weight * (top + tl.log(total)) - weighted_scores)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int, losses: Tensor) -> None:
    """Overwrite scores by the gradient of Σ weight · −log softmax(scores)[target].

    Scores are `(queries, padded columns)`. Only the first `num_columns` are scores; the rest become
    0. `losses` `(queries,)` receives the loss of each query.
    """
    if not len(scores):
        return
    stride = scores.stride(0)
    if stride <= SOFTMAX_BLOCK:
        block = triton.next_power_of_2(stride)
    else:
        block = SOFTMAX_BLOCK // 4

    _softmax_gradient[(len(scores),)](
        scores,
        targets.entities,
        targets.entities.stride(0),
        targets.weights,
        targets.starts,
        losses,
        num_columns,
        stride,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )


# -- softmax over a sample of candidates ---------------------------------------


@triton.jit
def _corrected_scores(row_ptr, negatives_ptr, log_counts_ptr, columns, num_columns, answer):
    """Load scores of negatives less the logarithms of their expected counts.

    They are −∞ for padding, and where the sample has the answer.
    """
    mask = columns < num_columns
    is_negative = mask & (tl.load(negatives_ptr + columns, mask=mask, other=0) != answer)
    scores = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    log_counts = tl.load(log_counts_ptr + columns, mask=mask, other=0.0)
    return tl.where(is_negative, scores - log_counts, float("-inf"))


@triton.jit
def _top_and_total(
    row_ptr,
    negatives_ptr,
    log_counts_ptr,
    num_columns,
    answer,
    answer_score,
    BLOCK: tl.constexpr,
):
    """The largest score of a row and its answer, and Σ exp(score − it) of the row alone."""
    # Each lane has the maximum of its columns, and the sum of exponentials relative to it. Maxima
    # start at the score of the answer, which unlike −inf can be subtracted from itself.
    lanes = tl.arange(0, BLOCK)
    lane_tops = tl.zeros([BLOCK], tl.float32) + answer_score
    lane_totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        scores = _corrected_scores(
            row_ptr, negatives_ptr, log_counts_ptr, start + lanes, num_columns, answer
        )
        new_tops = tl.maximum(lane_tops, scores, propagate_nan=tl.PropagateNan.ALL)
        lane_totals = lane_totals * tl.exp(lane_tops - new_tops) + tl.exp(scores - new_tops)
        lane_tops = new_tops
    top = tl.max(lane_tops, axis=0)
    return top, tl.sum(lane_totals * tl.exp(lane_tops - top), axis=0)


@triton.jit
def _write_gradient(
    row_ptr,
    negatives_ptr,
    log_counts_ptr,
    num_columns,
    stride,
    answer,
    normalizer,
    weight,
    BLOCK: tl.constexpr,
):
    """Overwrite a row by weight · exp(score − normalizer), and its padding by 0."""
    lanes = tl.arange(0, BLOCK)
    for start in range(0, stride, BLOCK):
        columns = start + lanes
        scores = _corrected_scores(
            row_ptr, negatives_ptr, log_counts_ptr, columns, num_columns, answer
        )
        gradient = weight * tl.exp(scores - normalizer)
        tl.store(row_ptr + columns, gradient.to(row_ptr.dtype.element_ty), mask=columns < stride)


@triton.jit
def _sampled_softmax_gradient(
    scores_ptr,
    answer_scores_ptr,
    negatives_ptr,
    log_counts_ptr,
    answers_ptr,
    answer_stride,
    weights_ptr,
    losses_ptr,
    answer_gradients_ptr,
    num_columns,
    stride,
    BLOCK: tl.constexpr,
):
    """Overwrite a row by its gradient, and write the gradient of its answer's score.

    The answer is part of the maximum and of the sum of exponentials, though not of the row.
    """
    row = tl.program_id(0)
    row_ptr = scores_ptr + row.to(tl.int64) * stride
    answer = tl.load(answers_ptr + row * answer_stride)
    weight = tl.load(weights_ptr + row)
    answer_score = tl.load(answer_scores_ptr + row)

    top, total = _top_and_total(
        row_ptr, negatives_ptr, log_counts_ptr, num_columns, answer, answer_score, BLOCK
    )
    normalizer = top + tl.log(total + tl.exp(answer_score - top))
    _write_gradient(
        row_ptr,
        negatives_ptr,
        log_counts_ptr,
        num_columns,
        stride,
        answer,
        normalizer,
        weight,
        BLOCK,
    )

    tl.store(losses_ptr + row, weight * (normalizer - answer_score))
    tl.store(answer_gradients_ptr + row, weight * (tl.exp(answer_score - normalizer) - 1.0))


@triton.jit
def _sampled_sums(
    scores_ptr,
    answer_scores_ptr,
    negatives_ptr,
    log_counts_ptr,
    answers_ptr,
    answer_stride,
    tops_ptr,
    totals_ptr,
    num_columns,
    stride,
    BLOCK: tl.constexpr,
):
    """Write the largest score of a row and its answer, and the sum of the row's exponentials."""
    row = tl.program_id(0)
    row_ptr = scores_ptr + row.to(tl.int64) * stride
    answer = tl.load(answers_ptr + row * answer_stride)
    answer_score = tl.load(answer_scores_ptr + row)
    top, total = _top_and_total(
        row_ptr, negatives_ptr, log_counts_ptr, num_columns, answer, answer_score, BLOCK
    )
    tl.store(tops_ptr + row, top)
    tl.store(totals_ptr + row, total)


@triton.jit
def _sampled_gradient(
    scores_ptr,
    negatives_ptr,
    log_counts_ptr,
    answers_ptr,
    answer_stride,
    normalizers_ptr,
    weights_ptr,
    num_columns,
    stride,
    BLOCK: tl.constexpr,
):
    """Overwrite a row by its gradient, given the normalizer of its softmax."""
    row = tl.program_id(0)
    _write_gradient(
        scores_ptr + row.to(tl.int64) * stride,
        negatives_ptr,
        log_counts_ptr,
        num_columns,
        stride,
        tl.load(answers_ptr + row * answer_stride),
        tl.load(normalizers_ptr + row),
        tl.load(weights_ptr + row),
        BLOCK,
    )


class Sample(NamedTuple):
    """The negatives of a batch, and what their scores are corrected by.

    `negatives` and `log_counts`, the logarithms of their expected counts, are `(num,)`. The
    `answers`, `(batch,)`, do not count as negatives. A negative of −1 with a log count of ∞ is
    padding.
    """

    negatives: Tensor
    log_counts: Tensor
    answers: Tensor


def sampled_softmax_gradient_(
    scores: Tensor, answer_scores: Tensor, sample: Sample, weights: Tensor, losses: Tensor
) -> Tensor:
    """Overwrite scores of a sample by the gradient of Σ weight · −log softmax of the answer.

    Scores are `(batch, padded num)`. `losses` `(batch,)` receives the loss of each query. Returns
    the gradient of the scores of the answers, `(batch,)`.
    """
    answer_gradients = torch.empty_like(answer_scores)
    if not len(scores):
        return answer_gradients
    _sampled_softmax_gradient[(len(scores),)](
        scores,
        answer_scores,
        sample.negatives,
        sample.log_counts,
        sample.answers,
        sample.answers.stride(0),
        weights,
        losses,
        answer_gradients,
        len(sample.negatives),
        scores.stride(0),
        **_launch_options(scores),
    )
    return answer_gradients


def sampled_sums(scores: Tensor, answer_scores: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """The largest score of each query, its answer's included, and Σ exp(score − it) of the sample.

    Both are `(batch,)`. The answer is not part of the sum.
    """
    tops = torch.empty_like(answer_scores)
    totals = torch.empty_like(answer_scores)
    if len(scores):
        _sampled_sums[(len(scores),)](
            scores,
            answer_scores,
            sample.negatives,
            sample.log_counts,
            sample.answers,
            sample.answers.stride(0),
            tops,
            totals,
            len(sample.negatives),
            scores.stride(0),
            **_launch_options(scores),
        )
    return tops, totals


def sampled_gradient_(scores: Tensor, normalizers: Tensor, sample: Sample, weights: Tensor) -> None:
    """Overwrite scores of a sample by weight · exp(score − normalizer) of their query."""
    if len(scores):
        _sampled_gradient[(len(scores),)](
            scores,
            sample.negatives,
            sample.log_counts,
            sample.answers,
            sample.answers.stride(0),
            normalizers,
            weights,
            len(sample.negatives),
            scores.stride(0),
            **_launch_options(scores),
        )


def _launch_options(scores: Tensor) -> dict[str, int]:
    block = min(triton.next_power_of_2(scores.stride(0)), SOFTMAX_BLOCK // 4)
    return {"BLOCK": block, "num_warps": 8 if block >= 4096 else 4}


# -- counts of better and tied candidates --------------------------------------

COUNT_BLOCK = 2048
KNOWN_BLOCK = 256  # most queries have few known answers


# Blocks of targets have any alignment; a kernel compiled for each would be no faster.
@triton.jit(
    do_not_specialize_on_alignment=["rows_ptr", "answers_ptr", "first_known_ptr", "last_known_ptr"]
)
def _count_better_and_tied(
    scores_ptr,
    known_ptr,
    rows_ptr,
    answers_ptr,
    first_known_ptr,
    last_known_ptr,
    counts_ptr,
    stride,
    num_columns: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    KNOWN_BLOCK: tl.constexpr,
):
    """Compare a target with its whole row, then subtract the known answers."""
    item = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + tl.load(rows_ptr + item) * stride
    answer = tl.load(answers_ptr + item)
    target_score = tl.load(row_ptr + answer).to(DTYPE)

    better = tl.zeros([BLOCK], tl.int32)
    tied = tl.zeros([BLOCK], tl.int32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        mask = start + lanes < num_columns
        scores = tl.load(row_ptr + start + lanes, mask=mask, other=0.0).to(DTYPE)
        better += (mask & (scores > target_score)).to(tl.int32)
        tied += (mask & (scores == target_score)).to(tl.int32)
        # NaN compares as false, and infinity is not below itself.
        nonfinite += 1 - (tl.abs(scores) < float("inf")).to(tl.int32)
    num_better = tl.sum(better, axis=0)
    num_tied = tl.sum(tied, axis=0) - 1  # without the answer itself

    position = tl.load(first_known_ptr + item)
    last_known = tl.load(last_known_ptr + item)
    known_lanes = tl.arange(0, KNOWN_BLOCK)
    while position < last_known:
        mask = position + known_lanes < last_known
        known = tl.load(known_ptr + position + known_lanes, mask=mask, other=0)
        known_scores = tl.load(row_ptr + known, mask=mask, other=0.0).to(DTYPE)
        is_other = mask & (known != answer)
        num_better -= tl.sum((is_other & (known_scores > target_score)).to(tl.int32), axis=0)
        num_tied -= tl.sum((is_other & (known_scores == target_score)).to(tl.int32), axis=0)
        position += KNOWN_BLOCK

    is_finite = tl.sum(nonfinite, axis=0) == 0
    tl.store(counts_ptr + 2 * item, tl.where(is_finite, num_better, -1))
    tl.store(counts_ptr + 2 * item + 1, tl.where(is_finite, num_tied, -1))


def count_better_and_tied(scores: Tensor, known: Tensor, targets: RankTargets) -> Tensor:
    """`count_with_torch` in one kernel."""
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    rows, answers, first_known, last_known = (array.contiguous() for array in targets)
    counts = torch.empty(len(rows), 2, dtype=torch.int32, device=scores.device)
    if not len(rows):
        return counts

    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        _count_better_and_tied[(len(rows),)](
            scores,
            known,
            rows,
            answers,
            first_known,
            last_known,
            counts,
            scores.stride(0),
            scores.shape[1],
            DTYPE=tl.float64 if scores.dtype == torch.float64 else tl.float32,
            BLOCK=COUNT_BLOCK,
            KNOWN_BLOCK=KNOWN_BLOCK,
        )
    return counts

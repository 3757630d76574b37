"""The gradient of softmax cross entropy, in the place of the scores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.targets import Targets

BLOCK = 16384  # a row of at most this many scores is read once and kept in registers


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
    """One program per row: find maximum and sum, then write Σ weight · (softmax − one-hot); padding becomes 0."""
    row = tl.program_id(0)
    start = scores + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    weight, of_targets = 0.0, 0.0
    for index in range(begin, end):
        target_weight = tl.load(weights + index)
        weight += target_weight
        of_targets += target_weight * tl.load(start + tl.load(targets + index * target_stride)).to(tl.float32)
    if stride <= BLOCK:
        values = tl.load(start + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
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
            values = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
            # A lane without a column yet holds −inf, and −inf − −inf is NaN.
            total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(highest - higher) + tl.exp(values - higher))
            highest = higher
        top = tl.max(highest, axis=0)
        summed = tl.sum(tl.where(highest == float("-inf"), 0.0, total * tl.exp(highest - top)), axis=0)
        for first in range(0, stride, BLOCK):
            here = first + columns
            values = tl.load(start + here, mask=here < num_columns, other=float("-inf")).to(tl.float32)
            gradient = weight * tl.exp(values - top) / summed
            for index in range(begin, end):
                is_target = here == tl.load(targets + index * target_stride)
                gradient -= tl.where(is_target, tl.load(weights + index), 0.0)
            tl.store(start + here, gradient.to(scores.dtype.element_ty), mask=here < stride)
    tl.store(losses + row, weight * (top + tl.log(summed)) - of_targets)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int, losses: Tensor) -> None:
    """Overwrite scores `(queries, padded columns)` by the gradient of Σ weight · −log softmax(scores)[target].

    Only the first `num_columns` are scores; the rest become 0. `losses` `(queries,)` receives the loss of each.
    """
    if len(scores):
        stride = scores.stride(0)
        block = min(triton.next_power_of_2(stride), BLOCK) if stride <= BLOCK else BLOCK // 4
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

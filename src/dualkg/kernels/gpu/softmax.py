"""Scores to their gradient, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.reference import Targets

BLOCK = 16384  # a row of up to so many scores is read once and kept in registers


@triton.jit
def _softmax_gradient(
    scores,
    targets,
    target_stride,
    shares,
    starts,
    losses,
    num_columns: tl.constexpr,
    stride: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: find its maximum and sum, then write Σ share · (softmax − one-hot); padding becomes 0."""
    row = tl.program_id(0)
    start = scores + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    weight, of_targets = 0.0, 0.0
    for place in range(begin, end):
        share = tl.load(shares + place)
        weight += share
        of_targets += share * tl.load(start + tl.load(targets + place * target_stride)).to(tl.float32)
    if stride <= BLOCK:
        values = tl.load(start + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
        top = tl.max(values, axis=0)
        powers = tl.exp(values - top)
        summed = tl.sum(powers, axis=0)
        gradient = weight * powers / summed
        for place in range(begin, end):
            is_target = columns == tl.load(targets + place * target_stride)
            gradient -= tl.where(is_target, tl.load(shares + place), 0.0)
        tl.store(start + columns, gradient.to(scores.dtype.element_ty), mask=columns < stride)
    else:
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, num_columns, BLOCK):
            inside = first + columns < num_columns
            values = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
            # A lane that has met no column yet holds −inf, and −inf − −inf is no number.
            total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(highest - higher) + tl.exp(values - higher))
            highest = higher
        top = tl.max(highest, axis=0)
        summed = tl.sum(tl.where(highest == float("-inf"), 0.0, total * tl.exp(highest - top)), axis=0)
        for first in range(0, stride, BLOCK):
            here = first + columns
            values = tl.load(start + here, mask=here < num_columns, other=float("-inf")).to(tl.float32)
            gradient = weight * tl.exp(values - top) / summed
            for place in range(begin, end):
                is_target = here == tl.load(targets + place * target_stride)
                gradient -= tl.where(is_target, tl.load(shares + place), 0.0)
            tl.store(start + here, gradient.to(scores.dtype.element_ty), mask=here < stride)
    tl.store(losses + row, weight * (top + tl.log(summed)) - of_targets)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int, losses: Tensor) -> None:
    """Overwrite scores `(questions, padded columns)` by the gradient of Σ share · −log softmax(scores)[target].

    Only the first `num_columns` are scores; the rest become 0. `losses` `(questions,)` receives what each adds.
    """
    if len(scores):
        stride = scores.stride(0)
        block = min(triton.next_power_of_2(stride), BLOCK) if stride <= BLOCK else BLOCK // 4
        _softmax_gradient[(len(scores),)](
            scores,
            targets.entities,
            targets.entities.stride(0),
            targets.shares,
            targets.starts,
            losses,
            num_columns,
            stride,
            BLOCK=block,
            num_warps=8 if block >= 4096 else 4,
        )


WIDEST = 4096  # numbers of a row that a program steps; of narrower rows it takes several


@triton.jit
def adagrad(value, seen, slope, rate, eps):
    """The value and the sum of squares after a step."""
    seen += slope * slope
    return value - rate * slope / (tl.sqrt(seen) + eps), seen


@triton.jit
def _update(
    table,
    sums,
    product,
    rows,
    stamps,
    now,
    copy,
    rate,
    eps,
    num_rows,
    width,
    padded_width,
    HAS_PRODUCT: tl.constexpr,
    HAS_COPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    stamped = tl.load(stamps + row, mask=row < num_rows, other=0) == tl.load(now)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    touched = inside & stamped[:, None]
    if not HAS_PRODUCT:
        if tl.sum(stamped.to(tl.int32), axis=0) == 0:
            return
        inside = touched
    at = row[:, None].to(tl.int64) * width + column[None, :]
    padded = row[:, None].to(tl.int64) * padded_width + column[None, :]
    slope = tl.load(rows + at, mask=touched, other=0.0)
    if HAS_PRODUCT:
        slope += tl.load(product + padded, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(table + at, mask=inside, other=0.0)
    seen = tl.load(sums + at, mask=inside, other=0.0)
    value, seen = adagrad(value, seen, slope, tl.load(rate), eps)
    tl.store(rows + at, tl.zeros_like(slope), mask=touched)
    tl.store(sums + at, seen, mask=inside)
    tl.store(table + at, value, mask=inside)
    if HAS_COPY:
        tl.store(copy + padded, value.to(copy.dtype.element_ty), mask=inside)


def adagrad_(
    table: Tensor,
    sums: Tensor,
    *,
    product: Tensor | None,
    rows: Tensor,
    stamps: Tensor,
    now: Tensor,
    copy: Tensor | None,
    rate: Tensor,
    eps: float,
) -> None:
    """Step a float32 table `(num_rows, width)` by `product` plus `rows`, and write its `copy`.

    `product` and `copy` may be padded below and to the right. A row of `rows` counts if its stamp is `now`, and is
    then set to 0; without a product, rows that do not count are passed over. Learning rate and `now` are read on the
    device, so that a captured step can change them.
    """
    num_rows, width = table.shape
    columns = min(triton.next_power_of_2(width), WIDEST)
    block_rows = max(1, 1024 // columns)
    padded = [other for other in (product, copy) if other is not None]
    _update[(triton.cdiv(num_rows, block_rows), triton.cdiv(width, columns))](
        table,
        sums,
        table if product is None else product,
        rows,
        stamps,
        now,
        table if copy is None else copy,
        rate,
        eps,
        num_rows,
        width,
        padded[0].stride(0) if padded else width,
        HAS_PRODUCT=product is not None,
        HAS_COPY=copy is not None,
        ROWS=block_rows,
        COLUMNS=columns,
        num_warps=max(2, columns * block_rows // 512),
    )

"""Elementwise kernels: Adagrad with the table's low-precision copy in one pass, and SplitMix64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

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


class RowGradients(NamedTuple):
    """A table, the sums of its rows' gradients, and for each row the step that last added to it."""

    table: Tensor
    rows: Tensor
    stamps: Tensor


def adagrad_(
    gradients: RowGradients,
    sums: Tensor,
    *,
    now: Tensor,
    rate: Tensor,
    eps: float,
    product: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """Step a float32 table `(num_rows, width)` by `product` plus the rows of `gradients`, and write
    its `copy`.

    `product` and `copy` may be padded below and to the right. A row of gradients counts if its
    stamp is `now`, and is then set to 0; without a product, rows that do not count are passed over.
    Learning rate and `now` are read on the device, so that a captured step can change them.
    """
    table, rows, stamps = gradients
    num_rows, width = table.shape
    columns = min(triton.next_power_of_2(width), WIDEST)
    block_rows = max(1, 1024 // columns)
    padded = next((other for other in (product, copy) if other is not None), table)
    arrays = (
        table,
        sums,
        table if product is None else product,
        rows,
        stamps,
        now,
        table if copy is None else copy,
    )
    sizes = (num_rows, width, padded.stride(0))
    warps = max(2, columns * block_rows // 512)
    tile = (product is not None, copy is not None, block_rows, columns)
    _update[(triton.cdiv(num_rows, block_rows), triton.cdiv(width, columns))](
        *arrays, rate, eps, *sizes, *tile, num_warps=warps
    )


@triton.jit
def _update_rows(
    table,
    sums,
    ids,
    order,
    gradients,
    products,
    rate,
    eps,
    num_gradients,
    width,
    padded_width,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per position of the sorted ids: the first of a row sums the gradients of all, and
    updates it.

    The ids have a −1 before the first and after the last; `order` has not.
    """
    position = tl.program_id(0)
    row = tl.load(ids + position + 1)
    if (row >= 0) & (tl.load(ids + position) != row):
        column = tl.arange(0, BLOCK)
        inside = column < width
        slope = tl.zeros([BLOCK], tl.float32)
        here = row
        while here == row:
            at = tl.load(order + position)
            if at < num_gradients:
                slope += tl.load(gradients + at * width + column, mask=inside, other=0.0)
            else:
                start = products + (at - num_gradients) * padded_width
                slope += tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
            position += 1
            here = tl.load(ids + position + 1)
        values = table + row * width + column
        value = tl.load(values, mask=inside, other=0.0)
        if BY_ROW:
            seen = tl.load(sums + row) + tl.sum(slope * slope, axis=0) / width
            tl.store(sums + row, seen)
            value -= tl.load(rate) * slope / (tl.sqrt(seen) + eps)
        else:
            seen = tl.load(sums + row * width + column, mask=inside, other=0.0)
            value, seen = adagrad(value, seen, slope, tl.load(rate), eps)
            tl.store(sums + row * width + column, seen, mask=inside)
        tl.store(values, value, mask=inside)


def adagrad_rows_(
    table: Tensor,
    sums: Tensor,
    ids: Tensor,
    gradients: Tensor,
    products: Tensor,
    *,
    rate: Tensor,
    eps: float,
) -> None:
    """Step the rows `ids` of a float32 table `(num_rows, width)`, each by the sum of its gradients.

    The first of the `ids` have rows of `gradients`, the others of `products`, which may be padded
    to the right; an id of −1 has none. `sums` has a number for each of the table, or for each row:
    of the means of its squared gradients.
    """
    width = table.shape[1]
    ids, order = ids.sort(stable=True)
    block = triton.next_power_of_2(width)
    arrays = (
        table,
        sums,
        nn.functional.pad(ids, (1, 1), value=-1),
        order,
        gradients,
        products,
        rate,
    )
    sizes = (len(gradients), width, products.stride(0))
    by_row = sums.shape != table.shape
    _update_rows[(len(ids),)](
        *arrays, eps, *sizes, BY_ROW=by_row, BLOCK=block, num_warps=4 if block <= 2048 else 8
    )


HASH_BLOCK = 1024  # numbers per program


@triton.jit
def _mix(bits, found, num, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(bits + positions, mask=positions < num, other=0).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    value = value ^ (value >> 31)
    tl.store(found + positions, value.to(tl.int64, bitcast=True), mask=positions < num)


def splitmix64(bits: Tensor, *, first: int, second: int) -> Tensor:
    """Hash an int64 tensor; the two factors are unsigned."""
    bits = bits.contiguous()
    found = torch.empty_like(bits)
    if num := bits.numel():
        _mix[(triton.cdiv(num, HASH_BLOCK),)](bits, found, num, first, second, HASH_BLOCK)
    return found

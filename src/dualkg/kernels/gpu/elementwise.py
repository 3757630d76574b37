"""Elementwise kernels: Adagrad with the table's low-precision copy in one pass, and SplitMix64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

# -- Adagrad of a whole table --------------------------------------------------

WIDEST = 4096  # numbers of a row that one program updates; it takes several narrower rows


class RowGradients(NamedTuple):
    """A table, the sums of its rows' gradients, and for each row the step that last added to it."""

    table: Tensor
    rows: Tensor
    stamps: Tensor


@triton.jit
def adagrad(value, square_sum, gradient, learning_rate, eps):
    """The value and the sum of its squared gradients after a step."""
    square_sum += gradient * gradient
    return value - learning_rate * gradient / (tl.sqrt(square_sum) + eps), square_sum


@triton.jit
def _update_table(
    table_ptr,
    sums_ptr,
    product_ptr,
    row_gradients_ptr,
    stamps_ptr,
    now_ptr,
    copy_ptr,
    rate_ptr,
    eps,
    num_rows,
    width,
    padded_width,
    HAS_PRODUCT: tl.constexpr,
    HAS_COPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Update one block of rows and columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    is_stamped = tl.load(stamps_ptr + rows, mask=rows < num_rows, other=0) == tl.load(now_ptr)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    stamped_mask = mask & is_stamped[:, None]
    if not HAS_PRODUCT:
        # Rows without a gradient keep their values, so their memory need not be read.
        if tl.sum(is_stamped.to(tl.int32), axis=0) == 0:
            return
        mask = stamped_mask

    offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
    padded_offsets = rows[:, None].to(tl.int64) * padded_width + columns[None, :]

    # Row gradients of an earlier step are not read.
    gradient = tl.load(row_gradients_ptr + offsets, mask=stamped_mask, other=0.0)
    if HAS_PRODUCT:
        gradient += tl.load(product_ptr + padded_offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(table_ptr + offsets, mask=mask, other=0.0)
    square_sum = tl.load(sums_ptr + offsets, mask=mask, other=0.0)

    value, square_sum = adagrad(value, square_sum, gradient, tl.load(rate_ptr), eps)

    tl.store(row_gradients_ptr + offsets, tl.zeros_like(gradient), mask=stamped_mask)
    tl.store(sums_ptr + offsets, square_sum, mask=mask)
    tl.store(table_ptr + offsets, value, mask=mask)
    if HAS_COPY:
        tl.store(copy_ptr + padded_offsets, value.to(copy_ptr.dtype.element_ty), mask=mask)


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
    """Step a float32 table `(num_rows, width)`, and write its `copy`.

    The gradient is `product` plus the rows of `gradients`. `product` and `copy` may be padded below
    and to the right. A row of gradients counts if its stamp is `now`, and is then set to 0; without
    a product, rows that do not count are passed over. Learning rate and `now` are read on the
    device, so that a captured step can change them.
    """
    table, row_gradients, stamps = gradients
    num_rows, width = table.shape
    block_columns = min(triton.next_power_of_2(width), WIDEST)
    block_rows = max(1, 1024 // block_columns)
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(width, block_columns))

    # The kernel takes pointers for all arguments, and does not use those of absent ones.
    product_or_table = table if product is None else product
    copy_or_table = table if copy is None else copy
    padded = copy_or_table if product is None else product

    _update_table[grid](
        table,
        sums,
        product_or_table,
        row_gradients,
        stamps,
        now,
        copy_or_table,
        rate,
        eps,
        num_rows,
        width,
        padded.stride(0),
        HAS_PRODUCT=product is not None,
        HAS_COPY=copy is not None,
        ROWS=block_rows,
        COLUMNS=block_columns,
        num_warps=max(2, block_columns * block_rows // 512),
    )


# -- Adagrad of some rows ------------------------------------------------------


@triton.jit
def _update_rows(
    table_ptr,
    sums_ptr,
    ids_ptr,
    order_ptr,
    gradients_ptr,
    products_ptr,
    rate_ptr,
    eps,
    num_gradients,
    width,
    padded_width,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of a row, and update it.

    There is one program per position of the sorted ids; that of the first of equal ids does the
    work for all. The ids have a −1 before the first and after the last; `order` has not.
    """
    position = tl.program_id(0)
    row = tl.load(ids_ptr + position + 1)
    if (row >= 0) & (tl.load(ids_ptr + position) != row):
        columns = tl.arange(0, BLOCK)
        mask = columns < width

        gradient = tl.zeros([BLOCK], tl.float32)
        current_row = row
        while current_row == row:
            source = tl.load(order_ptr + position)
            if source < num_gradients:
                gradient += tl.load(gradients_ptr + source * width + columns, mask=mask, other=0.0)
            else:
                product_ptr = products_ptr + (source - num_gradients) * padded_width
                gradient += tl.load(product_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            position += 1
            current_row = tl.load(ids_ptr + position + 1)

        value_ptrs = table_ptr + row * width + columns
        value = tl.load(value_ptrs, mask=mask, other=0.0)
        if BY_ROW:
            square_sum = tl.load(sums_ptr + row)
            square_sum += tl.sum(gradient * gradient, axis=0) / width
            tl.store(sums_ptr + row, square_sum)
            value -= tl.load(rate_ptr) * gradient / (tl.sqrt(square_sum) + eps)
        else:
            square_sum = tl.load(sums_ptr + row * width + columns, mask=mask, other=0.0)
            value, square_sum = adagrad(value, square_sum, gradient, tl.load(rate_ptr), eps)
            tl.store(sums_ptr + row * width + columns, square_sum, mask=mask)
        tl.store(value_ptrs, value, mask=mask)


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
    to the right; an id of −1 has none. `sums` has the sum of squared gradients of each number of
    the table; or one number for each row, and then their mean over the row is summed.
    """
    width = table.shape[1]
    block = triton.next_power_of_2(width)
    sorted_ids, order = ids.sort(stable=True)
    padded_ids = nn.functional.pad(sorted_ids, (1, 1), value=-1)

    _update_rows[(len(ids),)](
        table,
        sums,
        padded_ids,
        order,
        gradients,
        products,
        rate,
        eps,
        len(gradients),
        width,
        products.stride(0),
        BY_ROW=sums.shape != table.shape,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )


# -- SplitMix64 ----------------------------------------------------------------

HASH_BLOCK = 1024  # numbers per program


@triton.jit
def _hash(
    bits_ptr,
    hashes_ptr,
    num_numbers,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Hash one block; the integers are unsigned, so that shifts do not repeat the sign."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + offsets, mask=offsets < num_numbers, other=0)
    value = bits.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    value = value ^ (value >> 31)
    tl.store(hashes_ptr + offsets, value.to(tl.int64, bitcast=True), mask=offsets < num_numbers)


def splitmix64(bits: Tensor, *, first: int, second: int) -> Tensor:
    """Hash an int64 tensor; the two factors are unsigned."""
    bits = bits.contiguous()
    hashes = torch.empty_like(bits)
    size = bits.numel()
    if size:
        grid = (triton.cdiv(size, HASH_BLOCK),)
        _hash[grid](bits, hashes, size, FIRST=first, SECOND=second, BLOCK=HASH_BLOCK)
    return hashes

"""Sums over coordinates of |d| or |sin d| of the differences d of all pairs of rows, which stay in
registers.

Sines and cosines of angles are given: sin(a − b) = sin a cos b − cos a sin b takes two products per
pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
COLUMNS = 16
COORDINATES = 16  # of a tile, whose differences are in the registers of one program


@triton.jit
def _part(table, rows, coordinates, num_rows, num_coordinates, stride, part):
    """A tile of rows and coordinates, 0 outside the table."""
    inside = (rows < num_rows)[:, None] & (coordinates < num_coordinates)[None, :]
    positions = rows.to(tl.int64)[:, None] * stride + part * num_coordinates + coordinates[None, :]
    return tl.load(table + positions, mask=inside, other=0.0)


@triton.jit
def _sums(
    one,
    other,
    found,
    num_one,
    num_other,
    num_coordinates,
    one_stride,
    other_stride,
    PARTS: tl.constexpr,
    SINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COORDINATES: tl.constexpr,
):
    """One program per tile of pairs; lanes are summed at the end."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    for first in range(0, num_coordinates, COORDINATES):
        positions = first + tl.arange(0, COORDINATES)
        x = _part(one, rows, positions, num_one, num_coordinates, one_stride, 0)
        y = _part(other, columns, positions, num_other, num_coordinates, other_stride, 0)
        if PARTS == 1:
            total += tl.abs(x[:, None, :] - y[None, :, :])
        else:
            x_second = _part(one, rows, positions, num_one, num_coordinates, one_stride, 1)
            y_second = _part(other, columns, positions, num_other, num_coordinates, other_stride, 1)
            if SINE:
                total += tl.abs(
                    x[:, None, :] * y_second[None, :, :] - x_second[:, None, :] * y[None, :, :]
                )
            else:
                difference = x[:, None, :] - y[None, :, :]
                difference_second = x_second[:, None, :] - y_second[None, :, :]
                total += tl.sqrt(difference * difference + difference_second * difference_second)
    inside = (rows < num_one)[:, None] & (columns < num_other)[None, :]
    tl.store(
        found + rows.to(tl.int64)[:, None] * num_other + columns[None, :],
        tl.sum(total, axis=2),
        mask=inside,
    )


@triton.jit
def _gradients(
    one,
    other,
    upstream,
    found,
    num_one,
    num_other,
    num_coordinates,
    one_stride,
    other_stride,
    row_stride,
    column_stride,
    PARTS: tl.constexpr,
    SINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COORDINATES: tl.constexpr,
):
    """One program per tile of one side: Σ upstream · slope over the other side; 0 where coordinates
    are equal.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    positions = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)
    x = _part(one, rows, positions, num_one, num_coordinates, one_stride, 0)
    total = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    if PARTS == 2:
        x_second = _part(one, rows, positions, num_one, num_coordinates, one_stride, 1)
        total_second = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    for first in range(0, num_other, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside_pairs = (rows < num_one)[:, None] & (columns < num_other)[None, :]
        weights = tl.load(
            upstream
            + rows.to(tl.int64)[:, None] * row_stride
            + columns.to(tl.int64)[None, :] * column_stride,
            mask=inside_pairs,
            other=0.0,
        )[:, :, None]
        y = _part(other, columns, positions, num_other, num_coordinates, other_stride, 0)
        if PARTS == 1:
            difference = x[:, None, :] - y[None, :, :]
            total += weights * tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
        else:
            y_second = _part(other, columns, positions, num_other, num_coordinates, other_stride, 1)
            if (
                SINE
            ):  # whose slope is ±cos(a − b) = ±(cos a cos b + sin a sin b): a comes in at the end
                left = x[:, None, :] * y_second[None, :, :]
                right = x_second[:, None, :] * y[None, :, :]
                signed = tl.where(left > right, weights, tl.where(left < right, -weights, 0.0))
                total += signed * y[None, :, :]
                total_second += signed * y_second[None, :, :]
            else:
                difference = x[:, None, :] - y[None, :, :]
                difference_second = x_second[:, None, :] - y_second[None, :, :]
                square = difference * difference + difference_second * difference_second
                scaled = weights * tl.where(square == 0, 0.0, tl.rsqrt(square))
                total += scaled * difference
                total_second += scaled * difference_second
    inside = (rows < num_one)[:, None] & (positions < num_coordinates)[None, :]
    if SINE:
        slopes = x * tl.sum(total, axis=1) + x_second * tl.sum(total_second, axis=1)
        tl.store(
            found + rows.to(tl.int64)[:, None] * num_coordinates + positions[None, :],
            slopes,
            mask=inside,
        )
    else:
        start = found + rows.to(tl.int64)[:, None] * (PARTS * num_coordinates) + positions[None, :]
        tl.store(start, tl.sum(total, axis=1), mask=inside)
        if PARTS == 2:
            tl.store(start + num_coordinates, tl.sum(total_second, axis=1), mask=inside)


_TILE = (ROWS, COLUMNS, COORDINATES)


def pairwise_sums(one: Tensor, other: Tensor, *, parts: int, sine: bool) -> Tensor:
    """For each of `(batch, width)` and each of `(n, width)`, contiguous float32: `(batch, n)`.

    With `sine` the first numbers of a row are sines of angles, and the second ones their cosines.
    """
    found = torch.empty(len(one), len(other), device=one.device)
    if found.numel():
        grid = (
            triton.cdiv(len(other), COLUMNS),
            triton.cdiv(len(one), ROWS),
        )  # the second is at most 65,535
        _sums[grid](one, other, found, *_sizes(one, other, parts), parts, sine, *_TILE)
    return found


def pairwise_gradient(
    one: Tensor, other: Tensor, upstream: Tensor, *, parts: int, sine: bool
) -> Tensor:
    """The gradient of Σ upstream · sums with respect to `one`, or to its angles; 0 where
    coordinates are equal.
    """
    found = one.new_zeros(len(one), one.shape[1] // 2 if sine else one.shape[1])
    if one.numel() and len(other):
        grid = (triton.cdiv(len(one), ROWS), triton.cdiv(one.shape[1] // parts, COORDINATES))
        sizes = *_sizes(one, other, parts), *upstream.stride()
        _gradients[grid](one, other, upstream, found, *sizes, parts, sine, *_TILE)
    return found


def _sizes(one: Tensor, other: Tensor, parts: int) -> tuple[int, int, int, int, int]:
    return len(one), len(other), one.shape[1] // parts, one.stride(0), other.stride(0)

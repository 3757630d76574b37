"""Sums over coordinates of |d| or |sin d|, d the difference, for all pairs of rows: no difference leaves registers.

A sine is of two angles whose sines and cosines are given: sin(a − b) = sin a cos b − cos a sin b, so that a pair costs
two products, and no series."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, COORDINATES = 16, 16, 16  # of a tile: so many differences are in the registers of a program at once


@triton.jit
def _part(table, rows, coordinates, num_rows, num_coordinates, stride, part):
    """Numbers of some rows and coordinates, 0 where there are none."""
    inside = (rows < num_rows)[:, None] & (coordinates < num_coordinates)[None, :]
    places = rows.to(tl.int64)[:, None] * stride + part * num_coordinates + coordinates[None, :]
    return tl.load(table + places, mask=inside, other=0.0)


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
    """One program a tile of pairs; the sum over coordinates is over lanes only at the end."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    for first in range(0, num_coordinates, COORDINATES):
        places = first + tl.arange(0, COORDINATES)
        mine = _part(one, rows, places, num_one, num_coordinates, one_stride, 0)
        theirs = _part(other, columns, places, num_other, num_coordinates, other_stride, 0)
        if PARTS == 1:
            total += tl.abs(mine[:, None, :] - theirs[None, :, :])
        else:
            mine_second = _part(one, rows, places, num_one, num_coordinates, one_stride, 1)
            theirs_second = _part(other, columns, places, num_other, num_coordinates, other_stride, 1)
            if SINE:
                total += tl.abs(
                    mine[:, None, :] * theirs_second[None, :, :] - mine_second[:, None, :] * theirs[None, :, :]
                )
            else:
                gap = mine[:, None, :] - theirs[None, :, :]
                second = mine_second[:, None, :] - theirs_second[None, :, :]
                total += tl.sqrt(gap * gap + second * second)
    inside = (rows < num_one)[:, None] & (columns < num_other)[None, :]
    tl.store(found + rows.to(tl.int64)[:, None] * num_other + columns[None, :], tl.sum(total, axis=2), mask=inside)


@triton.jit
def _slopes(
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
    """One program a tile of one side's numbers: Σ over the other side of upstream · slope; 0 where a pair meets."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)
    mine = _part(one, rows, places, num_one, num_coordinates, one_stride, 0)
    total = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    if PARTS == 2:
        mine_second = _part(one, rows, places, num_one, num_coordinates, one_stride, 1)
        total_second = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    for first in range(0, num_other, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        asked = (rows < num_one)[:, None] & (columns < num_other)[None, :]
        weights = tl.load(
            upstream + rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride,
            mask=asked,
            other=0.0,
        )[:, :, None]
        theirs = _part(other, columns, places, num_other, num_coordinates, other_stride, 0)
        if PARTS == 1:
            gap = mine[:, None, :] - theirs[None, :, :]
            total += weights * tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
        else:
            theirs_second = _part(other, columns, places, num_other, num_coordinates, other_stride, 1)
            if SINE:  # whose slope is ±cos(a − b) = ±(cos a cos b + sin a sin b): a comes in at the end
                ahead = mine[:, None, :] * theirs_second[None, :, :]
                behind = mine_second[:, None, :] * theirs[None, :, :]
                signed = tl.where(ahead > behind, weights, tl.where(ahead < behind, -weights, 0.0))
                total += signed * theirs[None, :, :]
                total_second += signed * theirs_second[None, :, :]
            else:
                gap = mine[:, None, :] - theirs[None, :, :]
                second = mine_second[:, None, :] - theirs_second[None, :, :]
                square = gap * gap + second * second
                scaled = weights * tl.where(square == 0, 0.0, tl.rsqrt(square))
                total += scaled * gap
                total_second += scaled * second
    inside = (rows < num_one)[:, None] & (places < num_coordinates)[None, :]
    if SINE:
        slopes = mine * tl.sum(total, axis=1) + mine_second * tl.sum(total_second, axis=1)
        tl.store(found + rows.to(tl.int64)[:, None] * num_coordinates + places[None, :], slopes, mask=inside)
    else:
        start = found + rows.to(tl.int64)[:, None] * (PARTS * num_coordinates) + places[None, :]
        tl.store(start, tl.sum(total, axis=1), mask=inside)
        if PARTS == 2:
            tl.store(start + num_coordinates, tl.sum(total_second, axis=1), mask=inside)


_TILE = (ROWS, COLUMNS, COORDINATES)


def sums(one: Tensor, other: Tensor, *, parts: int, sine: bool) -> Tensor:
    """For each of `(batch, width)` and each of `(n, width)`, contiguous float32: `(batch, n)`.

    With `sine` the first numbers of a row are sines of angles, and the second ones their cosines.
    """
    found = torch.empty(len(one), len(other), device=one.device)
    if found.numel():
        grid = (triton.cdiv(len(other), COLUMNS), triton.cdiv(len(one), ROWS))  # the second is at most 65,535
        _sums[grid](one, other, found, *_sizes(one, other, parts), parts, sine, *_TILE)
    return found


def gradient(one: Tensor, other: Tensor, upstream: Tensor, *, parts: int, sine: bool) -> Tensor:
    """Of Σ upstream · sums, `(batch, n)`, with respect to `one` or to its angles; 0 where coordinates are the same."""
    found = one.new_zeros(len(one), one.shape[1] // 2 if sine else one.shape[1])
    if one.numel() and len(other):
        grid = (triton.cdiv(len(one), ROWS), triton.cdiv(one.shape[1] // parts, COORDINATES))
        sizes = *_sizes(one, other, parts), *upstream.stride()
        _slopes[grid](one, other, upstream, found, *sizes, parts, sine, *_TILE)
    return found


def _sizes(one: Tensor, other: Tensor, parts: int) -> tuple[int, int, int, int, int]:
    return len(one), len(other), one.shape[1] // parts, one.stride(0), other.stride(0)

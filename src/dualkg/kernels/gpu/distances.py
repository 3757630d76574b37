"""Sums over coordinates of |d| or |sin d|, d the difference, for all pairs of rows: no difference leaves registers."""

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
def _within_half_turn(angle):
    """The angle less the multiple of π nearest to it; π in two parts, so that no digit of it is lost."""
    turns = tl.floor(angle * 0.3183098861837907 + 0.5)
    return (angle - turns * 3.140625) - turns * 9.67653589793e-4


@triton.jit
def _sine(angle):
    """Of an angle within π/2 of 0, by its series: wrong by 6e-8 at most, and a few operations."""
    square = angle * angle
    series = square * -2.505210838544172e-08 + 2.7557319223985893e-06
    series = square * series - 0.0001984126984126984
    series = square * series + 0.008333333333333333
    series = square * series - 0.16666666666666666
    return angle + angle * square * series


@triton.jit
def _cosine(angle):
    """Of an angle within π/2 of 0: wrong by 1e-8 at most, but for rounding."""
    square = angle * angle
    series = square * 2.08767569878681e-09 - 2.755731922398589e-07
    series = square * series + 2.48015873015873e-05
    series = square * series - 0.001388888888888889
    series = square * series + 0.041666666666666664
    series = square * series - 0.5
    return 1.0 + square * series


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
        gap = mine[:, None, :] - theirs[None, :, :]
        if SINE:
            total += tl.abs(_sine(_within_half_turn(gap)))
        elif PARTS == 1:
            total += tl.abs(gap)
        else:
            mine = _part(one, rows, places, num_one, num_coordinates, one_stride, 1)
            theirs = _part(other, columns, places, num_other, num_coordinates, other_stride, 1)
            second = mine[:, None, :] - theirs[None, :, :]
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
        gap = mine[:, None, :] - theirs[None, :, :]
        if SINE:
            gap = _within_half_turn(gap)
            total += weights * _cosine(gap) * tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
        elif PARTS == 1:
            total += weights * tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
        else:
            theirs = _part(other, columns, places, num_other, num_coordinates, other_stride, 1)
            second = mine_second[:, None, :] - theirs[None, :, :]
            square = gap * gap + second * second
            scaled = weights * tl.where(square == 0, 0.0, tl.rsqrt(square))
            total += scaled * gap
            total_second += scaled * second
    start = found + rows.to(tl.int64)[:, None] * (PARTS * num_coordinates) + places[None, :]
    inside = (rows < num_one)[:, None] & (places < num_coordinates)[None, :]
    tl.store(start, tl.sum(total, axis=1), mask=inside)
    if PARTS == 2:
        tl.store(start + num_coordinates, tl.sum(total_second, axis=1), mask=inside)


_TILE = (ROWS, COLUMNS, COORDINATES)


def sums(one: Tensor, other: Tensor, *, parts: int, sine: bool) -> Tensor:
    """For each of `(batch, width)` and each of `(n, width)`, contiguous float32: `(batch, n)`."""
    found = torch.empty(len(one), len(other), device=one.device)
    if found.numel():
        grid = (triton.cdiv(len(other), COLUMNS), triton.cdiv(len(one), ROWS))  # the second is at most 65,535
        _sums[grid](one, other, found, *_sizes(one, other, parts), parts, sine, *_TILE)
    return found


def gradient(one: Tensor, other: Tensor, upstream: Tensor, *, parts: int, sine: bool) -> Tensor:
    """Of Σ upstream · sums, `(batch, n)`, with respect to `one`; 0 where two coordinates are the same."""
    found = torch.zeros_like(one)
    if one.numel() and len(other):
        grid = (triton.cdiv(len(one), ROWS), triton.cdiv(one.shape[1] // parts, COORDINATES))
        sizes = *_sizes(one, other, parts), *upstream.stride()
        _slopes[grid](one, other, upstream, found, *sizes, parts, sine, *_TILE)
    return found


def _sizes(one: Tensor, other: Tensor, parts: int) -> tuple[int, int, int, int, int]:
    return len(one), len(other), one.shape[1] // parts, one.stride(0), other.stride(0)

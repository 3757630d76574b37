"""Sums over coordinates of |d| or |sin d| for the differences d of all pairs of rows.

A coordinate is one number or two: the parts of a complex number, or the sine and the cosine of an
angle. A row holds the first numbers of all coordinates, then the second ones. Differences stay in
registers. With sines and cosines given, sin(a − b) = sin a cos b − cos a sin b takes two products
a pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The shape of a tile, whose differences are in the registers of one program.
ROWS = 16
COLUMNS = 16
COORDINATES = 16


@triton.jit
def _load_tile(vectors_ptr, rows, coordinates, num_rows, num_coordinates, row_stride, part):
    """Load the first (part 0) or second (part 1) numbers of a tile `(rows, coordinates)`.

    They are 0 outside the table.
    """
    mask = (rows < num_rows)[:, None] & (coordinates < num_coordinates)[None, :]
    row_offsets = rows.to(tl.int64)[:, None] * row_stride
    offsets = row_offsets + part * num_coordinates + coordinates[None, :]
    return tl.load(vectors_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def _sums(
    queries_ptr,
    candidates_ptr,
    sums_ptr,
    num_queries,
    num_candidates,
    num_coordinates,
    query_stride,
    candidate_stride,
    PARTS: tl.constexpr,
    SINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COORDINATES: tl.constexpr,
):
    """Sum over all coordinates, for a tile of queries x and candidates y.

    Coordinates are summed in separate lanes, and the lanes at the end.
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lane_sums = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)

    for start in range(0, num_coordinates, COORDINATES):
        coordinates = start + tl.arange(0, COORDINATES)
        x = _load_tile(
            queries_ptr, rows, coordinates, num_queries, num_coordinates, query_stride, 0
        )
        y = _load_tile(
            candidates_ptr,
            columns,
            coordinates,
            num_candidates,
            num_coordinates,
            candidate_stride,
            0,
        )
        if PARTS == 1:
            lane_sums += tl.abs(x[:, None, :] - y[None, :, :])
        else:
            x_second = _load_tile(
                queries_ptr, rows, coordinates, num_queries, num_coordinates, query_stride, 1
            )
            y_second = _load_tile(
                candidates_ptr,
                columns,
                coordinates,
                num_candidates,
                num_coordinates,
                candidate_stride,
                1,
            )
            if SINE:
                left = x[:, None, :] * y_second[None, :, :]
                right = x_second[:, None, :] * y[None, :, :]
                lane_sums += tl.abs(left - right)
            else:
                real = x[:, None, :] - y[None, :, :]
                imaginary = x_second[:, None, :] - y_second[None, :, :]
                lane_sums += tl.sqrt(real * real + imaginary * imaginary)

    mask = (rows < num_queries)[:, None] & (columns < num_candidates)[None, :]
    sum_ptrs = sums_ptr + rows.to(tl.int64)[:, None] * num_candidates + columns[None, :]
    tl.store(sum_ptrs, tl.sum(lane_sums, axis=2), mask=mask)


@triton.jit
def _gradient(
    queries_ptr,
    candidates_ptr,
    upstream_ptr,
    gradient_ptr,
    num_queries,
    num_candidates,
    num_coordinates,
    query_stride,
    candidate_stride,
    upstream_row_stride,
    upstream_column_stride,
    PARTS: tl.constexpr,
    SINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COORDINATES: tl.constexpr,
):
    """Sum upstream · slope over all candidates y, for a tile of queries x and coordinates.

    Candidates are summed in separate lanes, and the lanes at the end. A slope is 0 where the
    coordinates of a pair are equal.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    coordinates = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)

    x = _load_tile(queries_ptr, rows, coordinates, num_queries, num_coordinates, query_stride, 0)
    lane_sums = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)
    if PARTS == 2:
        x_second = _load_tile(
            queries_ptr, rows, coordinates, num_queries, num_coordinates, query_stride, 1
        )
        second_lane_sums = tl.zeros([ROWS, COLUMNS, COORDINATES], tl.float32)

    for start in range(0, num_candidates, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        pair_mask = (rows < num_queries)[:, None] & (columns < num_candidates)[None, :]
        row_ptrs = upstream_ptr + rows.to(tl.int64)[:, None] * upstream_row_stride
        pair_ptrs = row_ptrs + columns.to(tl.int64)[None, :] * upstream_column_stride
        upstream = tl.load(pair_ptrs, mask=pair_mask, other=0.0)[:, :, None]
        y = _load_tile(
            candidates_ptr,
            columns,
            coordinates,
            num_candidates,
            num_coordinates,
            candidate_stride,
            0,
        )
        if PARTS == 1:
            difference = x[:, None, :] - y[None, :, :]
            sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
            lane_sums += upstream * sign
        else:
            y_second = _load_tile(
                candidates_ptr,
                columns,
                coordinates,
                num_candidates,
                num_coordinates,
                candidate_stride,
                1,
            )
            if SINE:
                # The slope is ±cos(a − b) = ±(cos a cos b + sin a sin b). Only the sign and the
                # factors of b depend on the candidate; those of a are multiplied after the loop.
                left = x[:, None, :] * y_second[None, :, :]
                right = x_second[:, None, :] * y[None, :, :]
                signed = tl.where(left > right, upstream, tl.where(left < right, -upstream, 0.0))
                lane_sums += signed * y[None, :, :]
                second_lane_sums += signed * y_second[None, :, :]
            else:
                real = x[:, None, :] - y[None, :, :]
                imaginary = x_second[:, None, :] - y_second[None, :, :]
                square = real * real + imaginary * imaginary
                scaled = upstream * tl.where(square == 0, 0.0, tl.rsqrt(square))
                lane_sums += scaled * real
                second_lane_sums += scaled * imaginary

    mask = (rows < num_queries)[:, None] & (coordinates < num_coordinates)[None, :]
    if SINE:
        # An angle has one slope, where its row has two numbers.
        slopes = x * tl.sum(lane_sums, axis=1) + x_second * tl.sum(second_lane_sums, axis=1)
        row_ptrs = gradient_ptr + rows.to(tl.int64)[:, None] * num_coordinates
        tl.store(row_ptrs + coordinates[None, :], slopes, mask=mask)
    else:
        row_ptrs = gradient_ptr + rows.to(tl.int64)[:, None] * (PARTS * num_coordinates)
        first_ptrs = row_ptrs + coordinates[None, :]
        tl.store(first_ptrs, tl.sum(lane_sums, axis=1), mask=mask)
        if PARTS == 2:
            second_ptrs = first_ptrs + num_coordinates
            tl.store(second_ptrs, tl.sum(second_lane_sums, axis=1), mask=mask)


def pairwise_sums(queries: Tensor, candidates: Tensor, *, parts: int, sine: bool) -> Tensor:
    """Sums for each of `(batch, width)` and each of `(n, width)`: `(batch, n)`.

    Both are contiguous float32. With `sine` the first numbers of a row are sines of angles, and the
    second ones their cosines.
    """
    sums = torch.empty(len(queries), len(candidates), device=queries.device)
    if not sums.numel():
        return sums

    # Candidates come first, because the second size of a grid is at most 65,535.
    grid = (triton.cdiv(len(candidates), COLUMNS), triton.cdiv(len(queries), ROWS))
    _sums[grid](
        queries,
        candidates,
        sums,
        len(queries),
        len(candidates),
        queries.shape[1] // parts,
        queries.stride(0),
        candidates.stride(0),
        PARTS=parts,
        SINE=sine,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        COORDINATES=COORDINATES,
    )
    return sums


def pairwise_gradient(
    queries: Tensor, candidates: Tensor, upstream: Tensor, *, parts: int, sine: bool
) -> Tensor:
    """The gradient of Σ upstream · sums with respect to `queries`, or to their angles.

    `upstream` is `(batch, n)`, with any strides. The gradient is 0 where coordinates are equal.
    """
    width = queries.shape[1]
    num_coordinates = width // parts
    gradient = queries.new_zeros(len(queries), width // 2 if sine else width)
    if not queries.numel() or not len(candidates):
        return gradient

    grid = (triton.cdiv(len(queries), ROWS), triton.cdiv(num_coordinates, COORDINATES))
    _gradient[grid](
        queries,
        candidates,
        upstream,
        gradient,
        len(queries),
        len(candidates),
        num_coordinates,
        queries.stride(0),
        candidates.stride(0),
        upstream.stride(0),
        upstream.stride(1),
        PARTS=parts,
        SINE=sine,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        COORDINATES=COORDINATES,
    )
    return gradient

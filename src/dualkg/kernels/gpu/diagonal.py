"""The two passes of a training step over the vectors of a batch, for diagonal models.

The first gathers and maps. The second gathers again, adds the regularizer's gradient to that of the
loss, propagates both through the maps, and adds the results to the rows of the tables. The
gradients of ⟨x·r, g⟩ are g·r̄ and x̄·g; those of ⟨h̄·t, g⟩, in relation prediction, are t·ḡ and
h·g.

In kernels, h, r and t are the vectors of a triple: tuples with one block of coordinates for each
number of a coordinate. `grad_h` is the gradient of h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.elementwise import RowGradients

BLOCK = 512  # coordinates per program

# The terms of a regularizer in the order in which the kernel takes their weights.
TERMS = ("head", "relation", "tail", "mapped_head", "mapped_tail", "tail_residual", "head_residual")


class Algebra(NamedTuple):
    """The numbers of a diagonal model's coordinate, and their product and conjugate, compiled."""

    parts: int
    times: Any
    conjugate: Any


@cache
def compile_algebra(
    parts: int, times: Callable[..., Any], conjugate: Callable[..., Any]
) -> Algebra:
    """Compile the product and the conjugate of a diagonal model."""
    return Algebra(parts, triton.jit(times), triton.jit(conjugate))


# -- arithmetic of vectors -----------------------------------------------------


@triton.jit
def _load_vector(vectors_ptr, row, coordinates, dim, stride, PARTS: tl.constexpr):
    """Load a block of coordinates of a row, as a tuple of its parts."""
    ptrs = vectors_ptr + row.to(tl.int64) * stride + coordinates
    mask = coordinates < dim
    vector = (tl.load(ptrs, mask=mask, other=0.0),)
    for part in tl.static_range(1, PARTS):
        vector = vector + (tl.load(ptrs + part * dim, mask=mask, other=0.0),)
    return vector


@triton.jit
def _add_scaled(x, y, scale, PARTS: tl.constexpr):
    """x + scale · y."""
    total = (x[0] + scale * y[0],)
    for part in tl.static_range(1, PARTS):
        total = total + (x[part] + scale * y[part],)
    return total


@triton.jit
def power_and_slope(squared, POWER: tl.constexpr):
    """|x|^power of |x|², and the factor of x in its gradient."""
    if POWER == 2:
        power = squared
        slope = tl.full(squared.shape, 2.0, tl.float32)
    elif POWER == 3:
        modulus = tl.sqrt(squared)
        power = squared * modulus
        slope = 3.0 * modulus
    else:
        power = tl.sqrt(squared)
        slope = tl.where(squared > 0.0, 1.0 / power, 0.0)
    return power, slope


@triton.jit
def _add_penalty(penalty, gradient, x, weight, POWER: tl.constexpr, PARTS: tl.constexpr):
    """Add weight · |x|^power to the penalty, and its gradient to the gradient."""
    squared = x[0] * x[0]
    for part in tl.static_range(1, PARTS):
        squared += x[part] * x[part]
    power, slope = power_and_slope(squared, POWER)
    return penalty + weight * power, _add_scaled(gradient, x, weight * slope, PARTS)


@triton.jit
def _add_to_row(rows_ptr, stamps_ptr, now, row, coordinates, dim, gradient, PARTS: tl.constexpr):
    """Add a gradient to a row that other programs may add to, and stamp the row."""
    ptrs = rows_ptr + row.to(tl.int64) * dim * PARTS + coordinates
    for part in tl.static_range(PARTS):
        tl.atomic_add(ptrs + part * dim, gradient[part], mask=coordinates < dim, sem="relaxed")
    tl.store(stamps_ptr + row, now)


# -- the first pass ------------------------------------------------------------


@triton.jit
def _map(
    output_ptr,
    batch_ptr,
    left_ptr,
    right_ptr,
    dim,
    stride,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    TIMES: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply a block of the vectors of columns LEFT and RIGHT of a triple."""
    triple = tl.program_id(0)
    coordinates = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left_row = tl.load(batch_ptr + triple * 3 + LEFT)
    left = _load_vector(left_ptr, left_row, coordinates, dim, dim * PARTS, PARTS)
    right_row = tl.load(batch_ptr + triple * 3 + RIGHT)
    right = _load_vector(right_ptr, right_row, coordinates, dim, dim * PARTS, PARTS)

    # t Rᵀ is t·r̄, and a pair of entities is h̄·t.
    if LEFT == 2:
        right = CONJUGATE(right)
    if RIGHT == 2:
        left = CONJUGATE(left)
    mapped = TIMES(left, right)

    ptrs = output_ptr + triple.to(tl.int64) * stride + coordinates
    dtype = output_ptr.dtype.element_ty
    for part in tl.static_range(PARTS):
        tl.store(ptrs + part * dim, mapped[part].to(dtype), mask=coordinates < dim)


def num_blocks(dim: int) -> int:
    """The number of programs per triple."""
    return int(triton.cdiv(dim, BLOCK))


def map_rows_(
    output: Tensor,
    batch: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    algebra: Algebra,
    columns: tuple[int, int],
) -> None:
    """Write products of the rows of two columns of a contiguous batch of triples into `output`.

    Columns (0, 1) are h R, (2, 1) are t Rᵀ, and (0, 2) are h̄·t: ⟨h r, t⟩ is ⟨r, h̄·t⟩.
    """
    dim = left.shape[1] // algebra.parts
    left_column, right_column = columns
    _map[(len(batch), num_blocks(dim))](
        output,
        batch,
        left,
        right,
        dim,
        output.stride(0),
        LEFT=left_column,
        RIGHT=right_column,
        PARTS=algebra.parts,
        TIMES=algebra.times,
        CONJUGATE=algebra.conjugate,
        BLOCK=BLOCK,
    )


# -- the second pass -----------------------------------------------------------


@triton.jit
def _gradients(
    batch_ptr,
    heads_ptr,
    tails_ptr,
    relations_ptr,
    upstream_heads_ptr,
    upstream_tails_ptr,
    upstream_pairs_ptr,
    head_rows_ptr,
    tail_rows_ptr,
    relation_rows_ptr,
    head_stamps_ptr,
    tail_stamps_ptr,
    relation_stamps_ptr,
    now_ptr,
    penalties_ptr,
    query_rows_ptr,
    dim,
    upstream_stride,
    head_weight,
    relation_weight,
    tail_weight,
    mapped_head_weight,
    mapped_tail_weight,
    tail_residual_weight,
    head_residual_weight,
    POWER: tl.constexpr,
    RESIDUALS: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
    BY_QUERY: tl.constexpr,
    PAIRS: tl.constexpr,
    PARTS: tl.constexpr,
    TIMES: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the gradients of a block of a triple's vectors to their rows, and write its penalty.

    `upstream_heads` are the loss gradients of mapped heads, `upstream_tails` those of mapped tails.
    """
    triple = tl.program_id(0)
    coordinates = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = coordinates < dim
    head = tl.load(batch_ptr + triple * 3)
    relation = tl.load(batch_ptr + triple * 3 + 1)
    tail = tl.load(batch_ptr + triple * 3 + 2)
    h = _load_vector(heads_ptr, head, coordinates, dim, dim * PARTS, PARTS)
    r = _load_vector(relations_ptr, relation, coordinates, dim, dim * PARTS, PARTS)
    t = _load_vector(tails_ptr, tail, coordinates, dim, dim * PARTS, PARTS)

    r_conjugate = CONJUGATE(r)
    mapped_h = TIMES(h, r)
    mapped_t = TIMES(t, r_conjugate)

    # The regularizer.
    penalty = tl.zeros([BLOCK], tl.float32)
    zero = (penalty,)
    for _ in tl.static_range(1, PARTS):
        zero = zero + (penalty,)
    penalty, grad_mapped_h = _add_penalty(penalty, zero, mapped_h, mapped_head_weight, POWER, PARTS)
    penalty, grad_mapped_t = _add_penalty(penalty, zero, mapped_t, mapped_tail_weight, POWER, PARTS)
    penalty, grad_h = _add_penalty(penalty, zero, h, head_weight, POWER, PARTS)
    penalty, grad_r = _add_penalty(penalty, zero, r, relation_weight, POWER, PARTS)
    penalty, grad_t = _add_penalty(penalty, zero, t, tail_weight, POWER, PARTS)
    if RESIDUALS:
        residual = _add_scaled(mapped_h, t, -1.0, PARTS)
        penalty, grad_residual = _add_penalty(
            penalty, zero, residual, tail_residual_weight, POWER, PARTS
        )
        grad_mapped_h = _add_scaled(grad_mapped_h, grad_residual, 1.0, PARTS)
        grad_t = _add_scaled(grad_t, grad_residual, -1.0, PARTS)

        residual = _add_scaled(mapped_t, h, -1.0, PARTS)
        penalty, grad_residual = _add_penalty(
            penalty, zero, residual, head_residual_weight, POWER, PARTS
        )
        grad_mapped_t = _add_scaled(grad_mapped_t, grad_residual, 1.0, PARTS)
        grad_h = _add_scaled(grad_h, grad_residual, -1.0, PARTS)

    # The loss, with respect to the mapped vectors.
    if BY_QUERY:
        # The gradient of a query goes to the first of its triples; the others have row −1.
        query_row = tl.load(query_rows_ptr + triple)
        upstream = _load_vector(
            upstream_heads_ptr,
            tl.maximum(query_row, 0),
            coordinates,
            dim,
            upstream_stride,
            PARTS,
        )
        is_first = tl.where(query_row < 0, 0.0, 1.0)
        grad_mapped_h = _add_scaled(grad_mapped_h, upstream, is_first, PARTS)
    else:
        upstream = _load_vector(
            upstream_heads_ptr, triple, coordinates, dim, upstream_stride, PARTS
        )
        grad_mapped_h = _add_scaled(grad_mapped_h, upstream, 1.0, PARTS)
    if BOTH_SIDES:
        upstream = _load_vector(
            upstream_tails_ptr, triple, coordinates, dim, upstream_stride, PARTS
        )
        grad_mapped_t = _add_scaled(grad_mapped_t, upstream, 1.0, PARTS)

    # Back through the maps to the vectors.
    grad_h = _add_scaled(grad_h, TIMES(grad_mapped_h, r_conjugate), 1.0, PARTS)
    grad_t = _add_scaled(grad_t, TIMES(grad_mapped_t, r), 1.0, PARTS)
    if PAIRS:
        upstream = _load_vector(upstream_pairs_ptr, triple, coordinates, dim, dim * PARTS, PARTS)
        grad_h = _add_scaled(grad_h, TIMES(t, CONJUGATE(upstream)), 1.0, PARTS)
        grad_t = _add_scaled(grad_t, TIMES(h, upstream), 1.0, PARTS)
    grad_r = _add_scaled(grad_r, TIMES(CONJUGATE(h), grad_mapped_h), 1.0, PARTS)
    grad_r = _add_scaled(grad_r, TIMES(CONJUGATE(grad_mapped_t), t), 1.0, PARTS)

    now = tl.load(now_ptr)
    _add_to_row(head_rows_ptr, head_stamps_ptr, now, head, coordinates, dim, grad_h, PARTS)
    _add_to_row(tail_rows_ptr, tail_stamps_ptr, now, tail, coordinates, dim, grad_t, PARTS)
    _add_to_row(
        relation_rows_ptr, relation_stamps_ptr, now, relation, coordinates, dim, grad_r, PARTS
    )
    penalty = tl.sum(tl.where(mask, penalty, 0.0), axis=0)
    tl.store(penalties_ptr + triple * tl.num_programs(1) + tl.program_id(1), penalty)


def add_gradients_(
    batch: Tensor,
    *,
    heads: RowGradients,
    relations: RowGradients,
    tails: RowGradients,
    now: Tensor,
    upstream: list[Tensor],
    weights: Mapping[str, float],
    power: int,
    algebra: Algebra,
    penalties: Tensor,
    query_rows: Tensor | None = None,
    pairs: Tensor | None = None,
) -> None:
    """Add the gradients of loss and regularizer to the rows of all tables.

    `upstream` has the loss gradients of h R and, if heads were scored too, of t Rᵀ; `pairs` has
    those of h̄·t. `weights` are the regularizer's, by attributes of `Factors`, and `penalties`
    `(batch · num_blocks,)` receives its terms. `query_rows` has the row of `upstream` for each
    triple, or −1 for a triple that was not scored.
    """
    dim = heads.table.shape[1] // algebra.parts
    term_weights = [float(weights.get(term, 0.0)) for term in TERMS]
    has_residuals = "tail_residual" in weights or "head_residual" in weights

    _gradients[(len(batch), num_blocks(dim))](
        batch,
        heads.table,
        tails.table,
        relations.table,
        # The kernel takes pointers for all arguments, and does not use those of absent ones.
        upstream[0],
        upstream[-1],
        upstream[0] if pairs is None else pairs,
        heads.rows,
        tails.rows,
        relations.rows,
        heads.stamps,
        tails.stamps,
        relations.stamps,
        now,
        penalties,
        batch if query_rows is None else query_rows,
        dim,
        upstream[0].stride(0),
        *term_weights,
        POWER=power,
        RESIDUALS=has_residuals,
        BOTH_SIDES=len(upstream) == 2,
        BY_QUERY=query_rows is not None,
        PAIRS=pairs is not None,
        PARTS=algebra.parts,
        TIMES=algebra.times,
        CONJUGATE=algebra.conjugate,
        BLOCK=BLOCK,
    )

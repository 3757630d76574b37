"""The kernels of a training step of RESCAL: rows times the matrix of their relation.

Triples are sorted by relation, so that a matrix is read once for all its triples. In kernels, h and
t are blocks of the vectors of a triple, mapped_h and mapped_t are h R and t Rᵀ, and `grad_h` is the
gradient of h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.diagonal import power_and_slope
from dualkg.kernels.gpu.elementwise import RowGradients, adagrad

# The shape of a tile of a product: triples, summed numbers and columns.
ROWS = 16
INNER = 64
TILE = 64

PROGRAMS_PER_RELATION = 4  # programs that share the triples of one relation

# The terms of a regularizer in the order in which the kernel takes their weights. That of whole
# matrices is added when they are updated.
TERMS = ("head", "tail", "mapped_head", "mapped_tail", "tail_residual", "head_residual")


class TriplesByRelation(NamedTuple):
    """The triples of a batch sorted by relation.

    `order` has the positions of the triples in the batch, and `starts` `(relations + 1,)` the first
    of each relation in `order`.
    """

    order: Tensor
    starts: Tensor

    @staticmethod
    def of(relations: Tensor, num_relations: int) -> TriplesByRelation:
        """Sort without counting relations on the host, which would have to wait for the GPU."""
        dtype = torch.int16 if num_relations < 2**15 else torch.int32  # fewer digits to sort by
        sorted_ids, order = torch.sort(relations.to(dtype))
        ids = torch.arange(num_relations + 1, dtype=dtype, device=order.device)
        starts = torch.searchsorted(sorted_ids, ids)
        return TriplesByRelation(order, starts)


# -- rows times matrices -------------------------------------------------------


@triton.jit
def _map(
    vectors_ptr,
    ids_ptr,
    id_stride,
    matrices_ptr,
    order_ptr,
    starts_ptr,
    output_ptr,
    bf16_output_ptr,
    bf16_stride,
    rows_ptr,
    dim,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS_PER_RELATION: tl.constexpr,
):
    """Multiply vectors by a tile of columns of their relation's matrix.

    With GATHER, a vector is the row of an id and the product is stored for its triple. Without, a
    vector is that of a triple and the product is added to the row of an id.
    """
    relation = tl.program_id(2)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin = tl.load(starts_ptr + relation)
    end = tl.load(starts_ptr + relation + 1)
    matrix_ptr = matrices_ptr + relation.to(tl.int64) * dim * dim

    for first in range(begin + tl.program_id(1) * ROWS, end, ROWS * PROGRAMS_PER_RELATION):
        positions = first + tl.arange(0, ROWS)
        is_triple = positions < end
        triples = tl.load(order_ptr + positions, mask=is_triple, other=0)
        sources = triples
        if GATHER:
            sources = tl.load(ids_ptr + triples * id_stride, mask=is_triple, other=0)

        product = tl.zeros([ROWS, TILE], tl.float32)
        for start in range(0, dim, INNER):
            inner = start + tl.arange(0, INNER)
            vectors = tl.load(
                vectors_ptr + sources[:, None].to(tl.int64) * dim + inner[None, :],
                mask=is_triple[:, None] & (inner < dim)[None, :],
                other=0.0,
            )
            matrix_mask = (inner < dim)[:, None] & (columns < dim)[None, :]
            if TRANSPOSED:
                entry_ptrs = matrix_ptr + columns[None, :] * dim + inner[:, None]
            else:
                entry_ptrs = matrix_ptr + inner[:, None] * dim + columns[None, :]
            matrix = tl.load(entry_ptrs, mask=matrix_mask, other=0.0)
            product = tl.dot(vectors, matrix, product)

        mask = is_triple[:, None] & (columns < dim)[None, :]
        if GATHER:
            output_ptrs = output_ptr + triples[:, None].to(tl.int64) * dim + columns[None, :]
            tl.store(output_ptrs, product, mask=mask)
        else:
            targets = tl.load(ids_ptr + triples * id_stride, mask=is_triple, other=0)
            row_ptrs = rows_ptr + targets[:, None].to(tl.int64) * dim + columns[None, :]
            tl.atomic_add(row_ptrs, product, mask=mask, sem="relaxed")
        if BF16:
            bf16_row_ptrs = bf16_output_ptr + triples[:, None].to(tl.int64) * bf16_stride
            bf16_ptrs = bf16_row_ptrs + columns[None, :]
            tl.store(bf16_ptrs, product.to(bf16_output_ptr.dtype.element_ty), mask=mask)


def map_rows_(
    vectors: Tensor,
    matrices: Tensor,
    groups: TriplesByRelation,
    *,
    transposed: bool,
    ids: Tensor,
    output: Tensor | None = None,
    bf16_output: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Multiply each triple's vector by the matrix of its relation, or by the transpose.

    With `output` `(batch, dim)`, vectors are the rows `ids` of a table and the products are written
    there, and rounded to `bf16_output`. With `rows`, vectors are one a triple and the products are
    added to the rows `ids`.
    """
    dim = vectors.shape[1]
    num_relations = len(groups.starts) - 1
    grid = (triton.cdiv(dim, TILE), PROGRAMS_PER_RELATION, num_relations)

    # The kernel takes pointers for all arguments, and does not use those of absent ones.
    _map[grid](
        vectors,
        ids,
        ids.stride(0),
        matrices,
        groups.order,
        groups.starts,
        vectors if output is None else output,
        vectors if bf16_output is None else bf16_output,
        0 if bf16_output is None else bf16_output.stride(0),
        vectors if rows is None else rows,
        dim,
        TRANSPOSED=transposed,
        GATHER=rows is None,
        BF16=bf16_output is not None,
        ROWS=ROWS,
        INNER=INNER,
        TILE=TILE,
        PROGRAMS_PER_RELATION=PROGRAMS_PER_RELATION,
    )


# -- gradients of vectors ------------------------------------------------------

WIDE = 1024  # numbers of a vector that a program takes


@triton.jit
def _penalty(x, weight, POWER: tl.constexpr):
    """weight · |x|^power, and its gradient."""
    power, slope = power_and_slope(x * x, POWER)
    return weight * power, weight * slope * x


@triton.jit
def _mapped_gradients(
    batch_ptr,
    heads_ptr,
    tails_ptr,
    mapped_heads_ptr,
    mapped_tails_ptr,
    upstream_heads_ptr,
    upstream_tails_ptr,
    grad_mapped_heads_ptr,
    grad_mapped_tails_ptr,
    head_rows_ptr,
    tail_rows_ptr,
    head_stamps_ptr,
    tail_stamps_ptr,
    now_ptr,
    penalties_ptr,
    query_rows_ptr,
    dim,
    upstream_stride,
    head_weight,
    tail_weight,
    mapped_head_weight,
    mapped_tail_weight,
    tail_residual_weight,
    head_residual_weight,
    POWER: tl.constexpr,
    TAILS: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
    BY_QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of loss and regularizer, for a block of a triple's vectors.

    Those of h R and t Rᵀ are stored. Those of h and t are added to rows, without what reaches them
    through the matrix. `upstream_heads` are the loss gradients of mapped heads, `upstream_tails`
    those of mapped tails.
    """
    triple = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < dim
    head = tl.load(batch_ptr + triple * 3)
    tail = tl.load(batch_ptr + triple * 3 + 2)
    offsets = triple.to(tl.int64) * dim + columns
    h = tl.load(heads_ptr + head * dim + columns, mask=mask, other=0.0)
    t = tl.load(tails_ptr + tail * dim + columns, mask=mask, other=0.0)
    mapped_h = tl.load(mapped_heads_ptr + offsets, mask=mask, other=0.0)
    mapped_t = tl.zeros([BLOCK], tl.float32)
    if TAILS:
        mapped_t = tl.load(mapped_tails_ptr + offsets, mask=mask, other=0.0)

    # The regularizer.
    penalty, grad_h = _penalty(h, head_weight, POWER)
    term, grad_t = _penalty(t, tail_weight, POWER)
    penalty += term
    term, grad_mapped_h = _penalty(mapped_h, mapped_head_weight, POWER)
    penalty += term
    term, grad_mapped_t = _penalty(mapped_t, mapped_tail_weight, POWER)
    penalty += term

    term, grad_residual = _penalty(mapped_h - t, tail_residual_weight, POWER)
    penalty += term
    grad_mapped_h += grad_residual
    grad_t -= grad_residual

    term, grad_residual = _penalty(mapped_t - h, head_residual_weight, POWER)
    penalty += term
    grad_mapped_t += grad_residual
    grad_h -= grad_residual

    # The loss, with respect to the mapped vectors.
    upstream_offsets = triple.to(tl.int64) * upstream_stride + columns
    if BY_QUERY:
        # The gradient of a query goes to the first of its triples; the others have row −1.
        query_row = tl.load(query_rows_ptr + triple)
        grad_mapped_h += tl.load(
            upstream_heads_ptr + query_row * upstream_stride + columns,
            mask=mask & (query_row >= 0),
            other=0.0,
        )
    else:
        grad_mapped_h += tl.load(upstream_heads_ptr + upstream_offsets, mask=mask, other=0.0)
    if BOTH_SIDES:
        grad_mapped_t += tl.load(upstream_tails_ptr + upstream_offsets, mask=mask, other=0.0)

    tl.store(grad_mapped_heads_ptr + offsets, grad_mapped_h, mask=mask)
    tl.store(grad_mapped_tails_ptr + offsets, grad_mapped_t, mask=mask)
    tl.atomic_add(head_rows_ptr + head * dim + columns, grad_h, mask=mask, sem="relaxed")
    tl.atomic_add(tail_rows_ptr + tail * dim + columns, grad_t, mask=mask, sem="relaxed")
    now = tl.load(now_ptr)
    tl.store(head_stamps_ptr + head, now)
    tl.store(tail_stamps_ptr + tail, now)
    penalty = tl.sum(tl.where(mask, penalty, 0.0), axis=0)
    tl.store(penalties_ptr + triple * tl.num_programs(1) + tl.program_id(1), penalty)


def num_blocks(dim: int) -> int:
    """The number of programs per triple."""
    return int(triton.cdiv(dim, WIDE))


def add_mapped_gradients_(
    batch: Tensor,
    *,
    heads: RowGradients,
    tails: RowGradients,
    mapped: Sequence[Tensor],
    to_mapped: Sequence[Tensor],
    now: Tensor,
    upstream: list[Tensor],
    weights: Mapping[str, float],
    power: int,
    with_tails: bool,
    penalties: Tensor,
    query_rows: Tensor | None = None,
) -> None:
    """Write the gradients of mapped vectors, and add those of heads and tails to their rows.

    `mapped` has h R and t Rᵀ, `(batch, dim)` each, and `to_mapped` receives their gradients. t Rᵀ
    is read only `with_tails`. The other arguments are those of `diagonal.add_gradients_`.
    """
    dim = heads.table.shape[1]
    mapped_heads, mapped_tails = mapped
    grad_mapped_heads, grad_mapped_tails = to_mapped
    term_weights = [float(weights.get(term, 0.0)) for term in TERMS]

    _mapped_gradients[(len(batch), num_blocks(dim))](
        batch,
        heads.table,
        tails.table,
        mapped_heads,
        mapped_tails,
        # The kernel takes pointers for all arguments, and does not use those of absent ones.
        upstream[0],
        upstream[-1],
        grad_mapped_heads,
        grad_mapped_tails,
        heads.rows,
        tails.rows,
        heads.stamps,
        tails.stamps,
        now,
        penalties,
        batch if query_rows is None else query_rows,
        dim,
        upstream[0].stride(0),
        *term_weights,
        POWER=power,
        TAILS=with_tails,
        BOTH_SIDES=len(upstream) == 2,
        BY_QUERY=query_rows is not None,
        BLOCK=min(WIDE, triton.next_power_of_2(dim)),
    )


# -- gradients and steps of matrices -------------------------------------------


@triton.jit
def _update(
    matrices_ptr,
    sums_ptr,
    order_ptr,
    starts_ptr,
    batch_ptr,
    heads_ptr,
    tails_ptr,
    grad_mapped_heads_ptr,
    grad_mapped_tails_ptr,
    relation_weight,
    norms_ptr,
    rate_ptr,
    eps,
    dim,
    NORM: tl.constexpr,
    TAILS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Step a tile of a relation's matrix.

    The gradient is hᵀ ∂(h R) + ∂(t Rᵀ)ᵀ t summed over the relation's triples. Without STEP it is
    written to `sums`, and the matrix is not changed.
    """
    relation = tl.program_id(2)
    begin = tl.load(starts_ptr + relation)
    end = tl.load(starts_ptr + relation + 1)
    if begin < end:
        rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
        columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
        mask = (rows < dim)[:, None] & (columns < dim)[None, :]
        offsets = (relation.to(tl.int64) * dim + rows[:, None]) * dim + columns[None, :]

        # Values are loaded before the loop, which hides the latency.
        value = tl.load(matrices_ptr + offsets, mask=mask, other=0.0)
        square_sum = tl.zeros([TILE, TILE], tl.float32)
        if STEP:
            square_sum = tl.load(sums_ptr + offsets, mask=mask, other=0.0)

        gradient = tl.zeros([TILE, TILE], tl.float32)
        for first in range(begin, end, ROWS):
            positions = first + tl.arange(0, ROWS)
            is_triple = positions < end
            triples = tl.load(order_ptr + positions, mask=is_triple, other=0)
            left_mask = is_triple[:, None] & (rows < dim)[None, :]
            right_mask = is_triple[:, None] & (columns < dim)[None, :]
            triple_offsets = triples[:, None].to(tl.int64) * dim

            head = tl.load(batch_ptr + triples * 3, mask=is_triple, other=0)
            head_offsets = head[:, None].to(tl.int64) * dim
            left_ptrs = heads_ptr + head_offsets + rows[None, :]
            left = tl.load(left_ptrs, mask=left_mask, other=0.0)
            right_ptrs = grad_mapped_heads_ptr + triple_offsets + columns[None, :]
            right = tl.load(right_ptrs, mask=right_mask, other=0.0)
            gradient = tl.dot(tl.trans(left), right, gradient)

            if TAILS:
                tail = tl.load(batch_ptr + triples * 3 + 2, mask=is_triple, other=0)
                tail_offsets = tail[:, None].to(tl.int64) * dim
                left_ptrs = grad_mapped_tails_ptr + triple_offsets + rows[None, :]
                left = tl.load(left_ptrs, mask=left_mask, other=0.0)
                right_ptrs = tails_ptr + tail_offsets + columns[None, :]
                right = tl.load(right_ptrs, mask=right_mask, other=0.0)
                gradient = tl.dot(tl.trans(left), right, gradient)

        if NORM:
            # The regularizer counts a matrix once for each of its triples.
            weight = relation_weight * (end - begin).to(tl.float32)
            gradient += 2.0 * weight * value
            squared_norm = tl.sum(tl.sum(value * value, axis=1), axis=0)
            tl.atomic_add(norms_ptr, weight * squared_norm, sem="relaxed")

        if STEP:
            value, square_sum = adagrad(value, square_sum, gradient, tl.load(rate_ptr), eps)
            tl.store(sums_ptr + offsets, square_sum, mask=mask)
            tl.store(matrices_ptr + offsets, value, mask=mask)
        else:
            tl.store(sums_ptr + offsets, gradient, mask=mask)


def update_matrices_(
    matrices: Tensor,
    sums: Tensor,
    groups: TriplesByRelation,
    batch: Tensor,
    *,
    tables: tuple[Tensor, Tensor],
    to_mapped: Sequence[Tensor],
    with_tails: bool,
    of_relation: float,
    norms: Tensor,
    rate: Tensor,
    eps: float,
    step: bool = True,
) -> None:
    """Step the matrices of the batch's relations.

    `tables` are those of heads and tails, and `to_mapped` has the gradients of h R and t Rᵀ,
    `(batch, dim)` each. With `of_relation`, that much of the squared norm of a matrix is added to
    the loss for each of its triples, and to `norms`. Without `step` the gradients are written to
    `sums` instead; those of other relations stay as they are.
    """
    head_table, tail_table = tables
    grad_mapped_heads, grad_mapped_tails = to_mapped
    dim = head_table.shape[1]
    num_tiles = triton.cdiv(dim, TILE)
    num_relations = len(groups.starts) - 1

    _update[(num_tiles, num_tiles, num_relations)](
        matrices,
        sums,
        groups.order,
        groups.starts,
        batch,
        head_table,
        tail_table,
        grad_mapped_heads,
        grad_mapped_tails,
        of_relation,
        norms,
        rate,
        eps,
        dim,
        NORM=bool(of_relation),
        TAILS=with_tails,
        STEP=step,
        ROWS=ROWS,
        TILE=TILE,
    )

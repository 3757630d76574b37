"""The kernels of a training step of RESCAL: rows times the matrix of their relation.

Triples are sorted by relation, so that a matrix is read once for all its triples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.diagonal import power_and_slope
from dualkg.kernels.gpu.elementwise import RowGradients, adagrad

ROWS = 16
INNER = 64
TILE = 64  # triples, summed numbers and columns of a tile
PROGRAMS_PER_RELATION = 4  # programs that share the triples of one relation


class TriplesByRelation(NamedTuple):
    """The triples of a batch sorted by relation, and the start of each relation, `(relations +
    1,)`.
    """

    order: Tensor
    starts: Tensor

    @staticmethod
    def of(relations: Tensor, num_relations: int) -> TriplesByRelation:
        """Sort without counting relations on the host, which would have to wait for the GPU."""
        narrow = torch.int16 if num_relations < 2**15 else torch.int32  # fewer digits to sort by
        sorted_ids, order = torch.sort(relations.to(narrow))
        return TriplesByRelation(
            order,
            torch.searchsorted(
                sorted_ids, torch.arange(num_relations + 1, dtype=narrow, device=order.device)
            ),
        )


@triton.jit
def _map(
    vectors,
    ids,
    id_stride,
    matrices,
    order,
    starts,
    output,
    bf16_output,
    bf16_stride,
    rows,
    dim,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS_PER_RELATION: tl.constexpr,
):
    """Rows of vectors times a tile of columns of their relation's matrix."""
    relation = tl.program_id(2)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin = tl.load(starts + relation)
    end = tl.load(starts + relation + 1)
    matrix = matrices + relation.to(tl.int64) * dim * dim
    for first in range(begin + tl.program_id(1) * ROWS, end, ROWS * PROGRAMS_PER_RELATION):
        position = first + tl.arange(0, ROWS)
        there = position < end
        triple = tl.load(order + position, mask=there, other=0)
        source = triple
        if GATHER:
            source = tl.load(ids + triple * id_stride, mask=there, other=0)
        summed = tl.zeros([ROWS, TILE], tl.float32)
        for start in range(0, dim, INNER):
            inner = start + tl.arange(0, INNER)
            x = tl.load(
                vectors + source[:, None].to(tl.int64) * dim + inner[None, :],
                mask=there[:, None] & (inner < dim)[None, :],
                other=0.0,
            )
            inside = (inner < dim)[:, None] & (column < dim)[None, :]
            if TRANSPOSED:
                m = tl.load(matrix + column[None, :] * dim + inner[:, None], mask=inside, other=0.0)
            else:
                m = tl.load(matrix + inner[:, None] * dim + column[None, :], mask=inside, other=0.0)
            summed = tl.dot(x, m, summed)
        inside = there[:, None] & (column < dim)[None, :]
        if GATHER:
            tl.store(
                output + triple[:, None].to(tl.int64) * dim + column[None, :], summed, mask=inside
            )
        else:
            target = tl.load(ids + triple * id_stride, mask=there, other=0)
            at = rows + target[:, None].to(tl.int64) * dim + column[None, :]
            tl.atomic_add(at, summed, mask=inside, sem="relaxed")
        if BF16:
            at = bf16_output + triple[:, None].to(tl.int64) * bf16_stride + column[None, :]
            tl.store(at, summed.to(bf16_output.dtype.element_ty), mask=inside)


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
    inputs = (vectors, ids, ids.stride(0), matrices, *groups, vectors if output is None else output)
    rounded = (vectors, 0) if bf16_output is None else (bf16_output, bf16_output.stride(0))
    flags = (transposed, rows is None, bf16_output is not None)
    _map[(triton.cdiv(dim, TILE), PROGRAMS_PER_RELATION, len(groups.starts) - 1)](
        *inputs,
        *rounded,
        vectors if rows is None else rows,
        dim,
        *flags,
        ROWS,
        INNER,
        TILE,
        PROGRAMS_PER_RELATION,
    )


WIDE = 1024  # numbers of a vector that a program takes


@triton.jit
def _mapped_gradients(
    batch,
    head_table,
    tail_table,
    mapped_heads,
    mapped_tails,
    from_tails,
    from_heads,
    to_mapped_heads,
    to_mapped_tails,
    head_rows,
    tail_rows,
    head_stamps,
    tail_stamps,
    now,
    penalties,
    query_rows,
    dim,
    stride,
    of_head,
    of_tail,
    of_mapped_head,
    of_mapped_tail,
    of_tail_residual,
    of_head_residual,
    POWER: tl.constexpr,
    TAILS: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
    BY_QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of loss and regularizer: those of h R and t Rᵀ are stored, those of h and t added
    to rows.
    """
    triple = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < dim
    head = tl.load(batch + triple * 3)
    tail = tl.load(batch + triple * 3 + 2)
    here = triple.to(tl.int64) * dim + column
    h = tl.load(head_table + head * dim + column, mask=inside, other=0.0)
    t = tl.load(tail_table + tail * dim + column, mask=inside, other=0.0)
    mapped_head = tl.load(mapped_heads + here, mask=inside, other=0.0)
    mapped_tail = tl.zeros([BLOCK], tl.float32)
    if TAILS:
        mapped_tail = tl.load(mapped_tails + here, mask=inside, other=0.0)
    value, to_head = _penalty(h, of_head, POWER)
    more, to_tail = _penalty(t, of_tail, POWER)
    value += more
    more, to_mapped_head = _penalty(mapped_head, of_mapped_head, POWER)
    value += more
    more, to_mapped_tail = _penalty(mapped_tail, of_mapped_tail, POWER)
    value += more
    more, pull = _penalty(mapped_head - t, of_tail_residual, POWER)
    value += more
    to_mapped_head += pull
    to_tail -= pull
    more, pull = _penalty(mapped_tail - h, of_head_residual, POWER)
    value += more
    to_mapped_tail += pull
    to_head -= pull
    padded = triple.to(tl.int64) * stride + column
    if BY_QUERY:  # the gradient of a query goes to the first of its triples
        query_row = tl.load(query_rows + triple)
        to_mapped_head += tl.load(
            from_tails + query_row * stride + column, mask=inside & (query_row >= 0), other=0.0
        )
    else:
        to_mapped_head += tl.load(from_tails + padded, mask=inside, other=0.0)
    if BOTH_SIDES:
        to_mapped_tail += tl.load(from_heads + padded, mask=inside, other=0.0)
    tl.store(to_mapped_heads + here, to_mapped_head, mask=inside)
    tl.store(to_mapped_tails + here, to_mapped_tail, mask=inside)
    tl.atomic_add(head_rows + head * dim + column, to_head, mask=inside, sem="relaxed")
    tl.atomic_add(tail_rows + tail * dim + column, to_tail, mask=inside, sem="relaxed")
    time = tl.load(now)
    tl.store(head_stamps + head, time)
    tl.store(tail_stamps + tail, time)
    value = tl.sum(tl.where(inside, value, 0.0), axis=0)
    tl.store(penalties + triple * tl.num_programs(1) + tl.program_id(1), value)


@triton.jit
def _penalty(x, weight, POWER: tl.constexpr):
    power, slope = power_and_slope(x * x, POWER)
    return weight * power, weight * slope * x


@triton.jit
def _update(
    matrices,
    sums,
    order,
    starts,
    batch,
    head_table,
    tail_table,
    to_mapped_heads,
    to_mapped_tails,
    of_relation,
    norms,
    rate,
    eps,
    dim,
    NORM: tl.constexpr,
    TAILS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of hᵀ ∂(h R) + ∂(t Rᵀ)ᵀ t summed over a relation's triples, and the step of the
    matrix.

    Without STEP the sum is written to `sums`, and the matrix is not changed.
    """
    relation = tl.program_id(2)
    begin = tl.load(starts + relation)
    end = tl.load(starts + relation + 1)
    if begin < end:
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = (row < dim)[:, None] & (column < dim)[None, :]
        at = (relation.to(tl.int64) * dim + row[:, None]) * dim + column[None, :]
        value = tl.load(matrices + at, mask=inside, other=0.0)  # early, to hide the latency
        seen = tl.zeros([TILE, TILE], tl.float32)
        if STEP:
            seen = tl.load(sums + at, mask=inside, other=0.0)
        slope = tl.zeros([TILE, TILE], tl.float32)
        for first in range(begin, end, ROWS):
            position = first + tl.arange(0, ROWS)
            there = position < end
            triple = tl.load(order + position, mask=there, other=0)
            in_rows = there[:, None] & (row < dim)[None, :]
            in_columns = there[:, None] & (column < dim)[None, :]
            here = triple[:, None].to(tl.int64) * dim
            head = tl.load(batch + triple * 3, mask=there, other=0)[:, None].to(tl.int64) * dim
            left = tl.load(head_table + head + row[None, :], mask=in_rows, other=0.0)
            right = tl.load(to_mapped_heads + here + column[None, :], mask=in_columns, other=0.0)
            slope = tl.dot(tl.trans(left), right, slope)
            if TAILS:
                tail = (
                    tl.load(batch + triple * 3 + 2, mask=there, other=0)[:, None].to(tl.int64) * dim
                )
                left = tl.load(to_mapped_tails + here + row[None, :], mask=in_rows, other=0.0)
                right = tl.load(tail_table + tail + column[None, :], mask=in_columns, other=0.0)
                slope = tl.dot(tl.trans(left), right, slope)
        if NORM:
            weight = of_relation * (end - begin).to(tl.float32)
            slope += 2.0 * weight * value
            tl.atomic_add(
                norms, weight * tl.sum(tl.sum(value * value, axis=1), axis=0), sem="relaxed"
            )
        if STEP:
            value, seen = adagrad(value, seen, slope, tl.load(rate), eps)
            tl.store(sums + at, seen, mask=inside)
            tl.store(matrices + at, value, mask=inside)
        else:
            tl.store(sums + at, slope, mask=inside)


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
    """Write the gradients of mapped heads and tails, and add those of heads and tails to their
    rows.
    """
    dim = heads.table.shape[1]
    tables, rows, stamps = zip(heads, tails, strict=True)
    inputs = (batch, *tables, *mapped, upstream[0], upstream[-1])
    outputs = (
        *to_mapped,
        *rows,
        *stamps,
        now,
        penalties,
        batch if query_rows is None else query_rows,
    )
    names = ("head", "tail", "mapped_head", "mapped_tail", "tail_residual", "head_residual")
    terms = (float(weights.get(name, 0.0)) for name in names)
    flags = (power, with_tails, len(upstream) == 2, query_rows is not None)
    block = min(WIDE, triton.next_power_of_2(dim))
    _mapped_gradients[(len(batch), num_blocks(dim))](
        *inputs, *outputs, dim, upstream[0].stride(0), *terms, *flags, BLOCK=block
    )


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
    """Step the matrices of the batch's relations; with `of_relation`, also by that much of their
    squared norm.

    Without `step` their gradients are written to `sums` instead; those of other relations stay as
    they are.
    """
    dim = tables[0].shape[1]
    tiles = triton.cdiv(dim, TILE)
    arguments = (
        matrices,
        sums,
        *groups,
        batch,
        *tables,
        *to_mapped,
        of_relation,
        norms,
        rate,
        eps,
        dim,
    )
    _update[(tiles, tiles, len(groups.starts) - 1)](
        *arguments, NORM=bool(of_relation), TAILS=with_tails, STEP=step, ROWS=ROWS, TILE=TILE
    )

"""What a step does with the vectors of a batch where a relation is a matrix, and with the matrices.

A relation that the batch lacks is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.coordinates import RowSums, power_and_slope
from dualkg.kernels.gpu.grouped import ROWS, TILE, Groups
from dualkg.kernels.gpu.update import adagrad

WIDE = 1024  # numbers of a vector that a program takes


@triton.jit
def _image_gradients(
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
    places,
    dim,
    stride,
    of_head,
    of_tail,
    of_mapped_head,
    of_mapped_tail,
    of_tail_gap,
    of_head_gap,
    POWER: tl.constexpr,
    TAILS: tl.constexpr,
    BOTH: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What loss and regularizer ask of h, t, h R and t Rᵀ, those of the images kept, the others added to rows."""
    triple = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < dim
    head, tail = tl.load(batch + triple * 3), tl.load(batch + triple * 3 + 2)
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
    more, pull = _penalty(mapped_head - t, of_tail_gap, POWER)
    value += more
    to_mapped_head += pull
    to_tail -= pull
    more, pull = _penalty(mapped_tail - h, of_head_gap, POWER)
    value += more
    to_mapped_tail += pull
    to_head -= pull
    padded = triple.to(tl.int64) * stride + column
    if SOME:  # a question's image is that of the first of its triples
        place = tl.load(places + triple)
        to_mapped_head += tl.load(from_tails + place * stride + column, mask=inside & (place >= 0), other=0.0)
    else:
        to_mapped_head += tl.load(from_tails + padded, mask=inside, other=0.0)
    if BOTH:
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
def _penalty(x, share, POWER: tl.constexpr):
    power, slope = power_and_slope(x * x, POWER)
    return share * power, share * slope * x


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
    """A tile of hᵀ ∂(h R) + ∂(t Rᵀ)ᵀ t summed over a relation's triples, and the matrix stepped by it.

    Without STEP that sum is written in the place of `sums`, and no matrix is stepped.
    """
    relation = tl.program_id(2)
    begin, end = tl.load(starts + relation), tl.load(starts + relation + 1)
    if begin < end:
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = (row < dim)[:, None] & (column < dim)[None, :]
        at = (relation.to(tl.int64) * dim + row[:, None]) * dim + column[None, :]
        value = tl.load(matrices + at, mask=inside, other=0.0)  # long before they are needed
        seen = tl.zeros([TILE, TILE], tl.float32)
        if STEP:
            seen = tl.load(sums + at, mask=inside, other=0.0)
        slope = tl.zeros([TILE, TILE], tl.float32)
        for first in range(begin, end, ROWS):
            place = first + tl.arange(0, ROWS)
            there = place < end
            triple = tl.load(order + place, mask=there, other=0)
            in_rows, in_columns = there[:, None] & (row < dim)[None, :], there[:, None] & (column < dim)[None, :]
            here = triple[:, None].to(tl.int64) * dim
            head = tl.load(batch + triple * 3, mask=there, other=0)[:, None].to(tl.int64) * dim
            left = tl.load(head_table + head + row[None, :], mask=in_rows, other=0.0)
            right = tl.load(to_mapped_heads + here + column[None, :], mask=in_columns, other=0.0)
            slope = tl.dot(tl.trans(left), right, slope)
            if TAILS:
                tail = tl.load(batch + triple * 3 + 2, mask=there, other=0)[:, None].to(tl.int64) * dim
                left = tl.load(to_mapped_tails + here + row[None, :], mask=in_rows, other=0.0)
                right = tl.load(tail_table + tail + column[None, :], mask=in_columns, other=0.0)
                slope = tl.dot(tl.trans(left), right, slope)
        if NORM:
            share = of_relation * (end - begin).to(tl.float32)
            slope += 2.0 * share * value
            tl.atomic_add(norms, share * tl.sum(tl.sum(value * value, axis=1), axis=0), sem="relaxed")
        if STEP:
            value, seen = adagrad(value, seen, slope, tl.load(rate), eps)
            tl.store(sums + at, seen, mask=inside)
            tl.store(matrices + at, value, mask=inside)
        else:
            tl.store(sums + at, slope, mask=inside)


def num_blocks(dim: int) -> int:
    """How many programs share a triple."""
    return int(triton.cdiv(dim, WIDE))


def add_image_gradients_(
    batch: Tensor,
    *,
    heads: RowSums,
    tails: RowSums,
    mapped: tuple[Tensor, Tensor],
    to_mapped: tuple[Tensor, Tensor],
    now: Tensor,
    upstream: list[Tensor],
    shares: Mapping[str, float],
    power: int,
    with_tails: bool,
    penalties: Tensor,
    places: Tensor | None = None,
) -> None:
    """Write the gradients of the images of heads and tails, and add those of the vectors themselves to their rows.

    `places` say which row of `upstream` is that of a triple, or −1 where its image was not scored.
    """
    dim = heads.table.shape[1]
    names = ("head", "tail", "mapped_head", "mapped_tail", "tail_gap", "head_gap")
    _image_gradients[(len(batch), num_blocks(dim))](
        batch,
        heads.table,
        tails.table,
        *mapped,
        upstream[0],
        upstream[-1],
        *to_mapped,
        heads.rows,
        tails.rows,
        heads.stamps,
        tails.stamps,
        now,
        penalties,
        batch if places is None else places,
        dim,
        upstream[0].stride(0),
        *(float(shares.get(name, 0.0)) for name in names),
        POWER=power,
        TAILS=with_tails,
        BOTH=len(upstream) == 2,
        SOME=places is not None,
        BLOCK=min(WIDE, triton.next_power_of_2(dim)),
    )


def update_matrices_(
    matrices: Tensor,
    sums: Tensor,
    groups: Groups,
    batch: Tensor,
    *,
    tables: tuple[Tensor, Tensor],
    to_mapped: tuple[Tensor, Tensor],
    with_tails: bool,
    of_relation: float,
    norms: Tensor,
    rate: Tensor,
    eps: float,
    step: bool = True,
) -> None:
    """Step the matrices of the batch's relations; with `of_relation`, also by that much of their squared norm.

    Without `step` their gradients are written to `sums` instead; those of other relations stay as they are.
    """
    dim = tables[0].shape[1]
    tiles = triton.cdiv(dim, TILE)
    _update[(tiles, tiles, len(groups.starts) - 1)](
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
        NORM=bool(of_relation),
        TAILS=with_tails,
        STEP=step,
        ROWS=ROWS,
        TILE=TILE,
    )

"""The two passes of a training step over the vectors of a batch, for diagonal models.

The first gathers and maps. The second gathers again, adds the regularizer's gradient to that of the
loss, propagates both through the maps, and adds the results to the rows of the tables. The
gradients of ⟨x·r, g⟩ are g·r̄ and x̄·g; those of ⟨h̄·t, g⟩, in relation prediction, are t·ḡ and
h·g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.elementwise import RowGradients

BLOCK = 512  # coordinates per program


Algebra = tuple[int, Any, Any]


@cache
def compile_algebra(
    num_numbers: int, times: Callable[..., Any], conjugate: Callable[..., Any]
) -> Algebra:
    """The numbers of a diagonal model's coordinate, and their product and conjugate, compiled."""
    return num_numbers, triton.jit(times), triton.jit(conjugate)


@triton.jit
def _load(vectors, row, coordinate, dim, stride, NUM: tl.constexpr):
    start = vectors + row.to(tl.int64) * stride + coordinate
    inside = coordinate < dim
    found = (tl.load(start, mask=inside, other=0.0),)
    for part in tl.static_range(1, NUM):
        found = found + (tl.load(start + part * dim, mask=inside, other=0.0),)
    return found


@triton.jit
def _plus(x, y, weight, NUM: tl.constexpr):
    """x + weight · y."""
    found = (x[0] + weight * y[0],)
    for part in tl.static_range(1, NUM):
        found = found + (x[part] + weight * y[part],)
    return found


@triton.jit
def power_and_slope(squared, POWER: tl.constexpr):
    """|x|^power, and the factor of x in its gradient."""
    if POWER == 2:
        power = squared
        slope = tl.full(squared.shape, 2.0, tl.float32)
    elif POWER == 3:
        root = tl.sqrt(squared)
        power = squared * root
        slope = 3.0 * root
    else:
        power = tl.sqrt(squared)
        slope = tl.where(squared > 0.0, 1.0 / power, 0.0)
    return power, slope


@triton.jit
def _penalty(value, gradient, x, weight, POWER: tl.constexpr, NUM: tl.constexpr):
    """Add weight · |x|^power to the value and its gradient to the gradient."""
    squared = x[0] * x[0]
    for part in tl.static_range(1, NUM):
        squared += x[part] * x[part]
    power, slope = power_and_slope(squared, POWER)
    return value + weight * power, _plus(gradient, x, weight * slope, NUM)


@triton.jit
def _add_rows(rows, stamps, now, row, coordinate, dim, gradient, NUM: tl.constexpr):
    start = rows + row.to(tl.int64) * dim * NUM + coordinate
    for part in tl.static_range(NUM):
        tl.atomic_add(start + part * dim, gradient[part], mask=coordinate < dim, sem="relaxed")
    tl.store(stamps + row, now)


@triton.jit
def _map(
    output,
    batch,
    left_table,
    right_table,
    dim,
    stride,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    NUM: tl.constexpr,
    TIMES: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    triple = tl.program_id(0)
    coordinate = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load(left_table, tl.load(batch + triple * 3 + LEFT), coordinate, dim, dim * NUM, NUM)
    r = _load(right_table, tl.load(batch + triple * 3 + RIGHT), coordinate, dim, dim * NUM, NUM)
    if LEFT == 2:
        r = CONJUGATE(r)
    if RIGHT == 2:
        x = CONJUGATE(x)
    mapped = TIMES(x, r)
    start = output + triple.to(tl.int64) * stride + coordinate
    for part in tl.static_range(NUM):
        tl.store(
            start + part * dim, mapped[part].to(output.dtype.element_ty), mask=coordinate < dim
        )


@triton.jit
def _gradients(
    batch,
    head_table,
    tail_table,
    relations,
    from_tails,
    from_heads,
    from_relations,
    head_rows,
    tail_rows,
    relation_rows,
    head_stamps,
    tail_stamps,
    relation_stamps,
    now,
    penalties,
    query_rows,
    dim,
    stride,
    of_head,
    of_relation,
    of_tail,
    of_mapped_head,
    of_mapped_tail,
    of_tail_residual,
    of_head_residual,
    POWER: tl.constexpr,
    RESIDUALS: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
    BY_QUERY: tl.constexpr,
    PAIRS: tl.constexpr,
    NUM: tl.constexpr,
    TIMES: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    triple = tl.program_id(0)
    coordinate = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = coordinate < dim
    head = tl.load(batch + triple * 3)
    relation = tl.load(batch + triple * 3 + 1)
    tail = tl.load(batch + triple * 3 + 2)
    h = _load(head_table, head, coordinate, dim, dim * NUM, NUM)
    r = _load(relations, relation, coordinate, dim, dim * NUM, NUM)
    t = _load(tail_table, tail, coordinate, dim, dim * NUM, NUM)
    rotated = CONJUGATE(r)
    mapped_head = TIMES(h, r)
    mapped_tail = TIMES(t, rotated)

    value = tl.zeros([BLOCK], tl.float32)
    nothing = (value,)
    for _ in tl.static_range(1, NUM):
        nothing = nothing + (value,)
    to_mapped_head = nothing
    to_mapped_tail = nothing
    value, to_mapped_head = _penalty(value, to_mapped_head, mapped_head, of_mapped_head, POWER, NUM)
    value, to_mapped_tail = _penalty(value, to_mapped_tail, mapped_tail, of_mapped_tail, POWER, NUM)
    value, to_head = _penalty(value, nothing, h, of_head, POWER, NUM)
    value, to_relation = _penalty(value, nothing, r, of_relation, POWER, NUM)
    value, to_tail = _penalty(value, nothing, t, of_tail, POWER, NUM)
    if RESIDUALS:
        value, pull = _penalty(
            value, nothing, _plus(mapped_head, t, -1.0, NUM), of_tail_residual, POWER, NUM
        )
        to_mapped_head = _plus(to_mapped_head, pull, 1.0, NUM)
        to_tail = _plus(to_tail, pull, -1.0, NUM)
        value, pull = _penalty(
            value, nothing, _plus(mapped_tail, h, -1.0, NUM), of_head_residual, POWER, NUM
        )
        to_mapped_tail = _plus(to_mapped_tail, pull, 1.0, NUM)
        to_head = _plus(to_head, pull, -1.0, NUM)
    if BY_QUERY:  # the gradient of a query goes to the first of its triples
        query_row = tl.load(query_rows + triple)
        found = _load(from_tails, tl.maximum(query_row, 0), coordinate, dim, stride, NUM)
        to_mapped_head = _plus(to_mapped_head, found, tl.where(query_row < 0, 0.0, 1.0), NUM)
    else:
        to_mapped_head = _plus(
            to_mapped_head, _load(from_tails, triple, coordinate, dim, stride, NUM), 1.0, NUM
        )
    if BOTH_SIDES:
        to_mapped_tail = _plus(
            to_mapped_tail, _load(from_heads, triple, coordinate, dim, stride, NUM), 1.0, NUM
        )

    to_head = _plus(to_head, TIMES(to_mapped_head, rotated), 1.0, NUM)
    to_tail = _plus(to_tail, TIMES(to_mapped_tail, r), 1.0, NUM)
    if PAIRS:
        pair = _load(from_relations, triple, coordinate, dim, dim * NUM, NUM)
        to_head = _plus(to_head, TIMES(t, CONJUGATE(pair)), 1.0, NUM)
        to_tail = _plus(to_tail, TIMES(h, pair), 1.0, NUM)
    to_relation = _plus(to_relation, TIMES(CONJUGATE(h), to_mapped_head), 1.0, NUM)
    to_relation = _plus(to_relation, TIMES(CONJUGATE(to_mapped_tail), t), 1.0, NUM)
    time = tl.load(now)
    _add_rows(head_rows, head_stamps, time, head, coordinate, dim, to_head, NUM)
    _add_rows(tail_rows, tail_stamps, time, tail, coordinate, dim, to_tail, NUM)
    _add_rows(relation_rows, relation_stamps, time, relation, coordinate, dim, to_relation, NUM)
    value = tl.sum(tl.where(inside, value, 0.0), axis=0)
    tl.store(penalties + triple * tl.num_programs(1) + tl.program_id(1), value)


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
    """Write products of the rows of two columns of a contiguous batch of triples into rows of
    `output`.

    Columns (0, 1) are h R, (2, 1) are t Rᵀ, and (0, 2) are h̄·t: ⟨h r, t⟩ is ⟨r, h̄·t⟩.
    """
    dim = left.shape[1] // algebra[0]
    _map[(len(batch), num_blocks(dim))](
        output, batch, left, right, dim, output.stride(0), *columns, *algebra, BLOCK=BLOCK
    )


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
    dim = heads.table.shape[1] // algebra[0]
    tables, rows, stamps = zip(heads, tails, relations, strict=True)
    inputs = (batch, *tables, upstream[0], upstream[-1], upstream[0] if pairs is None else pairs)
    outputs = (*rows, *stamps, now, penalties, batch if query_rows is None else query_rows)
    names = (
        "head",
        "relation",
        "tail",
        "mapped_head",
        "mapped_tail",
        "tail_residual",
        "head_residual",
    )
    terms = (float(weights.get(name, 0.0)) for name in names)
    residuals = bool({"tail_residual", "head_residual"} & weights.keys())
    flags = (power, residuals, len(upstream) == 2, query_rows is not None, pairs is not None)
    _gradients[(len(batch), num_blocks(dim))](
        *inputs, *outputs, dim, upstream[0].stride(0), *terms, *flags, *algebra, BLOCK=BLOCK
    )

"""Statistics of the messages that enter each entity, in Triton: messages are never written.

Forward, a program goes over a segment of the edges that enter an entity. Backward, it goes over a
segment of the edges that leave one, and computes the messages again, rounded as before, so that a
message that is equal to the maximum is known to be it. Edges with one relation have one message, so
that their gradients are summed before they are multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.path_reach import Reached
from dualkg.kernels.paths import MIN_VARIANCE, NUM_STATISTICS, Edges

# Numbers of an entity's vectors that a program handles: forward, where segments are combined, and
# backward.
COLUMN_BLOCK = 256
COMBINED_COLUMNS = 64
BACKWARD_BLOCK = 256
UNROLLED = 4  # edges whose messages are loaded at a time, or segments that are combined
NUM_GRADIENTS = 6  # what an edge reads backward: see `message_gradients`


@triton.jit
def _store_statistics(
    sums,
    squares,
    highest,
    lowest,
    query_vectors_ptr,
    heads_ptr,
    degrees_ptr,
    statistics_ptr,
    entity,
    columns,
    queries,
    is_column,
    is_reached,
    batch,
    min_variance,
    DIM: tl.constexpr,
):
    """Store mean, maximum, minimum and standard deviation of the messages to an entity."""
    heads = tl.load(heads_ptr + queries, mask=is_column, other=-1)
    is_head = is_column & (heads == entity)
    boundary = tl.load(query_vectors_ptr + columns, mask=is_head, other=0.0).to(tl.float32)
    degree = tl.load(degrees_ptr + entity)
    mean = (sums + boundary) / degree
    mean_square = (squares + boundary * boundary) / degree
    deviation = tl.sqrt(tl.maximum(mean_square - mean * mean, min_variance))
    rows = entity * batch + queries
    ptrs = statistics_ptr + rows * (4 * DIM) + columns % DIM
    mask = is_column & is_reached
    tl.store(ptrs, mean, mask=mask)
    tl.store(ptrs + DIM, tl.maximum(highest, boundary), mask=mask)
    tl.store(ptrs + 2 * DIM, tl.minimum(lowest, boundary), mask=mask)
    tl.store(ptrs + 3 * DIM, deviation, mask=mask)


@triton.jit
def _aggregate(
    vectors_ptr,
    factors_ptr,
    query_vectors_ptr,
    heads_ptr,
    steps_ptr,
    degrees_ptr,
    entities_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    others_ptr,
    relations_ptr,
    kept_ptr,
    partial_ptr,
    statistics_ptr,
    num_steps,
    batch,
    slot_stride,
    min_variance,
    HAS_KEPT: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Take the statistics of the messages of a segment of edges, or a part of them."""
    segment = tl.program_id(0)
    entity = tl.load(entities_ptr + segment).to(tl.int64)
    width = batch * DIM
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    queries = columns // DIM
    steps = tl.load(steps_ptr + entity * batch + queries, mask=is_column, other=255).to(tl.int32)
    is_reached = steps <= num_steps
    if tl.max(is_reached.to(tl.int32)) == 0:
        return
    sums = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    highest = tl.zeros((COLUMNS,), tl.float32)
    lowest = tl.zeros((COLUMNS,), tl.float32)
    first = tl.load(starts_ptr + segment)
    last = tl.load(ends_ptr + segment)
    for start in range(first, last, EDGES):
        for number in tl.static_range(EDGES):
            edge = start + number
            is_edge = edge < last
            if HAS_KEPT:
                is_edge = is_edge & (tl.load(kept_ptr + edge, mask=is_edge, other=0) != 0)
            other = tl.load(others_ptr + edge, mask=is_edge, other=0).to(tl.int64)
            relation = tl.load(relations_ptr + edge, mask=is_edge, other=0).to(tl.int64)
            mask = is_column & is_edge
            vectors = tl.load(vectors_ptr + other * width + columns, mask=mask, other=0.0)
            factors = tl.load(factors_ptr + relation * width + columns, mask=mask, other=0.0)
            products = vectors.to(tl.float32) * factors.to(tl.float32)
            messages = products.to(vectors.dtype).to(tl.float32)
            sums += messages
            squares += messages * messages
            highest = tl.maximum(highest, messages)
            lowest = tl.minimum(lowest, messages)

    slot = tl.load(slots_ptr + segment).to(tl.int64)
    if slot >= 0:
        ptrs = partial_ptr + slot * width + columns
        tl.store(ptrs, sums, mask=is_column)
        tl.store(ptrs + slot_stride, squares, mask=is_column)
        tl.store(ptrs + 2 * slot_stride, highest, mask=is_column)
        tl.store(ptrs + 3 * slot_stride, lowest, mask=is_column)
    else:
        _store_statistics(
            sums,
            squares,
            highest,
            lowest,
            query_vectors_ptr,
            heads_ptr,
            degrees_ptr,
            statistics_ptr,
            entity,
            columns,
            queries,
            is_column,
            is_reached,
            batch,
            min_variance,
            DIM,
        )


@triton.jit
def _combine(
    partial_ptr,
    query_vectors_ptr,
    heads_ptr,
    steps_ptr,
    degrees_ptr,
    divided_ptr,
    slot_starts_ptr,
    statistics_ptr,
    num_steps,
    batch,
    slot_stride,
    min_variance,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Combine the statistics of the segments of an entity."""
    number = tl.program_id(0)
    entity = tl.load(divided_ptr + number).to(tl.int64)
    width = batch * DIM
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    queries = columns // DIM
    steps = tl.load(steps_ptr + entity * batch + queries, mask=is_column, other=255).to(tl.int32)
    is_reached = steps <= num_steps
    if tl.max(is_reached.to(tl.int32)) == 0:
        return
    sums = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    highest = tl.zeros((COLUMNS,), tl.float32)
    lowest = tl.zeros((COLUMNS,), tl.float32)
    first = tl.load(slot_starts_ptr + number)
    last = tl.load(slot_starts_ptr + number + 1)
    for start in range(first, last, SLOTS):
        for offset in tl.static_range(SLOTS):
            slot = tl.full((), 0, tl.int64) + start + offset
            mask = is_column & (slot < last)
            ptrs = partial_ptr + slot * width + columns
            sums += tl.load(ptrs, mask=mask, other=0.0)
            squares += tl.load(ptrs + slot_stride, mask=mask, other=0.0)
            highest = tl.maximum(highest, tl.load(ptrs + 2 * slot_stride, mask=mask, other=0.0))
            lowest = tl.minimum(lowest, tl.load(ptrs + 3 * slot_stride, mask=mask, other=0.0))
    _store_statistics(
        sums,
        squares,
        highest,
        lowest,
        query_vectors_ptr,
        heads_ptr,
        degrees_ptr,
        statistics_ptr,
        entity,
        columns,
        queries,
        is_column,
        is_reached,
        batch,
        min_variance,
        DIM,
    )


def take_statistics(
    vectors: Tensor,
    factors: Tensor,
    query_vectors: Tensor,
    statistics: Tensor,
    *,
    heads: Tensor,
    edges: Edges,
    after: Reached,
) -> None:
    """Fill the `statistics` `(num_entities, batch, 4, dim)` of the rows that are reached."""
    _, batch, dim = vectors.shape
    incoming = edges.incoming
    segments = incoming.segments
    kept = edges.kept_incoming
    columns = min(COLUMN_BLOCK, triton.next_power_of_2(batch * dim))
    num_blocks = triton.cdiv(batch * dim, columns)
    shape = (NUM_STATISTICS, segments.num_slots, batch * dim)
    partial = torch.empty(shape, device=vectors.device)
    _aggregate[(len(segments.entities), num_blocks)](
        vectors,
        factors,
        query_vectors,
        heads,
        after.steps,
        edges.degrees,
        segments.entities,
        segments.starts,
        segments.ends,
        segments.slots,
        incoming.others,
        incoming.relations,
        vectors if kept is None else kept.view(torch.uint8),
        partial,
        statistics,
        after.num_steps,
        batch,
        segments.num_slots * batch * dim,
        MIN_VARIANCE,
        HAS_KEPT=kept is not None,
        DIM=dim,
        COLUMNS=columns,
        EDGES=UNROLLED,
        num_warps=1,
    )
    if segments.num_slots:
        few_columns = min(COMBINED_COLUMNS, columns)
        num_blocks = triton.cdiv(batch * dim, few_columns)
        _combine[(len(segments.divided), num_blocks)](
            partial,
            query_vectors,
            heads,
            after.steps,
            edges.degrees,
            segments.divided,
            segments.slot_starts,
            statistics,
            after.num_steps,
            batch,
            segments.num_slots * batch * dim,
            MIN_VARIANCE,
            DIM=dim,
            COLUMNS=few_columns,
            SLOTS=UNROLLED,
            num_warps=1,
        )


# -- backward ------------------------------------------------------------------


@triton.jit
def _read_edge(
    edge, last, others_ptr, kept_ptr, gradients_ptr, width, columns, mask, HAS_KEPT: tl.constexpr
):
    """What the gradient of the message along an edge depends on; zeros for one not kept."""
    is_edge = edge < last
    if HAS_KEPT:
        is_edge = is_edge & (tl.load(kept_ptr + edge, mask=is_edge, other=0) != 0)
    other = tl.load(others_ptr + edge, mask=is_edge, other=0).to(tl.int64)
    of_edge = mask & is_edge
    ptrs = gradients_ptr + other * (6 * width) + columns
    of_sums = tl.load(ptrs, mask=of_edge, other=0.0)
    of_squares = tl.load(ptrs + width, mask=of_edge, other=0.0)
    highest = tl.load(ptrs + 2 * width, mask=of_edge, other=0.0)
    of_highest = tl.load(ptrs + 3 * width, mask=of_edge, other=0.0)
    lowest = tl.load(ptrs + 4 * width, mask=of_edge, other=0.0)
    of_lowest = tl.load(ptrs + 5 * width, mask=of_edge, other=0.0)
    return of_sums, of_squares, highest, of_highest, lowest, of_lowest


@triton.jit
def _gradient_of_message(messages, of_sums, of_squares, highest, of_highest, lowest, of_lowest):
    gradient = of_sums.to(tl.float32) + messages * of_squares.to(tl.float32)
    is_highest = (messages == highest.to(tl.float32)) & (messages > 0)
    gradient += tl.where(is_highest, of_highest.to(tl.float32), 0.0)
    is_lowest = (messages == lowest.to(tl.float32)) & (messages < 0)
    return gradient + tl.where(is_lowest, of_lowest.to(tl.float32), 0.0)


@triton.jit
def _aggregate_backward(
    vectors_ptr,
    factors_ptr,
    steps_ptr,
    entities_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    others_ptr,
    relations_ptr,
    kept_ptr,
    gradients_ptr,
    own_gradients_ptr,
    grad_vectors_ptr,
    grad_factors_ptr,
    num_steps,
    batch,
    HAS_KEPT: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the gradients of vectors and factors that come along a segment of edges.

    Where an entity has several segments, sums are added to its own gradients. An entity at the end
    of a kept edge is reached if the one at its beginning is.
    """
    segment = tl.program_id(0)
    entity = tl.load(entities_ptr + segment).to(tl.int64)
    width = batch * DIM
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    rows = entity * batch + columns // DIM
    steps = tl.load(steps_ptr + rows, mask=is_column, other=255).to(tl.int32)
    mask = is_column & (steps <= num_steps)
    if tl.max(mask.to(tl.int32)) == 0:
        return
    loaded = tl.load(vectors_ptr + entity * width + columns, mask=mask, other=0.0)
    vectors = loaded.to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    of_relation = tl.zeros((COLUMNS,), tl.float32)
    first = tl.load(starts_ptr + segment)
    last = tl.load(ends_ptr + segment)
    current = tl.load(relations_ptr + first, mask=first < last, other=0).to(tl.int64)
    factors = tl.load(factors_ptr + current * width + columns, mask=mask, other=0.0).to(tl.float32)
    messages = (vectors * factors).to(loaded.dtype).to(tl.float32)
    for start in range(first, last, 2):
        # Both edges are read before a relation may end.
        one = _read_edge(
            start, last, others_ptr, kept_ptr, gradients_ptr, width, columns, mask, HAS_KEPT
        )
        two = _read_edge(
            start + 1, last, others_ptr, kept_ptr, gradients_ptr, width, columns, mask, HAS_KEPT
        )
        for number in tl.static_range(2):
            edge = start + number
            is_edge = edge < last
            if number == 0:
                parts = one
            else:
                parts = two
            relation = tl.load(relations_ptr + edge, mask=is_edge, other=0).to(tl.int64)
            if is_edge & (relation != current):
                # Edges are sorted by relation.
                ptrs = grad_factors_ptr + current * width + columns
                tl.atomic_add(ptrs, of_relation * vectors, mask=mask, sem="relaxed")
                total += of_relation * factors
                of_relation = tl.zeros((COLUMNS,), tl.float32)
                current = relation
                ptrs = factors_ptr + relation * width + columns
                factors = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
                messages = (vectors * factors).to(loaded.dtype).to(tl.float32)
            of_relation += _gradient_of_message(
                messages, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]
            )
    if first < last:
        ptrs = grad_factors_ptr + current * width + columns
        tl.atomic_add(ptrs, of_relation * vectors, mask=mask, sem="relaxed")
        total += of_relation * factors
    own_ptrs = own_gradients_ptr + entity * width + columns
    if tl.load(slots_ptr + segment) >= 0:
        tl.atomic_add(own_ptrs, total, mask=mask, sem="relaxed")
    else:
        total += tl.load(own_ptrs, mask=mask, other=0.0)
        tl.store(grad_vectors_ptr + entity * width + columns, total, mask=mask)


@triton.jit
def _round_divided(own_gradients_ptr, grad_vectors_ptr, divided_ptr, width, COLUMNS: tl.constexpr):
    """Store the gradients of an entity that has several segments."""
    entity = tl.load(divided_ptr + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    offsets = entity * width + columns
    total = tl.load(own_gradients_ptr + offsets, mask=mask, other=0.0)
    tl.store(grad_vectors_ptr + offsets, total, mask=mask)


def message_gradients(
    vectors: Tensor,
    factors: Tensor,
    gradients: Tensor,
    own_gradients: Tensor,
    *,
    edges: Edges,
    before: Reached,
) -> tuple[Tensor, Tensor]:
    """The gradients of `vectors`, and in float32 those of `factors`.

    `gradients` is `(num_entities, 6, batch, dim)`: the gradient of a message is the first, plus the
    second times the message, plus the fourth if it is the maximum, which is the third, plus the
    sixth if it is the minimum, which is the fifth. `own_gradients` of vectors, in float32, are
    added, and changed. Sums are in an arbitrary order.
    """
    _, batch, dim = vectors.shape
    width = batch * dim
    outgoing = edges.outgoing
    segments = outgoing.segments
    kept = edges.kept_outgoing
    grad_vectors = torch.empty_like(vectors)
    grad_factors = torch.zeros(factors.shape, dtype=torch.float32, device=vectors.device)
    columns = min(BACKWARD_BLOCK, triton.next_power_of_2(width))
    num_blocks = triton.cdiv(width, columns)
    _aggregate_backward[(len(segments.entities), num_blocks)](
        vectors,
        factors,
        before.steps,
        segments.entities,
        segments.starts,
        segments.ends,
        segments.slots,
        outgoing.others,
        outgoing.relations,
        vectors if kept is None else kept.view(torch.uint8),
        gradients,
        own_gradients,
        grad_vectors,
        grad_factors,
        before.num_steps,
        batch,
        HAS_KEPT=kept is not None,
        DIM=dim,
        COLUMNS=columns,
        num_warps=1,
    )
    if segments.num_slots:
        _round_divided[(len(segments.divided), num_blocks)](
            own_gradients, grad_vectors, segments.divided, width, COLUMNS=columns, num_warps=1
        )
    return grad_vectors, grad_factors


@triton.jit
def _query_gradients(
    query_vectors_ptr, heads_ptr, gradients_ptr, grad_queries_ptr, batch, DIM: tl.constexpr
):
    """Store the gradients of the message of a query to its head."""
    query = tl.program_id(0)
    columns = query * DIM + tl.arange(0, DIM)
    head = tl.load(heads_ptr + query).to(tl.int64)
    width = batch * DIM
    messages = tl.load(query_vectors_ptr + columns).to(tl.float32)
    ptrs = gradients_ptr + head * (6 * width) + columns
    gradient = _gradient_of_message(
        messages,
        tl.load(ptrs),
        tl.load(ptrs + width),
        tl.load(ptrs + 2 * width),
        tl.load(ptrs + 3 * width),
        tl.load(ptrs + 4 * width),
        tl.load(ptrs + 5 * width),
    )
    tl.store(grad_queries_ptr + columns, gradient)


def query_gradients(query_vectors: Tensor, gradients: Tensor, *, heads: Tensor) -> Tensor:
    """The gradients of the vectors that queries send to their heads, `(batch, dim)`.

    `gradients` are those that `message_gradients` reads.
    """
    batch, dim = query_vectors.shape
    result = torch.empty_like(query_vectors)
    _query_gradients[(batch,)](query_vectors, heads, gradients, result, batch, DIM=dim, num_warps=1)
    return result

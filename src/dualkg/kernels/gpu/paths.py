"""Message passing of a path network, compiled: messages are never written.

A step is two kernels forward and two backward. One goes over the edges that enter an entity and
takes the statistics of their messages, for all queries whether they reach the entity or not. The
other mixes the statistics of the rows that are reached: pairs of an entity and a query. Backward,
the second is first. It computes the gradients of the statistics, and the other goes over the edges
that leave an entity. The messages are computed again there, rounded as before, so that a message
that is equal to the maximum is known to be it.

The gradients of relation factors and of gain and shift are sums in an arbitrary order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.paths import (
    MIN_VARIANCE,
    NORM_EPSILON,
    NUM_SCALERS,
    NUM_STATISTICS,
    Edges,
    Mixing,
)

COLUMN_BLOCK = 256  # numbers of an entity's vectors that a program handles
UNROLLED = 4  # edges whose messages are loaded at a time
ROW_BLOCK = 64  # rows that are mixed at a time
NUM_PARTS = NUM_STATISTICS + 1  # of a row that is mixed: its statistics and its own vector
NUM_GRADIENTS = 6  # what an edge reads backward: see `_mix_backward`
WORD = 32  # queries whose reach is one number
EDGE_BLOCK = 128  # edges of an entity that are searched at a time
MIX_WARPS = 4


# -- reach ---------------------------------------------------------------------


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _reach(
    words_ptr,
    further_ptr,
    starts_ptr,
    others_ptr,
    kept_ptr,
    num_words,
    HAS_KEPT: tl.constexpr,
    EDGES: tl.constexpr,
):
    entity = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    found = tl.load(words_ptr + entity * num_words + word)
    first = tl.load(starts_ptr + entity)
    last = tl.load(starts_ptr + entity + 1)
    for start in range(first, last, EDGES):
        edges = start + tl.arange(0, EDGES)
        is_edge = edges < last
        if HAS_KEPT:
            is_edge = is_edge & (tl.load(kept_ptr + edges, mask=is_edge, other=0) != 0)
        others = tl.load(others_ptr + edges, mask=is_edge, other=0).to(tl.int64)
        words = tl.load(words_ptr + others * num_words + word, mask=is_edge, other=0)
        found = found | tl.reduce(words, 0, _either)
    tl.store(further_ptr + entity * num_words + word, found)


def reach(heads: Tensor, edges: Edges, num_steps: int) -> list[Tensor]:
    """Which entities the queries reach, as `dualkg.kernels.paths.reach`."""
    batch = len(heads)
    num_words = triton.cdiv(batch, WORD)
    bits = torch.arange(WORD, dtype=torch.int32, device=heads.device)
    queries = torch.arange(batch, device=heads.device)
    words = torch.zeros(edges.num_entities, num_words, dtype=torch.int32, device=heads.device)
    # Queries with one head have different bits, so that their sum is their union.
    words.index_put_((heads, queries // WORD), 1 << (queries % WORD).int(), accumulate=True)
    kept = edges.kept_in(edges.incoming)

    def unpack(words: Tensor) -> Tensor:
        reached = (words[:, :, None] >> bits) & 1
        return reached.view(edges.num_entities, -1)[:, :batch].bool()

    reached = [unpack(words)]
    for _ in range(num_steps):
        further = torch.empty_like(words)
        _reach[(edges.num_entities, num_words)](
            words,
            further,
            edges.incoming.starts,
            edges.incoming.others,
            words if kept is None else kept.view(torch.uint8),
            num_words,
            HAS_KEPT=kept is not None,
            EDGES=EDGE_BLOCK,
            num_warps=1,
        )
        words = further
        reached.append(unpack(words))
    return reached


# -- statistics of messages ----------------------------------------------------


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
    width,
    part_stride,
    min_variance,
):
    """Store mean, maximum, minimum and standard deviation of the messages to an entity."""
    heads = tl.load(heads_ptr + queries, mask=is_column, other=-1)
    is_head = is_column & (heads == entity)
    boundary = tl.load(query_vectors_ptr + columns, mask=is_head, other=0.0).to(tl.float32)
    degree = tl.load(degrees_ptr + entity)
    mean = (sums + boundary) / degree
    mean_square = (squares + boundary * boundary) / degree
    deviation = tl.sqrt(tl.maximum(mean_square - mean * mean, min_variance))
    ptrs = statistics_ptr + entity * width + columns
    mask = is_column & is_reached
    tl.store(ptrs, mean, mask=mask)
    tl.store(ptrs + part_stride, tl.maximum(highest, boundary), mask=mask)
    tl.store(ptrs + 2 * part_stride, tl.minimum(lowest, boundary), mask=mask)
    tl.store(ptrs + 3 * part_stride, deviation, mask=mask)


@triton.jit
def _aggregate(
    vectors_ptr,
    factors_ptr,
    query_vectors_ptr,
    heads_ptr,
    after_ptr,
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
    batch,
    part_stride,
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
    after = tl.load(after_ptr + entity * batch + queries, mask=is_column, other=0).to(tl.int32)
    if tl.max(after) == 0:
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
            after != 0,
            width,
            part_stride,
            min_variance,
        )


@triton.jit
def _combine(
    partial_ptr,
    query_vectors_ptr,
    heads_ptr,
    after_ptr,
    degrees_ptr,
    divided_ptr,
    slot_starts_ptr,
    statistics_ptr,
    batch,
    part_stride,
    slot_stride,
    min_variance,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Combine the statistics of the segments of an entity."""
    number = tl.program_id(0)
    entity = tl.load(divided_ptr + number).to(tl.int64)
    width = batch * DIM
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    queries = columns // DIM
    after = tl.load(after_ptr + entity * batch + queries, mask=is_column, other=0).to(tl.int32)
    if tl.max(after) == 0:
        return
    sums = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    highest = tl.zeros((COLUMNS,), tl.float32)
    lowest = tl.zeros((COLUMNS,), tl.float32)
    first = tl.load(slot_starts_ptr + number)
    last = tl.load(slot_starts_ptr + number + 1)
    ptrs = partial_ptr + first.to(tl.int64) * width + columns
    for _ in range(first, last):
        sums += tl.load(ptrs, mask=is_column, other=0.0)
        squares += tl.load(ptrs + slot_stride, mask=is_column, other=0.0)
        highest = tl.maximum(highest, tl.load(ptrs + 2 * slot_stride, mask=is_column, other=0.0))
        lowest = tl.minimum(lowest, tl.load(ptrs + 3 * slot_stride, mask=is_column, other=0.0))
        ptrs += width
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
        after != 0,
        width,
        part_stride,
        min_variance,
    )


@triton.jit
def _aggregate_backward(
    vectors_ptr,
    factors_ptr,
    before_ptr,
    entities_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    others_ptr,
    relations_ptr,
    kept_ptr,
    gradients_ptr,
    grad_vectors_ptr,
    grad_factors_ptr,
    batch,
    part_stride,
    HAS_KEPT: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the gradients of vectors and factors that come along a segment of edges.

    An entity at the end of a kept edge is reached if the one at its beginning is.
    """
    segment = tl.program_id(0)
    entity = tl.load(entities_ptr + segment).to(tl.int64)
    width = batch * DIM
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    rows = entity * batch + columns // DIM
    before = tl.load(before_ptr + rows, mask=is_column, other=0).to(tl.int32)
    if tl.max(before) == 0:
        return
    mask = is_column & (before != 0)
    loaded = tl.load(vectors_ptr + entity * width + columns, mask=mask, other=0.0)
    vectors = loaded.to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    of_relation = tl.zeros((COLUMNS,), tl.float32)
    first = tl.load(starts_ptr + segment)
    last = tl.load(ends_ptr + segment)
    current = tl.load(relations_ptr + first, mask=first < last, other=0).to(tl.int64)
    for edge in range(first, last):
        is_kept = True
        if HAS_KEPT:
            is_kept = tl.load(kept_ptr + edge) != 0
        if is_kept:
            other = tl.load(others_ptr + edge).to(tl.int64)
            relation = tl.load(relations_ptr + edge).to(tl.int64)
            if relation != current:
                # Edges are sorted by relation.
                ptrs = grad_factors_ptr + current * width + columns
                tl.atomic_add(ptrs, of_relation, mask=mask, sem="relaxed")
                of_relation = tl.zeros((COLUMNS,), tl.float32)
                current = relation
            ptrs = factors_ptr + relation * width + columns
            factors = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
            messages = (vectors * factors).to(loaded.dtype).to(tl.float32)
            ptrs = gradients_ptr + other * width + columns
            of_sums = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
            of_squares = tl.load(ptrs + part_stride, mask=mask, other=0.0).to(tl.float32)
            highest = tl.load(ptrs + 2 * part_stride, mask=mask, other=0.0).to(tl.float32)
            of_highest = tl.load(ptrs + 3 * part_stride, mask=mask, other=0.0).to(tl.float32)
            lowest = tl.load(ptrs + 4 * part_stride, mask=mask, other=0.0).to(tl.float32)
            of_lowest = tl.load(ptrs + 5 * part_stride, mask=mask, other=0.0).to(tl.float32)
            gradient = of_sums + messages * of_squares
            gradient += tl.where((messages == highest) & (messages > 0), of_highest, 0.0)
            gradient += tl.where((messages == lowest) & (messages < 0), of_lowest, 0.0)
            total += gradient * factors
            of_relation += gradient * vectors
    if first < last:
        ptrs = grad_factors_ptr + current * width + columns
        tl.atomic_add(ptrs, of_relation, mask=mask, sem="relaxed")
    ptrs = grad_vectors_ptr + entity * width + columns
    if tl.load(slots_ptr + segment) >= 0:
        tl.atomic_add(ptrs, total, mask=mask, sem="relaxed")
    else:
        tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + total, mask=mask)


# -- mixing --------------------------------------------------------------------


@triton.jit
def _mix(
    vectors_ptr,
    statistics_ptr,
    weight_ptr,
    own_weight_ptr,
    bias_ptr,
    scalers_ptr,
    offsets,
    mask,
    entities,
    is_row,
    part_stride,
    epsilon,
    DIM: tl.constexpr,
):
    """Normalized mixtures of a block of rows, with the reciprocal deviation and the scalers."""
    columns = tl.arange(0, DIM)
    amplified = tl.load(scalers_ptr + entities * 3 + 1, mask=is_row, other=0.0)
    attenuated = tl.load(scalers_ptr + entities * 3 + 2, mask=is_row, other=0.0)
    # The transposed blocks of the weights: input × output.
    block = columns[None, :] * (4 * DIM) + columns[:, None]
    own = tl.load(vectors_ptr + offsets, mask=mask, other=0.0)
    own_weight = tl.load(own_weight_ptr + columns[None, :] * DIM + columns[:, None])
    plain = tl.dot(own, own_weight, input_precision="ieee")
    more = tl.zeros_like(plain)
    less = tl.zeros_like(plain)
    for part in tl.static_range(4):
        values = tl.load(statistics_ptr + part * part_stride + offsets, mask=mask, other=0.0)
        at_part = weight_ptr + part * DIM + block
        plain = tl.dot(values, tl.load(at_part), acc=plain, input_precision="ieee")
        more_weight = tl.load(at_part + 4 * DIM * DIM)
        more = tl.dot(values, more_weight, acc=more, input_precision="ieee")
        less_weight = tl.load(at_part + 8 * DIM * DIM)
        less = tl.dot(values, less_weight, acc=less, input_precision="ieee")
    mixed = plain + more * amplified[:, None] + less * attenuated[:, None]
    mixed += tl.load(bias_ptr + columns)[None, :]
    mean = tl.sum(mixed, axis=1) / DIM
    centred = mixed - mean[:, None]
    variance = tl.sum(centred * centred, axis=1) / DIM
    reciprocal = 1 / tl.sqrt(variance + epsilon)
    return centred * reciprocal[:, None], reciprocal, amplified, attenuated, own


@triton.jit
def _mix_forward(
    vectors_ptr,
    statistics_ptr,
    weight_ptr,
    own_weight_ptr,
    bias_ptr,
    gain_ptr,
    shift_ptr,
    scalers_ptr,
    rows_ptr,
    result_ptr,
    num_rows,
    batch,
    part_stride,
    epsilon,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    numbers = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    is_row = numbers < num_rows
    rows = tl.load(rows_ptr + numbers, mask=is_row, other=0)
    offsets = rows[:, None] * DIM + columns[None, :]
    mask = is_row[:, None]
    normalized, _, _, _, own = _mix(
        vectors_ptr,
        statistics_ptr,
        weight_ptr,
        own_weight_ptr,
        bias_ptr,
        scalers_ptr,
        offsets,
        mask,
        rows // batch,
        is_row,
        part_stride,
        epsilon,
        DIM,
    )
    gain = tl.load(gain_ptr + columns)[None, :]
    shift = tl.load(shift_ptr + columns)[None, :]
    vectors = own.to(tl.float32) + tl.maximum(normalized * gain + shift, 0.0)
    tl.store(result_ptr + offsets, vectors, mask=mask)


@triton.jit
def _mix_backward(
    vectors_ptr,
    statistics_ptr,
    weight_ptr,
    own_weight_ptr,
    bias_ptr,
    gain_ptr,
    shift_ptr,
    scalers_ptr,
    degrees_ptr,
    rows_ptr,
    heads_ptr,
    query_vectors_ptr,
    grad_ptr,
    gradients_ptr,
    parts_ptr,
    grad_mixed_ptr,
    grad_vectors_ptr,
    grad_gain_ptr,
    grad_shift_ptr,
    grad_query_vectors_ptr,
    num_rows,
    batch,
    part_stride,
    min_deviation,
    epsilon,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the gradients of a block of rows, and their statistics and vectors side by side.

    `gradients` has six parts, which are read along the edges: the gradient of a message is the
    first, plus the second times the message, plus the fourth if it is the maximum, which is the
    third, plus the sixth if it is the minimum, which is the fifth.
    """
    numbers = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    is_row = numbers < num_rows
    rows = tl.load(rows_ptr + numbers, mask=is_row, other=0)
    entities = rows // batch
    queries = rows % batch
    offsets = rows[:, None] * DIM + columns[None, :]
    mask = is_row[:, None]
    normalized, reciprocal, amplified, attenuated, own = _mix(
        vectors_ptr,
        statistics_ptr,
        weight_ptr,
        own_weight_ptr,
        bias_ptr,
        scalers_ptr,
        offsets,
        mask,
        entities,
        is_row,
        part_stride,
        epsilon,
        DIM,
    )
    gain = tl.load(gain_ptr + columns)[None, :]
    shift = tl.load(shift_ptr + columns)[None, :]
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    of_output = tl.where(normalized * gain + shift > 0, grad, 0.0)
    tl.atomic_add(grad_gain_ptr + columns, tl.sum(of_output * normalized, axis=0), sem="relaxed")
    tl.atomic_add(grad_shift_ptr + columns, tl.sum(of_output, axis=0), sem="relaxed")
    of_normalized = of_output * gain
    mean = tl.sum(of_normalized, axis=1) / DIM
    slope = tl.sum(of_normalized * normalized, axis=1) / DIM
    of_mixed = of_normalized - mean[:, None] - normalized * slope[:, None]
    of_mixed = of_mixed * reciprocal[:, None]

    dtype = own.dtype
    plain = of_mixed.to(dtype)
    more = (of_mixed * amplified[:, None]).to(dtype)
    less = (of_mixed * attenuated[:, None]).to(dtype)
    wide = numbers.to(tl.int64)[:, None]
    mixed_ptrs = grad_mixed_ptr + wide * (3 * DIM) + columns[None, :]
    tl.store(mixed_ptrs, plain, mask=mask)
    tl.store(mixed_ptrs + DIM, more, mask=mask)
    tl.store(mixed_ptrs + 2 * DIM, less, mask=mask)

    # The blocks of the weights: output × input.
    block = columns[:, None] * (4 * DIM) + columns[None, :]
    of_mean = _mix_transposed(plain, more, less, weight_ptr + block, DIM)
    of_highest = _mix_transposed(plain, more, less, weight_ptr + DIM + block, DIM)
    of_lowest = _mix_transposed(plain, more, less, weight_ptr + 2 * DIM + block, DIM)
    of_deviation = _mix_transposed(plain, more, less, weight_ptr + 3 * DIM + block, DIM)
    own_weight = tl.load(own_weight_ptr + columns[:, None] * DIM + columns[None, :])
    of_own = grad + tl.dot(plain, own_weight, input_precision="ieee")
    tl.store(grad_vectors_ptr + offsets, of_own, mask=mask)

    degree = tl.load(degrees_ptr + entities, mask=is_row, other=1.0)[:, None]
    at_row = statistics_ptr + offsets
    mean_of_row = tl.load(at_row, mask=mask, other=0.0)
    highest = tl.load(at_row + part_stride, mask=mask, other=0.0)
    lowest = tl.load(at_row + 2 * part_stride, mask=mask, other=0.0)
    deviation = tl.load(at_row + 3 * part_stride, mask=mask, other=1.0)
    part_ptrs = parts_ptr + wide * (5 * DIM) + columns[None, :]
    tl.store(part_ptrs, mean_of_row, mask=mask)
    tl.store(part_ptrs + DIM, highest, mask=mask)
    tl.store(part_ptrs + 2 * DIM, lowest, mask=mask)
    tl.store(part_ptrs + 3 * DIM, deviation, mask=mask)
    tl.store(part_ptrs + 4 * DIM, own, mask=mask)

    wide_deviation = deviation.to(tl.float32)
    slope_of_deviation = of_deviation / wide_deviation / degree
    of_squares = tl.where(wide_deviation > min_deviation, slope_of_deviation, 0.0)
    of_sums = of_mean / degree - mean_of_row.to(tl.float32) * of_squares
    gradient_ptrs = gradients_ptr + offsets
    tl.store(gradient_ptrs, of_sums, mask=mask)
    tl.store(gradient_ptrs + part_stride, of_squares, mask=mask)
    tl.store(gradient_ptrs + 2 * part_stride, highest, mask=mask)
    tl.store(gradient_ptrs + 3 * part_stride, of_highest, mask=mask)
    tl.store(gradient_ptrs + 4 * part_stride, lowest, mask=mask)
    tl.store(gradient_ptrs + 5 * part_stride, of_lowest, mask=mask)

    # The message of a query to its head.
    is_head = (is_row & (tl.load(heads_ptr + queries, mask=is_row, other=-1) == entities))[:, None]
    query_offsets = queries[:, None] * DIM + columns[None, :]
    message = tl.load(query_vectors_ptr + query_offsets, mask=is_head, other=0.0).to(tl.float32)
    of_message = of_sums + message * of_squares
    stored = message.to(dtype)
    of_message += tl.where((stored == highest) & (message > 0), of_highest, 0.0)
    of_message += tl.where((stored == lowest) & (message < 0), of_lowest, 0.0)
    tl.store(grad_query_vectors_ptr + query_offsets, of_message, mask=is_head)


@triton.jit
def _mix_transposed(plain, more, less, block_ptrs, DIM: tl.constexpr):
    result = tl.dot(plain, tl.load(block_ptrs), input_precision="ieee")
    more_weight = tl.load(block_ptrs + 4 * DIM * DIM)
    result = tl.dot(more, more_weight, acc=result, input_precision="ieee")
    less_weight = tl.load(block_ptrs + 8 * DIM * DIM)
    return tl.dot(less, less_weight, acc=result, input_precision="ieee")


# -- a step --------------------------------------------------------------------


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        factors: Tensor,
        query_vectors: Tensor,
        statistics_weight: Tensor,
        own_weight: Tensor,
        bias: Tensor,
        gain: Tensor,
        shift: Tensor,
        heads: Tensor,
        edges: Edges,
        before: Tensor,
        after: Tensor,
    ) -> Tensor:
        dtype = vectors.dtype
        _, batch, dim = vectors.shape
        factors = factors.contiguous()
        weight = statistics_weight.to(dtype).contiguous()
        own = own_weight.to(dtype).contiguous()
        statistics = torch.empty(NUM_STATISTICS, *vectors.shape, dtype=dtype, device=vectors.device)
        kept = edges.kept_in(edges.incoming)
        incoming = edges.incoming
        segments = incoming.segments
        columns = min(COLUMN_BLOCK, triton.next_power_of_2(batch * dim))
        num_blocks = triton.cdiv(batch * dim, columns)
        num_slots = int(segments.slot_starts[-1])
        partial = torch.empty(NUM_STATISTICS, num_slots, batch * dim, device=vectors.device)
        _aggregate[(len(segments.entities), num_blocks)](
            vectors,
            factors,
            query_vectors,
            heads,
            after.view(torch.uint8),
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
            batch,
            vectors.numel(),
            num_slots * batch * dim,
            MIN_VARIANCE,
            HAS_KEPT=kept is not None,
            DIM=dim,
            COLUMNS=columns,
            EDGES=UNROLLED,
            num_warps=1,
        )
        if len(segments.divided):
            _combine[(len(segments.divided), num_blocks)](
                partial,
                query_vectors,
                heads,
                after.view(torch.uint8),
                edges.degrees,
                segments.divided,
                segments.slot_starts,
                statistics,
                batch,
                vectors.numel(),
                num_slots * batch * dim,
                MIN_VARIANCE,
                DIM=dim,
                COLUMNS=columns,
                num_warps=1,
            )
        rows = after.view(-1).nonzero().squeeze(1)
        scalers = edges.scalers
        result = torch.zeros_like(vectors)
        _mix_forward[(triton.cdiv(len(rows), ROW_BLOCK),)](
            vectors,
            statistics,
            weight,
            own,
            bias,
            gain,
            shift,
            scalers,
            rows,
            result,
            len(rows),
            batch,
            vectors.numel(),
            NORM_EPSILON,
            DIM=dim,
            ROWS=ROW_BLOCK,
            num_warps=MIX_WARPS,
        )
        ctx.save_for_backward(
            vectors, factors, query_vectors, weight, own, bias, gain, shift, heads, statistics
        )
        ctx.rows = rows
        ctx.scalers = scalers
        ctx.edges = edges
        ctx.before = before
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (vectors, factors, query_vectors, weight, own, bias, gain, shift, heads, statistics) = (
            ctx.saved_tensors
        )
        edges: Edges = ctx.edges
        rows: Tensor = ctx.rows
        dtype = vectors.dtype
        device = vectors.device
        _, batch, dim = vectors.shape
        gradients = torch.empty(NUM_GRADIENTS, *vectors.shape, dtype=dtype, device=device)
        parts = torch.empty(len(rows), NUM_PARTS * dim, dtype=dtype, device=device)
        grad_mixed = torch.empty(len(rows), NUM_SCALERS * dim, dtype=dtype, device=device)
        grad_vectors = torch.empty(vectors.shape, dtype=torch.float32, device=device)
        grad_factors = torch.zeros(factors.shape, dtype=torch.float32, device=device)
        grad_gain = torch.zeros_like(gain)
        grad_shift = torch.zeros_like(shift)
        grad_queries = torch.zeros(query_vectors.shape, dtype=torch.float32, device=device)
        _mix_backward[(triton.cdiv(len(rows), ROW_BLOCK),)](
            vectors,
            statistics,
            weight,
            own,
            bias,
            gain,
            shift,
            ctx.scalers,
            edges.degrees,
            rows,
            heads,
            query_vectors,
            grad.contiguous(),
            gradients,
            parts,
            grad_mixed,
            grad_vectors,
            grad_gain,
            grad_shift,
            grad_queries,
            len(rows),
            batch,
            vectors.numel(),
            MIN_VARIANCE**0.5 * (1 + 1e-2),
            NORM_EPSILON,
            DIM=dim,
            ROWS=ROW_BLOCK,
            num_warps=MIX_WARPS,
        )
        outgoing = edges.outgoing
        kept = edges.kept_in(outgoing)
        columns = min(COLUMN_BLOCK, triton.next_power_of_2(batch * dim))
        segments = outgoing.segments
        _aggregate_backward[(len(segments.entities), triton.cdiv(batch * dim, columns))](
            vectors,
            factors,
            ctx.before.view(torch.uint8),
            segments.entities,
            segments.starts,
            segments.ends,
            segments.slots,
            outgoing.others,
            outgoing.relations,
            vectors if kept is None else kept.view(torch.uint8),
            gradients,
            grad_vectors,
            grad_factors,
            batch,
            vectors.numel(),
            HAS_KEPT=kept is not None,
            DIM=dim,
            COLUMNS=columns,
            num_warps=1,
        )
        products = (grad_mixed.T @ parts).float()
        return (
            grad_vectors.to(dtype),
            grad_factors.to(factors.dtype),
            grad_queries.to(query_vectors.dtype),
            products[:, : NUM_STATISTICS * dim],
            products[:dim, NUM_STATISTICS * dim :],
            grad_mixed[:, :dim].sum(0, dtype=torch.float32),
            grad_gain,
            grad_shift,
            None,
            None,
            None,
            None,
        )


def take_step(
    vectors: Tensor,
    factors: Tensor,
    query_vectors: Tensor,
    mixing: Mixing,
    *,
    heads: Tensor,
    edges: Edges,
    before: Tensor,
    after: Tensor,
) -> Tensor:
    """The vectors after one more step, as `dualkg.kernels.paths.take_step`.

    The gradient of vectors that are not reached `before` is undefined: they are constants.
    """
    result: Tensor = _Step.apply(  # type: ignore[no-untyped-call]
        vectors, factors, query_vectors, *mixing, heads, edges, before, after
    )
    return result

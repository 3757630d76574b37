"""New vectors from the statistics of messages, in Triton.

Only rows that are reached are mixed: pairs of an entity and a query. Their number is known on the
device alone, so that a fixed number of programs share them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.path_messages import NUM_GRADIENTS
from dualkg.kernels.gpu.path_reach import Reached
from dualkg.kernels.paths import (
    MIN_VARIANCE,
    NORM_EPSILON,
    NUM_SCALERS,
    NUM_STATISTICS,
    Edges,
    Mixing,
)

ROW_BLOCK = 64  # rows that are mixed at a time
FORWARD_WARPS = 4
FORWARD_PROGRAMS = 4  # for each multiprocessor
BACKWARD_WARPS = 4
BACKWARD_PROGRAMS = 2
SUMMED_DIMS = (32,)  # for which the gradients of the weights are summed in registers


@triton.jit
def _mix(
    values,
    own,
    weight_ptr,
    own_weight_ptr,
    bias_ptr,
    amplified,
    attenuated,
    epsilon,
    DIM: tl.constexpr,
):
    """Normalized mixtures of a block of rows, and the reciprocals of their deviations."""
    columns = tl.arange(0, DIM)
    inputs = tl.arange(0, 4 * DIM)
    # The transposed weights: input × output.
    block = columns[None, :] * (4 * DIM) + inputs[:, None]
    plain = tl.dot(values, tl.load(weight_ptr + block), input_precision="ieee")
    own_weight = tl.load(own_weight_ptr + columns[None, :] * DIM + columns[:, None])
    plain = tl.dot(own, own_weight, acc=plain, input_precision="ieee")
    more_weight = tl.load(weight_ptr + 4 * DIM * DIM + block)
    more = tl.dot(values, more_weight, input_precision="ieee")
    less_weight = tl.load(weight_ptr + 8 * DIM * DIM + block)
    less = tl.dot(values, less_weight, input_precision="ieee")
    mixed = plain + more * amplified[:, None] + less * attenuated[:, None]
    mixed += tl.load(bias_ptr + columns)[None, :]
    mean = tl.sum(mixed, axis=1) / DIM
    centred = mixed - mean[:, None]
    variance = tl.sum(centred * centred, axis=1) / DIM
    reciprocal = 1 / tl.sqrt(variance + epsilon)
    return centred * reciprocal[:, None], reciprocal


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
    num_rows_ptr,
    result_ptr,
    batch,
    epsilon,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    columns = tl.arange(0, DIM)
    inputs = tl.arange(0, 4 * DIM)
    gain = tl.load(gain_ptr + columns)[None, :]
    shift = tl.load(shift_ptr + columns)[None, :]
    num_rows = tl.load(num_rows_ptr).to(tl.int32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        numbers = start + tl.arange(0, ROWS)
        is_row = numbers < num_rows
        rows = tl.load(rows_ptr + numbers, mask=is_row, other=0)
        mask = is_row[:, None]
        offsets = rows[:, None] * DIM + columns[None, :]
        own = tl.load(vectors_ptr + offsets, mask=mask, other=0.0)
        at_rows = statistics_ptr + rows[:, None] * (4 * DIM) + inputs[None, :]
        values = tl.load(at_rows, mask=mask, other=0.0)
        entities = rows // batch
        normalized, _ = _mix(
            values,
            own,
            weight_ptr,
            own_weight_ptr,
            bias_ptr,
            tl.load(scalers_ptr + entities * 3 + 1, mask=is_row, other=0.0),
            tl.load(scalers_ptr + entities * 3 + 2, mask=is_row, other=0.0),
            epsilon,
            DIM,
        )
        vectors = own.to(tl.float32) + tl.maximum(normalized * gain + shift, 0.0)
        tl.store(result_ptr + offsets, vectors, mask=mask)


def mix(
    vectors: Tensor,
    statistics: Tensor,
    mixing: Mixing,
    result: Tensor,
    *,
    edges: Edges,
    after: Reached,
) -> None:
    """Fill the rows of the `result` that are reached."""
    _, batch, dim = vectors.shape
    _mix_forward[(_num_programs(vectors, FORWARD_PROGRAMS),)](
        vectors,
        statistics,
        *mixing,
        edges.scalers,
        after.rows,
        after.num_rows,
        result,
        batch,
        NORM_EPSILON,
        DIM=dim,
        ROWS=ROW_BLOCK,
        num_warps=FORWARD_WARPS,
        num_stages=1,
    )


def _num_programs(vectors: Tensor, for_each: int) -> int:
    num_entities, batch, _ = vectors.shape
    num_blocks = triton.cdiv(num_entities * batch, ROW_BLOCK)
    return int(min(num_blocks, for_each * num_multiprocessors(vectors.device)))


def num_multiprocessors(device: torch.device) -> int:
    """How many programs run at a time, if each fills a multiprocessor."""
    if device.type != "cuda":
        return 2  # where kernels are interpreted
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


# -- backward ------------------------------------------------------------------


@triton.jit
def _mix_transposed(plain, more, less, block_ptrs, DIM: tl.constexpr):
    result = tl.dot(plain, tl.load(block_ptrs), input_precision="ieee")
    more_weight = tl.load(block_ptrs + 4 * DIM * DIM)
    result = tl.dot(more, more_weight, acc=result, input_precision="ieee")
    less_weight = tl.load(block_ptrs + 8 * DIM * DIM)
    return tl.dot(less, less_weight, acc=result, input_precision="ieee")


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
    num_rows_ptr,
    grad_ptr,
    gradients_ptr,
    grad_mixed_ptr,
    grad_vectors_ptr,
    sums_ptr,
    batch,
    min_deviation,
    epsilon,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Store the gradients of rows, and of the weights as a sum for each program.

    The sums of a program are a matrix of 3 · dim + dim + 3 rows with 4 · dim columns: the gradients
    of the weights of statistics, of the own vector (its first dim columns) and of bias, gain and
    shift (likewise). Without `SUMS`, the gradients of the mixtures are stored instead of those of
    the weights.
    """
    columns = tl.arange(0, DIM)
    inputs = tl.arange(0, 4 * DIM)
    gain = tl.load(gain_ptr + columns)[None, :]
    shift = tl.load(shift_ptr + columns)[None, :]
    of_bias = tl.zeros((DIM,), tl.float32)
    of_gain = tl.zeros((DIM,), tl.float32)
    of_shift = tl.zeros((DIM,), tl.float32)
    if SUMS:
        of_plain = tl.zeros((4 * DIM, DIM), tl.float32)
        of_more = tl.zeros((4 * DIM, DIM), tl.float32)
        of_less = tl.zeros((4 * DIM, DIM), tl.float32)
        of_own_weight = tl.zeros((DIM, DIM), tl.float32)
    num_rows = tl.load(num_rows_ptr).to(tl.int32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        numbers = start + tl.arange(0, ROWS)
        is_row = numbers < num_rows
        rows = tl.load(rows_ptr + numbers, mask=is_row, other=0)
        entities = rows // batch
        queries = rows % batch
        mask = is_row[:, None]
        offsets = rows[:, None] * DIM + columns[None, :]
        own = tl.load(vectors_ptr + offsets, mask=mask, other=0.0)
        at_rows = statistics_ptr + rows[:, None] * (4 * DIM)
        values = tl.load(at_rows + inputs[None, :], mask=mask, other=0.0)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        amplified = tl.load(scalers_ptr + entities * 3 + 1, mask=is_row, other=0.0)
        attenuated = tl.load(scalers_ptr + entities * 3 + 2, mask=is_row, other=0.0)
        normalized, reciprocal = _mix(
            values,
            own,
            weight_ptr,
            own_weight_ptr,
            bias_ptr,
            amplified,
            attenuated,
            epsilon,
            DIM,
        )
        of_output = tl.where(normalized * gain + shift > 0, grad, 0.0)
        of_gain += tl.sum(of_output * normalized, axis=0)
        of_shift += tl.sum(of_output, axis=0)
        of_normalized = of_output * gain
        mean = tl.sum(of_normalized, axis=1) / DIM
        slope = tl.sum(of_normalized * normalized, axis=1) / DIM
        of_mixed = of_normalized - mean[:, None] - normalized * slope[:, None]
        of_mixed = of_mixed * reciprocal[:, None]
        of_bias += tl.sum(of_mixed, axis=0)

        dtype = own.dtype
        plain = of_mixed.to(dtype)
        more = (of_mixed * amplified[:, None]).to(dtype)
        less = (of_mixed * attenuated[:, None]).to(dtype)
        if SUMS:
            transposed = tl.trans(values)
            of_plain = tl.dot(transposed, plain, acc=of_plain, input_precision="ieee")
            of_more = tl.dot(transposed, more, acc=of_more, input_precision="ieee")
            of_less = tl.dot(transposed, less, acc=of_less, input_precision="ieee")
            of_own_weight = tl.dot(tl.trans(plain), own, acc=of_own_weight, input_precision="ieee")
        else:
            mixed_ptrs = grad_mixed_ptr + rows[:, None] * (3 * DIM) + columns[None, :]
            tl.store(mixed_ptrs, plain, mask=mask)
            tl.store(mixed_ptrs + DIM, more, mask=mask)
            tl.store(mixed_ptrs + 2 * DIM, less, mask=mask)

        own_weight = tl.load(own_weight_ptr + columns[:, None] * DIM + columns[None, :])
        of_own = grad + tl.dot(plain, own_weight, input_precision="ieee")
        tl.store(grad_vectors_ptr + offsets, of_own, mask=mask)

        # The blocks of the weights: output × input.
        block = columns[:, None] * (4 * DIM) + columns[None, :]
        at_columns = at_rows + columns[None, :]
        width = batch * DIM
        query_offsets = queries[:, None] * DIM + columns[None, :]
        gradient_ptrs = gradients_ptr + entities[:, None] * (6 * width) + query_offsets
        of_highest = _mix_transposed(plain, more, less, weight_ptr + DIM + block, DIM)
        highest = tl.load(at_columns + DIM, mask=mask, other=0.0)
        tl.store(gradient_ptrs + 2 * width, highest, mask=mask)
        tl.store(gradient_ptrs + 3 * width, of_highest, mask=mask)
        of_lowest = _mix_transposed(plain, more, less, weight_ptr + 2 * DIM + block, DIM)
        lowest = tl.load(at_columns + 2 * DIM, mask=mask, other=0.0)
        tl.store(gradient_ptrs + 4 * width, lowest, mask=mask)
        tl.store(gradient_ptrs + 5 * width, of_lowest, mask=mask)
        of_deviation = _mix_transposed(plain, more, less, weight_ptr + 3 * DIM + block, DIM)
        degree = tl.load(degrees_ptr + entities, mask=is_row, other=1.0)[:, None]
        deviation = tl.load(at_columns + 3 * DIM, mask=mask, other=1.0).to(tl.float32)
        slope_of_deviation = of_deviation / deviation / degree
        of_squares = tl.where(deviation > min_deviation, slope_of_deviation, 0.0)
        tl.store(gradient_ptrs + width, of_squares, mask=mask)
        of_mean = _mix_transposed(plain, more, less, weight_ptr + block, DIM)
        mean_of_row = tl.load(at_columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(gradient_ptrs, of_mean / degree - mean_of_row * of_squares, mask=mask)

    own_sums_ptr = sums_ptr + tl.program_id(0) * ((4 * DIM + 3) * 4 * DIM)
    if SUMS:
        at_outputs = own_sums_ptr + columns[None, :] * (4 * DIM) + inputs[:, None]
        tl.store(at_outputs, of_plain)
        tl.store(at_outputs + 4 * DIM * DIM, of_more)
        tl.store(at_outputs + 8 * DIM * DIM, of_less)
        at_own = own_sums_ptr + (3 * DIM + columns[:, None]) * (4 * DIM) + columns[None, :]
        tl.store(at_own, of_own_weight)
    at_rest = own_sums_ptr + 4 * DIM * (4 * DIM) + columns
    tl.store(at_rest, of_bias)
    tl.store(at_rest + 4 * DIM, of_gain)
    tl.store(at_rest + 8 * DIM, of_shift)


class MixingGradients(NamedTuple):
    """The gradients of what was mixed.

    `messages` are what `path_messages.message_gradients` reads. `vectors` are those of the own
    vectors of entities, to which gradients of messages are to be added.
    """

    messages: Tensor
    vectors: Tensor
    mixing: Mixing


def mix_backward(
    vectors: Tensor,
    statistics: Tensor,
    mixing: Mixing,
    grad: Tensor,
    *,
    edges: Edges,
    after: Reached,
) -> MixingGradients:
    """The gradients of everything that `mix` read; of vectors for rows that are reached alone."""
    dtype = vectors.dtype
    device = vectors.device
    num_entities, batch, dim = vectors.shape
    num_rows = num_entities * batch
    is_summed = dim in SUMMED_DIMS
    num_programs = _num_programs(vectors, BACKWARD_PROGRAMS)
    messages = torch.empty(num_entities, NUM_GRADIENTS, batch, dim, dtype=dtype, device=device)
    grad_vectors = torch.empty(vectors.shape, dtype=torch.float32, device=device)
    num_weights = NUM_SCALERS * dim
    shape = (num_programs, num_weights + dim + 3, NUM_STATISTICS * dim)
    sums = torch.zeros(shape, device=device)
    num_stored = 0 if is_summed else num_rows
    grad_mixed = torch.zeros(num_stored, NUM_SCALERS * dim, dtype=dtype, device=device)
    _mix_backward[(num_programs,)](
        vectors,
        statistics,
        *mixing,
        edges.scalers,
        edges.degrees,
        after.rows,
        after.num_rows,
        grad.contiguous(),
        messages,
        grad_mixed,
        grad_vectors,
        sums,
        batch,
        MIN_VARIANCE**0.5 * (1 + 1e-2),
        NORM_EPSILON,
        DIM=dim,
        ROWS=ROW_BLOCK,
        SUMS=is_summed,
        num_warps=BACKWARD_WARPS,
        num_stages=1,
    )
    of_weights = sums.sum(0)
    bias, gain, shift = of_weights[num_weights + dim :, :dim].unbind(0)
    if is_summed:
        of_statistics = of_weights[:num_weights]
        own = of_weights[num_weights : num_weights + dim, :dim]
    else:
        of_statistics = (grad_mixed.T @ statistics.view(num_rows, -1)).float()
        own = (grad_mixed[:, :dim].T @ vectors.view(num_rows, dim)).float()
    of_mixing = Mixing(of_statistics, own, bias, gain, shift)
    return MixingGradients(messages, grad_vectors, of_mixing)

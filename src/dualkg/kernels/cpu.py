"""numba kernels of a training step, run by as many threads as PyTorch uses.

They have plain forms in PyTorch, which run without numba. `cpu_diagonal.py`, `cpu_noise.py`,
`cpu_pairwise.py`, `cpu_paths.py` and `cpu_ranks.py` have the kernels of other topics.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.scores import Targets

# numba is an extra: without it the plain forms run, and the undecorated functions are never called.
# Importing it also fails if it does not support this version of NumPy.
try:
    import numba

    HAS_NUMBA = True
except ImportError:
    HAS_NUMBA = False

# -- compiling and running kernels ---------------------------------------------


def compiled(*flags: str) -> Callable[[Any], Any]:
    """Compile a function with LLVM's fast-math `flags`, never with `nnan`: a NaN must propagate."""

    def decorate(function: Any) -> Any:
        if not HAS_NUMBA:
            return function
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(flags)}
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # There is no writable folder for the compiled code.
            return numba.njit(**options)(function)

    return decorate


def in_parallel(function: Callable[..., object], num_rows: int, *arguments: object) -> None:
    """Call `function(start, stop, *arguments)` for ranges that cover all rows.

    There is a range for each thread of PyTorch. The calling thread takes the first one, so that one
    thread needs no pool. Ranges may be empty.
    """
    num_ranges = max(1, min(torch.get_num_threads(), num_rows))
    bounds = [num_rows * number // num_ranges for number in range(num_ranges + 1)]
    first_range, *other_ranges = pairwise(bounds)

    futures = [_pool().submit(function, *rows, *arguments) for rows in other_ranges]
    function(*first_range, *arguments)
    for future in futures:
        future.result()


@cache
def _pool() -> ThreadPoolExecutor:
    # A thread inherits the treatment of denormal numbers from its creator; all threads must compute
    # alike.
    return ThreadPoolExecutor(
        os.cpu_count(), "dualkg", initializer=torch.set_flush_denormal, initargs=(False,)
    )


if hasattr(os, "register_at_fork"):
    # A forked process has the pool without its threads, and would wait forever.
    os.register_at_fork(after_in_child=_pool.cache_clear)

# -- bfloat16 ------------------------------------------------------------------

# numba has no bfloat16, so kernels compute with the bits: the upper half of those of a float32.
ROUND_BIAS = np.uint32(0x7FFF)
BF16_NAN = np.uint32(0x7FC0)
ONE_BIT = np.uint32(1)
SIXTEEN = np.uint32(16)


@compiled()
def widened(bits):
    """Convert the bits of a bfloat16 to float32."""
    return np.uint32(np.uint32(bits) << SIXTEEN).view(np.float32)


@compiled()
def narrowed(number):
    """Round a float32 to the bits of the nearest bfloat16, the even one of two."""
    bits = np.float32(number).view(np.uint32)
    nearest = (bits + ROUND_BIAS + ((bits >> SIXTEEN) & ONE_BIT)) >> SIXTEEN
    # Rounding could carry the mantissa of a NaN into its sign.
    return np.uint16(nearest if number == number else BF16_NAN)


def bits_of(tensor: Tensor) -> Any:
    """The NumPy array of a tensor; for bfloat16, the array of its bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


# -- softmax ------------------------------------------------------------------

SOFTMAX_BLOCK = 256  # rows per block of the plain form, which copies bfloat16 to float32
SUM_CHUNK = 1024  # numbers summed in float32 before the sum continues in float64

# A number below e⁻⁶⁴ of the largest counts as 0. This also avoids denormal numbers, which are slow.
LOWEST = np.float32(-64)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)

# A float32 of this size has no fraction, and its last bits are those of an integer.
LARGE = np.float32(1.5 * 2**23)

# exp on |x| ≤ ln 2 / 2 is 1 + x + x²(C2 + C3 x + …). The coefficients are fitted to the least
# relative error, 3e-9.
C2 = np.float32(0.49999994)
C3 = np.float32(0.1666652)
C4 = np.float32(0.0416684)
C5 = np.float32(0.00836885)
C6 = np.float32(0.00138143)

ZERO = np.float32(0)
ONE = np.float32(1)
MANTISSA_BITS = np.int32(23)
BITS_OF_ONE = np.int32(0x3F800000)
ALL_BUT_SIGN = np.int32(0x7FFFFFFF)
ALL_BUT_SIGN_BF16 = np.int16(0x7FFF)


def softmax_gradient_(scores: Tensor, targets: Targets, num_columns: int) -> Tensor:
    """Overwrite scores by the gradient of Σ weight · −log softmax(scores)[target].

    Scores are `(queries, padded columns)`. Only the first `num_columns` are scores; the rest become
    0. Returns the loss of each query, `(queries,)`.
    """
    if not HAS_NUMBA or scores.dtype not in (torch.float32, torch.bfloat16):
        return _softmax_gradient_in_torch(scores, targets, num_columns)

    losses = torch.empty(len(scores))
    if not len(scores):
        return losses

    num_rows, width = scores.shape
    stride = scores.stride(0)
    # The array is flat, since numba does not know that the rows of a wider array are contiguous.
    flat = scores.as_strided(((num_rows - 1) * stride + width,), (1,))
    in_parallel(
        _bf16_rows if scores.dtype == torch.bfloat16 else _float32_rows,
        num_rows,
        bits_of(flat),
        targets.entities.contiguous().numpy(),
        targets.weights.float().contiguous().numpy(),
        targets.starts.contiguous().numpy(),
        losses.numpy(),
        num_columns,
        width,
        stride,
    )
    return losses


def _softmax_gradient_in_torch(scores: Tensor, targets: Targets, num_columns: int) -> Tensor:
    """`softmax_gradient_` in PyTorch."""
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    losses = torch.empty(len(scores), dtype=dtype)
    for first in range(0, len(scores), SOFTMAX_BLOCK):
        block = scores[first : first + SOFTMAX_BLOCK]
        loss = losses[first : first + SOFTMAX_BLOCK]
        values = block[:, :num_columns].to(dtype)

        block_targets = targets.part(first, first + len(block))
        queries = block_targets.queries
        weights = block_targets.weights.to(dtype)
        positions = (queries, block_targets.entities)

        largest = values.amax(dim=-1)
        query_weights = loss.new_zeros(len(block)).index_add_(0, queries, weights)
        loss.zero_().index_add_(0, queries, weights * (largest[queries] - values[positions]))
        torch.softmax(values, dim=-1, out=values)
        # The largest probability is exp(largest − logsumexp).
        loss -= query_weights * values.amax(dim=-1).log()

        values *= query_weights[:, None]
        values.index_put_(positions, -weights, accumulate=True)
        block[:, :num_columns] = values
        block[:, num_columns:] = 0
    return losses


@compiled()
def _float32_rows(
    first, last, scores, targets, weights, starts, losses, num_columns, width, stride
):
    """Rows of float32, each overwritten at every pass."""
    for row in range(first, last):
        start = row * stride
        values = scores[start : start + num_columns]
        top = np.int32(_largest(values.view(np.int32), ALL_BUT_SIGN)).view(np.float32)

        # The targets of a row, their weight, and their weighted distance below the top.
        begin = starts[row]
        end = starts[row + 1]
        weight = 0.0
        distance = 0.0
        for i in range(begin, end):
            weight += weights[i]
            distance += weights[i] * (top - values[targets[i]])

        total = 0.0
        for column in range(0, num_columns, SUM_CHUNK):
            total += _exponentials(values[column : column + SUM_CHUNK], top)
        losses[row] = distance + weight * np.log(total)

        factor = np.float32(weight / total)
        for column in range(num_columns):
            values[column] *= factor
        for i in range(begin, end):
            values[targets[i]] -= weights[i]
        scores[start + num_columns : start + width] = ZERO


@compiled()
def _bf16_rows(first, last, scores, targets, weights, starts, losses, num_columns, width, stride):
    """Rows of bfloat16, given as their bits; a row is converted to float32 between passes."""
    values = np.empty(num_columns, np.float32)
    for row in range(first, last):
        start = row * stride
        bits = scores[start : start + num_columns]
        top = widened(np.uint16(_largest(bits.view(np.int16), ALL_BUT_SIGN_BF16)))

        # The targets of a row, their weight, and their weighted distance below the top.
        begin = starts[row]
        end = starts[row + 1]
        weight = 0.0
        distance = 0.0
        for i in range(begin, end):
            weight += weights[i]
            distance += weights[i] * (top - widened(bits[targets[i]]))

        total = 0.0
        for column in range(0, num_columns, SUM_CHUNK):
            total += _bf16_exponentials(
                bits[column : column + SUM_CHUNK], values[column : column + SUM_CHUNK], top
            )
        losses[row] = distance + weight * np.log(total)

        if weight > 0.0:
            # Targets are subtracted before scaling, so that a repeated target counts twice.
            for i in range(begin, end):
                values[targets[i]] -= np.float32(weights[i] / weight * total)
        factor = np.float32(weight / total)
        for column in range(num_columns):
            bits[column] = narrowed(values[column] * factor)
        scores[start + num_columns : start + width] = 0


@compiled()
def _largest(bits, all_but_sign):
    """The bits of the largest of some floats, or of a NaN.

    LLVM vectorizes a maximum of floats only without NaN, but one of integers always. The bits of
    floats are ordered like integers, if those below the sign of negative ones are inverted.
    """
    largest = bits.dtype.type(~all_but_sign)
    for i in range(len(bits)):
        value = bits[i]
        ordered = bits.dtype.type(value ^ all_but_sign if value < 0 else value)
        largest = max(largest, ordered)
    return bits.dtype.type(largest ^ all_but_sign if largest < 0 else largest)


@compiled("contract")
def exp(x):
    """exp(x) for x < 88 to a relative error of 1e-7.

    A call of the C library would prevent vectorization.
    """
    # x = exponent · ln 2 + rest, and exp(x) = 2^exponent · exp(rest).
    shifted = x * LOG2_E + LARGE
    rest = x - (shifted - LARGE) * LN_2

    square = rest * rest
    near_one = (ONE + rest) + square * (
        (C2 + rest * C3) + square * ((C4 + rest * C5) + square * C6)
    )
    power = (np.float32(shifted).view(np.int32) << MANTISSA_BITS) + BITS_OF_ONE
    return ZERO if x < LOWEST else near_one * np.int32(power).view(np.float32)


@compiled("contract", "reassoc")
def _exponentials(values, top):
    """Overwrite numbers by exp(number − top) and sum them."""
    total = ZERO
    for i in range(len(values)):
        exponential = exp(values[i] - top)
        values[i] = exponential
        total += exponential
    return total


@compiled("contract", "reassoc")
def _bf16_exponentials(bits, values, top):
    """Write exp(number − top) of the bits of bfloat16 numbers to `values`, and sum them."""
    total = ZERO
    for i in range(len(bits)):
        exponential = exp(widened(bits[i]) - top)
        values[i] = exponential
        total += exponential
    return total


def logsumexp_rows(scores: Tensor) -> Tensor:
    """The logsumexp of each row of scores `(batch, n)`, `(batch,)`.

    Scores are float32, and each row is contiguous.
    """
    sums = torch.empty(len(scores))
    in_parallel(_logsumexp, len(scores), scores.numpy(), sums.numpy())
    return sums


@compiled()
def _logsumexp(first, last, scores, sums):
    for row in range(first, last):
        values = scores[row]
        top = np.int32(_largest(values.view(np.int32), ALL_BUT_SIGN)).view(np.float32)
        total = 0.0
        for column in range(0, len(values), SUM_CHUNK):
            total += _sum_of_exponentials(values[column : column + SUM_CHUNK], top)
        sums[row] = top + np.log(total)


@compiled("contract", "reassoc")
def _sum_of_exponentials(values, top):
    """Σ exp(number − top)."""
    total = ZERO
    for i in range(len(values)):
        total += exp(values[i] - top)
    return total


# -- sampled softmax -----------------------------------------------------------

LEFT_OUT = np.float32(-np.inf)  # the score of a negative that does not count


def sampled_softmax_gradient_(
    scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
) -> tuple[Tensor, Tensor]:
    """Overwrite the scores of negatives by the gradient of the sampled softmax.

    Scores are `(queries, negatives)`. The targets of a query are its positive triples, whose scores
    are `positives`. Each is compared with all negatives but the one that is its own answer, in the
    column `hits`, or −1. Returns the loss of each query, and the gradient of `positives`.
    """
    losses = torch.empty(len(scores), dtype=scores.dtype)
    gradients = torch.empty_like(positives)
    if not HAS_NUMBA or scores.dtype != torch.float32:
        _sampled_softmax_in_torch(scores, positives, hits, targets, losses, gradients)
        return losses, gradients

    in_parallel(
        _sampled_rows,
        len(scores),
        scores.numpy(),
        positives.contiguous().numpy(),
        hits.contiguous().numpy(),
        targets.weights.float().contiguous().numpy(),
        targets.starts.contiguous().numpy(),
        losses.numpy(),
        gradients.numpy(),
    )
    return losses, gradients


def _sampled_softmax_in_torch(
    scores: Tensor,
    positives: Tensor,
    hits: Tensor,
    targets: Targets,
    losses: Tensor,
    gradients: Tensor,
) -> None:
    """`sampled_softmax_gradient_` in PyTorch, with a row of scores for each target."""
    queries = targets.queries
    weights = targets.weights.to(scores.dtype)
    of_targets = torch.cat([positives[:, None], scores[queries]], dim=1)
    is_hit = hits >= 0
    of_targets[is_hit, 1 + hits[is_hit]] = -torch.inf

    normalizers = of_targets.logsumexp(1)
    losses.zero_().index_add_(0, queries, weights * (normalizers - positives))
    probabilities = (of_targets - normalizers[:, None]).exp_().mul_(weights[:, None])
    gradients.copy_(probabilities[:, 0] - weights)
    scores.zero_().index_add_(0, queries, probabilities[:, 1:])


@compiled()
def _top_of_query(values, positives):
    """The largest score of a query's negatives and targets."""
    top = np.int32(_largest(values.view(np.int32), ALL_BUT_SIGN)).view(np.float32)
    for i in range(len(positives)):
        # A NaN becomes the top, since no comparison with it is true.
        if not positives[i] <= top:
            top = positives[i]
    return top


@compiled()
def _sampled_rows(first, last, scores, positives, hits, weights, starts, losses, gradients):
    """The queries from `first` to `last` − 1."""
    for row in range(first, last):
        values = scores[row]
        own = slice(starts[row], starts[row + 1])
        top = _top_of_query(values, positives[own])
        has_hits = False
        for target in range(own.start, own.stop):
            has_hits = has_hits or hits[target] >= 0
        arrays = (values, positives[own], weights[own], gradients[own])
        losses[row] = (
            _sampled_row_with_hits(*arrays, hits[own], top)
            if has_hits
            else _sampled_row(*arrays, top)
        )


@compiled()
def _sampled_row(values, positives, weights, gradients, top):
    """A query none of whose answers is a negative; returns its loss."""
    total = 0.0
    for column in range(0, len(values), SUM_CHUNK):
        total += _exponentials(values[column : column + SUM_CHUNK], top)

    loss = 0.0
    slope = 0.0
    for i in range(len(positives)):
        distance = np.float64(positives[i]) - top
        exponential = np.exp(distance)
        normalizer = total + exponential
        share = weights[i] / normalizer
        slope += share
        loss += weights[i] * (np.log(normalizer) - distance)
        gradients[i] = share * exponential - weights[i]

    factor = np.float32(slope)
    for column in range(len(values)):
        values[column] *= factor
    return loss


@compiled()
def _take_hits(values, hits, top):
    """Leave out the negatives that are answers, and return the exponential of each."""
    exponentials = np.zeros(len(hits))
    for i in range(len(hits)):
        # An answer that occurs twice is a hit once.
        if hits[i] >= 0 and values[hits[i]] != LEFT_OUT:
            exponentials[i] = np.exp(np.float64(values[hits[i]]) - top)
            values[hits[i]] = LEFT_OUT
    return exponentials


@compiled()
def _sampled_row_with_hits(values, positives, weights, gradients, hits, top):
    """A query of whose answers some are negatives; returns its loss.

    These hits are summed apart, because each target leaves out its own: a difference of sums would
    lose all digits where that one is the largest.
    """
    num = len(positives)
    hit_exponentials = _take_hits(values, hits, top)
    total = 0.0
    for column in range(0, len(values), SUM_CHUNK):
        total += _exponentials(values[column : column + SUM_CHUNK], top)

    loss = 0.0
    shares = np.zeros(num)
    for i in range(num):
        distance = np.float64(positives[i]) - top
        exponential = np.exp(distance)
        normalizer = total + exponential
        for other in range(num):
            if hits[other] != hits[i]:
                normalizer += hit_exponentials[other]
        shares[i] = weights[i] / normalizer
        loss += weights[i] * (np.log(normalizer) - distance)
        gradients[i] = shares[i] * exponential - weights[i]

    factor = np.float32(shares.sum())
    for column in range(len(values)):
        values[column] *= factor
    for hit in range(num):
        if hit_exponentials[hit] > 0.0:
            slope = 0.0
            for i in range(num):
                if hits[i] != hits[hit]:
                    slope += shares[i]
            values[hits[hit]] = hit_exponentials[hit] * slope
    return loss


def sampled_exponentials_(
    scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
) -> tuple[Tensor, Tensor]:
    """Overwrite the scores of negatives by exp(score − top), where others have more negatives.

    Arguments are those of `sampled_softmax_gradient_`. The top of a query is the largest of these
    scores and of the positive ones. Returns the tops, `(queries,)`, and for each target the sum of
    the exponentials of all negatives but the one that is its own answer.
    """
    tops = torch.empty(len(scores), dtype=scores.dtype)
    totals = torch.empty_like(positives)
    if not HAS_NUMBA or scores.dtype != torch.float32:
        _sampled_exponentials_in_torch(scores, positives, hits, targets, tops, totals)
        return tops, totals

    in_parallel(
        _sampled_exponentials,
        len(scores),
        scores.numpy(),
        positives.contiguous().numpy(),
        hits.contiguous().numpy(),
        targets.starts.contiguous().numpy(),
        tops.numpy(),
        totals.numpy(),
    )
    return tops, totals


def _sampled_exponentials_in_torch(
    scores: Tensor,
    positives: Tensor,
    hits: Tensor,
    targets: Targets,
    tops: Tensor,
    totals: Tensor,
) -> None:
    """`sampled_exponentials_` in PyTorch, with a row of exponentials for each target."""
    queries = targets.queries
    tops.fill_(-torch.inf)
    if scores.shape[1]:
        torch.amax(scores, 1, out=tops)
    tops.scatter_reduce_(0, queries, positives, "amax")
    scores.sub_(tops[:, None]).exp_()
    of_targets = scores[queries]
    is_hit = hits >= 0
    of_targets[is_hit, hits[is_hit]] = 0
    torch.sum(of_targets, 1, out=totals)


@compiled()
def _sampled_exponentials(first, last, scores, positives, hits, starts, tops, totals):
    """The queries from `first` to `last` − 1."""
    for row in range(first, last):
        values = scores[row]
        own_hits = hits[starts[row] : starts[row + 1]]
        top = _top_of_query(values, positives[starts[row] : starts[row + 1]])
        hit_exponentials = _take_hits(values, own_hits, top)
        total = 0.0
        for column in range(0, len(values), SUM_CHUNK):
            total += _exponentials(values[column : column + SUM_CHUNK], top)
        for i in range(len(own_hits)):
            without_own = total
            for other in range(len(own_hits)):
                if own_hits[other] != own_hits[i]:
                    without_own += hit_exponentials[other]
            totals[starts[row] + i] = without_own
        for i in range(len(own_hits)):
            if hit_exponentials[i] > 0.0:
                values[own_hits[i]] = hit_exponentials[i]
        tops[row] = top


# -- Adagrad -----------------------------------------------------------------

# Numbers per block of the plain form: enough for all threads, and few compared to the table.
ADAGRAD_BLOCK = 1 << 20


def adagrad_(
    table: Tensor,
    sums: Tensor,
    gradient: Tensor,
    copy: Tensor | None,
    learning_rate: float,
    *,
    eps: float,
) -> None:
    """Step a table by its gradient, and write its bfloat16 `copy`.

    `sums` are those of squared gradients. All tensors have the shape of the table.
    """
    if not HAS_NUMBA or table.dtype != torch.float32:
        _adagrad_in_torch(table, sums, gradient, copy, learning_rate, eps=eps)
        return

    in_parallel(
        _adagrad,
        table.numel(),
        bits_of(table.view(-1)),
        bits_of(sums.view(-1)),
        bits_of(gradient.view(-1)),
        None if copy is None else bits_of(copy.view(-1)),
        np.float32(learning_rate),
        np.float32(eps),
    )


def _adagrad_in_torch(
    table: Tensor,
    sums: Tensor,
    gradient: Tensor,
    copy: Tensor | None,
    learning_rate: float,
    *,
    eps: float,
) -> None:
    """`adagrad_` in PyTorch."""
    for first in range(0, table.numel(), ADAGRAD_BLOCK):
        block = slice(first, first + ADAGRAD_BLOCK)
        values = table.view(-1)[block]
        square_sums = sums.view(-1)[block]
        gradients = gradient.view(-1)[block]

        square_sums.addcmul_(gradients, gradients)
        values.addcdiv_(gradients, square_sums.sqrt().add_(eps), value=-learning_rate)
        if copy is not None:
            copy.view(-1)[block].copy_(values)


@compiled("contract")
def _adagrad(first, last, table, sums, gradient, copy, rate, eps):
    """Step the numbers from `first` to `last` − 1."""
    values = table[first:last]
    square_sums = sums[first:last]
    gradients = gradient[first:last]
    if copy is not None:
        copies = copy[first:last]

    for i in range(len(values)):
        slope = gradients[i]
        square_sum = square_sums[i] + slope * slope
        value = values[i] - rate * slope / (np.sqrt(square_sum) + eps)
        square_sums[i] = square_sum
        values[i] = value
        if copy is not None:
            copies[i] = narrowed(value)


def adagrad_rows_(
    table: Tensor,
    sums: Tensor,
    rows: Tensor,
    gradient: Tensor,
    learning_rate: float,
    *,
    eps: float,
) -> None:
    """Step some distinct rows of a table by their gradient, `(num_rows, width)`.

    All tensors are contiguous float32; `sums` has the shape of the table.
    """
    in_parallel(
        _adagrad_rows,
        len(rows),
        table.numpy(),
        sums.numpy(),
        rows.contiguous().numpy(),
        gradient.numpy(),
        np.float32(learning_rate),
        np.float32(eps),
    )


@compiled("contract")
def _adagrad_rows(first, last, table, sums, rows, gradient, rate, eps):
    """Step the rows from `first` to `last` − 1 of `rows`."""
    for position in range(first, last):
        values = table[rows[position]]
        square_sums = sums[rows[position]]
        gradients = gradient[position]
        for i in range(len(values)):
            slope = gradients[i]
            square_sum = square_sums[i] + slope * slope
            square_sums[i] = square_sum
            values[i] -= rate * slope / (np.sqrt(square_sum) + eps)

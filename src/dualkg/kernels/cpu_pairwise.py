"""numba forms of the sums over differences of all pairs in `pairwise.py`."""

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu import compiled, in_parallel

# Sums may be reordered, so that loops are vectorized; NaN must still propagate.
ANY_ORDER = ("reassoc", "contract", "nsz")


def pairwise_sums(queries: Tensor, candidates: Tensor, *, parts: int, sine: bool) -> Tensor:
    """Sums for each of `(batch, width)` and each of `(n, width)`: `(batch, n)`."""
    sums = torch.empty(len(queries), len(candidates), dtype=queries.dtype)
    arrays = [tensor.detach().numpy() for tensor in (queries, candidates, sums)]
    if parts == 1:
        in_parallel(_real_sums, len(queries), *arrays)
    else:
        in_parallel(_complex_sums, len(queries), *arrays, sine or None)
    return sums


def pairwise_gradient(
    queries: Tensor, candidates: Tensor, upstream: Tensor, *, parts: int, sine: bool
) -> Tensor:
    """The gradient of Σ upstream · sums with respect to `queries`, or to their angles.

    It is 0 where coordinates are equal.
    """
    width = queries.shape[1]
    gradient = queries.new_zeros(len(queries), width // 2 if sine else width)
    tensors = (queries, candidates, upstream.contiguous(), gradient)
    arrays = [tensor.detach().numpy() for tensor in tensors]
    if parts == 1:
        in_parallel(_real_gradient, len(queries), *arrays)
    else:
        in_parallel(_complex_gradient, len(queries), *arrays, sine or None)
    return gradient


@compiled(*ANY_ORDER)
def _real_sums(first, last, queries, candidates, sums):
    for row in range(first, last):
        x = queries[row]
        for column in range(len(candidates)):
            y = candidates[column]
            total = x.dtype.type(0)
            for i in range(len(x)):
                total += abs(x[i] - y[i])
            sums[row, column] = total


@compiled(*ANY_ORDER)
def _complex_sums(first, last, queries, candidates, sums, sine):
    """Sums of the moduli of complex differences, or of sines of differences of angles.

    Rows of angles hold their sines and then their cosines. `sine` is None or True: numba decides
    the type of None when it compiles, so that the loop has no branch.
    """
    half = queries.shape[1] // 2
    for row in range(first, last):
        x = queries[row, :half]
        y = queries[row, half:]
        for column in range(len(candidates)):
            candidate_x = candidates[column, :half]
            candidate_y = candidates[column, half:]
            total = x.dtype.type(0)
            for i in range(half):
                if sine is None:
                    real = x[i] - candidate_x[i]
                    imaginary = y[i] - candidate_y[i]
                    total += np.sqrt(real * real + imaginary * imaginary)
                else:
                    total += abs(x[i] * candidate_y[i] - y[i] * candidate_x[i])
            sums[row, column] = total


@compiled(*ANY_ORDER)
def _real_gradient(first, last, queries, candidates, upstream, gradient):
    for row in range(first, last):
        x = queries[row]
        gradient_row = gradient[row]
        for column in range(len(candidates)):
            y = candidates[column]
            slope = upstream[row, column]
            for i in range(len(x)):
                gradient_row[i] += slope * np.sign(x[i] - y[i])


@compiled(*ANY_ORDER)
def _complex_gradient(first, last, queries, candidates, upstream, gradient, sine):
    """The gradient of `_complex_sums`; that of |sin(a − b)| is ±cos(a − b).

    cos(a − b) is cos a cos b + sin a sin b.
    """
    half = queries.shape[1] // 2
    zero = queries.dtype.type(0)
    unit = queries.dtype.type(1)
    for row in range(first, last):
        x = queries[row, :half]
        y = queries[row, half:]
        grad_x = gradient[row, :half]
        grad_y = gradient[row, half:]
        for column in range(len(candidates)):
            candidate_x = candidates[column, :half]
            candidate_y = candidates[column, half:]
            slope = upstream[row, column]
            for i in range(half):
                if sine is None:
                    real = x[i] - candidate_x[i]
                    imaginary = y[i] - candidate_y[i]
                    modulus = np.sqrt(real * real + imaginary * imaginary)
                    scaled = slope / (modulus if modulus != zero else unit)
                    grad_x[i] += scaled * real
                    grad_y[i] += scaled * imaginary
                else:
                    left = x[i] * candidate_y[i]
                    right = y[i] * candidate_x[i]
                    signed = slope if left > right else (-slope if left < right else zero)
                    grad_x[i] += signed * (y[i] * candidate_y[i] + x[i] * candidate_x[i])

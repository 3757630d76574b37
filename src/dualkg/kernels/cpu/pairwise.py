"""Sums over coordinates of |d| or |sin d| of the differences d of all pairs of rows, while both are in the cache.

With `sine` a row holds sines of angles, then their cosines, and sin(a − b) is sin a cos b − cos a sin b."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import compiled, in_parallel

# Sums may be reordered, so that loops are vectorized; NaN must still propagate.
ANY_ORDER = ("reassoc", "contract", "nsz")


def sums(one: Tensor, other: Tensor, *, parts: int, sine: bool) -> Tensor:
    """For each of `(batch, width)` and each of `(n, width)`: `(batch, n)`."""
    found = torch.empty(len(one), len(other), dtype=one.dtype)
    in_parallel(_sums[parts, sine], len(one), one.detach().numpy(), other.detach().numpy(), found.numpy())
    return found


def gradient(one: Tensor, other: Tensor, upstream: Tensor, *, parts: int, sine: bool) -> Tensor:
    """The gradient of Σ upstream · sums with respect to `one`, or to its angles; 0 where coordinates are equal."""
    found = one.new_zeros(len(one), one.shape[1] // 2 if sine else one.shape[1])
    arrays = (array.detach().numpy() for array in (one, other, upstream.contiguous(), found))
    in_parallel(_gradients[parts, sine], len(one), *arrays)
    return found


@compiled(*ANY_ORDER)
def _sums_of_real(first, last, one, other, found):
    for row in range(first, last):
        x = one[row]
        for column in range(len(other)):
            y = other[column]
            total = x.dtype.type(0)
            for i in range(len(x)):
                total += abs(x[i] - y[i])
            found[row, column] = total


@compiled(*ANY_ORDER)
def _sums_of_complex(first, last, one, other, found):
    half = one.shape[1] // 2
    for row in range(first, last):
        real, imaginary = one[row, :half], one[row, half:]
        for column in range(len(other)):
            other_real, other_imaginary = other[column, :half], other[column, half:]
            total = real.dtype.type(0)
            for i in range(half):
                real_part, imaginary_part = real[i] - other_real[i], imaginary[i] - other_imaginary[i]
                total += np.sqrt(real_part * real_part + imaginary_part * imaginary_part)
            found[row, column] = total


@compiled(*ANY_ORDER)
def _sums_of_sines(first, last, one, other, found):
    half = one.shape[1] // 2
    for row in range(first, last):
        sine, cosine = one[row, :half], one[row, half:]
        for column in range(len(other)):
            other_sine, other_cosine = other[column, :half], other[column, half:]
            total = sine.dtype.type(0)
            for i in range(half):
                total += abs(sine[i] * other_cosine[i] - cosine[i] * other_sine[i])
            found[row, column] = total


@compiled(*ANY_ORDER)
def _gradient_of_real(first, last, one, other, upstream, found):
    for row in range(first, last):
        x, gradient_row = one[row], found[row]
        for column in range(len(other)):
            y, slope = other[column], upstream[row, column]
            for i in range(len(x)):
                gradient_row[i] += slope * np.sign(x[i] - y[i])


@compiled(*ANY_ORDER)
def _gradient_of_complex(first, last, one, other, upstream, found):
    half = one.shape[1] // 2
    zero, unit = one.dtype.type(0), one.dtype.type(1)
    for row in range(first, last):
        real, imaginary = one[row, :half], one[row, half:]
        to_real, to_imaginary = found[row, :half], found[row, half:]
        for column in range(len(other)):
            other_real, other_imaginary = other[column, :half], other[column, half:]
            slope = upstream[row, column]
            for i in range(half):
                real_part, imaginary_part = real[i] - other_real[i], imaginary[i] - other_imaginary[i]
                modulus = np.sqrt(real_part * real_part + imaginary_part * imaginary_part)
                scaled = slope / (modulus if modulus != zero else unit)
                to_real[i] += scaled * real_part
                to_imaginary[i] += scaled * imaginary_part


@compiled(*ANY_ORDER)
def _gradient_of_sines(first, last, one, other, upstream, found):
    """The gradient of |sin(a − b)| is ±cos(a − b), which is cos a cos b + sin a sin b."""
    half = one.shape[1] // 2
    zero = one.dtype.type(0)
    for row in range(first, last):
        sine, cosine, gradient_row = one[row, :half], one[row, half:], found[row]
        for column in range(len(other)):
            other_sine, other_cosine = other[column, :half], other[column, half:]
            slope = upstream[row, column]
            for i in range(half):
                left, right = sine[i] * other_cosine[i], cosine[i] * other_sine[i]
                signed = slope if left > right else (-slope if left < right else zero)
                gradient_row[i] += signed * (cosine[i] * other_cosine[i] + sine[i] * other_sine[i])


_sums = {(1, False): _sums_of_real, (2, False): _sums_of_complex, (2, True): _sums_of_sines}
_gradients = {(1, False): _gradient_of_real, (2, False): _gradient_of_complex, (2, True): _gradient_of_sines}

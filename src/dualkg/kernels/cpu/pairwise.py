"""Sums over coordinates of |d| or |sin d|, d the difference, for all pairs of rows, while both are in the cache.

With `sine` a row holds sines of angles, then their cosines, and sin(a − b) is sin a cos b − cos a sin b."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compile import compiled, in_parallel

# Sums may be taken in any order, so that several are in one register; NaN must still come out where one went in.
ANY_ORDER = ("reassoc", "contract", "nsz")


def sums(one: Tensor, other: Tensor, *, parts: int, sine: bool) -> Tensor:
    """For each of `(batch, width)` and each of `(n, width)`: `(batch, n)`."""
    found = torch.empty(len(one), len(other), dtype=one.dtype)
    in_parallel(_sums[parts, sine], len(one), one.detach().numpy(), other.detach().numpy(), found.numpy())
    return found


def gradient(one: Tensor, other: Tensor, upstream: Tensor, *, parts: int, sine: bool) -> Tensor:
    """Of Σ upstream · sums, `(batch, n)`, with respect to `one` or to its angles; 0 where coordinates are the same."""
    found = one.new_zeros(len(one), one.shape[1] // 2 if sine else one.shape[1])
    arrays = (array.detach().numpy() for array in (one, other, upstream.contiguous(), found))
    in_parallel(_gradients[parts, sine], len(one), *arrays)
    return found


@compiled(*ANY_ORDER)
def _sums_of_real(first, last, one, other, found):
    for row in range(first, last):
        mine = one[row]
        for column in range(len(other)):
            theirs = other[column]
            total = mine.dtype.type(0)
            for place in range(len(mine)):
                total += abs(mine[place] - theirs[place])
            found[row, column] = total


@compiled(*ANY_ORDER)
def _sums_of_complex(first, last, one, other, found):
    half = one.shape[1] // 2
    for row in range(first, last):
        real, imaginary = one[row, :half], one[row, half:]
        for column in range(len(other)):
            other_real, other_imaginary = other[column, :half], other[column, half:]
            total = real.dtype.type(0)
            for place in range(half):
                across, up = real[place] - other_real[place], imaginary[place] - other_imaginary[place]
                total += np.sqrt(across * across + up * up)
            found[row, column] = total


@compiled(*ANY_ORDER)
def _sums_of_sines(first, last, one, other, found):
    half = one.shape[1] // 2
    for row in range(first, last):
        sine, cosine = one[row, :half], one[row, half:]
        for column in range(len(other)):
            other_sine, other_cosine = other[column, :half], other[column, half:]
            total = sine.dtype.type(0)
            for place in range(half):
                total += abs(sine[place] * other_cosine[place] - cosine[place] * other_sine[place])
            found[row, column] = total


@compiled(*ANY_ORDER)
def _gradient_of_real(first, last, one, other, upstream, found):
    for row in range(first, last):
        mine, mine_found = one[row], found[row]
        for column in range(len(other)):
            theirs, slope = other[column], upstream[row, column]
            for place in range(len(mine)):
                mine_found[place] += slope * np.sign(mine[place] - theirs[place])


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
            for place in range(half):
                across, up = real[place] - other_real[place], imaginary[place] - other_imaginary[place]
                modulus = np.sqrt(across * across + up * up)
                scaled = slope / (modulus if modulus != zero else unit)
                to_real[place] += scaled * across
                to_imaginary[place] += scaled * up


@compiled(*ANY_ORDER)
def _gradient_of_sines(first, last, one, other, upstream, found):
    """Of |sin(a − b)| it is ±cos(a − b), which is cos a cos b + sin a sin b."""
    half = one.shape[1] // 2
    zero = one.dtype.type(0)
    for row in range(first, last):
        sine, cosine, mine_found = one[row, :half], one[row, half:], found[row]
        for column in range(len(other)):
            other_sine, other_cosine = other[column, :half], other[column, half:]
            slope = upstream[row, column]
            for place in range(half):
                ahead, behind = sine[place] * other_cosine[place], cosine[place] * other_sine[place]
                signed = slope if ahead > behind else (-slope if ahead < behind else zero)
                mine_found[place] += signed * (cosine[place] * other_cosine[place] + sine[place] * other_sine[place])


_sums = {(1, False): _sums_of_real, (2, False): _sums_of_complex, (2, True): _sums_of_sines}
_gradients = {(1, False): _gradient_of_real, (2, False): _gradient_of_complex, (2, True): _gradient_of_sines}

"""Compilation by numba, parallel loops, and bfloat16 as bits, since NumPy has no such type."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

# numba is an extra: without it the plain forms run, and the undecorated functions are never called.
try:
    import numba

    HAS_NUMBA = True
except ImportError:  # also if numba does not support this version of NumPy
    HAS_NUMBA = False
ROUND_BIAS, BF16_NAN = np.uint32(0x7FFF), np.uint32(0x7FC0)
ONE, SIXTEEN = np.uint32(1), np.uint32(16)


def compiled(*flags: str) -> Callable[[Any], Any]:
    """Compile a function with LLVM's fast-math `flags`, never with `nnan`: a NaN must propagate."""

    def decorate(function: Any) -> Any:
        if not HAS_NUMBA:
            return function
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(flags)}
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder can be written to cache the compiled code
            return numba.njit(**options)(function)

    return decorate


@compiled()
def widened(bits):
    """The float32 that the bits of a bfloat16 stand for."""
    return np.uint32(np.uint32(bits) << SIXTEEN).view(np.float32)


@compiled()
def narrowed(number):
    """The bits of the bfloat16 nearest to a float32, the even one of two."""
    bits = np.float32(number).view(np.uint32)
    nearest = (bits + ROUND_BIAS + ((bits >> SIXTEEN) & ONE)) >> SIXTEEN
    # Rounding could carry the mantissa of a NaN into its sign.
    return np.uint16(nearest if number == number else BF16_NAN)


def bits_of(tensor: Tensor) -> Any:
    """The NumPy array of a tensor; for bfloat16, the array of its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def in_parallel(function: Callable[..., object], num_rows: int, *arguments: object) -> None:
    """Call `function(start, stop, *arguments)` for ranges that cover all rows, one per PyTorch thread.

    The calling thread takes the first range, which may be empty, so that one thread needs no pool.
    """
    num_parts = max(1, min(torch.get_num_threads(), num_rows))
    own, *ranges = pairwise(num_rows * part // num_parts for part in range(num_parts + 1))
    others = [_pool().submit(function, *part, *arguments) for part in ranges]
    function(*own, *arguments)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    # A thread inherits the treatment of denormal numbers from its creator; all threads shall compute alike.
    return ThreadPoolExecutor(os.cpu_count(), "dualkg", initializer=torch.set_flush_denormal, initargs=(False,))


if hasattr(os, "register_at_fork"):
    # A forked process has the pool without its threads, and would wait forever.
    os.register_at_fork(after_in_child=_pool.cache_clear)

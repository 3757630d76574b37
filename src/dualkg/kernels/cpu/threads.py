"""Threads for kernels that let go of Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch


def in_parallel(function: Callable[..., object], num_rows: int, *arguments: object) -> None:
    """Call `function(start, stop, *arguments)` for ranges that cover all rows, as many as PyTorch has threads.

    The first range is the caller's own, so that one thread needs no pool; it may be empty.
    """
    num_parts = max(1, min(torch.get_num_threads(), num_rows))
    own, *ranges = pairwise(num_rows * part // num_parts for part in range(num_parts + 1))
    others = [_pool().submit(function, *part, *arguments) for part in ranges]
    function(*own, *arguments)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    # A thread inherits how its maker treats tiny numbers, for good; these are to calculate alike whenever made.
    return ThreadPoolExecutor(os.cpu_count(), "dualkg", initializer=torch.set_flush_denormal, initargs=(False,))


if hasattr(os, "register_at_fork"):
    # A forked process has the pool but not its threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_pool.cache_clear)

"""The logarithm of the sum of exp(score) over a row while it is in the cache. Loads numba; without it, never called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compiling import HAS_NUMBA, compiled
from dualkg.kernels.cpu.softmax import CHUNK, ZERO, _largest, exp
from dualkg.kernels.cpu.threads import in_parallel

__all__ = ["HAS_NUMBA", "log_sums_by_row"]

DIGITS = np.int32(0x7FFFFFFF)


def log_sums_by_row(scores: Tensor) -> Tensor:
    """Scores `(batch, n)` in float32, each row in one piece → `(batch,)`."""
    sums = torch.empty(len(scores))
    in_parallel(_rows, len(scores), scores.numpy(), sums.numpy())
    return sums


@compiled()
def _rows(first: int, last: int, scores: Any, sums: Any) -> None:
    for row in range(first, last):
        values = scores[row]
        top = np.int32(_largest(values.view(np.int32), DIGITS)).view(np.float32)
        total = 0.0
        for begin in range(0, len(values), CHUNK):
            total += _sum_of_exponentials(values[begin : begin + CHUNK], top)
        sums[row] = top + np.log(total)


@compiled("contract", "reassoc")
def _sum_of_exponentials(values: Any, top: Any) -> Any:
    total = ZERO
    for place in range(len(values)):
        total += exp(values[place] - top)
    return total

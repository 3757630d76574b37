"""What t-SNE draws each place by, its pairs read once. Loads numba; without it, never called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu.compiling import HAS_NUMBA, compiled
from dualkg.kernels.cpu.threads import in_parallel

__all__ = ["HAS_NUMBA", "attraction_by_row"]

ONE, ZERO = np.float32(1), np.float32(0)


def attraction_by_row(starts: Tensor, columns: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Σ_j p_ij (y_i − y_j) / (1 + ‖y_i − y_j‖²) for places `(2, n)` in float32, p by compressed rows."""
    found = torch.empty_like(places, memory_format=torch.contiguous_format)
    arrays = (array.numpy() for array in (starts, columns, weights, places, found))
    in_parallel(_rows, places.shape[1], *arrays)
    return found


@compiled("contract", "reassoc")
def _rows(first: int, last: int, starts: Any, columns: Any, weights: Any, places: Any, found: Any) -> None:
    x, y = places[0], places[1]
    for row in range(first, last):
        to_x, to_y = ZERO, ZERO
        for pair in range(starts[row], starts[row + 1]):
            column = columns[pair]
            across, up = x[row] - x[column], y[row] - y[column]
            pull = weights[pair] / (ONE + across * across + up * up)
            to_x += pull * across
            to_y += pull * up
        found[0, row], found[1, row] = to_x, to_y

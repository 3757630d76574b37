"""Arrays that are kept from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """An array that grows to the largest size asked for: fresh pages cost as much as the work done on them."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Some array `(rows, columns)`, whatever is in it."""
        if self._buffer is None or self._buffer.numel() < rows * columns:
            self._buffer = torch.zeros(rows * columns, dtype=like.dtype, device=like.device)
        return self._buffer[: rows * columns].view(rows, columns)

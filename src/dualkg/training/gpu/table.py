"""A table with what a step on a GPU keeps beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dualkg.training.workspace import Workspace

if TYPE_CHECKING:
    from dualkg.kernels.gpu.coordinates import RowSums

ALIGNED = 8  # bfloat16 numbers in the 16 bytes that matrix units want rows to start at
TILE = 128  # rows of a table that a product takes at once


@dataclass
class Table:
    """A table, the rows of its gradient that a batch touches, and the stamps that say which those are.

    Where all its rows are `scored`, also a bfloat16 copy for the products and the gradient that comes of them. Both
    are padded, so that products are aligned.
    """

    parameter: nn.Parameter
    sums: Tensor
    scored: bool

    def __post_init__(self) -> None:
        rows, width = self.parameter.shape
        device = self.parameter.device
        self.rows = torch.zeros(rows, width, device=device)
        self.stamps = torch.zeros(rows, dtype=torch.int32, device=device)
        self.copy: Tensor | None = None
        self.product: Tensor | None = None
        if self.scored:
            padded = (-(-rows // TILE) * TILE, -(-width // ALIGNED) * ALIGNED)
            self.copy, self.product = torch.zeros(2, *padded, dtype=torch.bfloat16, device=device)
            self.copy[:rows, :width] = self.parameter.detach()
        self.scores, self.images = Workspace(), Workspace()

    @property
    def row_sums(self) -> RowSums:
        from dualkg.kernels.gpu.coordinates import RowSums

        return RowSums(self.parameter.detach(), self.rows, self.stamps)

    def update(self, now: Tensor, rate: Tensor, eps: float) -> None:
        """Step the table."""
        from dualkg.kernels.gpu.update import adagrad_

        adagrad_(
            self.parameter.detach(),
            self.sums,
            product=self.product,
            rows=self.rows,
            stamps=self.stamps,
            now=now,
            copy=self.copy,
            rate=rate,
            eps=eps,
        )

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
PIECES = 4  # of a table, updated one by one


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
        self.pieces = [slice(0, rows)]
        self.ready: list[torch.cuda.Event] = []
        if self.scored:
            step = -(-rows // (PIECES * TILE)) * TILE
            self.pieces = [slice(start, start + step) for start in range(0, rows, step)]
            padded = (-(-rows // TILE) * TILE, -(-width // ALIGNED) * ALIGNED)
            self.copy, self.product = torch.zeros(2, *padded, dtype=torch.bfloat16, device=device)
            self.copy[:rows, :width] = self.parameter.detach()
        self.scores, self.images = Workspace(), Workspace()

    @property
    def row_sums(self) -> RowSums:
        from dualkg.kernels.gpu.coordinates import RowSums

        return RowSums(self.parameter.detach(), self.rows, self.stamps)

    def update(self, now: Tensor, rate: Tensor, eps: float) -> None:
        """Step the table, each piece as soon as its product is there."""
        from dualkg.kernels.gpu.update import adagrad_

        for number, piece in enumerate(self.pieces):
            if self.ready:
                torch.cuda.current_stream().wait_event(self.ready[number])
            adagrad_(
                self.parameter.detach()[piece],
                self.sums[piece],
                product=None if self.product is None else self.product[piece],
                rows=self.rows[piece],
                stamps=self.stamps[piece],
                now=now,
                copy=None if self.copy is None else self.copy[piece],
                rate=rate,
                eps=eps,
            )

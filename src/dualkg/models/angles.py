"""What models share that store angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.models.distance import DistanceModel


class AngleModel(DistanceModel):
    """Stores angles in the numbers of the other coordinates, so that one learning rate moves both alike.

    `half_turn` is the stored number of the angle π: as far as numbers go that are drawn uniformly with the deviation
    `init_scale`. It is saved with the tables.
    """

    half_turn: Tensor

    def fresh_angles(self, rows: int, width: int) -> Tensor:
        """Stored angles anywhere on the circle."""
        if isinstance(self.init_scale, str) or not self.init_scale > 0:
            raise RequestError(
                f"{type(self).__name__} stores angles in units of init_scale, so that should be a number above 0; it "
                f"is {self.init_scale!r}."
            )
        limit = math.sqrt(3.0) * self.init_scale
        self.register_buffer("half_turn", torch.tensor(limit))
        return torch.empty(rows, width).uniform_(-limit, limit, generator=self._random)

    def angles(self, stored: Tensor) -> Tensor:
        return stored * (math.pi / self.half_turn)

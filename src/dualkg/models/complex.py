"""ComplEx."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.models.base import rows
from dualkg.models.diagonal import DiagonalModel


class ComplEx(DiagonalModel):
    """A relation scales and rotates each complex coordinate (Trouillon et al., 2016).

    A row holds all real parts, then all imaginary parts. `dim` counts complex coordinates.
    """

    numbers_per_coordinate = 2

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return _times(head, rows(self.relations, relations))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return _times(tail, _conjugate(rows(self.relations, relations)))

    def relation_between(self, head: Tensor, tail: Tensor) -> Tensor:
        return _times(tail, _conjugate(head))

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        real, imaginary = vectors.chunk(2, dim=-1)
        return real.square() + imaginary.square()


def _times(left: Tensor, right: Tensor) -> Tensor:
    a, b = left.chunk(2, dim=-1)
    c, d = right.chunk(2, dim=-1)
    return torch.cat([a * c - b * d, a * d + b * c], dim=-1)


def _conjugate(vectors: Tensor) -> Tensor:
    real, imaginary = vectors.chunk(2, dim=-1)
    return torch.cat([real, -imaginary], dim=-1)

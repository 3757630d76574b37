"""RotatE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualkg.models.angles import AngleModel
from dualkg.models.complex import ComplEx
from dualkg.models.distance import NormModel, primal_of
from dualkg.models.factors import rows


class RotatE(NormModel, AngleModel):
    """A relation turns each complex coordinate by an angle: −‖h∘r − t‖ with |r| = 1 (Sun et al., 2019).

    It is the dual of a ComplEx whose relations have modulus 1, with the norm 1 in place of the square. A row of a
    relation holds angles; entities are as ComplEx has them.
    """

    two_maps = True
    isometric = True
    numbers_per_coordinate = 2

    def relation_width(self, dim: int) -> int:
        return dim

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        return nn.Parameter(self.fresh_angles(rows, width))

    def relation_norms(self, relations: Tensor) -> Tensor:
        return self.entities.new_full((len(relations),), float(self.dim))

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        real, imaginary = vectors.chunk(2, dim=-1)
        return real.square() + imaginary.square()

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return self._turned(head, rows(self.relations, relations))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self._turned(tail, -rows(self.relations, relations))

    @torch.no_grad()
    def primal(self) -> ComplEx:
        """The ComplEx whose dual this is, but for the norm: the same entities, relations of modulus 1."""
        angles = self.angles(self.relations)
        relations = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return primal_of(self, ComplEx, relations)

    def _turned(self, vectors: Tensor, stored: Tensor) -> Tensor:
        angles = self.angles(stored)
        return torch.cat(ComplEx.times(vectors.chunk(2, dim=-1), (angles.cos(), angles.sin())), dim=-1)

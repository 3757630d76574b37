"""ModE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualkg.models.distance import NormModel, primal_of
from dualkg.models.distmult import DistMult
from dualkg.models.factors import rows


class ModE(NormModel):
    """A relation stretches each coordinate, or turns it about: −‖h∘r − t‖ (Zhang et al., 2020).

    It is the dual of DistMult, with a norm in place of the square.
    """

    two_maps = True
    diagonal = True

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Near 1 or −1."""
        return nn.Parameter(self.fresh_signs(rows, width) + self.init_noise(rows, width))

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return head * rows(self.relations, relations)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """The transpose, which is the same: where DURA asks for the tail, not where the distance would have it."""
        return self.map_head(tail, relations)

    @torch.no_grad()
    def primal(self) -> DistMult:
        """The DistMult whose dual this is, but for the norm: the same entities and relations."""
        return primal_of(self, DistMult, self.relations)

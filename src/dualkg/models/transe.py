"""TransE."""

from __future__ import annotations

from torch import Tensor

from dualkg.models.distance import NormModel
from dualkg.models.factors import rows


class TransE(NormModel):
    """A relation is a step from the head to the tail: −‖h + r − t‖ (Bordes et al., 2013).

    A step has no transpose; where it takes the tail is back, to t − r, and DURA is made of that.
    """

    two_maps = True
    isometric = True

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return head + rows(self.relations, relations)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return tail - rows(self.relations, relations)

"""CP."""

from __future__ import annotations

from torch import Tensor

from dualkg.data.graph import GraphShape
from dualkg.models.base import InitScale
from dualkg.models.diagonal import RealDiagonalModel


class CP(RealDiagonalModel):
    """A relation scales each coordinate; an entity is one vector as head, another as tail (Hitchcock, 1927)."""

    def __init__(
        self,
        shape: GraphShape,
        *,
        dim: int,
        reciprocal: bool = True,
        init_scale: InitScale = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(shape, dim=dim, reciprocal=reciprocal, init_scale=init_scale, seed=seed)
        self.tails = self.table(self.shape.num_entities, self.width)

    @property
    def tail_table(self) -> Tensor:
        return self.tails

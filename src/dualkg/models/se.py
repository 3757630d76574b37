"""SE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualkg.models.distance import NormModel
from dualkg.models.factors import rows
from dualkg.models.groups import Groups, mapped_by


class SE(NormModel):
    """Two matrices of a relation take head and tail to one place: −‖h R₁ − t R₂‖ (structured embeddings, Bordes, 2011).

    A row of a relation holds both matrices.
    """

    meets_between = True

    def relation_width(self, dim: int) -> int:
        return 2 * dim * dim

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Near the identity, so that a relation begins as one that takes an entity to itself."""
        same = torch.eye(self.dim).flatten().repeat(2)
        return nn.Parameter(same + self.init_noise(rows, width))

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return self._mapped(head, relations, 0)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self._mapped(tail, relations, 1)

    def _mapped(self, vectors: Tensor, relations: Tensor, which: int) -> Tensor:
        groups = Groups(relations)
        matrices = rows(self.relations, groups.distinct).view(-1, 2, self.dim, self.dim)[:, which]
        return mapped_by(matrices, groups, vectors)

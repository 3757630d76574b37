"""SE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from dualkg.models.base import Side
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

    def maps_of(self, relations: Tensor, side: Side) -> list[Callable[[Tensor], Tensor]]:
        """By matrices that are fetched once: each look-up has a gradient as large as the table of relations."""
        matrices = self._matrices(relations, 0 if side == "head" else 1)
        return [partial(_times, matrix) for matrix in matrices.unbind()]

    def _mapped(self, vectors: Tensor, relations: Tensor, which: int) -> Tensor:
        groups = Groups(relations)
        return mapped_by(self._matrices(groups.distinct, which), groups, vectors)

    def _matrices(self, relations: Tensor, which: int) -> Tensor:
        return rows(self.relations, relations).view(-1, 2, self.dim, self.dim)[:, which]


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    return vectors @ matrix

"""SE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from dualkg.models.base import Side
from dualkg.models.distance import DIFFERENCES, NormModel, made_again
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
        return self._mapped(head, relations, "head")

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self._mapped(tail, relations, "tail")

    def maps_of(self, relations: Tensor, side: Side) -> list[Callable[[Tensor], Tensor]]:
        """By matrices that are fetched once: each look-up has a gradient as large as the table of relations."""
        matrices = self._matrices(relations, side)
        return [partial(_times, matrix) for matrix in matrices.unbind()]

    def _to_images(self, points: Tensor, relations: Tensor, table: Tensor, side: Side) -> Tensor:
        """Squared, by products for all relations at once: ‖p − t R‖² = ‖p‖² − 2 (p Rᵀ)·t + ‖t R‖²."""
        if self.norm != "squared":
            return super()._to_images(points, relations, table, side)
        groups = Groups(relations)
        matrices = self._matrices(groups.distinct, side)
        back = mapped_by(matrices.transpose(1, 2), groups, points)
        lengths = rows(squared_lengths(table, matrices), torch.searchsorted(groups.distinct, relations.contiguous()))
        return points.square().sum(-1, keepdim=True) + lengths - 2 * back @ table.T

    def _mapped(self, vectors: Tensor, relations: Tensor, side: Side) -> Tensor:
        groups = Groups(relations)
        return mapped_by(self._matrices(groups.distinct, side), groups, vectors)

    def _matrices(self, relations: Tensor, side: Side) -> Tensor:
        return rows(self.relations, relations).view(-1, 2, self.dim, self.dim)[:, 0 if side == "head" else 1]


def squared_lengths(table: Tensor, matrices: Tensor) -> Tensor:
    """‖t R‖² of each row of `(n, width)` under each of `(num_matrices, width, width)`: `(num_matrices, n)`."""
    size = max(1, DIFFERENCES[table.device.type] // max(table.numel(), 1))
    parts = [made_again(_squared_lengths, table, part) for part in matrices.split(size)]  # type: ignore[no-untyped-call]
    return torch.cat(parts)


def _squared_lengths(table: Tensor, matrices: Tensor) -> Tensor:
    return torch.matmul(table, matrices).square().sum(-1)


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    return vectors @ matrix

"""RESCAL."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.models.base import InitScale
from dualkg.models.bilinear import BilinearModel
from dualkg.models.grouping import RelationGroups, lookup, multiply_groups


class RESCAL(BilinearModel):
    """A relation is a full matrix (Nickel et al., 2011).

    A batch is grouped by relation, so that a matrix is gathered once for all its triples.
    """

    default_init_scale: InitScale = "xavier"
    relation_kernel = "matrices"

    def relation_width(self, dim: int) -> int:
        return dim * dim

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return self._grouped(head, relations, transposed=False)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self._grouped(tail, relations, transposed=True)

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """By the Gram matrix G = HᵀH, without mapping any entity: Σ‖h R‖² is the trace of Rᵀ G R."""
        table = self.tail_table if transposed else self.head_table
        matrices = self.relations.view(-1, self.dim, self.dim)
        matrices = matrices.mT if transposed else matrices
        gram = table.T @ table
        return gram.trace(), (gram @ matrices * matrices).sum()

    @torch.no_grad()
    def rotate_(self, axes: Tensor) -> None:
        """Change to the basis of an orthogonal Q: h becomes h Q and R becomes Qᵀ R Q; scores stay the same."""
        self.entities.copy_(self.entities @ axes)
        for matrix in self.relations.view(-1, self.dim, self.dim):
            matrix.copy_(axes.T @ matrix @ axes)

    def _grouped(self, vectors: Tensor, relations: Tensor, *, transposed: bool) -> Tensor:
        groups = RelationGroups(relations)
        matrices = lookup(self.relations, groups.distinct).view(-1, self.dim, self.dim)
        return multiply_groups(matrices.mT if transposed else matrices, groups, vectors)

"""TuckER."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError
from dualkg.models.base import Factors, InitScale
from dualkg.models.bilinear import BilinearModel
from dualkg.models.grouping import RelationGroups, lookup, multiply_groups


class TuckER(BilinearModel):
    """A relation is a mixture of matrices that all relations share: R = Σₖ rₖ Wₖ (Balažević et al., 2019).

    The Wₖ are the `core`, `(relation_dim, dim, dim)`, at first uniform on ±1 whatever `init_scale` says of the tables.
    With `batch_norm` heads, and then their images, are normalised over the batch. Such a map has no transpose.
    """

    default_init_scale: InitScale = "xavier"

    def __init__(
        self,
        shape: GraphShape,
        *,
        dim: int,
        relation_dim: int | None = None,
        batch_norm: bool = False,
        **config: Any,
    ) -> None:
        if relation_dim is not None and relation_dim < 1:
            raise RequestError(f"relation_dim must be at least 1; it is {relation_dim}.")
        self.relation_dim = dim if relation_dim is None else relation_dim  # before tables are made of that width
        super().__init__(shape, dim=dim, **config)
        if batch_norm and not self.reciprocal:
            raise RequestError(f"{NO_TRANSPOSE}, so heads can only be asked for through reciprocal relations.")
        self.batch_norm = batch_norm
        self.has_adjoint = not batch_norm
        drawn = torch.empty(self.relation_dim, dim, dim).uniform_(-1, 1, generator=self._random)
        self.core = nn.Parameter(drawn)
        self.before, self.after = (BatchNorm(dim) if batch_norm else nn.Identity() for _ in range(2))

    @property
    def config(self) -> dict[str, object]:
        return {**super().config, "relation_dim": self.relation_dim, "batch_norm": self.batch_norm}

    def relation_width(self, dim: int) -> int:
        return self.relation_dim

    def num_shared_parameters(self, dim: int) -> int:
        return self.relation_dim * dim * dim

    def matrices(self, relations: Tensor) -> Tensor:
        """Of relations that are each named once, for they are formed here: `(num_relations named, dim, dim)`."""
        mixed = lookup(self.relations, relations) @ self.core.flatten(1)
        return mixed.view(-1, self.dim, self.dim)

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        image: Tensor = self.after(self._mapped(self.before(head), relations))
        return image

    def _mapped(self, head: Tensor, relations: Tensor) -> Tensor:
        if head.is_cuda and self.training and self.batch_norm:  # without, there are kernels
            return through_core(head, lookup(self.relations, relations), self.core)
        groups = RelationGroups(relations)
        return multiply_groups(self.matrices(groups.distinct), groups, head)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        self._check_linear()
        groups = RelationGroups(relations)
        return multiply_groups(self.matrices(groups.distinct).mT, groups, tail)

    def relation_scores(self, f: Factors) -> Tensor:
        if self.batch_norm and self.training:
            raise RequestError(
                "TuckER with batch_norm learns the statistics of the images of a batch, and relation prediction would "
                "mix in those by every other relation. Set loss.relation_weight to 0, or batch_norm to false."
            )
        return super().relation_scores(f)

    def relation_norms(self, relations: Tensor) -> Tensor:
        distinct, position = torch.unique(relations, return_inverse=True)
        norms = self.matrices(distinct).square().sum((1, 2))
        return lookup(norms.unsqueeze(-1), position).squeeze(-1)

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Through the Gram matrices of entities and relations, G and C: Σ‖h R‖² = Σₖₗ Cₖₗ tr(Wₖᵀ G Wₗ)."""
        self._check_linear()
        table, core = (self.tail_table, self.core.mT) if transposed else (self.head_table, self.core)
        gram = table.T @ table
        mixed = torch.tensordot(self.relations.T @ self.relations, core, dims=1)
        return gram.trace(), (gram @ core * mixed).sum()

    def _check_linear(self) -> None:
        if self.batch_norm:
            raise RequestError(f"{NO_TRANSPOSE}, which was asked for. Set batch_norm to false.")


def through_core(head: Tensor, relation: Tensor, core: Tensor) -> Tensor:
    """h Σₖ rₖ Wₖ as Σₖ rₖ (h Wₖ), `(batch, dim)`: without a matrix, and without asking which relations there are.

    So a GPU need not wait for the answer. It takes batch × relation_dim × dim numbers, which a batch of training has.
    """
    images = (head @ core.transpose(0, 1).flatten(1)).view(len(head), len(core), -1)
    return (relation.unsqueeze(1) @ images).squeeze(1)


NO_TRANSPOSE = "A relation of TuckER with batch_norm is not a linear map and has no transpose"


class BatchNorm(nn.Module):
    """Gives every coordinate of a batch mean 0 and variance 1, then a scale and a shift that are learned.

    In evaluation by the running mean and variance of the training before. So is a batch of one, which has no variance.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, vectors: Tensor) -> Tensor:
        of_batch = self.training and len(vectors) > 1
        return F.batch_norm(vectors, self.mean, self.variance, self.scale, self.shift, training=of_batch)

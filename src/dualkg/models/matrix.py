"""Relations as full matrices: RESCAL and TuckER, with products grouped by relation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualkg.data.triples import GraphShape
from dualkg.errors import InvalidValue, RequestError
from dualkg.models.base import MODELS, Factors, InitScale
from dualkg.models.bilinear import BilinearModel
from dualkg.tables.base import lookup

if TYPE_CHECKING:
    from dualkg.data.graph import Graph

__all__ = ["RESCAL", "TuckER"]

# A GPU multiplies all groups at once while padding makes the batch at most this many times larger.
MAX_PADDING = 32


class RelationGroups:
    """The rows of a batch grouped by relation id `(batch,)`.

    `distinct` has the relation of each group.
    """

    def __init__(self, relations: Tensor) -> None:
        self.order = torch.argsort(relations, stable=True)
        self.distinct, counts = torch.unique_consecutive(relations[self.order], return_counts=True)
        self.sizes: list[int] = counts.tolist()

    def split(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors `(batch, width)` → those of each group."""
        return torch.split(lookup(vectors, self.order), self.sizes)

    def padded_positions(self, size: int) -> Tensor:
        """The position of each row if every group is padded to `size` rows, `(batch,)`."""
        device = self.order.device
        counts = torch.tensor(self.sizes, device=device)
        starts = counts.cumsum(0) - counts
        groups = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        offsets = torch.arange(len(self.order), device=device) - starts[groups]
        positions = groups * size + offsets
        return torch.empty_like(self.order).index_copy_(0, self.order, positions)

    def join(self, parts: Sequence[Tensor], *, empty: Tensor) -> Tensor:
        """The results of all groups in the order of the batch; `empty` for an empty batch."""
        if not parts:
            return empty
        return lookup(torch.cat(list(parts)), torch.argsort(self.order))


def multiply_groups(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """Each vector `(batch, width)` times the matrix of its group, `(num_groups, width, width)`."""
    if vectors.is_cuda and groups.sizes:
        padded_rows = len(groups.sizes) * max(groups.sizes)
        if padded_rows <= MAX_PADDING * len(vectors):
            return multiply_padded(matrices, groups, vectors)
    pairs = zip(groups.split(vectors), matrices.unbind(), strict=True)
    products = [group @ matrix for group, matrix in pairs]
    return groups.join(products, empty=vectors)


def multiply_padded(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """One batched product of groups that are padded to the largest.

    On a GPU, many launches cost more than the zeros.
    """
    num_groups = len(groups.sizes)
    largest = max(groups.sizes)
    positions = groups.padded_positions(largest)
    zeros = vectors.new_zeros(num_groups * largest, vectors.shape[1])
    padded = zeros.index_copy(0, positions, vectors)
    products = padded.view(num_groups, largest, -1) @ matrices
    return lookup(products.flatten(0, 1), positions)


class MatrixModel(BilinearModel):
    """A relation is a matrix.

    A batch is grouped by relation, so that a matrix is made once for all its triples.
    """

    default_init_scale: InitScale = "xavier"

    @abstractmethod
    def matrices(self, relations: Tensor) -> Tensor:
        """Matrices of distinct relations `(n,)`: `(n, dim, dim)`."""

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        groups = RelationGroups(relations)
        return multiply_groups(self.matrices(groups.distinct), groups, head)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        groups = RelationGroups(relations)
        return multiply_groups(self.matrices(groups.distinct).mT, groups, tail)


@MODELS.register
class RESCAL(MatrixModel):
    """A relation is a full matrix (Nickel et al., 2011).

    Examples:
        >>> model = kg.RESCAL(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    relation_kernel = "matrices"

    def relation_width(self, dim: int) -> int:
        """A matrix, dim × dim."""
        return dim * dim

    def matrices(self, relations: Tensor) -> Tensor:
        return lookup(self.relations, relations).view(-1, self.dim, self.dim)

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """By the Gram matrix G = HᵀH, without mapping any entity: Σ‖h R‖² = tr(Rᵀ G R)."""
        table = self.tail_table if transposed else self.head_table
        matrices = self.relations.view(-1, self.dim, self.dim)
        if transposed:
            matrices = matrices.mT
        gram = table.T @ table
        return gram.trace(), (gram @ matrices * matrices).sum()

    @torch.no_grad()
    def rotate_(self, axes: Tensor) -> None:
        """Change to the basis of an orthogonal Q, which changes no score.

        h becomes h Q, and R becomes Qᵀ R Q.
        """
        self.entities.copy_(self.entities @ axes)
        for matrix in self.relations.view(-1, self.dim, self.dim):
            matrix.copy_(axes.T @ matrix @ axes)


@MODELS.register
class TuckER(MatrixModel):
    """A relation is a linear combination of shared matrices: R = Σₖ rₖ Wₖ (Balažević et al., 2019).

    The Wₖ are the `core`, `(relation_dim, dim, dim)`, drawn uniformly from ±1; `init_scale` is for
    the tables alone. With `batch_norm`, heads and then mapped heads are normalized over the batch,
    and the map has no transpose.

    Args:
        shape: A graph, or its shape.
        dim: Dimension of an entity.
        relation_dim: Dimension of a relation; `dim` if left out.
        batch_norm: Whether heads and mapped heads are normalized over the batch.
        config: Other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.TuckER(graph.shape, dim=8, relation_dim=4)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    relation_kernel = "mixtures"
    options = ("relation_dim", "batch_norm")

    def __init__(
        self,
        shape: Graph | GraphShape,
        *,
        dim: int,
        relation_dim: int | None = None,
        batch_norm: bool = False,
        **config: Any,
    ) -> None:
        if relation_dim is not None and relation_dim < 1:
            raise InvalidValue("relation_dim", expected="at least 1", found=relation_dim)
        # The width of the relation table, which the constructor of the base class makes.
        self.relation_dim = dim if relation_dim is None else relation_dim
        super().__init__(shape, dim=dim, **config)
        if batch_norm and not self.reciprocal:
            raise no_transpose("predicting heads", advice="Use reciprocal relations.")
        self.batch_norm = batch_norm
        self.has_adjoint = not batch_norm
        # With batch_norm, heads are mapped through the core, without grouping by relation.
        self.capturable = batch_norm
        core = torch.empty(self.relation_dim, dim, dim)
        self.core = nn.Parameter(core.uniform_(-1, 1, generator=self._random))
        self.before = BatchNorm(dim) if batch_norm else nn.Identity()
        self.after = BatchNorm(dim) if batch_norm else nn.Identity()

    def relation_width(self, dim: int) -> int:
        """`relation_dim`, whatever the size of entities is."""
        return self.relation_dim

    def num_shared_parameters(self, dim: int) -> int:
        return self.relation_dim * dim * dim

    def matrices(self, relations: Tensor) -> Tensor:
        mixtures = lookup(self.relations, relations) @ self.core.flatten(1)
        return mixtures.view(-1, self.dim, self.dim)

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        head = self.before(head)
        # Without batch_norm, Triton kernels map the heads of a training step.
        if head.is_cuda and self.training and self.batch_norm:
            mapped = through_core(head, lookup(self.relations, relations), self.core)
        else:
            mapped = super().map_head(head, relations)
        normalized: Tensor = self.after(mapped)
        return normalized

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        self._check_linear()
        return super().map_tail(tail, relations)

    def relation_scores(self, f: Factors) -> Tensor:
        if self.batch_norm and self.training:
            raise RequestError(
                "TuckER with batch_norm learns the statistics of the mapped heads of a batch, and "
                "relation prediction would mix in the heads mapped by every other relation. Set "
                "`loss.relation_weight` to 0, or batch_norm to false."
            )
        return super().relation_scores(f)

    def relation_norms(self, relations: Tensor) -> Tensor:
        distinct, position = torch.unique(relations, return_inverse=True)
        norms = self.matrices(distinct).square().sum((1, 2))
        return lookup(norms.unsqueeze(-1), position).squeeze(-1)

    def total_squared_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """By the Gram matrices of entities and relations, G and C.

        Σ‖h R‖² = Σₖₗ Cₖₗ tr(Wₖᵀ G Wₗ).
        """
        self._check_linear()
        table = self.tail_table if transposed else self.head_table
        core = self.core.mT if transposed else self.core
        gram = table.T @ table
        combined = torch.tensordot(self.relations.T @ self.relations, core, dims=1)
        return gram.trace(), (gram @ core * combined).sum()

    def _check_linear(self) -> None:
        if self.batch_norm:
            raise no_transpose("this", advice="Set batch_norm to false.")


def no_transpose(purpose: str, *, advice: str) -> RequestError:
    """The error of TuckER with batch_norm where a transpose is needed."""
    return RequestError(
        "TuckER with batch_norm has relations that are not linear maps and have no transpose, "
        f"which {purpose} needs. {advice}"
    )


def through_core(head: Tensor, relation: Tensor, core: Tensor) -> Tensor:
    """h Σₖ rₖ Wₖ as Σₖ rₖ (h Wₖ), `(batch, dim)`.

    A matrix per relation would need their number from the GPU.
    """
    products = (head @ core.transpose(0, 1).flatten(1)).view(len(head), len(core), -1)
    return (relation.unsqueeze(1) @ products).squeeze(1)


class BatchNorm(nn.Module):
    """Batch normalization with learned scale and shift.

    A batch of one is normalized as in evaluation.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, vectors: Tensor) -> Tensor:
        by_batch = self.training and len(vectors) > 1
        return F.batch_norm(
            vectors, self.mean, self.variance, self.scale, self.shift, training=by_batch
        )

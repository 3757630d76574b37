"""Table look-up, and products of vectors with the matrix of their relation, one relation at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_PADDING = 32  # a GPU multiplies all groups at once while padding makes the batch at most this many times larger


def lookup(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """Rows of a table by id; an embedding look-up sums its gradient in a fixed order, which indexing does not.

    With `sparse`, the gradient of a table that is a parameter has only the rows that were read.
    """
    return F.embedding(ids, table, sparse=sparse and table.is_leaf)


class RelationGroups:
    """The rows of a batch grouped by relation id `(batch,)`; `distinct` has the relation of each group."""

    def __init__(self, relations: Tensor) -> None:
        self.order = torch.argsort(relations, stable=True)
        self.distinct, counts = torch.unique_consecutive(relations[self.order], return_counts=True)
        self.sizes: list[int] = counts.tolist()

    def split(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors `(batch, width)` → those of each group."""
        return torch.split(lookup(vectors, self.order), self.sizes)

    def padded_positions(self, size: int) -> Tensor:
        """The position of each row of the batch if every group is padded to `size` rows, `(batch,)`."""
        counts = torch.tensor(self.sizes, device=self.order.device)
        numbers = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        offsets = torch.arange(len(self.order), device=counts.device) - (counts.cumsum(0) - counts)[numbers]
        return torch.empty_like(self.order).index_copy_(0, self.order, numbers * size + offsets)

    def join(self, parts: Sequence[Tensor], *, empty: Tensor) -> Tensor:
        """The results of all groups in the order of the batch; `empty` for an empty batch."""
        return lookup(torch.cat(list(parts)), torch.argsort(self.order)) if parts else empty


def multiply_groups(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """Each vector `(batch, width)` times the matrix of its group, `(num_groups, width, width)`."""
    if vectors.is_cuda and groups.sizes and len(groups.sizes) * max(groups.sizes) <= MAX_PADDING * len(vectors):
        return multiply_padded(matrices, groups, vectors)
    return multiply_one_by_one(matrices, groups, vectors)


def multiply_one_by_one(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    parts = [group @ matrix for group, matrix in zip(groups.split(vectors), matrices.unbind(), strict=True)]
    return groups.join(parts, empty=vectors)


def multiply_padded(matrices: Tensor, groups: RelationGroups, vectors: Tensor) -> Tensor:
    """One batched product of groups padded to the largest: on a GPU many launches cost more than the zeros."""
    num_groups, largest = len(groups.sizes), max(groups.sizes)
    positions = groups.padded_positions(largest)
    padded = vectors.new_zeros(num_groups * largest, vectors.shape[1]).index_copy(0, positions, vectors)
    return lookup((padded.view(num_groups, largest, -1) @ matrices).flatten(0, 1), positions)

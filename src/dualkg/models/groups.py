"""A batch taken relation by relation, so that what belongs to a relation is fetched or made once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualkg.models.factors import rows

MOST_PADDING = 32  # rows with their padding for each row, up to which a GPU multiplies all groups at once


class Groups:
    """The rows of a batch by their relation ids `(batch,)`; `distinct` are the relations in the order of the groups."""

    def __init__(self, relations: Tensor) -> None:
        self.order = torch.argsort(relations, stable=True)
        self.distinct, counts = torch.unique_consecutive(relations[self.order], return_counts=True)
        self.sizes: list[int] = counts.tolist()

    def of(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors `(batch, width)` → those of each relation."""
        return torch.split(rows(vectors, self.order), self.sizes)

    def slots(self, room: int) -> Tensor:
        """The place of each row of the batch where every group has so much room, `(batch,)`."""
        counts = torch.tensor(self.sizes, device=self.order.device)
        numbers = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        behind = torch.arange(len(self.order), device=counts.device) - (counts.cumsum(0) - counts)[numbers]
        return torch.empty_like(self.order).index_copy_(0, self.order, numbers * room + behind)

    def joined(self, parts: Sequence[Tensor], *, empty: Tensor) -> Tensor:
        """What was made of each group, in the order of the batch; `empty` where the batch has no row."""
        return rows(torch.cat(list(parts)), torch.argsort(self.order)) if parts else empty


def mapped_by(matrices: Tensor, groups: Groups, vectors: Tensor) -> Tensor:
    """Each vector times the matrix of its relation, `(num_groups, width, width)`, one for each group."""
    if vectors.is_cuda and groups.sizes and len(groups.sizes) * max(groups.sizes) <= MOST_PADDING * len(vectors):
        return padded_products(matrices, groups, vectors)
    return products(matrices, groups, vectors)


def products(matrices: Tensor, groups: Groups, vectors: Tensor) -> Tensor:
    """Group by group."""
    parts = [group @ matrix for group, matrix in zip(groups.of(vectors), matrices.unbind(), strict=True)]
    return groups.joined(parts, empty=vectors)


def padded_products(matrices: Tensor, groups: Groups, vectors: Tensor) -> Tensor:
    """All groups in one product, filled up with zeros to the largest: on a GPU many calls cost more than zeros do."""
    num_groups, largest = len(groups.sizes), max(groups.sizes)
    slots = groups.slots(largest)
    padded = vectors.new_zeros(num_groups * largest, vectors.shape[1]).index_copy(0, slots, vectors)
    return rows((padded.view(num_groups, largest, -1) @ matrices).flatten(0, 1), slots)

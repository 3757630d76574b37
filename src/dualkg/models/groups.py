"""A batch taken relation by relation, so that what belongs to a relation is fetched or made once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualkg.models.factors import rows


class Groups:
    """The rows of a batch by their relation ids `(batch,)`; `distinct` are the relations in the order of the groups."""

    def __init__(self, relations: Tensor) -> None:
        self.order = torch.argsort(relations, stable=True)
        self.distinct, counts = torch.unique_consecutive(relations[self.order], return_counts=True)
        self.sizes: list[int] = counts.tolist()

    def of(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors `(batch, width)` → those of each relation."""
        return torch.split(rows(vectors, self.order), self.sizes)

    def joined(self, parts: Sequence[Tensor], *, empty: Tensor) -> Tensor:
        """What was made of each group, in the order of the batch; `empty` where the batch has no row."""
        return rows(torch.cat(list(parts)), torch.argsort(self.order)) if parts else empty


def mapped_by(matrices: Tensor, groups: Groups, vectors: Tensor) -> Tensor:
    """Each vector times the matrix of its relation, `(num_groups, width, width)`, one for each group."""
    parts = [group @ matrix for group, matrix in zip(groups.of(vectors), matrices.unbind(), strict=True)]
    return groups.joined(parts, empty=vectors)

"""The same model in other axes, in which few entries of an entity's vector matter.

RESCAL scores h R tᵀ. Written in axes Q, an orthogonal matrix, h becomes h Q and R becomes Qᵀ R Q: every score and every
norm, so DURA too, stays what it was, and the entries do not. Training picks axes at random; here they are picked so
that setting the smallest entries to zero changes the vectors least.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from dualkg.analysis.thresholds import check_share
from dualkg.errors import RequestError
from dualkg.models import RESCAL
from dualkg.models.base import Model

ROUNDS = 100
ENOUGH = 1e-4  # a round that takes away less of the error than this share is the last


def turned(model: Model, *, share: float) -> RESCAL:
    """The model in axes in which a share of its entity entries can become zero at the least cost."""
    check_share(share)
    if not isinstance(model, RESCAL):
        raise RequestError(
            f"Only the axes of RESCAL can be turned without changing a score; those of {type(model).__name__} are tied "
            f"to its relations. Leave the turning out."
        )
    copy = deepcopy(model)
    copy.turn_(find_axes(model.entities.detach(), share))
    return copy


@torch.no_grad()
def find_axes(table: Tensor, share: float) -> Tensor:
    """Orthogonal axes Q `(dim, dim)` with a small ‖X Q − S‖, where S is X Q without its smallest entries.

    In turns: the best S of a Q are its largest entries, and the best Q of an S the polar factor of Xᵀ S (the orthogonal
    Procrustes problem). Neither makes the error larger. The principal axes are where it begins.
    """
    numbers = table.double()
    axes: Tensor = torch.linalg.eigh(numbers.T @ numbers).eigenvectors
    last = float("inf")
    for _ in range(ROUNDS):
        image = numbers @ axes
        kept = without_smallest(image, share)
        error = float((image - kept).square().sum())
        if not error < last * (1 - ENOUGH):
            break
        last = error
        left, _, right = torch.linalg.svd(numbers.T @ kept)
        axes = left @ right
    return axes.to(table.dtype)


def without_smallest(numbers: Tensor, share: float) -> Tensor:
    """The same entries with a share of them, the smallest, set to zero."""
    num_zeros = int(share * numbers.numel())
    if not num_zeros:
        return numbers
    threshold = numbers.abs().flatten().kthvalue(num_zeros).values
    return numbers.masked_fill(numbers.abs() <= threshold, 0.0)

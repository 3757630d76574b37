"""What pushes places apart: each off all others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualkg.analysis.tsne.grid import FINE, Grid, fitting

FEW = 600  # places for which all pairs take less time than a grid


class Repulsion(NamedTuple):
    """Σ_j d / (1 + ‖d‖²)², d = y_i − y_j, for each of the places, `(2, n)`, and Σ_ij 1 / (1 + ‖d‖²) with i ≠ j."""

    pushes: Tensor
    total: Tensor


class Repeller:
    """Finds the repulsion of places `(2, n)`: of few by all pairs, of many on a grid, which is kept while it fits."""

    def __init__(self, cell: float = FINE) -> None:
        self._cell = cell
        self._grid: Grid | None = None

    def __call__(self, places: Tensor) -> Repulsion:
        if places.shape[1] <= FEW:
            return exact_repulsion(places)
        asked = fitting(places, cell=self._cell)
        if self._grid is None or self._grid.key != asked:
            self._grid = Grid(*asked, device=places.device)
        return repulsion_on(self._grid, places)


def exact_repulsion(places: Tensor) -> Repulsion:
    """By all pairs: the definition, which the grid is tested against."""
    across, up = (axis[:, None] - axis for axis in places)
    near = (1 + across * across + up * up).reciprocal().fill_diagonal_(0)  # none pushes itself
    pushes = near.square()
    return Repulsion(
        torch.stack([(pushes * across).sum(1), (pushes * up).sum(1)]),
        near.sum(),
    )


def repulsion_on(grid: Grid, places: Tensor) -> Repulsion:
    """By three sums on the grid."""
    near, across, up = grid.sums(places)
    total = near.sum() - places.shape[1]  # less what each is to itself, which is 1 but for the grid's error
    return Repulsion(torch.stack([across, up]), total.clamp(min=1.0))

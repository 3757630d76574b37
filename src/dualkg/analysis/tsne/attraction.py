"""What draws places together: each to those that have an affinity with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dualkg.analysis.tsne.affinities import Affinities

WORTH_NUMBA = 2**18  # pairs; for fewer it is not worth loading


def attraction(affinities: Affinities, places: Tensor) -> Tensor:
    """Σ_j p_ij (y_i − y_j) / (1 + ‖y_i − y_j‖²) for each of the places `(2, n)`; faster where numba is installed."""
    large = places.device.type == "cpu" and len(affinities.weights) >= WORTH_NUMBA
    kernel = _kernel() if large else None
    if kernel:
        return kernel(affinities.starts, affinities.columns, affinities.weights, places)
    return attraction_in_torch(affinities, places)


def attraction_in_torch(affinities: Affinities, places: Tensor) -> Tensor:
    """The same, by whole arrays of pairs."""
    across, up = differences(affinities, places)
    pulls = (across * across).addcmul_(up, up).add_(1).reciprocal_().mul_(affinities.weights)
    return torch.stack([_by_row(axis.mul_(pulls), affinities) for axis in (across, up)])


def differences(affinities: Affinities, places: Tensor) -> tuple[Tensor, Tensor]:
    """y_i − y_j of each pair, axis by axis."""
    across, up = (
        axis.index_select(0, affinities.rows).sub_(axis.index_select(0, affinities.columns)) for axis in places
    )
    return across, up


def _by_row(values: Tensor, affinities: Affinities) -> Tensor:
    """Sums over the pairs of each point, always in the same order."""
    sums: Tensor = torch.segment_reduce(values, "sum", offsets=affinities.starts, axis=0, unsafe=True)
    return sums


@cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    from dualkg.kernels.cpu.attraction import HAS_NUMBA, attraction_by_row

    return attraction_by_row if HAS_NUMBA else None

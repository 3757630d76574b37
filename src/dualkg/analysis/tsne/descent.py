"""Steps down the divergence of the affinities of points from those of their places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualkg.analysis.tsne.affinities import Affinities
from dualkg.analysis.tsne.attraction import attraction, differences
from dualkg.analysis.tsne.grid import COARSE, FINE
from dualkg.analysis.tsne.repulsion import Repeller

EXAGGERATION = 12.0  # of the attraction at first, so that what belongs together finds together


class Phase(NamedTuple):
    """Some steps alike; `cell` is the spacing of the grid for repulsion."""

    num_steps: int
    exaggeration: float
    momentum: float
    cell: float


PHASES = (
    Phase(250, exaggeration=EXAGGERATION, momentum=0.5, cell=COARSE),
    Phase(500, exaggeration=1.0, momentum=0.8, cell=COARSE),
    Phase(250, exaggeration=1.0, momentum=0.8, cell=FINE),
)


def descend(affinities: Affinities, places: Tensor) -> Tensor:
    """From places `(2, n)` to those of small divergence. The rate is n / exaggeration (Belkina et al., 2019)."""
    velocity, gains = torch.zeros_like(places), torch.ones_like(places)
    for phase in PHASES:
        repeller, rate = Repeller(phase.cell), affinities.num_points / phase.exaggeration
        for _ in range(phase.num_steps):
            pushes, total = repeller(places)
            slope = phase.exaggeration * attraction(affinities, places) - pushes / total
            # An axis that keeps its direction gets faster (Jacobs, 1988): velocity is against the slope then.
            gains = torch.where(slope * velocity < 0, gains + 0.2, gains * 0.8).clamp_(min=0.01)
            velocity = phase.momentum * velocity - rate * gains * slope
            places = places + velocity
            places = places - places.mean(1, keepdim=True)
    return places


def divergence(affinities: Affinities, places: Tensor) -> float:
    """Kullback and Leibler's: Σ p log(p / q), where q is 1 / (1 + ‖y_i − y_j‖²) as part of its sum over all pairs."""
    across, up = differences(affinities, places)
    _, total = Repeller()(places)
    weights = affinities.weights.double()
    logs = weights.clamp(min=1e-300).log() + (1 + across * across + up * up).double().log() + total.double().log()
    return float((weights * logs).sum())

"""HAKE: polar coordinates with moduli and phases."""

from typing import Any

import torch
from torch import Tensor, nn

from dualkg.data.graph import Graph, GraphShape
from dualkg.kernels import pairwise as kernels
from dualkg.models.base import Factors, Side
from dualkg.models.distance import AngleModel, chunked_distances
from dualkg.models.grouping import lookup

ROUNDING = 8  # units of the last place by which a squared distance, a difference of two sums, may be wrong


class HAKE(AngleModel):
    """Entities in polar coordinates, relations scale and rotate them (Zhang et al., 2020).

    −a ‖h_m∘(r_m + r_b) − t_m∘(1 − r_b)‖₂ − b Σ|sin((h_p + r_p − t_p) / 2)|, with r_m ≥ 0 and −r_m ≤ r_b ≤ 1. A row of
    an entity holds moduli, then angles; one of a relation r_m, r_b and r_p. The weights a and b are learned. They are
    initially `modulus_weight` and `phase_weight` · `half_turn`, so that both distances have the scale of the numbers
    in the tables, and one learning rate changes b and the angles by similar relative amounts.
    """

    maps_both_sides = True
    euclidean = False
    capturable = True
    score_arrays = 8
    numbers_per_coordinate = 2

    def __init__(
        self, shape: Graph | GraphShape, *, modulus_weight: float = 1.0, phase_weight: float = 0.5, **config: Any
    ) -> None:
        super().__init__(shape, **config)
        self.initial_weights = {"modulus_weight": modulus_weight, "phase_weight": phase_weight}
        self.scales = nn.Parameter(torch.tensor([modulus_weight, phase_weight * self.half_turn.item()]))

    @property
    def config(self) -> dict[str, object]:
        return {**super().config, **self.initial_weights}

    def relation_width(self, dim: int) -> int:
        return 3 * dim

    def table(self, rows: int, width: int) -> nn.Parameter:
        moduli = self.init_noise(rows, width // 2)
        return nn.Parameter(torch.cat([moduli, self.random_angles(rows, width // 2)], dim=-1))

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Initially the identity on moduli: r_m is 1 and r_b is 0."""
        ones, zeros = torch.ones(rows, self.dim), torch.zeros(rows, self.dim)
        return nn.Parameter(torch.cat([ones, zeros, self.random_angles(rows, self.dim)], dim=-1))

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        (modulus, phase), (scale, bias, turn) = head.chunk(2, dim=-1), self._relation(relations)
        return torch.cat([modulus * (scale + bias), phase + turn], dim=-1)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        (modulus, phase), (_, bias, _) = tail.chunk(2, dim=-1), self._relation(relations)
        return torch.cat([modulus * (1 - bias), phase], dim=-1)

    def _relation(self, relations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, bias, turn = lookup(self.relations, relations).chunk(3, dim=-1)
        scale = scale.abs()
        return scale, torch.maximum(bias.clamp(max=1.0), -scale), turn

    def entity_vectors(self) -> Tensor:
        """Moduli, and points on the circle: the same for angles that differ by a full turn."""
        modulus, phase = self.entities.chunk(2, dim=-1)
        angles = self.angles(phase)
        return torch.cat([modulus, angles.cos(), angles.sin()], dim=-1)

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        modulus, phase = (one - other).chunk(2, dim=-1)
        apart = torch.linalg.vector_norm(modulus, dim=-1)
        return self._weighted(apart, self._sines(phase))

    def tail_scores(self, f: Factors) -> Tensor:
        return -self._distances_to_scaled(*self._query(f, "tail"), self.tail_table)

    def head_scores(self, f: Factors) -> Tensor:
        return -self._distances_to_scaled(*self._query(f, "head"), self.head_table)

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        chosen = f.candidates(candidates, side=side)
        points, scale = self._query(f, side)
        if candidates.dim() == 1:
            return -self._distances_to_scaled(points, scale, chosen)
        moduli, phases = chosen.chunk(2, dim=-1)
        return -self.distance(points.unsqueeze(1), torch.cat([moduli * scale.unsqueeze(1), phases], dim=-1))

    def _query(self, f: Factors, side: Side) -> tuple[Tensor, Tensor]:
        """The target point of an answer, `(batch, width)`, after scaling its moduli by `(batch, dim)`."""
        scale, bias, turn = self._relation(f.relations)
        if side == "tail":
            return f.mapped_head, 1 - bias
        modulus, phase = f.mapped_tail.chunk(2, dim=-1)
        return torch.cat([modulus, phase - turn], dim=-1), scale + bias

    def _distances_to_scaled(self, points: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        """Distances to all rows with scaled moduli, without scaling one: ‖x − s∘y‖² = ‖x‖² − 2 (x∘s)·y + s²·y²."""
        (modulus, phase), (moduli, phases) = points.chunk(2, dim=-1), table.chunk(2, dim=-1)
        added = modulus.square().sum(-1, keepdim=True) + scale.square() @ moduli.square().T
        squared = added - 2 * (modulus * scale) @ moduli.T
        near = squared <= ROUNDING * torch.finfo(added.dtype).eps * added
        apart = squared.masked_fill(near, 1.0).sqrt().masked_fill(near, 0.0)
        return self._weighted(apart, self._sines_of_all(phase, phases))

    def _sines_of_all(self, one: Tensor, other: Tensor) -> Tensor:
        if kernels.available_for(one):
            return kernels.pairwise_sine_sums(self.angles(one) / 2, self.angles(other) / 2)
        return chunked_distances(lambda phase, part: self._sines(phase - part), one, other)

    def _sines(self, phase: Tensor) -> Tensor:
        return (self.angles(phase) / 2).sin().abs().sum(-1)

    def _weighted(self, apart: Tensor, rotated: Tensor) -> Tensor:
        return self.scales[0] * apart + self.scales[1] * rotated

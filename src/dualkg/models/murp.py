"""MuRP: a Poincaré ball."""

from typing import Any

import torch
from torch import Tensor, nn

from dualkg.data.graph import Graph, GraphShape
from dualkg.models.base import Factors, Side
from dualkg.models.distance import DistanceModel
from dualkg.models.grouping import lookup

EDGE = 1 - 1e-5  # the largest norm of a point: at 1, distances in float32 would be infinite
LEAST = 1e-15  # a square below this is rounding
LEAST_ROOM = 1 - EDGE**2  # the smallest 1 − ‖x‖² of a point


class MuRP(DistanceModel):
    """Entities in a Poincaré ball: −d(R h, t ⊕ r)² + b_h + b_t, with R diagonal (Balažević et al., 2019).

    A row of an entity holds its tangent vector at the origin, so that Euclidean optimizers apply, then its biases as
    head and as tail; R h is R times the tangent. A row of a relation holds R, then the tangent vector of r. Distances
    of all pairs are computed from matrix products, without a vector t ⊕ r for each tail and relation.
    """

    maps_both_sides = True
    euclidean = False
    num_biases = 2
    capturable = True
    score_arrays = 20

    def __init__(self, shape: Graph | GraphShape, *, signs: bool = False, **config: Any) -> None:
        self.signs = signs  # used by `relation_table`, which `super` calls
        super().__init__(shape, **config)

    @property
    def config(self) -> dict[str, object]:
        return {**super().config, "signs": self.signs}

    def relation_width(self, dim: int) -> int:
        return 2 * dim

    def table(self, rows: int, width: int) -> nn.Parameter:
        """Entities, with biases of 0."""
        noise = self.init_noise(rows, self.dim)
        return nn.Parameter(torch.cat([noise, noise.new_zeros(len(noise), 2)], dim=1))

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """R initially near the identity, or with `signs` near 1 or −1 in each coordinate."""
        noise = self.init_noise(rows, width)
        noise[:, : self.dim] += self.random_signs(rows, self.dim) if self.signs else 1
        return nn.Parameter(noise)

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return _to_ball(head[..., : self.dim] * self._diagonal(relations))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """t ⊕ r, of which 1 + 2⟨t, r⟩ + ‖t‖²‖r‖² is ‖t + r‖² + (1 − ‖t‖²)(1 − ‖r‖²), a sum of numbers ≥ 0."""
        point, step = _to_ball(tail[..., : self.dim]), self._step(relations)
        between, step_norm = _dot(point, step), _dot(step, step)
        room, whole_room = _room(point), _room(point) * _room(step)
        whole = _dot(point + step, point + step) + whole_room
        return ((1 + 2 * between + step_norm) * point + room * step) / whole

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """The square of the distance in the ball."""
        difference = one - other
        return _squared_distance(_dot(difference, difference), _room(one) * _room(other)).squeeze(-1)

    def triple_scores(self, f: Factors) -> Tensor:
        return super().triple_scores(f) + f.head[:, -2] + f.tail[:, -1]

    def relation_scores(self, f: Factors) -> Tensor:
        return super().relation_scores(f) + (f.head[:, -2] + f.tail[:, -1]).unsqueeze(-1)

    def tail_scores(self, f: Factors) -> Tensor:
        return self._to_tails(f, self.tail_table)

    def head_scores(self, f: Factors) -> Tensor:
        return self._to_heads(f, self.head_table)

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        if candidates.dim() > 1:
            return super().candidate_scores(f, candidates, side)
        rows = f.candidates(candidates, side=side)
        return self._to_tails(f, rows) if side == "tail" else self._to_heads(f, rows)

    def entity_vectors(self) -> Tensor:
        return self.entities[:, : self.dim]

    def _to_tails(self, f: Factors, rows: Tensor) -> Tensor:
        """With x = R h, and y = t ⊕ r for every t: x·y and ‖y‖² follow from x·t, r·t, x·r and the norms."""
        x, step, points = f.mapped_head, self._step(f.relations), _to_ball(rows[:, : self.dim])
        step_norm, norm = _dot(step, step), _dot(points, points).squeeze(-1)
        room, step_room = _room(points).squeeze(-1), _room(step)
        between = 2 * step @ points.T
        whole = (norm + between + step_norm).clamp(min=0) + room * step_room
        product = ((1 + between + step_norm) * (x @ points.T) + room * _dot(x, step)) / whole
        y_norm = (norm + between + step_norm).clamp(min=0) / whole
        squared = _dot(x, x) - 2 * product + y_norm
        found = _squared_distance(squared, _room(x) * room * step_room / whole)
        return rows[:, -1] + f.head[:, -2, None] - found

    def _to_heads(self, f: Factors, rows: Tensor) -> Tensor:
        """With y = t ⊕ r, and x = R h for every h: ‖R v‖ and R v·y are products with the tangents v."""
        y, diagonal, tangents = f.mapped_tail, self._diagonal(f.relations), rows[:, : self.dim]
        y_norm, squared = _dot(y, y), diagonal.square() @ tangents.square().T
        shrink = _shrink(squared)
        product, x_norm = shrink * ((diagonal * y) @ tangents.T), shrink.square() * squared
        found = _squared_distance(x_norm - 2 * product + y_norm, (1 - x_norm).clamp(min=LEAST_ROOM) * _room(y))
        return rows[:, -2] + f.tail[:, -1:] - found

    def _diagonal(self, relations: Tensor) -> Tensor:
        return lookup(self.relations, relations)[..., : self.dim]

    def _step(self, relations: Tensor) -> Tensor:
        return _to_ball(lookup(self.relations, relations)[..., self.dim :])


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1, keepdim=True)


def _shrink(squared_lengths: Tensor) -> Tensor:
    """The factor tanh(‖v‖) / ‖v‖ that maps a tangent vector v of this squared length to its point."""
    length = squared_lengths.clamp(min=LEAST).sqrt()
    return length.tanh().clamp(max=EDGE) / length


def _to_ball(tangents: Tensor) -> Tensor:
    return tangents * _shrink(_dot(tangents, tangents))


def _room(points: Tensor) -> Tensor:
    """1 − ‖x‖², at least `LEAST_ROOM`."""
    return (1 - _dot(points, points)).clamp(min=LEAST_ROOM)


def _squared_distance(squared: Tensor, room: Tensor) -> Tensor:
    """(2 arsinh √(‖x − y‖² / room))², with room (1 − ‖x‖²)(1 − ‖y‖²)."""
    return 4 * (squared / room).clamp(min=LEAST).sqrt().asinh().square()

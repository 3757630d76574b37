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

    An entity is stored as its tangent vector at the origin, so that Euclidean optimizers apply, and R h is R times that
    tangent. A row of a relation holds R, then the tangent vector of r. Distances of all pairs are computed from matrix
    products, without a vector t ⊕ r for each tail and relation.
    """

    maps_both_sides = True
    euclidean = False
    capturable = True
    score_arrays = 20

    def __init__(self, shape: Graph | GraphShape, *, signs: bool = False, **config: Any) -> None:
        self.signs = signs  # used by `relation_table`, which `super` calls
        super().__init__(shape, **config)
        self.biases = nn.Parameter(torch.zeros(self.shape.num_entities, 2))  # as head, as tail

    @property
    def config(self) -> dict[str, object]:
        return {**super().config, "signs": self.signs}

    def relation_width(self, dim: int) -> int:
        return 2 * dim

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """R initially near the identity, or with `signs` near 1 or −1 in each coordinate."""
        noise = self.init_noise(rows, width)
        noise[:, : self.dim] += self.random_signs(rows, self.dim) if self.signs else 1
        return nn.Parameter(noise)

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return _to_ball(head * self._diagonal(relations))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """t ⊕ r, of which 1 + 2⟨t, r⟩ + ‖t‖²‖r‖² is ‖t + r‖² + (1 − ‖t‖²)(1 − ‖r‖²), a sum of numbers ≥ 0."""
        point, step = _to_ball(tail), self._step(relations)
        between, step_norm = _dot(point, step), _dot(step, step)
        room, whole_room = _room(point), _room(point) * _room(step)
        whole = _dot(point + step, point + step) + whole_room
        return ((1 + 2 * between + step_norm) * point + room * step) / whole

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """The square of the distance in the ball."""
        difference = one - other
        return _squared_distance(_dot(difference, difference), _room(one) * _room(other)).squeeze(-1)

    def triple_scores(self, f: Factors) -> Tensor:
        return super().triple_scores(f) + self.rows(self.biases, f.heads)[:, 0] + self.rows(self.biases, f.tails)[:, 1]

    def relation_scores(self, f: Factors) -> Tensor:
        biases = self.rows(self.biases, f.heads)[:, 0] + self.rows(self.biases, f.tails)[:, 1]
        return super().relation_scores(f) + biases.unsqueeze(-1)

    def tail_scores(self, f: Factors) -> Tensor:
        return self._to_tails(f, self.tail_table, self.biases)

    def head_scores(self, f: Factors) -> Tensor:
        return self._to_heads(f, self.head_table, self.biases)

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        if candidates.dim() > 1:
            return super().candidate_scores(f, candidates, side)
        tangents, biases = f.candidates(candidates, side=side), self.rows(self.biases, candidates)
        return self._to_tails(f, tangents, biases) if side == "tail" else self._to_heads(f, tangents, biases)

    def _to_tails(self, f: Factors, tangents: Tensor, biases: Tensor) -> Tensor:
        """With x = R h, and y = t ⊕ r for every t: x·y and ‖y‖² follow from x·t, r·t, x·r and the norms."""
        x, step, points = f.mapped_head, self._step(f.relations), _to_ball(tangents)
        step_norm, norm = _dot(step, step), _dot(points, points).squeeze(-1)
        room, step_room = _room(points).squeeze(-1), _room(step)
        between = 2 * step @ points.T
        whole = (norm + between + step_norm).clamp(min=0) + room * step_room
        product = ((1 + between + step_norm) * (x @ points.T) + room * _dot(x, step)) / whole
        y_norm = (norm + between + step_norm).clamp(min=0) / whole
        squared = _dot(x, x) - 2 * product + y_norm
        found = _squared_distance(squared, _room(x) * room * step_room / whole)
        return biases[:, 1] + self.rows(self.biases, f.heads)[:, :1] - found

    def _to_heads(self, f: Factors, tangents: Tensor, biases: Tensor) -> Tensor:
        """With y = t ⊕ r, and x = R h for every h: ‖R v‖ and R v·y are products with the tangents v."""
        y, diagonal = f.mapped_tail, self._diagonal(f.relations)
        y_norm, squared = _dot(y, y), diagonal.square() @ tangents.square().T
        shrink = _shrink(squared)
        product, x_norm = shrink * ((diagonal * y) @ tangents.T), shrink.square() * squared
        found = _squared_distance(x_norm - 2 * product + y_norm, (1 - x_norm).clamp(min=LEAST_ROOM) * _room(y))
        return biases[:, 0] + self.rows(self.biases, f.tails)[:, 1:] - found

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

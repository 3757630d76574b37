"""What a model gets that scores by minus a distance: of one pair, of all pairs in bounded memory, of all relations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError
from dualkg.kernels import distances as kernels
from dualkg.models.base import EmbeddingModel, InitScale, Side, blank
from dualkg.models.bilinear import BilinearModel
from dualkg.models.factors import Factors
from dualkg.models.groups import Groups

Norm = Literal[1, 2, "squared"]
BilinearT = TypeVar("BilinearT", bound=BilinearModel)
# How many differences between two vectors exist at once; a distance makes a few such arrays of them.
DIFFERENCES = {"cpu": 2**22, "cuda": 2**26}


def in_parts(distance: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor) -> Tensor:
    """Distances from each of `(batch, width)` to each of `(n, width)`, a part of the second at a time: `(batch, n)`.

    A backward pass makes the differences of each part again, rather than keep batch × n × width of them.
    """
    size = max(1, DIFFERENCES[one.device.type] // max(one.numel(), 1))
    parts = other.split(size)  # type: ignore[no-untyped-call]
    return torch.cat([made_again(distance, one.unsqueeze(1), part) for part in parts], dim=-1)


def made_again(function: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor) -> Tensor:
    """What a function gives, of which nothing is kept for a backward pass: that calls it again."""
    if not torch.is_grad_enabled():
        return function(one, other)
    found: Tensor = checkpoint(function, one, other, use_reentrant=False, preserve_rng_state=False)
    return found


class DistanceModel(EmbeddingModel):
    """A model that scores by −d(where the relation takes the head, the tail).

    Where `meets_between`, the relation moves the tail too, and the two meet in a third place. Where `isometric`, the
    distance from the mapped head to the tail is that from the head to the mapped tail, so that heads are looked for
    as tails are.
    """

    meets_between = False
    isometric = False
    usual_init_scale: InitScale = 1e-2

    def fresh_signs(self, rows: int, width: int) -> Tensor:
        """1 or −1, the same for a relation and its inverse. Training hardly leads a multiplier through 0."""
        num_relations = self.shape.num_relations
        drawn = 2.0 * torch.randint(0, 2, (num_relations, width), generator=self._random) - 1
        return drawn.repeat(rows // max(num_relations, 1), 1)

    @abstractmethod
    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """Vectors `(…, width)` twice, which broadcast → distances `(…)`."""

    def distances(self, one: Tensor, other: Tensor) -> Tensor:
        """From each of `(batch, width)` to each of `(n, width)`: `(batch, n)`."""
        return in_parts(self.distance, one, other)

    def triple_scores(self, f: Factors) -> Tensor:
        return -self.distance(f.mapped_head, self._target(f))

    def tail_scores(self, f: Factors) -> Tensor:
        if self.meets_between:
            return -self._to_images(f.mapped_head, f.relations, self.tail_table, "tail")
        return -self.distances(f.mapped_head, self.tail_table)

    def head_scores(self, f: Factors) -> Tensor:
        if self.isometric:
            return -self.distances(f.mapped_tail, self.head_table)
        return -self._to_images(self._target(f), f.relations, self.head_table, "head")

    def relation_scores(self, f: Factors) -> Tensor:
        heads = self.map_by_every_relation(f.head)
        if not self.meets_between:
            return torch.stack([-self.distance(image, f.tail) for image in heads], dim=-1)
        tails = self.map_by_every_relation(f.tail, transposed=True)
        return torch.stack([-self.distance(*images) for images in zip(heads, tails, strict=True)], dim=-1)

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        if self.meets_between and candidates.dim() == 1:
            points = f.mapped_head if side == "tail" else f.mapped_tail
            return -self._to_images(points, f.relations, f.candidates(candidates, side=side), side)
        if self.meets_between or (side == "head" and not self.isometric):  # without asking a GPU for sizes
            return super().candidate_scores(f, candidates, side)
        chosen = f.candidates(candidates, side=side)
        image = f.mapped_head if side == "tail" else f.mapped_tail
        if candidates.dim() == 1:
            return -self.distances(image, chosen)
        return -self.distance(image.unsqueeze(1), chosen)

    def _target(self, f: Factors) -> Tensor:
        return f.mapped_tail if self.meets_between else f.tail

    def maps_of(self, relations: Tensor, side: Side) -> list[Callable[[Tensor], Tensor]]:
        """Where each of some relations, `(num_relations,)`, takes vectors `(n, width)` of a side."""
        apply = self.map_head if side == "head" else self.map_tail

        def taken(relation: Tensor, vectors: Tensor) -> Tensor:
            return apply(vectors, relation.expand(len(vectors)))

        return [partial(taken, relation) for relation in relations]

    def _to_images(self, points: Tensor, relations: Tensor, table: Tensor, side: Side) -> Tensor:
        """From each point to where its relation takes every row of a table; a table is mapped once a relation."""
        groups = Groups(relations)

        def to_images(take: Callable[[Tensor], Tensor], group: Tensor, vectors: Tensor) -> Tensor:
            return self.distances(group, take(vectors))

        pairs = zip(groups.of(points), self.maps_of(groups.distinct, side), strict=True)
        found = [made_again(partial(to_images, take), group, table) for group, take in pairs]
        return groups.joined(found, empty=points.new_zeros(0, len(table)))


class NormModel(DistanceModel):
    """A model whose distance is a norm of the difference: `norm` 1, 2, or the square of 2.

    Norm 1 adds up the modulus of each coordinate, which is a complex number in some models.
    """

    def __init__(self, shape: GraphShape, *, norm: Norm = 1, **choices: Any) -> None:
        super().__init__(shape, **choices)
        self.norm: Norm = norm
        if isinstance(norm, bool) or norm not in (1, 2, "squared"):
            raise RequestError(f"A distance has norm 1, 2 or 'squared'; '{norm}' was asked for.")

    @property
    def choices(self) -> dict[str, object]:
        return {**super().choices, "norm": self.norm}

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        difference = one - other
        if self.norm == 1:
            return self.modulus(difference).sum(-1)
        if self.norm == 2:
            length: Tensor = torch.linalg.vector_norm(difference, dim=-1)  # whose gradient at zero is zero
            return length
        return difference.square().sum(-1)

    def distances(self, one: Tensor, other: Tensor) -> Tensor:
        """Without an array of all differences, but for the sum of complex moduli where there is no kernel."""
        if self.norm == "squared":
            squares: Tensor = one.square().sum(-1, keepdim=True) + other.square().sum(-1)
            return squares - 2 * one @ other.T
        if self.norm == 1 and kernels.apply_to(one):
            return kernels.sums_of_moduli(one, other, parts=self.numbers_per_coordinate)
        if self.norm == 2 or self.numbers_per_coordinate == 1:
            # By differences: from products, the distance of near vectors would be what rounding leaves of it.
            return torch.cdist(one, other, p=float(self.norm), compute_mode="donot_use_mm_for_euclid_dist")
        return super().distances(one, other)


def primal_of(model: DistanceModel, kind: type[BilinearT], relations: Tensor) -> BilinearT:
    """A bilinear model with the entities of a distance model, and these relations."""
    with blank():
        found = kind(model.shape, dim=model.dim, reciprocal=model.reciprocal)
    found.load_state_dict({"entities": model.entities, "relations": relations})
    return found.to(model.entities)

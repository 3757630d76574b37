"""Distance models: TransE, RotatE, ModE, SE, HAKE and MuRP."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualkg.data.triples import GraphShape
from dualkg.errors import InvalidValue
from dualkg.kernels import pairwise as kernels
from dualkg.models.base import MODELS, EmbeddingModel, Factors, InitScale, ScoreForm
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import ComplEx, DistMult
from dualkg.models.matrix import RelationGroups, multiply_groups
from dualkg.tables.base import Side, local_tables, lookup

if TYPE_CHECKING:
    from dualkg.data.graph import Graph

__all__ = ["HAKE", "SE", "DistanceModel", "ModE", "MuRP", "RotatE", "TransE"]

Norm = Literal[1, 2, "squared"]
BilinearT = TypeVar("BilinearT", bound=BilinearModel)
# Units of the last place by which a squared distance, a difference of two sums, may be wrong.
ROUNDING = 8
# The largest norm of a point of MuRP: at 1, distances in float32 would be infinite.
EDGE = 1 - 1e-5
LEAST = 1e-15  # a square below this is rounding
LEAST_ROOM = 1 - EDGE**2  # the smallest 1 − ‖x‖² of a point
# Numbers in an array of differences of vectors. Computing a distance takes a few such arrays.
DIFFERENCES = {"cpu": 2**22, "cuda": 2**26}


def chunked_distances(
    distance: Callable[[Tensor, Tensor], Tensor], points: Tensor, others: Tensor
) -> Tensor:
    """Distances of two sets of rows, `(num_points, num_others)`.

    The backward pass computes the differences of each chunk again.
    """
    size = max(1, DIFFERENCES[points.device.type] // max(points.numel(), 1))
    chunks = torch.split(others, size)
    distances = [checkpointed(distance, points.unsqueeze(1), chunk) for chunk in chunks]
    return torch.cat(distances, dim=-1)


def checkpointed(
    function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor
) -> Tensor:
    """Call a function without saving its intermediate results: the backward pass calls it again."""
    if not torch.is_grad_enabled():
        return function(left, right)
    result: Tensor = checkpoint(
        function, left, right, use_reentrant=False, preserve_rng_state=False
    )
    return result


class DistanceModel(EmbeddingModel):
    """A model that scores by −d(mapped head, tail).

    Examples:
        >>> issubclass(kg.RotatE, kg.DistanceModel)
        True
    """

    # Whether the distance is to the mapped tail.
    maps_both_sides = False
    # Whether d(mapped head, tail) is d(head, mapped tail), so that heads are scored like tails.
    isometric = False
    default_init_scale: InitScale = 1e-2

    def random_signs(self, rows: int, width: int) -> Tensor:
        """1 or −1, the same for a relation and its inverse.

        Training rarely changes the sign of a multiplier.
        """
        num_relations = self.shape.num_relations
        bits = torch.randint(0, 2, (num_relations, width), generator=self._random)
        signs = 2.0 * bits - 1
        return signs.repeat(rows // max(num_relations, 1), 1)

    @abstractmethod
    def distance(self, points: Tensor, others: Tensor) -> Tensor:
        """Vectors `(…, width)` twice, which broadcast → distances `(…)`."""

    def distances(self, points: Tensor, others: Tensor) -> Tensor:
        """From each of `(batch, width)` to each of `(n, width)`: `(batch, n)`."""
        return chunked_distances(self.distance, points, others)

    def triple_scores(self, f: Factors) -> Tensor:
        return -self.distance(f.mapped_head, self._target(f))

    def tail_scores(self, f: Factors) -> Tensor:
        return self.side_scores(f, "tail")

    def head_scores(self, f: Factors) -> Tensor:
        return self.side_scores(f, "head")

    def relation_scores(self, f: Factors) -> Tensor:
        heads = self.map_by_all_relations(f.head)
        if not self.maps_both_sides:
            return torch.stack([-self.distance(head, f.tail) for head in heads], dim=-1)
        tails = self.map_by_all_relations(f.tail, transposed=True)
        pairs = zip(heads, tails, strict=True)
        return torch.stack([-self.distance(head, tail) for head, tail in pairs], dim=-1)

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        # Otherwise the batch is grouped by relation, which would wait for a GPU.
        is_direct = side == "tail" or self.isometric
        if candidates.dim() == 1 and (self.maps_both_sides or is_direct):
            return self.side_scores(f, side, candidates)
        if self.maps_both_sides or not is_direct:
            return super().candidate_scores(f, candidates, side)
        vectors = f.candidates(candidates, side=side)
        return -self.distance(f.query(side).unsqueeze(1), vectors)

    def side_scores(self, f: Factors, side: Side, candidates: Tensor | None = None) -> Tensor:
        """Scores of candidates `(n,)` on one side of all triples of a batch, or of all entities."""
        if not self.maps_both_sides and (side == "tail" or self.isometric):
            rows = self._rows_of(f, side, candidates)
            return -self.distances(f.query(side), rows)
        # Candidates are read after the vectors of the batch, in a look-up of their own.
        points = f.mapped_head if side == "tail" else self._target(f)
        rows = self._rows_of(f, side, candidates)
        return -self._distances_to_mapped(points, f.relations, rows, side)

    def _rows_of(self, f: Factors, side: Side, candidates: Tensor | None) -> Tensor:
        if candidates is not None:
            return f.candidates(candidates, side=side)
        return self.tail_table if side == "tail" else self.head_table

    @property
    def shares_candidates(self) -> bool:
        return self.maps_both_sides or self.reciprocal or self.isometric

    def _target(self, f: Factors) -> Tensor:
        return f.mapped_tail if self.maps_both_sides else f.tail

    def maps_of(self, relations: Tensor, side: Side) -> list[Callable[[Tensor], Tensor]]:
        """One function per relation `(num_relations,)` that maps vectors `(n, width)` of a side."""
        apply = self.map_head if side == "head" else self.map_tail

        def map_vectors(relation: Tensor, vectors: Tensor) -> Tensor:
            return apply(vectors, relation.expand(len(vectors)))

        return [partial(map_vectors, relation) for relation in relations]

    def _distances_to_mapped(
        self, points: Tensor, relations: Tensor, table: Tensor, side: Side
    ) -> Tensor:
        """Distances from each point to all rows of a table, mapped by the point's relation.

        The table is mapped once for each relation of the batch.
        """
        groups = RelationGroups(relations)

        def to_mapped(
            map_vectors: Callable[[Tensor], Tensor], group: Tensor, vectors: Tensor
        ) -> Tensor:
            return self.distances(group, map_vectors(vectors))

        maps = self.maps_of(groups.distinct, side)
        distances = []
        for group, map_vectors in zip(groups.split(points), maps, strict=True):
            distances.append(checkpointed(partial(to_mapped, map_vectors), group, table))
        return groups.join(distances, empty=points.new_zeros(0, len(table)))


class NormModel(DistanceModel):
    """The distance is a norm of the difference: 1, 2, or the square of 2 ("squared").

    Norm 1 is a sum of moduli if coordinates are complex.
    """

    options = ("norm",)

    def __init__(self, shape: Graph | GraphShape, *, norm: Norm = 1, **config: Any) -> None:
        super().__init__(shape, **config)
        self.norm: Norm = norm
        if isinstance(norm, bool) or norm not in (1, 2, "squared"):
            raise InvalidValue("norm", expected="1, 2 or 'squared'", found=norm)

    @property
    def score_form(self) -> ScoreForm | None:
        if self.norm != "squared" or self.maps_both_sides:
            return None
        if not (self.reciprocal or self.isometric):
            return None
        is_plain = self.scores_as(NormModel, "side_scores", "distance", "distances")
        return "squared distances" if is_plain else None

    def distance(self, points: Tensor, others: Tensor) -> Tensor:
        difference = points - others
        if self.norm == 1:
            return self.modulus(difference).sum(-1)
        if self.norm == 2:
            # Its gradient at zero is zero.
            length: Tensor = torch.linalg.vector_norm(difference, dim=-1)
            return length
        return difference.square().sum(-1)

    def distances(self, points: Tensor, others: Tensor) -> Tensor:
        """Without an array of all differences.

        Only sums of complex moduli without a kernel need one.
        """
        if self.norm == "squared":
            squares: Tensor = points.square().sum(-1, keepdim=True) + others.square().sum(-1)
            return squares - 2 * points @ others.T
        if self.norm == 1 and kernels.available_for(points):
            return kernels.pairwise_modulus_sums(points, others, parts=self.numbers_per_coordinate)
        if self.norm == 2 or self.numbers_per_coordinate == 1:
            # Not by matrix products, whose rounding errors exceed the distance of close vectors.
            mode = "donot_use_mm_for_euclid_dist"
            return torch.cdist(points, others, p=float(self.norm), compute_mode=mode)
        return super().distances(points, others)


def primal_of(model: DistanceModel, kind: type[BilinearT], relations: Tensor) -> BilinearT:
    """A bilinear model with the entities of a distance model and the given relations."""
    tables = local_tables(model.shape.num_entities, initialize=False)
    options = {"dim": model.dim, "reciprocal": model.reciprocal}
    primal = kind.with_tables(tables, model.shape, **options)
    primal.load_state_dict({"entities": model.entities, "relations": relations})
    return primal.to(model.entities)


class AngleModel(DistanceModel):
    """Stores angles in the scale of the other parameters, so that one learning rate suits both."""

    # The stored number of the angle π: the bound of a uniform distribution whose standard deviation
    # is `init_scale`.
    half_turn: Tensor

    def random_angles(self, rows: int, width: int) -> Tensor:
        """Stored angles, uniform on the circle."""
        if isinstance(self.init_scale, str) or not self.init_scale > 0:
            raise InvalidValue(
                "init_scale",
                expected="a number above 0",
                found=self.init_scale,
                advice=f"{type(self).__name__} stores angles in units of it.",
            )
        limit = math.sqrt(3.0) * self.init_scale
        self.register_buffer("half_turn", torch.tensor(limit))
        return self.drawn(rows, width, bound=limit)

    def angles(self, stored: Tensor) -> Tensor:
        """Stored angles in radians."""
        return stored * (math.pi / self.half_turn)


@MODELS.register
class ModE(NormModel):
    """A relation scales each coordinate: −‖h∘r − t‖ (Zhang et al., 2020).

    It is the dual of DistMult, without the square.

    Args:
        shape: A graph, or its shape.
        norm: 1, 2 or "squared": the distance.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.ModE(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    has_adjoint = True
    capturable = True
    diagonal = True

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Near 1 or −1."""
        return nn.Parameter(self.random_signs(rows, width) + self.init_noise(rows, width))

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return head * lookup(self.relations, relations)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """The transpose, which equals `map_head`: DURA uses it, the distance does not."""
        return self.map_head(tail, relations)

    @torch.no_grad()
    def primal(self) -> DistMult:
        """The DistMult model with the same parameters, whose dual this is up to the norm."""
        return primal_of(self, DistMult, self.relations)


@MODELS.register
class RotatE(NormModel, AngleModel):
    """A relation rotates each complex coordinate: −‖h∘r − t‖ with |r| = 1 (Sun et al., 2019).

    A relation is stored as a row of angles.

    Args:
        shape: A graph, or its shape.
        norm: 1, 2 or "squared": the distance.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.RotatE(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    has_adjoint = True
    capturable = True
    isometric = True
    numbers_per_coordinate = 2

    def relation_width(self, dim: int) -> int:
        """One angle for each coordinate."""
        return dim

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        return nn.Parameter(self.random_angles(rows, width))

    def relation_norms(self, relations: Tensor) -> Tensor:
        return self.entities.new_full((len(relations),), float(self.dim))

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        real, imaginary = vectors.chunk(2, dim=-1)
        return real.square() + imaginary.square()

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return self._rotated(head, lookup(self.relations, relations))

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self._rotated(tail, -lookup(self.relations, relations))

    @torch.no_grad()
    def primal(self) -> ComplEx:
        """The ComplEx model whose dual this is up to the norm; its relations have modulus 1."""
        angles = self.angles(self.relations)
        return primal_of(self, ComplEx, torch.cat([angles.cos(), angles.sin()], dim=-1))

    def _rotated(self, vectors: Tensor, stored: Tensor) -> Tensor:
        angles = self.angles(stored)
        multiplier = (angles.cos(), angles.sin())
        return torch.cat(ComplEx.times(vectors.chunk(2, dim=-1), multiplier), dim=-1)


@MODELS.register
class SE(NormModel):
    """Structured embeddings: −‖h R₁ − t R₂‖ (Bordes et al., 2011).

    The row of a relation holds both matrices.

    Args:
        shape: A graph, or its shape.
        norm: 1, 2 or "squared": the distance.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.SE(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    maps_both_sides = True

    def relation_width(self, dim: int) -> int:
        """Two matrices, dim × dim."""
        return 2 * dim * dim

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Initially near the identity."""
        return nn.Parameter(torch.eye(self.dim).flatten().repeat(2) + self.init_noise(rows, width))

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return self._mapped(head, relations, "head")

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return self._mapped(tail, relations, "tail")

    def maps_of(self, relations: Tensor, side: Side) -> list[Callable[[Tensor], Tensor]]:
        """With matrices gathered once.

        The gradient of each look-up is as large as the table of relations.
        """
        matrices = self._matrices(relations, side).unbind()
        return [partial(torch.matmul, other=matrix) for matrix in matrices]

    def _distances_to_mapped(
        self, points: Tensor, relations: Tensor, table: Tensor, side: Side
    ) -> Tensor:
        """Squared distances of all relations at once: ‖p − t R‖² = ‖p‖² − 2 (p Rᵀ)·t + ‖t R‖²."""
        if self.norm != "squared":
            return super()._distances_to_mapped(points, relations, table, side)
        groups = RelationGroups(relations)
        matrices = self._matrices(groups.distinct, side)
        mapped_back = multiply_groups(matrices.transpose(1, 2), groups, points)
        positions = torch.searchsorted(groups.distinct, relations.contiguous())
        lengths = lookup(squared_lengths(table, matrices), positions)
        return points.square().sum(-1, keepdim=True) + lengths - 2 * mapped_back @ table.T

    def _mapped(self, vectors: Tensor, relations: Tensor, side: Side) -> Tensor:
        groups = RelationGroups(relations)
        return multiply_groups(self._matrices(groups.distinct, side), groups, vectors)

    def _matrices(self, relations: Tensor, side: Side) -> Tensor:
        both = lookup(self.relations, relations).view(-1, 2, self.dim, self.dim)
        return both[:, 0 if side == "head" else 1]


def squared_lengths(table: Tensor, matrices: Tensor) -> Tensor:
    """‖t R‖² of each row t `(n, width)` and each matrix R, `(num_matrices, n)`."""

    def lengths(rows: Tensor, part: Tensor) -> Tensor:
        return (rows @ part).square().sum(-1)

    size = max(1, DIFFERENCES[table.device.type] // max(table.numel(), 1))
    parts = torch.split(matrices, size)
    return torch.cat([checkpointed(lengths, table, part) for part in parts])


@MODELS.register
class TransE(NormModel):
    """A translation: −‖h + r − t‖ (Bordes et al., 2013).

    It has no transpose, and DURA uses its inverse, t − r.

    Args:
        shape: A graph, or its shape.
        norm: 1, 2 or "squared": the distance.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.TransE(graph.shape, dim=8, norm=2)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    has_adjoint = True
    capturable = True
    isometric = True

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        return head + lookup(self.relations, relations)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        return tail - lookup(self.relations, relations)


@MODELS.register
class HAKE(AngleModel):
    """Entities in polar coordinates, relations scale and rotate them (Zhang et al., 2020).

    −a ‖h_m∘(r_m + r_b) − t_m∘(1 − r_b)‖₂ − b Σ|sin((h_p + r_p − t_p) / 2)|, with r_m ≥ 0 and −r_m ≤
    r_b ≤ 1. A row of an entity holds moduli, then angles; one of a relation r_m, r_b and r_p. The
    learned weights a and b are initially `modulus_weight` and `phase_weight` · `half_turn`: one
    learning rate changes b and the angles by similar amounts.

    Args:
        shape: A graph, or its shape.
        modulus_weight: Initial value of a.
        phase_weight: Initial value of b, in half turns.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.HAKE(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    options = ("modulus_weight", "phase_weight")
    maps_both_sides = True
    euclidean = False
    capturable = True
    numbers_per_coordinate = 2

    def __init__(
        self,
        shape: Graph | GraphShape,
        *,
        modulus_weight: float = 1.0,
        phase_weight: float = 0.5,
        **config: Any,
    ) -> None:
        super().__init__(shape, **config)
        self.modulus_weight = modulus_weight
        self.phase_weight = phase_weight
        scales = [modulus_weight, phase_weight * self.half_turn.item()]
        self.scales = nn.Parameter(torch.tensor(scales))

    def relation_width(self, dim: int) -> int:
        """A scale, a bias and an angle for each coordinate."""
        return 3 * dim

    def table(self, rows: int, width: int) -> nn.Parameter:
        """Moduli, drawn as `init_scale` says, and then uniform angles."""
        moduli = self.init_noise(rows, width // 2)
        return nn.Parameter(torch.cat([moduli, self.random_angles(rows, width // 2)], dim=-1))

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Initially the identity on moduli: r_m is 1 and r_b is 0."""
        ones = torch.ones(rows, self.dim)
        zeros = torch.zeros(rows, self.dim)
        return nn.Parameter(torch.cat([ones, zeros, self.random_angles(rows, self.dim)], dim=-1))

    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        modulus, phase = head.chunk(2, dim=-1)
        scale, bias, turn = self._relation(relations)
        return torch.cat([modulus * (scale + bias), phase + turn], dim=-1)

    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        modulus, phase = tail.chunk(2, dim=-1)
        _, bias, _ = self._relation(relations)
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

    def distance(self, points: Tensor, others: Tensor) -> Tensor:
        modulus, phase = (points - others).chunk(2, dim=-1)
        of_moduli: Tensor = torch.linalg.vector_norm(modulus, dim=-1)
        of_phases = self._sines(phase)
        return self.scales[0] * of_moduli + self.scales[1] * of_phases

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        if candidates.dim() == 1:
            return self.side_scores(f, side, candidates)
        rows = f.candidates(candidates, side=side)
        points, scale = self._point_and_scale(f, side)
        moduli, phases = rows.chunk(2, dim=-1)
        scaled = torch.cat([moduli * scale.unsqueeze(1), phases], dim=-1)
        return -self.distance(points.unsqueeze(1), scaled)

    def _point_and_scale(self, f: Factors, side: Side) -> tuple[Tensor, Tensor]:
        """The target point of an answer, `(batch, width)`, and the scale of its moduli.

        The moduli of an answer are multiplied by the scale, `(batch, dim)`, before they are
        compared with the point.
        """
        scale, bias, turn = self._relation(f.relations)
        if side == "tail":
            return f.mapped_head, 1 - bias
        modulus, phase = f.mapped_tail.chunk(2, dim=-1)
        return torch.cat([modulus, phase - turn], dim=-1), scale + bias

    def side_scores(self, f: Factors, side: Side, candidates: Tensor | None = None) -> Tensor:
        """By distances to scaled moduli y, none of which is scaled.

        ‖x − s∘y‖² = ‖x‖² − 2 (x∘s)·y + s²·y².
        """
        rows = self._rows_of(f, side, candidates)
        points, scale = self._point_and_scale(f, side)
        modulus, phase = points.chunk(2, dim=-1)
        moduli, phases = rows.chunk(2, dim=-1)
        added = modulus.square().sum(-1, keepdim=True) + scale.square() @ moduli.square().T
        squared = added - 2 * (modulus * scale) @ moduli.T
        is_zero = squared <= ROUNDING * torch.finfo(added.dtype).eps * added
        of_moduli = squared.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)
        if kernels.available_for(phase):
            halves = (self.angles(phase) / 2, self.angles(phases) / 2)
            of_phases = kernels.pairwise_sine_sums(*halves)
        else:
            of_phases = chunked_distances(
                lambda query, part: self._sines(query - part), phase, phases
            )
        return -(self.scales[0] * of_moduli + self.scales[1] * of_phases)

    def _sines(self, phase: Tensor) -> Tensor:
        return (self.angles(phase) / 2).sin().abs().sum(-1)


@MODELS.register
class MuRP(DistanceModel):
    """Entities in a Poincaré ball: −d(R h, t ⊕ r)² + b_h + b_t (Balažević et al., 2019).

    R is diagonal. A row of an entity holds its tangent vector at the origin, so that Euclidean
    optimizers apply, then its biases as head and as tail; R h is R times the tangent. A row of a
    relation holds R, then the tangent vector of r.

    Args:
        shape: A graph, or its shape.
        signs: Whether the initial R has values of either sign.
        config: `dim` and other arguments of `EmbeddingModel`.

    Examples:
        >>> model = kg.MuRP(graph.shape, dim=8)
        >>> model.score_tails(torch.tensor([3]), torch.tensor([1])).shape
        torch.Size([1, 1945])
    """

    options = ("signs",)
    maps_both_sides = True
    euclidean = False
    num_biases = 2
    capturable = True

    def __init__(self, shape: Graph | GraphShape, *, signs: bool = False, **config: Any) -> None:
        # The constructor of the base class makes the relations, which depend on it.
        self.signs = signs
        super().__init__(shape, **config)

    def relation_width(self, dim: int) -> int:
        """A diagonal matrix and a translation."""
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
        """t ⊕ r, whose denominator is computed as a sum of numbers ≥ 0.

        1 + 2⟨t, r⟩ + ‖t‖²‖r‖² = ‖t + r‖² + (1 − ‖t‖²)(1 − ‖r‖²).
        """
        point = _to_ball(tail[..., : self.dim])
        step = self._step(relations)
        between = _dot(point, step)
        step_norm = _dot(step, step)
        room = _room(point)
        whole_room = _room(point) * _room(step)
        whole = _dot(point + step, point + step) + whole_room
        return ((1 + 2 * between + step_norm) * point + room * step) / whole

    def distance(self, points: Tensor, others: Tensor) -> Tensor:
        """The square of the distance in the ball."""
        difference = points - others
        room = _room(points) * _room(others)
        return _squared_distance(_dot(difference, difference), room).squeeze(-1)

    def triple_scores(self, f: Factors) -> Tensor:
        return super().triple_scores(f) + f.head[:, -2] + f.tail[:, -1]

    def relation_scores(self, f: Factors) -> Tensor:
        return super().relation_scores(f) + (f.head[:, -2] + f.tail[:, -1]).unsqueeze(-1)

    def side_scores(self, f: Factors, side: Side, candidates: Tensor | None = None) -> Tensor:
        rows = self._rows_of(f, side, candidates)
        return self._to_tails(f, rows) if side == "tail" else self._to_heads(f, rows)

    def entity_vectors(self) -> Tensor:
        return self.entities[:, : self.dim]

    def _to_tails(self, f: Factors, rows: Tensor) -> Tensor:
        """Scores of all tails, with x = R h and y = t ⊕ r for every t.

        x·y and ‖y‖² follow from x·t, r·t, x·r and the norms.
        """
        x = f.mapped_head
        step = self._step(f.relations)
        points = _to_ball(rows[:, : self.dim])
        step_norm = _dot(step, step)
        norm = _dot(points, points).squeeze(-1)
        room = _room(points).squeeze(-1)
        step_room = _room(step)
        between = 2 * step @ points.T
        whole = (norm + between + step_norm).clamp(min=0) + room * step_room
        product = ((1 + between + step_norm) * (x @ points.T) + room * _dot(x, step)) / whole
        y_norm = (norm + between + step_norm).clamp(min=0) / whole
        squared = _dot(x, x) - 2 * product + y_norm
        distances = _squared_distance(squared, _room(x) * room * step_room / whole)
        return rows[:, -1] + f.head[:, -2, None] - distances

    def _to_heads(self, f: Factors, rows: Tensor) -> Tensor:
        """Scores of all heads, with y = t ⊕ r and x = R h for every h.

        ‖R v‖ and R v·y are products with the tangents v.
        """
        y = f.mapped_tail
        diagonal = self._diagonal(f.relations)
        tangents = rows[:, : self.dim]
        y_norm = _dot(y, y)
        squared = diagonal.square() @ tangents.square().T
        shrink = _shrink(squared)
        product = shrink * ((diagonal * y) @ tangents.T)
        x_norm = shrink.square() * squared
        room = (1 - x_norm).clamp(min=LEAST_ROOM) * _room(y)
        distances = _squared_distance(x_norm - 2 * product + y_norm, room)
        return rows[:, -2] + f.tail[:, -1:] - distances

    def _diagonal(self, relations: Tensor) -> Tensor:
        return lookup(self.relations, relations)[..., : self.dim]

    def _step(self, relations: Tensor) -> Tensor:
        return _to_ball(lookup(self.relations, relations)[..., self.dim :])


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1, keepdim=True)


def _shrink(squared_lengths: Tensor) -> Tensor:
    """The factor tanh(‖v‖) / ‖v‖ that maps a tangent vector v of this length to its point."""
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

"""The least point of a smooth convex function, by L-BFGS."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.filters import with_reciprocals
from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.losses.softmax import frequency_weights
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.factors import Factors, rows
from dualkg.regularizers import DURA, PowerSum, Regularizer, depends_on_batch_only
from dualkg.training.recipe import Recipe
from dualkg.training.registry import build_regularizer

MOST_STEPS = 200
MOST_TRIALS = 10  # of a step's length
MEMORY = 20
Array = npt.NDArray[np.floating]
Function = Callable[[Array], tuple[float, Array]]  # its value and its gradient
Past = deque[tuple[Array, Array, float]]  # steps, how the gradient changed by each, and the product of the two


def least(
    value_and_slope: Function,
    start: Array,
    *,
    tolerance: float,
    at_start: tuple[float, Array] | None = None,
    past: Past | None = None,
) -> Array:
    """Descend from a point until no number of the gradient is above `tolerance`.

    Along a line a convex function has not passed its least point while it still falls, so that lengths are judged by
    slopes, which rounding hurts less than values. `at_start` is what is known there already. `past` may have steps of a
    function much alike, and gets more.
    """
    past = deque(maxlen=MEMORY) if past is None else past
    point = start
    value, slope = at_start or value_and_slope(point)
    for _ in range(MOST_STEPS):
        if np.abs(slope).max() <= tolerance:
            break
        direction = -_over_curvature(slope, past)
        falls = np.vdot(slope, direction)
        length = 1.0 if past else min(1.0, 1.0 / float(np.linalg.norm(slope)))
        for _ in range(MOST_TRIALS):
            there = point + length * direction
            there_value, there_slope = value_and_slope(there)
            rises = np.vdot(there_slope, direction)
            if rises <= 0 or there_value - value <= 1e-4 * length * falls:
                break
            # To where the slope would be 0 if it were a straight line; halfway at most, for beyond it may be flat.
            length *= min(0.5, max(0.1, float(falls / (falls - rises))))
        step, change = there - point, there_slope - slope
        past.append((step, change, max(float(np.vdot(step, change)), 1e-30)))
        point, value, slope = there, there_value, there_slope
    return point


def _over_curvature(slope: Array, past: Past) -> Array:
    """The gradient over the curvature that past steps have shown: the two loops of L-BFGS."""
    shares = []
    for step, change, product in reversed(past):
        shares.append(float(np.vdot(step, slope)) / product)
        slope = slope - shares[-1] * change
    if past:
        _, change, product = past[-1]
        slope = slope * (product / max(float(np.vdot(change, change)), 1e-30))
    for (step, change, product), share in zip(past, reversed(shares), strict=True):
        slope = slope + (share - float(np.vdot(change, slope)) / product) * step
    return slope


def as_array(tensor: Tensor) -> Array:
    """The same numbers in NumPy; those on a CPU are not copied."""
    found: Array = tensor.detach().cpu().numpy()
    return found


class Maps(Protocol):
    """The maps of some relations."""

    def __call__(self, vector: Array) -> Array:
        """A vector `(width,)` → its images `(num_relations, width)`."""

    def back(self, vectors: Array) -> Array:
        """Vectors `(num_relations, width)`, each by the transpose of a map → their sum `(width,)`."""


def maps_of(model: BilinearModel, relations: Tensor, side: Side) -> Maps:
    """Those of heads or of tails."""
    if isinstance(model, DiagonalModel):
        return Products(model, relations, side)
    return Matrices(model, relations, side)


class Matrices:
    """Any maps, by their matrices: where each takes the unit vectors."""

    @torch.no_grad()
    def __init__(self, model: BilinearModel, relations: Tensor, side: Side) -> None:
        width = model.head_table.shape[1]
        units = torch.eye(width, device=relations.device, dtype=model.head_table.dtype).repeat(len(relations), 1)
        there = model.map_head if side == "head" else model.map_tail
        self._matrices = as_array(there(units, relations.repeat_interleave(width))).reshape(-1, width, width)

    def __call__(self, vector: Array) -> Array:
        return np.stack([vector @ matrix for matrix in self._matrices])

    def back(self, vectors: Array) -> Array:
        found: Array = sum(matrix @ vector for matrix, vector in zip(self._matrices, vectors, strict=True))
        return found


class Products:
    """Products of coordinates; with so few, NumPy is done before PyTorch has begun."""

    def __init__(self, model: DiagonalModel, relations: Tensor, side: Side) -> None:
        self._model = model
        multipliers = self._parts(as_array(model.multipliers[relations]))
        rotated = np.stack(model.conjugate(multipliers))
        self._there = multipliers if side == "head" else rotated
        self._back = rotated if side == "head" else multipliers

    def __call__(self, vector: Array) -> Array:
        return self._times(vector[None], self._there)

    def back(self, vectors: Array) -> Array:
        found: Array = self._times(vectors, self._back).sum(0)
        return found

    def _times(self, vectors: Array, multipliers: Array) -> Array:
        return np.concatenate(self._model.times(self._parts(vectors), multipliers), axis=1)

    def _parts(self, vectors: Array) -> Array:
        """`(n, width)` → `(numbers_per_coordinate, n, num_coordinates)`."""
        return vectors.reshape(len(vectors), self._model.numbers_per_coordinate, -1).swapaxes(0, 1)


FEW = 512
ONE_BY_ONE = 4
SMALLEST = 1e-30


def are_few(candidates: Tensor | Array) -> bool:
    return len(candidates) <= FEW


@dataclass(frozen=True, eq=False)
class Few:
    """The likeliest candidates `(num_chosen, width)`, and for each image one that stands for all the others.

    That one is their mean, `means` `(num_images, width)`; `weights` `(num_images,)` are added to its scores, so that it
    counts for their sum. For the images that they were chosen by, log-sums and their gradients are those of all. For
    others log-sums are below those of all: exp of a mean is below the mean of exp.
    """

    chosen: Array
    means: Array
    weights: Array

    @classmethod
    def of(cls, candidates: Tensor, images: Tensor) -> Few:
        """Choose among candidates `(num_candidates, width)`; where they are no more than `FEW`, all of them."""
        if are_few(candidates):
            nothing = torch.full_like(images[:, 0], -torch.inf)
            return cls(as_array(candidates), as_array(torch.zeros_like(images)), as_array(nothing))
        chances = _times(candidates, images)
        sums = chances.logsumexp(1)
        chances.sub_(sums[:, None]).exp_()
        best = chances.amax(0).topk(FEW, sorted=False).indices
        chances[:, best] = 0.0
        shares = chances.sum(1).clamp(min=SMALLEST)
        means = _times(candidates.T, chances) / shares[:, None]
        weights = sums + shares.log() - (images * means).sum(1)
        return cls(as_array(candidates[best]), as_array(means), as_array(weights))

    def __call__(self, images: Array) -> tuple[Array, Array]:
        """Images `(num_images, width)` → log-sums `(num_images,)`, and their gradients `(num_images, width)`.

        A gradient is the mean of the rivals, each as likely as its score makes it.
        """
        # One image at a time: a product of few with few is not worth its threads, which NumPy's own would be beside
        # those of PyTorch.
        scores = np.stack([self.chosen @ image for image in images])
        rest = (images * self.means).sum(1) + self.weights
        top = np.maximum(scores.max(1), rest)
        scores -= top[:, None]
        likely, of_rest = np.exp(scores, out=scores), np.exp(rest - top)
        totals = likely.sum(1) + of_rest
        means = np.stack([shares @ self.chosen for shares in likely]) + of_rest[:, None] * self.means
        return top + np.log(totals), means / totals[:, None]


def _times(table: Tensor, vectors: Tensor) -> Tensor:
    """Vectors `(n, width)` times the rows of a table `(num_rows, width)` → `(n, num_rows)`.

    The table is on the left. A product of which it is on the right is split over threads that wait for each other where
    it is a sum over many rows, and takes a hundred times as long when a core is busy with something else. A product for
    many vectors takes more than one for each of a few.
    """
    if len(vectors) > ONE_BY_ONE:
        return (table @ vectors.T).T
    return torch.stack([table @ vector for vector in vectors])


SCORES_AT_ONCE = 16_000_000


def images_at_once(num_candidates: int) -> int:
    """How many images are scored at a time, so that memory is bounded."""
    return max(1, SCORES_AT_ONCE // max(num_candidates, 1))


def log_sums(images: Tensor, candidates: Tensor) -> Tensor:
    """The log-sum-exp of the scores of all candidates for each image, `(num_images,)`, in bounded memory."""
    size = images_at_once(len(candidates))
    parts = [torch.logsumexp(part @ candidates.T, dim=-1) for part in images.split(size)]  # type: ignore[no-untyped-call]
    return torch.cat(parts) if parts else images.new_zeros(0)


def log_sums_with_slopes(images: Tensor, candidates: Tensor) -> Tensor:
    """As log Σ exp(images @ candidatesᵀ) over the candidates, `(num_images,)`, with its gradient found beside it."""
    found: Tensor = _LogSums.apply(images, candidates)  # type: ignore[no-untyped-call]
    return found


class _LogSums(torch.autograd.Function):
    """The gradient is the mean of the candidates, each as likely as its score makes it.

    The table is multiplied from the left in both passes. A product that sums over all candidates row by row is split
    over threads that wait for each other, and takes a hundred times as long where a core is busy with something else.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, candidates: Tensor) -> Tensor:
        found = []
        for part in images.split(images_at_once(len(candidates))):  # type: ignore[no-untyped-call]
            scores = candidates @ part.T
            sums = scores.logsumexp(0)
            found.append((sums, (candidates.T @ scores.sub_(sums).exp_()).T))
        sums, means = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(images, candidates, means)
        return sums

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        images, candidates, means = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, which the means of the first pass do not have
            means = torch.softmax(images @ candidates.T, dim=-1) @ candidates
        return slopes[0][:, None] * means, None


FEWEST_EXAMPLES = 1_000
MOST_EXAMPLES = {"cpu": 5_000, "cuda": 50_000}  # that are looked at: of more, so many are drawn, and count for all
MOST_PRODUCTS = {"cpu": 10**11, "cuda": 10**13}  # of numbers, to score all entities for them: about a second
ALMOST_SURE = 1 - 1e-6


@dataclass(frozen=True, eq=False)
class Queries:
    """Distinct queries that ask for one side, with the log-sum-exp of the scores of all entities, and their answers.

    `given`, `images` and `sums` are of the queries, `queries` and `answers` of the examples: which query it is, and
    what answers it. Each example counts `share`.
    """

    asked: Side
    given: Tensor
    images: Tensor
    sums: Tensor
    queries: Tensor
    answers: Tensor
    share: float

    def weights_without(self, entity: int, weights: Tensor) -> Tensor:
        """How much each query counts, `(num_queries,)`: by its answers, but for what the entity asks or answers."""
        other = (self.answers != entity) & (self.given[self.queries] != entity)
        return torch.zeros_like(self.sums).index_add(0, self.queries, self.share * weights * other)

    def sums_without(self, row: Tensor) -> Tensor:
        """The log-sum-exp over all entities but the one that has this row."""
        chances = torch.exp(self.images @ row - self.sums).clamp(max=ALMOST_SURE)
        return self.sums + torch.log1p(-chances)


def num_examples(model: BilinearModel) -> int:
    """How many examples are looked at: the fewer, the more entities each is scored against, and the wider they are."""
    device = "cuda" if model.device.type == "cuda" else "cpu"
    quick = MOST_PRODUCTS[device] // max(model.head_table.numel(), 1)
    return max(FEWEST_EXAMPLES, min(MOST_EXAMPLES[device], quick))


def queries_of(model: BilinearModel, train: Triples, *, most: int | None = None) -> Iterator[Queries]:
    """Those of a training split: tails of both directions, or tails and heads where there are no reciprocals."""
    examples = with_reciprocals(train, model.shape.num_relations) if model.reciprocal else train
    chosen, most = torch.from_numpy(examples).long(), most or num_examples(model)
    if len(chosen) > most:
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:most]]
    share = len(examples) / max(len(chosen), 1) / (1 if model.reciprocal else 2)
    heads, relations, tails = chosen.to(model.device).unbind(1)
    yield _queries(model, "tail", heads, relations, tails, share=share)
    if not model.reciprocal:
        yield _queries(model, "head", tails, relations, heads, share=share)


def _queries(
    model: BilinearModel, asked: Side, given: Tensor, relations: Tensor, answers: Tensor, *, share: float
) -> Queries:
    keys, queries = torch.unique(given * model.num_relation_ids + relations, return_inverse=True)
    entities, relations = keys // model.num_relation_ids, keys % model.num_relation_ids
    if asked == "tail":
        images, candidates = model.map_head(rows(model.head_table, entities), relations), model.tail_table
    else:
        images, candidates = model.map_tail(rows(model.tail_table, entities), relations), model.head_table
    return Queries(asked, entities, images, log_sums(images, candidates), queries, answers, share)


RIDGE = 0.03  # of an example, where the regularizer leaves some direction free


@dataclass(frozen=True)
class Penalty:
    """What each example adds for the size of its vectors: the regularizer, and a ridge where that is not enough."""

    regularizer: PowerSum | None
    ridge: float

    @classmethod
    def of(cls, regularizer: Regularizer) -> Penalty:
        """Squares of heads and tails make the problem strongly convex; without them a ridge does.

        A sum of absolute values (RegP1) is not smooth, and one over all entities (UnweightedDURA) is not of examples:
        in their place there is the ridge alone.
        """
        if not depends_on_batch_only(regularizer) or regularizer.power == 1 or not regularizer.weight:
            return cls(None, RIDGE)
        shares = regularizer.term_weights
        enough = regularizer.power == 2 and min(shares.get("head", 0.0), shares.get("tail", 0.0)) > 0
        return cls(regularizer, 0.0 if enough else RIDGE)

    @property
    def quadratic(self) -> bool:
        return self.regularizer is None or self.regularizer.power == 2

    def __call__(self, f: Factors) -> Tensor:
        """Of each example, `(batch,)`."""
        size = self.ridge * (f.head.square().sum(-1) + f.tail.square().sum(-1))
        return size if self.regularizer is None else size + self.regularizer.weight * self.regularizer.per_triple(f)

    def slopes(self, f: Factors, side: Side, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum over examples, `counts` `(batch,)` of each, that have the same vector on a side and 0 on the other.

        Beside it its gradients with respect to that vector, `(width,)`, and to its images `(batch, width)`, as if these
        were made of nothing.
        """
        vectors, images = (f.head, f.mapped_head) if side == "head" else (f.tail, f.mapped_tail)
        vector = vectors[0]
        slope = (2 * self.ridge * counts.sum()) * vector
        value, of_images = 0.5 * (slope @ vector), torch.zeros_like(images)
        if self.regularizer is None:
            return value, slope, of_images
        found, counts = self.regularizer.gradients(f), len(counts) * counts  # those are of a mean
        if f"mapped_{side}" in found:
            of_images = counts[:, None] * found[f"mapped_{side}"]
        plain = counts @ found[side] if side in found else torch.zeros_like(vector)
        # Euler: x · ∇|x|ᵖ = p |x|ᵖ.
        value = value + (plain @ vector + (of_images * images).sum()) / self.regularizer.power
        return value, slope + plain, of_images


@dataclass(frozen=True, eq=False)
class FrozenContext:
    """A trained model with its train, and the rows `(num_new, num_rows, width)` of entities it does not know.

    InductiveEntities are counted on from the entities of the model. They are no candidates for the queries of others.
    `answer_weights` is empty where all answers count alike.
    """

    model: BilinearModel
    train: Triples
    penalty: Penalty
    queries: tuple[Queries, ...]
    frequency_weight: float
    answer_weights: Tensor
    inductive_entities: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, graph: Graph, *, recipe: Recipe | None = None) -> FrozenContext:
        """Of a model as it was trained; without a recipe as if by cross entropy and DURA, with the usual weights."""
        bilinear = with_adjoint(model)
        bilinear.check_shape(graph.shape)
        regularizer = build_regularizer(recipe.regularizer) if recipe else DURA(0.05, plain=0.5, mapped=1.5)
        share = recipe.loss.frequency_weight if recipe else 0.0
        context = cls(
            model=bilinear,
            train=graph.train,
            penalty=Penalty.of(regularizer),
            queries=tuple(queries_of(bilinear, graph.train)),
            frequency_weight=share,
            answer_weights=bilinear.head_table.new_empty(0),
            inductive_entities=bilinear.head_table.new_empty(
                0, 2 if bilinear.two_entity_tables else 1, bilinear.head_table.shape[1]
            ),
        )
        return replace(context, answer_weights=context._answer_weights(graph.train, graph.shape.num_entities))

    @property
    def num_known(self) -> int:
        return self.model.shape.num_entities

    @property
    def usual_triples(self) -> float:
        """How many triples an entity of train is in, on average."""
        return 2 * len(self.train) / max(self.num_known, 1)

    def with_inductive_entities(self, num_new: int, train: Triples) -> FrozenContext:
        """The same with rows of zeros for inductive_entities; `train` has their triples too."""
        fresh = self.inductive_entities.new_zeros(num_new, *self.inductive_entities.shape[1:])
        weights = self._answer_weights(train, self.num_known + num_new)
        return replace(self, inductive_entities=fresh, answer_weights=weights)

    def vectors(self, entities: Tensor, side: Side) -> Tensor:
        """The rows of entities, new or not, `(batch, width)`."""
        found = rows(self._table(side), entities.clamp(max=self.num_known - 1))
        new = entities >= self.num_known
        if bool(new.any()):
            found[new] = self.inductive_entities[entities[new] - self.num_known, 0 if side == "head" else -1]
        return found

    def rows_of(self, entity: int) -> Tensor:
        """The rows of one entity, `(num_rows, width)`: the same one as head and as tail, or two."""
        one = torch.tensor([entity], device=self.model.device)
        sides: tuple[Side, ...] = ("head", "tail") if self.model.two_entity_tables else ("head",)
        return torch.cat([self.vectors(one, side) for side in sides])

    def candidates(self, side: Side, *, without: int) -> Tensor:
        """The entities that the model knows, but for one."""
        table = self._table(side)
        return table if without >= len(table) else torch.cat([table[:without], table[without + 1 :]])

    def weights_of(self, answers: Tensor) -> Tensor:
        """How much each of these answers counts: 1, or by its frequency with 1 as the mean."""
        if not len(self.answer_weights):
            return torch.ones_like(answers, dtype=self.inductive_entities.dtype)
        return self.answer_weights[answers]

    def _answer_weights(self, train: Triples, num_entities: int) -> Tensor:
        """w(t) of the recipe's loss, over its mean: training divides by the summed weights of a batch."""
        if not self.frequency_weight:
            return self.inductive_entities.new_empty(0)
        weights = frequency_weights(train, num_entities, self.frequency_weight).to(self.inductive_entities)
        seen = torch.from_numpy(train[:, [0, 2]].reshape(-1)).long().to(weights.device)
        return weights / weights[seen].mean()

    def _table(self, side: Side) -> Tensor:
        return (self.model.head_table if side == "head" else self.model.tail_table).detach()


def with_adjoint(model: Model) -> BilinearModel:
    """The model, where its relations are linear maps with a transpose; others are refused."""
    if isinstance(model, BilinearModel) and model.has_adjoint:
        return model
    raise RequestError(
        f"The row of one entity is a convex problem of its own where a model scores by ⟨h R, t⟩: CP, DistMult, "
        f"ComplEx, RESCAL, SimplE, QuatE, or TuckER without batch_norm. This {type(model).__name__} is none of them."
    )


SIDES: tuple[Side, Side] = ("head", "tail")


@dataclass(frozen=True, eq=False)
class Role:
    """The examples in which the entity is on one side, and either asks or is asked for.

    `rivals` are the candidates `(num_candidates, width)` of one who asks, or the constants `(num_examples,)` that stand
    against one who is asked for. `apart` marks the answers that are not among the rivals.
    """

    side: Side
    asks: bool
    triples: Tensor  # which triple each example is of
    vectors: Tensor  # of the other entities, mapped, `(num_examples, width)`
    owners: Tensor  # entities, `(num_groups,)`: each once with each of its relations
    relations: Tensor
    groups: Tensor  # which entity and relation each example has
    rivals: Tensor
    apart: Tensor
    weights: Tensor
    share: float  # of a penalty that is of this example

    def losses(self, rows: Tensor, context: FrozenContext) -> Tensor:
        """Loss and penalty of each example, `(num_examples,)`, for a row `(width,)`, or one of each group."""
        f = self.factors(rows, context)
        rivals = self._rivals(f)[self.groups] if self.asks else self.rivals
        mine = f.head if self.side == "head" else f.tail
        gaps = rivals - (self.vectors * mine[self.groups]).sum(-1)
        # log(exp(rivals) + exp(score)) − score where the answer is none of the rivals; rivals − score where it is.
        losses = torch.where(self.apart, F.softplus(gaps), gaps)
        return self.weights * losses + self.share * context.penalty(f)[self.groups]

    def factors(self, rows: Tensor, context: FrozenContext) -> Factors:
        """Rows with their relations. The other entity is 0, which leaves of a penalty the part of the row."""
        f = Factors(context.model, None, self.relations, None)
        mine = rows.expand(len(self.relations), -1)
        zero = torch.zeros_like(mine)
        f.relation, f.relation_norm = zero, zero[:, 0]  # constants, which would be found again each time
        if self.side == "head":
            f.head, f.tail, f.mapped_tail = mine, zero, zero
        else:
            f.head, f.tail, f.mapped_head = zero, mine, zero
        return f

    def _rivals(self, f: Factors) -> Tensor:
        image = f.mapped_head if self.side == "head" else f.mapped_tail
        return log_sums_with_slopes(image, self.rivals)


@dataclass(frozen=True, eq=False)
class NegativeQuery:
    """An entity as a wrong answer to the queries of others: Σ weight · log(1 + exp(score − rivals))."""

    side: Side
    images: Tensor
    rivals: Tensor
    weights: Tensor

    def loss(self, rows: Tensor) -> Tensor:
        """Of a row `(width,)`, or of each of `(num_entities, width)`."""
        return F.softplus(F.linear(rows, self.images) - self.rivals) @ self.weights


@dataclass(frozen=True, eq=False)
class Problem:
    """The objective of an entity's rows `(num_rows, width)`: one row, or one as head and one as tail."""

    context: FrozenContext
    roles: tuple[Role, ...]
    negative_queries: tuple[NegativeQuery, ...]
    num_triples: int

    @classmethod
    @torch.no_grad()
    def of(cls, entity: int, triples: Tensor, context: FrozenContext, *, bystanding: float = 1.0) -> Problem:
        """Of an entity by the triples `(num_triples, 3)` that it is in; of one with itself nothing convex is left.

        `bystanding` is how much the queries of others count.
        """
        as_head, as_tail = triples[:, 0] == entity, triples[:, 2] == entity
        roles = roles_in(triples, as_head & ~as_tail, as_tail & ~as_head, context, without=entity)
        return cls(context, roles, negative_queries_of(entity, context, bystanding), len(triples))

    def losses(self, rows: Tensor) -> Tensor:
        """What each triple adds, `(num_triples,)`."""
        found = rows.new_zeros(self.num_triples)
        for role in self.roles:
            found = found.index_add(0, role.triples, role.losses(row_of(rows, role.side), self.context))
        return found

    def __call__(self, rows: Tensor) -> Tensor:
        """The objective, a scalar."""
        return self.losses(rows).sum() + sum(one.loss(row_of(rows, one.side)) for one in self.negative_queries)

    def slope(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and its gradient."""
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            value = self(rows)
            (gradient,) = torch.autograd.grad(value, rows)
        return value.detach(), gradient

    def start(self) -> Tensor:
        """Rows to begin with: the mean of the vectors that each is multiplied with."""
        rows = self.context.inductive_entities.new_zeros(self.context.inductive_entities.shape[1:])
        counts = rows.new_zeros(len(rows), 1)
        for role in self.roles:
            row_of(rows, role.side).add_(role.vectors.sum(0))
            row_of(counts, role.side).add_(len(role.vectors))
        return rows / counts.clamp(min=1)


def row_of(rows: Tensor, side: Side) -> Tensor:
    """The row as head or as tail, of rows `(…, num_rows, width)`: one, or two."""
    return rows[..., 0 if side == "head" else -1, :]


def roles_in(
    triples: Tensor, as_head: Tensor, as_tail: Tensor, context: FrozenContext, *, without: int
) -> tuple[Role, ...]:
    """The roles of the entities that are heads of these triples, and of those that are tails of those.

    `without` is an entity that is no rival; where there are several entities, one that the model does not know.
    """
    parts = _parts(triples, as_head, as_tail, context)
    return tuple(_role(part, context, without=without) for part in parts if len(part.triples))


def negative_queries_of(entity: int, context: FrozenContext, bystanding: float = 1.0) -> tuple[NegativeQuery, ...]:
    """An entity as what it is to the queries of others."""
    return tuple(_negative_query(entity, queries, context, bystanding) for queries in context.queries)


@dataclass(frozen=True)
class _Part:
    """Examples `(num_examples, 3)` of which `asked` is asked for, with an entity to be placed on `side` of each."""

    side: Side
    asked: Side
    triples: Tensor
    examples: Tensor
    share: float


def _parts(triples: Tensor, as_head: Tensor, as_tail: Tensor, context: FrozenContext) -> Iterator[_Part]:
    numbers = torch.arange(len(triples), device=triples.device)
    if not context.model.reciprocal:
        for asked in SIDES:
            yield _Part("head", asked, numbers[as_head], triples[as_head], 0.5)
            yield _Part("tail", asked, numbers[as_tail], triples[as_tail], 0.5)
        return
    rotated = triples[:, [2, 1, 0]] + triples.new_tensor([0, context.model.shape.num_relations, 0])
    for side, straight, back in zip(SIDES, (as_head, as_tail), (as_tail, as_head), strict=True):
        found, examples = torch.cat([numbers[straight], numbers[back]]), torch.cat([triples[straight], rotated[back]])
        yield _Part(side, "tail", found, examples, 1.0)


def _role(part: _Part, context: FrozenContext, *, without: int) -> Role:
    asks, num_relations = part.asked != part.side, context.model.num_relation_ids
    heads, relations, tails = part.examples.unbind(1)
    if part.side == "head":
        mine, others, vectors = heads, tails, context.model.map_tail(context.vectors(tails, "tail"), relations)
    else:
        mine, others, vectors = tails, heads, context.model.map_head(context.vectors(heads, "head"), relations)
    distinct, groups = torch.unique(mine * num_relations + relations, return_inverse=True)
    candidates = context.candidates(part.asked, without=without)
    answers = others if asks else mine
    return Role(
        side=part.side,
        asks=asks,
        triples=part.triples,
        vectors=vectors,
        owners=distinct // num_relations,
        relations=distinct % num_relations,
        groups=groups,
        rivals=candidates if asks else log_sums(vectors, candidates),
        apart=answers >= context.num_known if asks else torch.ones_like(answers, dtype=torch.bool),
        weights=part.share * context.weights_of(answers),
        share=part.share,
    )


def _negative_query(entity: int, queries: Queries, context: FrozenContext, bystanding: float) -> NegativeQuery:
    weights = bystanding * queries.weights_without(entity, context.weights_of(queries.answers))
    known = entity < context.num_known
    rivals = queries.sums_without(row_of(context.rows_of(entity), queries.asked)) if known else queries.sums
    return NegativeQuery(queries.asked, queries.images, rivals, weights)


PLACES: dict[Side, int] = {"head": 0, "tail": -1}  # of an entity's rows: one, or two

Part = Callable[[Array], tuple[float, Array]]  # what it adds for a row `(width,)`, and the gradient


@dataclass(frozen=True, eq=False)
class Near:
    """The objective and its gradient for rows `(num_rows, width)`, as a sum of parts that see one row each."""

    parts: tuple[tuple[int, Part], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, problem: Problem) -> Near:
        """Of a problem; where somebody asks, nothing is known of rivals before `looked`."""
        parts: list[tuple[int, Part]] = []
        for role in problem.roles:
            at, maps = PLACES[role.side], maps_of(problem.context.model, role.relations, role.side)
            parts += [(at, _losses(role, maps)), (at, _penalty(role, maps, problem.context))]
        for one in problem.negative_queries:
            arrays = as_array(one.images), as_array(-one.rivals), as_array(one.weights)
            parts.append((PLACES[one.side], Rising(*arrays)))
        return cls(tuple(parts))

    @property
    def is_small(self) -> bool:
        """Whether the few are all, so that it is the problem's own objective everywhere."""
        return all(part.is_small for _, part in self.parts if isinstance(part, Looking))

    @torch.no_grad()
    def looked(self, rows: Array) -> Near:
        """The same with the rivals, and the queries of others, that stand for all of them near these rows."""
        looked = [(at, part.looked(rows[at]) if isinstance(part, Looking) else part) for at, part in self.parts]
        return replace(self, parts=tuple(looked))

    def __call__(self, rows: Array) -> tuple[float, Array]:
        value, slopes = 0.0, np.zeros_like(rows)
        for at, part in self.parts:
            more, slope = part(rows[at])
            value += more
            slopes[at] += slope
        return value, slopes


@dataclass(frozen=True, eq=False)
class Rising:
    """Σ weight · log(1 + exp(⟨row, vector⟩ + constant)), and what is added to it."""

    vectors: Array
    constants: Array
    weights: Array
    more: float = 0.0

    @property
    def is_small(self) -> bool:
        return are_few(self.vectors)

    def looked(self, row: Array) -> Rising:
        """Those that rise most at this row, and one that stands for all others: as high and as steep there as they."""
        if self.is_small:
            return self
        losses, rises = softplus(_product(self.vectors, row) + self.constants)
        steep = self.weights * rises
        order = np.argpartition(steep, -FEW)
        others, chosen = order[:-FEW], order[-FEW:]
        steep[chosen] = 0
        weight, slope = self.weights[others].sum(), max(steep.sum(), SMALLEST)
        mean = _product(self.vectors.T, steep) / slope
        chance = min(slope / max(weight, SMALLEST), ALMOST_SURE)
        score = np.log(chance) - np.log1p(-chance)
        return Rising(
            np.concatenate([self.vectors[chosen], mean[None]]),
            np.append(self.constants[chosen], score - mean @ row).astype(row.dtype),
            np.append(self.weights[chosen], weight).astype(row.dtype),
            self.more + float(self.weights[others] @ losses[others] + weight * np.log1p(-chance)),
        )

    def __call__(self, row: Array) -> tuple[float, Array]:
        losses, rises = softplus(self.vectors @ row + self.constants)
        return float(self.weights @ losses) + self.more, (self.weights * rises) @ self.vectors


@dataclass(frozen=True, eq=False)
class Asking:
    """The losses of examples in which the entity asks."""

    candidates: Tensor
    maps: Maps
    vectors: Array
    groups: npt.NDArray[np.int64]
    weights: Array
    apart: npt.NDArray[np.bool_] | None  # None where all answers are among the rivals
    few: Few | None = None

    @property
    def is_small(self) -> bool:
        return are_few(self.candidates)

    def looked(self, row: Array) -> Asking:
        return replace(self, few=Few.of(self.candidates, torch.from_numpy(self.maps(row)).to(self.candidates)))

    def __call__(self, row: Array) -> tuple[float, Array]:
        if self.few is None:
            raise ValueError("the rivals have not been looked at")
        sums, means = self.few(self.maps(row))
        losses, rises = sums[self.groups] - self.vectors @ row, self.weights
        if self.apart is not None:
            softer, slower = softplus(losses)
            losses, rises = np.where(self.apart, softer, losses), rises * np.where(self.apart, slower, 1)
        counts = np.bincount(self.groups, rises, len(sums)).astype(row.dtype)
        return float(self.weights @ losses), self.maps.back(counts[:, None] * means) - rises @ self.vectors


Looking = Asking | Rising


def _losses(role: Role, maps: Maps) -> Part:
    vectors, weights = as_array(role.vectors), as_array(role.weights)
    if not role.asks:
        return Rising(-vectors, as_array(role.rivals), weights)
    apart = role.apart.cpu().numpy() if role.apart.any() else None
    return Asking(role.rivals, maps, vectors, role.groups.cpu().numpy(), weights, apart)


def _penalty(role: Role, maps: Maps, context: FrozenContext) -> Part:
    """The penalty of a role's examples. Of squares it is known once and for all by what they are multiplied with."""
    counts = role.share * torch.bincount(role.groups, minlength=len(role.relations)).to(role.vectors)

    @torch.no_grad()
    def slopes(row: Array, images: Array) -> tuple[float, Array, Array]:
        f = role.factors(torch.from_numpy(row).to(counts), context)
        setattr(f, f"mapped_{role.side}", torch.from_numpy(images).to(counts))
        value, slope, of_images = context.penalty.slopes(f, role.side, counts)
        return float(value), as_array(slope), as_array(of_images)

    def penalty(row: Array) -> tuple[float, Array]:
        value, slope, of_images = slopes(row, maps(row))
        return value, slope + maps.back(of_images)

    if not context.penalty.quadratic:
        return penalty
    ones = np.ones_like(as_array(role.vectors)[0])
    _, plain, mapped = slopes(ones, np.ones((len(counts), len(ones)), ones.dtype))

    def squares(row: Array) -> tuple[float, Array]:
        slope = plain * row + maps.back(mapped * maps(row))
        return 0.5 * float(slope @ row), slope

    if not context.model.diagonal:
        return squares
    _, curvature = squares(ones)

    def by_coordinate(row: Array) -> tuple[float, Array]:
        slope = curvature * row
        return 0.5 * float(slope @ row), slope

    return by_coordinate


def _product(table: Array, vector: Array) -> Array:
    """Of a large table with a vector, by the threads that PyTorch has anyway."""
    return as_array(torch.from_numpy(table) @ torch.from_numpy(vector))


def softplus(numbers: Array) -> tuple[Array, Array]:
    """log(1 + exp x), and its slope."""
    small = np.exp(-np.abs(numbers))
    slopes = np.where(numbers > 0, 1, small) / (1 + small)
    return np.maximum(numbers, 0) + np.log1p(small), slopes

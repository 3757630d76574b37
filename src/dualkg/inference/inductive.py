"""Embedding unseen entities by their triples, while everything the model has learned stays fixed.

A bilinear score is linear in the row of either entity, so the training loss of an entity's triples
is convex in it. `docs/inductive.md` has the derivation. Batched L-BFGS minimizes the loss.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.filters import with_reciprocals
from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.losses.softmax import frequency_weights
from dualkg.models.base import Factors, Model, Side, lookup
from dualkg.models.bilinear import BilinearModel
from dualkg.regularizers import DURA, PowerSum, Regularizer, is_power_sum
from dualkg.training.recipe import Recipe

MAX_SCORES = 16_000_000  # of a block
MIN_EXAMPLES = 1_000
MAX_EXAMPLES = {"cpu": 5_000, "cuda": 50_000}  # training examples sampled as negative queries
MAX_PRODUCTS = {
    "cpu": 10**11,
    "cuda": 10**13,
}  # multiplications to score all entities for them: about a second
MAX_PROBABILITY = 1 - 1e-6
RIDGE = 0.03  # per example, where the regularizer is not strongly convex
SIDES: tuple[Side, Side] = ("head", "tail")
HISTORY = 20  # steps that L-BFGS remembers
MAX_STEPS = 200
MAX_TRIALS = 10  # step lengths tried in a line search
TOLERANCE = {
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}  # of the gradient: about four and ten digits of a row
MAX_BATCH = 1024  # entities
MAX_ROUNDS = 5  # over entities that have triples with each other
ROUND_TOLERANCE = 1e-3  # change of the rows in a round, relative to their norm
TINY = 1e-30

History = deque[
    tuple[Tensor, Tensor, Tensor]
]  # steps, changes of the gradients, and their dot products


def with_adjoint(model: Model) -> BilinearModel:
    """Return the model if its relations are linear maps with a transpose; refuse any other."""
    if isinstance(model, BilinearModel) and model.has_adjoint:
        return model
    _ = model.embedding  # an ensemble has none, and says so
    raise RequestError(
        "Explanations and unseen entities need a model that scores by ⟨h R, t⟩: CP, DistMult, "
        f"ComplEx, RESCAL, SimplE, QuatE, or TuckER without batch_norm. {type(model).__name__} is "
        "none of them."
    )


def row_of(rows: Tensor, side: Side) -> Tensor:
    """The row as head or as tail of rows `(…, num_rows, width)`; `num_rows` is 1 where one row
    serves both sides.
    """
    return rows[..., 0 if side == "head" else -1, :]


# -- log-normalizers ---------------------------------------------------------


def log_normalizers(images: Tensor, candidates: Tensor) -> Tensor:
    """log Σ exp(images @ candidatesᵀ) over the candidates, `(num_images,)`, differentiable twice in
    the images.
    """
    if images.requires_grad:
        result: Tensor = _LogNormalizers.apply(images, candidates)  # type: ignore[no-untyped-call]
        return result
    return torch.cat(
        [
            torch.logsumexp(block @ candidates.T, dim=-1)
            for block in _blocks(images, len(candidates))
        ]
    )


def _blocks(images: Tensor, num_candidates: int) -> tuple[Tensor, ...]:
    return torch.split(images, max(1, MAX_SCORES // max(num_candidates, 1)))


class _LogNormalizers(torch.autograd.Function):
    """Computes the gradient, the mean of the candidates under the softmax, in the forward pass and
    in bounded memory.

    The candidate table is always the left factor: a product that sums over all candidates row by
    row is split over threads that wait for each other, and takes a hundred times as long when
    another process keeps a core busy.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, candidates: Tensor) -> Tensor:
        blocks = []
        for block in _blocks(images, len(candidates)):
            scores = candidates @ block.T
            normalizers = scores.logsumexp(0)
            blocks.append((normalizers, (candidates.T @ scores.sub_(normalizers).exp_()).T))
        normalizers, means = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        ctx.save_for_backward(images, candidates, means)
        return normalizers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        images, candidates, means = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need the means as a function of the images
            means = torch.softmax(images @ candidates.T, dim=-1) @ candidates
        return gradients[0][:, None] * means, None


# -- the frozen context ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NegativeQueries:
    """Distinct queries of a sample of train for one side, to which an entity to be embedded is a
    wrong answer.

    `given`, `images`, `normalizers` (of all entities) and `weights` have an entry per query;
    `queries` (an index into them) and `answers` an entry per training example. Each example has the
    weight `weight`.
    """

    target: Side
    given: Tensor
    images: Tensor
    normalizers: Tensor
    queries: Tensor
    answers: Tensor
    weight: float
    weights: Tensor

    def without(self, entity: int, context: "FrozenContext") -> Self:
        """The queries as negative ones of an entity: a known one is neither in them nor in their
        normalizers.
        """
        others = (self.answers != entity) & (self.given[self.queries] != entity)
        weights = self.weight * context.answer_weights[self.answers] * others
        normalizers = self.normalizers
        if entity < context.num_known:
            scores = self.images @ row_of(context.rows_of(entity), self.target)
            normalizers = normalizers + torch.log1p(
                -(scores - normalizers).exp().clamp(max=MAX_PROBABILITY)
            )
        weights = torch.zeros_like(normalizers).index_add(0, self.queries, weights)
        return replace(self, normalizers=normalizers, weights=weights)

    def losses(self, rows: Tensor) -> Tensor:
        """Σ weight · log(1 + exp(score − normalizer)) of each entity, `(batch,)`."""
        return (
            F.softplus(F.linear(row_of(rows, self.target), self.images) - self.normalizers)
            @ self.weights
        )


def num_examples(model: BilinearModel) -> int:
    """How many training examples to sample: the more numbers the entity table has, the fewer."""
    device = "cuda" if model.device.type == "cuda" else "cpu"
    affordable = MAX_PRODUCTS[device] // max(model.head_table.numel(), 1)
    return max(MIN_EXAMPLES, min(MAX_EXAMPLES[device], affordable))


def training_queries(
    model: BilinearModel, train: Triples, *, most: int | None = None
) -> Iterator[NegativeQueries]:
    """Queries of at most `most` sampled examples: tails in both directions, or both sides without
    reciprocals.
    """
    examples = with_reciprocals(train, model.shape.num_relations) if model.reciprocal else train
    sample = torch.from_numpy(examples).long()
    most = most or num_examples(model)
    if len(sample) > most:
        sample = sample[
            torch.randperm(len(sample), generator=torch.Generator().manual_seed(0))[:most]
        ]
    weight = len(examples) / max(len(sample), 1) / (1 if model.reciprocal else 2)
    heads, relations, tails = sample.to(model.device).unbind(1)
    targets: tuple[Side, ...] = ("tail",) if model.reciprocal else ("tail", "head")
    for target in targets:
        given, answers = (heads, tails) if target == "tail" else (tails, heads)
        keys, queries = torch.unique(
            given * model.num_relation_ids + relations, return_inverse=True
        )
        entities = keys // model.num_relation_ids
        of_queries = keys % model.num_relation_ids
        images = model.queries(entities, of_queries, target).query(target)
        normalizers = log_normalizers(
            images, model.tail_table if target == "tail" else model.head_table
        )
        weights = torch.ones_like(normalizers)
        yield NegativeQueries(
            target, entities, images, normalizers, queries, answers, weight, weights
        )


@dataclass(frozen=True)
class Penalty:
    """The regularization of one example: the model's regularizer, and a ridge where that is not
    strongly convex.
    """

    regularizer: PowerSum | None
    ridge: float

    @classmethod
    def of(cls, regularizer: Regularizer) -> Self:
        """Squares of both heads and tails make the problem strongly convex; other regularizers get
        a ridge.

        RegP1 is not smooth and UnweightedDURA is no sum over examples: the ridge replaces them.
        """
        if not is_power_sum(regularizer) or regularizer.power == 1 or not regularizer.weight:
            return cls(None, RIDGE)
        weights = regularizer.term_weights
        strongly_convex = (
            regularizer.power == 2 and min(weights.get("head", 0.0), weights.get("tail", 0.0)) > 0
        )
        return cls(regularizer, 0.0 if strongly_convex else RIDGE)

    def __call__(self, f: Factors) -> Tensor:
        """The penalty of each example, `(batch,)`."""
        terms = []
        if self.ridge:
            terms.append(self.ridge * (f.head.square().sum(-1) + f.tail.square().sum(-1)))
        if self.regularizer is not None:
            terms.append(self.regularizer.weight * self.regularizer.per_triple(f))
        return sum(terms[1:], start=terms[0])


@dataclass(frozen=True, eq=False)
class FrozenContext:
    """A trained model with its graph, and the rows `(num_new, num_rows, width)` of entities it
    lacks.

    New entities have the ids after those of the model. They are no candidates for the queries of
    other entities. `answer_weights` are the loss weights of entities as answers: 1, or by frequency
    with mean 1.
    """

    model: BilinearModel
    graph: Graph
    penalty: Penalty
    queries: tuple[NegativeQueries, ...]
    frequency_weight: float
    answer_weights: Tensor
    new_rows: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, graph: Graph, *, recipe: Recipe | None = None) -> Self:
        """The context of a model trained by a recipe; without one, by 1-vs-all and DURA with the
        usual weights.
        """
        bilinear = with_adjoint(model)
        bilinear.check_shape(graph.shape)
        table = bilinear.head_table
        context = cls(
            model=bilinear,
            graph=graph,
            penalty=Penalty.of(
                recipe.regularizer.build() if recipe else DURA(0.05, plain=0.5, mapped=1.5)
            ),
            queries=tuple(training_queries(bilinear, graph.train)),
            frequency_weight=getattr(recipe.loss, "frequency_weight", 0.0) if recipe else 0.0,
            answer_weights=table.new_empty(0),
            new_rows=table.new_empty(0, 2 if bilinear.two_entity_tables else 1, table.shape[1]),
        )
        return context.with_new_entities(0, graph.train)

    def with_new_entities(self, num_new: int, train: Triples) -> Self:
        """The context with zero rows for new entities; `train` includes their triples."""
        new_rows = self.new_rows.new_zeros(num_new, *self.new_rows.shape[1:])
        weights = new_rows.new_ones(self.num_known + num_new)
        if self.frequency_weight:  # over the mean, since training divides by the sum of a batch
            weights = frequency_weights(train, len(weights), self.frequency_weight).to(new_rows)
            entities = torch.from_numpy(train[:, [0, 2]].reshape(-1)).long().to(weights.device)
            weights = weights / weights[entities].mean()
        return replace(self, new_rows=new_rows, answer_weights=weights)

    @property
    def num_known(self) -> int:
        return self.model.shape.num_entities

    def table(self, side: Side) -> Tensor:
        return (self.model.head_table if side == "head" else self.model.tail_table).detach()

    def vectors(self, entities: Tensor, side: Side) -> Tensor:
        """The rows of entities, known or new, `(batch, width)`."""
        vectors = lookup(self.table(side), entities.clamp(max=self.num_known - 1))
        new = entities >= self.num_known
        if bool(new.any()):
            vectors[new] = row_of(self.new_rows[entities[new] - self.num_known], side)
        return vectors

    def rows_of(self, entity: int) -> Tensor:
        """The rows of one entity, `(num_rows, width)`."""
        ids = torch.tensor([entity], device=self.model.device)
        return torch.cat([self.vectors(ids, side) for side in SIDES[: self.new_rows.shape[1]]])


# -- the problem -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExampleGroup:
    """The training examples that have an entity of the batch on one side, as the query's entity or
    as its answer.

    A pair is an entity of the batch with one of its relations; several examples share it. With
    `candidates` `(num_candidates, width)` the entity is the query's; without them it is the answer,
    and `normalizers` `(num_examples,)` are the log-normalizers of the other candidates.
    """

    side: Side
    candidates: Tensor | None
    normalizers: Tensor
    positions: Tensor  # of a pair's entity in the batch, `(num_pairs,)`
    relations: Tensor  # of a pair
    pairs: Tensor  # of an example, `(num_examples,)`
    triples: Tensor  # an index: the triple that an example comes from
    vectors: Tensor  # of an example's other entity, mapped by the relation, `(num_examples, width)`
    is_extra: Tensor  # whether the answer is none of the candidates
    weights: Tensor
    penalty_weight: float

    def losses(self, rows: Tensor, context: FrozenContext) -> Tensor:
        """Loss and penalty of each example, `(num_examples,)`, for the rows of the batch `(batch,
        num_rows, width)`.
        """
        f = self._factors(row_of(rows, self.side), context)
        normalizers = self.normalizers
        if self.candidates is not None:
            images = f.mapped_head if self.side == "head" else f.mapped_tail
            normalizers = log_normalizers(images, self.candidates)[self.pairs]
        own = f.head if self.side == "head" else f.tail
        margins = normalizers - (self.vectors * own[self.pairs]).sum(-1)
        # log(exp(normalizer) + exp(score)) − score where the answer is no candidate; normalizer −
        # score where it is.
        losses = torch.where(self.is_extra, F.softplus(margins), margins)
        return self.weights * losses + self.penalty_weight * context.penalty(f)[self.pairs]

    def _factors(self, rows: Tensor, context: FrozenContext) -> Factors:
        """The pairs as factors. The other entity is 0, which leaves the part of a penalty that
        depends on the row.
        """
        f = Factors(context.model, None, self.relations, None)
        own = rows.expand(len(self.relations), -1) if len(rows) == 1 else rows[self.positions]
        zero = torch.zeros_like(own)
        f.relation = zero
        f.relation_norm = zero[:, 0]  # constants
        if self.side == "head":
            f.head = own
            f.tail = zero
            f.mapped_tail = zero
        else:
            f.head = zero
            f.tail = own
            f.mapped_head = zero
        return f

    def select(self, kept: Tensor) -> Self:
        """The examples of some entities of the batch, `kept` `(batch,)` boolean."""
        of_pairs = kept[self.positions]
        of_examples = of_pairs[self.pairs]
        return replace(
            self,
            positions=(kept.cumsum(0) - 1)[self.positions[of_pairs]],
            relations=self.relations[of_pairs],
            pairs=(of_pairs.cumsum(0) - 1)[self.pairs[of_examples]],
            normalizers=self.normalizers[of_examples]
            if self.candidates is None
            else self.normalizers,
            **{
                name: getattr(self, name)[of_examples]
                for name in ("triples", "vectors", "is_extra", "weights")
            },
        )


@dataclass(frozen=True, eq=False)
class EmbeddingProblem:
    """One convex objective per entity of a batch, in its rows `(batch, num_rows, width)`."""

    context: FrozenContext
    groups: tuple[ExampleGroup, ...]
    negative_queries: tuple[NegativeQueries, ...]
    negative_weights: Tensor  # of the negative queries, `(batch,)`
    num_triples: Tensor  # of each entity, `(batch,)`

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        entities: Tensor,
        triples: Tensor,
        context: FrozenContext,
        *,
        embedded: Tensor | None = None,
        negative_weight: float | None = None,
    ) -> Self:
        """The problem of entities by those of the triples `(num_triples, 3)` that join one of them
        to an embedded one.

        No triple may join two of the entities. All are new, or there is a single known one, which
        is then excluded from the candidates. A triple of an entity with itself is not convex and
        left out. `embedded` marks the entities that have rows (default: all). The weight of
        negative queries is by default an entity's share of the mean degree, at most 1.
        """
        num_entities = context.num_known + len(context.new_rows)
        embedded = (
            torch.ones(num_entities, dtype=torch.bool, device=triples.device)
            if embedded is None
            else embedded
        )
        position = torch.full((num_entities,), -1, device=triples.device)
        position[entities] = torch.arange(len(entities), device=triples.device)
        heads = triples[:, 0]
        tails = triples[:, 2]
        loops = heads == tails
        as_head = (position[heads] >= 0) & embedded[tails] & ~loops
        as_tail = (position[tails] >= 0) & embedded[heads] & ~loops
        members = torch.cat([heads[as_head], tails[as_tail], heads[loops & embedded[heads]]])
        degrees = torch.bincount(members, minlength=num_entities)[entities].to(context.new_rows)
        mean_degree = 2 * len(context.graph.train) / max(context.num_known, 1)
        share = (degrees / mean_degree).clamp(max=1.0) if mean_degree else torch.ones_like(degrees)
        excluded = int(entities[0]) if len(entities) == 1 else context.num_known
        groups = tuple(
            _example_groups(triples, as_head, as_tail, position, context, excluded=excluded)
        )
        negative_queries = tuple(queries.without(excluded, context) for queries in context.queries)
        weights = share if negative_weight is None else torch.full_like(share, negative_weight)
        return cls(context, groups, negative_queries, weights, degrees)

    def triple_losses(self, rows: Tensor, num_triples: int) -> Tensor:
        """The loss and penalty of each of the triples that the problem was made of,
        `(num_triples,)`.
        """
        losses = rows.new_zeros(num_triples)
        for group in self.groups:
            losses = losses.index_add(0, group.triples, group.losses(rows, self.context))
        return losses

    def __call__(self, rows: Tensor) -> Tensor:
        """The objectives, `(batch,)`."""
        objectives = torch.zeros_like(self.num_triples)
        for group in self.groups:
            losses = group.losses(rows, self.context)
            objectives = objectives.index_add(0, group.positions[group.pairs], losses)
        for queries in self.negative_queries:
            objectives = objectives + self.negative_weights * queries.losses(rows)
        return objectives

    def value_and_gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objectives per triple, and the gradient of each in its own rows."""
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            values = self(rows) / self.num_triples.clamp(min=1)
            (gradient,) = torch.autograd.grad(values.sum(), rows)
        return values.detach(), gradient

    def start(self) -> Tensor:
        """Initial rows: the mean of the vectors that each is multiplied with."""
        rows = self.context.new_rows.new_zeros(
            len(self.num_triples), *self.context.new_rows.shape[1:]
        )
        counts = rows.new_zeros(*rows.shape[:2], 1)
        for group in self.groups:
            positions = group.positions[group.pairs]
            row_of(rows, group.side).index_add_(0, positions, group.vectors)
            row_of(counts, group.side).index_add_(
                0, positions, torch.ones_like(group.vectors[:, :1])
            )
        return rows / counts.clamp(min=1)

    def select(self, kept: Tensor) -> Self:
        """The problem of some entities of the batch, `kept` `(batch,)` boolean."""
        return replace(
            self,
            groups=tuple(group.select(kept) for group in self.groups),
            negative_weights=self.negative_weights[kept],
            num_triples=self.num_triples[kept],
        )


def _example_groups(
    triples: Tensor,
    as_head: Tensor,
    as_tail: Tensor,
    position: Tensor,
    context: FrozenContext,
    *,
    excluded: int,
) -> Iterator[ExampleGroup]:
    """Examples of the triples whose heads, and whose tails, are in the batch, for every query that
    training makes.
    """
    model = context.model
    numbers = torch.arange(len(triples), device=triples.device)
    inverse = triples[:, [2, 1, 0]] + triples.new_tensor([0, model.shape.num_relations, 0])
    weight = (
        1.0 if model.reciprocal else 0.5
    )  # without reciprocal relations each triple makes two queries
    targets: tuple[Side, ...] = ("tail",) if model.reciprocal else SIDES
    for target, side in product(targets, SIDES):
        own, other = (as_head, as_tail) if side == "head" else (as_tail, as_head)
        sources = numbers[own]
        examples = triples[own]
        if model.reciprocal:
            sources = torch.cat([sources, numbers[other]])
            examples = torch.cat([examples, inverse[other]])
        if not len(examples):
            continue
        heads, relations, tails = examples.unbind(1)
        if side == "head":
            entities = heads
            others = tails
            vectors = model.map_tail(context.vectors(tails, "tail"), relations)
        else:
            entities = tails
            others = heads
            vectors = model.map_head(context.vectors(heads, "head"), relations)
        distinct, pairs = torch.unique(
            entities * model.num_relation_ids + relations, return_inverse=True
        )
        is_query, answers = (True, others) if target != side else (False, entities)
        candidates = context.table(target)
        if excluded < len(candidates):
            candidates = torch.cat([candidates[:excluded], candidates[excluded + 1 :]])
        yield ExampleGroup(
            side=side,
            candidates=candidates if is_query else None,
            normalizers=vectors.new_empty(0) if is_query else log_normalizers(vectors, candidates),
            positions=position[distinct // model.num_relation_ids],
            relations=distinct % model.num_relation_ids,
            pairs=pairs,
            triples=sources,
            vectors=vectors,
            is_extra=answers >= context.num_known
            if is_query
            else torch.ones_like(answers, dtype=torch.bool),
            weights=weight * context.answer_weights[answers],
            penalty_weight=weight,
        )


# -- the solver --------------------------------------------------------------


@torch.no_grad()
def minimize(problem: EmbeddingProblem, start: Tensor, *, tolerance: float | None = None) -> Tensor:
    """Minimize the objectives of a batch from points `(batch, …)`, by L-BFGS.

    One has converged when no number of its gradient is above the tolerance: its point stays, and it
    is no longer evaluated once a quarter has converged. A convex function falls along a line up to
    its minimum, so a step is judged by its slope, which rounding hurts less than the value.
    """
    tolerance = tolerance or TOLERANCE[start.dtype]
    minima = start.clone()
    points = start
    active = torch.arange(len(start), device=start.device)
    history: History = deque(maxlen=HISTORY)
    values, gradients = problem.value_and_gradient(points)
    for _ in range(MAX_STEPS):
        converged = gradients.flatten(1).abs().amax(1) <= tolerance
        if bool(converged.all()):
            break
        if 4 * int(converged.sum()) >= len(converged):
            minima[active] = points
            kept = ~converged
            problem = problem.select(kept)
            active = active[kept]
            converged = converged[kept]
            points = points[kept]
            values = values[kept]
            gradients = gradients[kept]
            history = deque(
                ((step[kept], change[kept], dot[kept]) for step, change, dot in history),
                maxlen=HISTORY,
            )
        directions = -_inverse_hessian(gradients, history)
        directions[converged] = 0.0
        slopes = _dot(gradients, directions)
        lengths = torch.ones_like(values)
        if not history:
            lengths = (1 / gradients.flatten(1).norm(dim=1).clamp(min=TINY)).clamp(max=1.0)
        for _ in range(MAX_TRIALS):
            new_points = points + _scaled(lengths, directions)
            new_values, new_gradients = problem.value_and_gradient(new_points)
            new_slopes = _dot(new_gradients, directions)
            accepted = (
                converged | (new_slopes <= 0) | (new_values - values <= 1e-4 * lengths * slopes)
            )
            if bool(accepted.all()):
                break
            # To the root of the slope by linear interpolation, but at most half way: beyond it may
            # be flat.
            lengths = torch.where(
                accepted, lengths, lengths * (slopes / (slopes - new_slopes)).clamp(0.1, 0.5)
            )
        steps = new_points - points
        changes = new_gradients - gradients
        history.append((steps, changes, _dot(steps, changes).clamp(min=TINY)))
        points = new_points
        values = new_values
        gradients = new_gradients
    minima[active] = points
    return minima


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).flatten(1).sum(1)


def _scaled(numbers: Tensor, points: Tensor) -> Tensor:
    """Points `(batch, …)` times numbers `(batch,)`."""
    return numbers.view(-1, *[1] * (points.dim() - 1)) * points


def _inverse_hessian(gradients: Tensor, history: History) -> Tensor:
    """The gradients times the inverse Hessian that past steps suggest: the two-loop recursion of
    L-BFGS.
    """
    factors = []
    for steps, changes, dots in reversed(history):
        factors.append(_dot(steps, gradients) / dots)
        gradients = gradients - _scaled(factors[-1], changes)
    if history:
        _, changes, dots = history[-1]
        gradients = _scaled(dots / _dot(changes, changes).clamp(min=TINY), gradients)
    for (steps, changes, dots), factor in zip(history, reversed(factors), strict=True):
        gradients = gradients + _scaled(factor - _dot(changes, gradients) / dots, steps)
    return gradients


def embed_entities(triples: Triples, context: FrozenContext) -> Tensor:
    """Rows `(num_new, num_rows, width)` of new entities by their triples, each connected to a known
    entity.

    An entity is embedded as soon as one of its triples has an entity that has a row. Entities that
    have triples with each other are then embedded again, in turns, until nothing moves: every turn
    lowers the same objective.
    """
    ids = torch.from_numpy(triples).long().to(context.model.device)
    rows = context.new_rows.clone()
    context = replace(context, new_rows=rows)  # later problems read the rows of earlier ones
    embedded = torch.arange(context.num_known + len(rows), device=ids.device) < context.num_known

    def embed(entities: Tensor, *, again: bool) -> None:
        for batch in entities.split(MAX_BATCH):  # type: ignore[no-untyped-call]
            problem = EmbeddingProblem.of(batch, ids, context, embedded=embedded)
            positions = batch - context.num_known
            rows[positions] = minimize(problem, rows[positions] if again else problem.start())

    ends = ids[:, [0, 2]]
    while not bool(embedded.all()):
        has_row = embedded[ends]
        ready = torch.unique(
            ends[~has_row & has_row.flip(1)]
        )  # without a row, in a triple with an entity that has one
        if not len(ready):
            raise ValueError(
                "some inductive entities have no triples that connect them to a known entity"
            )
        embed(ready, again=False)
        embedded[ready] = True
    turns = _independent_sets(ids, context.num_known)
    for _ in range(MAX_ROUNDS if turns else 0):
        before = rows.clone()
        for entities in turns:
            embed(entities, again=True)
        if float((rows - before).norm()) <= ROUND_TOLERANCE * float(before.norm()):
            break
    return rows


def _independent_sets(triples: Tensor, num_known: int) -> list[Tensor]:
    """The new entities that have triples with each other, by a greedy coloring: no two of a set
    share a triple.
    """
    ends = triples[:, [0, 2]]
    neighbours = defaultdict(set)
    for one, other in ends[(ends >= num_known).all(1) & (ends[:, 0] != ends[:, 1])].tolist():
        neighbours[one].add(other)
        neighbours[other].add(one)
    color_of: dict[int, int] = {}
    sets = defaultdict(list)
    for entity in sorted(neighbours):
        taken = {color_of[other] for other in neighbours[entity] if other in color_of}
        color_of[entity] = next(color for color in range(len(taken) + 1) if color not in taken)
        sets[color_of[entity]].append(entity)
    return [triples.new_tensor(sets[color]) for color in sorted(sets)]

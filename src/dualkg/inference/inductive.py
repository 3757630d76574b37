"""Embedding unseen entities by their triples, while everything the model has learned stays fixed.

A bilinear score is linear in the row of either entity, so the training loss of an entity's triples
is convex in it. `docs/inductive.md` has the derivation. A mapped entity is hR or tRᵀ, the vector
that scores of a query are products with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.filters import with_reciprocals
from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.losses import Loss, OneVsAll
from dualkg.models.base import Factors, Model
from dualkg.models.bilinear import BilinearModel
from dualkg.regularizers import DURA, PowerSum, Regularizer, is_power_sum
from dualkg.tables.base import Side, lookup

if TYPE_CHECKING:
    from dualkg.training.recipe import Recipe

MAX_SCORES = 2**24  # of a batch of entities, 64 MiB
HISTORY = 20  # steps of L-BFGS that are remembered
MAX_STEPS = 200
# The largest number of a gradient that counts as 0: about four and eight digits of a row.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
MIN_EXAMPLES = 1_000
# Training examples sampled as negative queries, and the multiplications to score all entities for
# them, which take about a second.
MAX_EXAMPLES = {"cpu": 5_000, "cuda": 50_000}
MAX_PRODUCTS = {"cpu": 10**11, "cuda": 10**13}
MAX_PROBABILITY = 1 - 1e-6
RIDGE = 0.03  # per example, where the regularizer is not strongly convex
SIDES: tuple[Side, Side] = ("head", "tail")
MAX_ROUNDS = 5  # over entities that have triples with each other
ROUND_TOLERANCE = 1e-3  # change of the rows in a round, relative to their norm


def with_adjoint(model: Model) -> BilinearModel:
    """Return the model if its relations are linear maps with a transpose; refuse any other."""
    if isinstance(model, BilinearModel) and model.has_adjoint:
        return model
    _ = model.embedding  # an ensemble has none, and says so
    from dualkg.models import MODELS  # with all families of models

    bilinear = [name for name, kind in MODELS.items() if issubclass(kind, BilinearModel)]
    raise RequestError(
        "Explanations and unseen entities need a model that scores by ⟨h R, t⟩: "
        f"{', '.join(bilinear)}; TuckER only without batch_norm. {type(model).__name__} is none of "
        "them. A PathNetwork also takes unseen entities."
    )


def row_of(rows: Tensor, side: Side) -> Tensor:
    """The row as head or as tail of rows `(…, num_rows, width)`.

    `num_rows` is 1 where one row serves both sides.
    """
    position = 0 if side == "head" else -1
    return rows[..., position, :]


# -- log-normalizers ---------------------------------------------------------


def log_normalizers(mapped: Tensor, candidates: Tensor) -> Tensor:
    """log Σ exp(candidates @ mapped) over the candidates, `(num_mapped,)`.

    The candidate table is the left factor of the product and of its gradient: a product that sums
    over all candidates row by row is split over threads that wait for each other, and takes a
    hundred times as long when another process keeps a core busy.
    """
    size = max(1, MAX_SCORES // max(len(candidates), 1))
    return torch.cat([(candidates @ block.T).logsumexp(0) for block in torch.split(mapped, size)])


# -- the frozen context ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NegativeQueries:
    """Distinct queries of a sample of train, to which an entity to be embedded is a wrong answer.

    `target` is the missing side. `given`, `mapped`, `normalizers` (of all entities) and `weights`
    have an entry per query; `queries` (an index into them) and `answers` an entry per training
    example. Each example has the weight `weight`.
    """

    target: Side
    given: Tensor
    mapped: Tensor
    normalizers: Tensor
    queries: Tensor
    answers: Tensor
    weight: float
    weights: Tensor

    def without(self, entity: int, context: FrozenContext) -> Self:
        """The queries as negative ones of an entity.

        A known entity is neither in them nor in their normalizers.
        """
        is_other = (self.answers != entity) & (self.given[self.queries] != entity)
        example_weights = self.weight * context.answer_weights[self.answers] * is_other
        normalizers = self.normalizers
        if entity < context.num_known:
            scores = self.mapped @ row_of(context.rows_of(entity), self.target)
            probabilities = (scores - normalizers).exp().clamp(max=MAX_PROBABILITY)
            normalizers = normalizers + torch.log1p(-probabilities)
        weights = torch.zeros_like(normalizers).index_add(0, self.queries, example_weights)
        return replace(self, normalizers=normalizers, weights=weights)

    def losses(self, rows: Tensor) -> Tensor:
        """Σ weight · log(1 + exp(score − normalizer)) of each entity, `(batch,)`."""
        scores = F.linear(row_of(rows, self.target), self.mapped)
        return F.softplus(scores - self.normalizers) @ self.weights


def num_examples(model: BilinearModel) -> int:
    """How many training examples to sample: the more numbers the entity table has, the fewer."""
    device = "cuda" if model.device.type == "cuda" else "cpu"
    affordable = MAX_PRODUCTS[device] // max(model.head_table.numel(), 1)
    return max(MIN_EXAMPLES, min(MAX_EXAMPLES[device], affordable))


def training_queries(
    model: BilinearModel, train: Triples, *, most: int | None = None
) -> Iterator[NegativeQueries]:
    """Queries of at most `most` sampled examples.

    They are tail queries in both directions, or without reciprocal relations of both sides.
    """
    examples = with_reciprocals(train, model.shape.num_relations) if model.reciprocal else train
    sample = torch.from_numpy(examples).long()
    most = most or num_examples(model)
    if len(sample) > most:
        order = torch.randperm(len(sample), generator=torch.Generator().manual_seed(0))
        sample = sample[order[:most]]
    queries_per_example = 1 if model.reciprocal else 2
    weight = len(examples) / max(len(sample), 1) / queries_per_example

    heads, relations, tails = sample.to(model.device).unbind(1)
    targets: tuple[Side, ...] = ("tail",) if model.reciprocal else ("tail", "head")
    for target in targets:
        if target == "tail":
            given = heads
            answers = tails
            candidates = model.tail_table
        else:
            given = tails
            answers = heads
            candidates = model.head_table
        pairs = given * model.num_relation_ids + relations
        distinct, queries = torch.unique(pairs, return_inverse=True)
        query_entities = distinct // model.num_relation_ids
        query_relations = distinct % model.num_relation_ids
        mapped = model.queries(query_entities, query_relations, target).query(target)
        normalizers = log_normalizers(mapped, candidates)
        yield NegativeQueries(
            target=target,
            given=query_entities,
            mapped=mapped,
            normalizers=normalizers,
            queries=queries,
            answers=answers,
            weight=weight,
            weights=torch.ones_like(normalizers),
        )


@dataclass(frozen=True)
class Penalty:
    """The regularization of one example.

    It is the regularizer of the model, and a ridge where that is not strongly convex.
    """

    regularizer: PowerSum | None
    ridge: float

    @classmethod
    def of(cls, regularizer: Regularizer) -> Self:
        """The penalty that replaces a regularizer of training.

        Squares of both heads and tails make the problem strongly convex; other regularizers get a
        ridge. RegP1 is not smooth and UnweightedDURA is no sum over examples: the ridge replaces
        them.
        """
        if not is_power_sum(regularizer) or regularizer.power == 1 or not regularizer.weight:
            return cls(None, RIDGE)
        weights = regularizer.term_weights
        has_both_sides = weights.get("head", 0.0) > 0 and weights.get("tail", 0.0) > 0
        is_strongly_convex = regularizer.power == 2 and has_both_sides
        return cls(regularizer, 0.0 if is_strongly_convex else RIDGE)

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
    """A trained model with its graph, and the rows of entities that it lacks.

    New entities have the ids after those of the model, and rows `(num_new, num_rows, width)`. They
    are no candidates for the queries of other entities. `answer_weights` are the loss weights of
    entities as answers: 1, or by frequency with mean 1.
    """

    model: BilinearModel
    graph: Graph
    penalty: Penalty
    queries: tuple[NegativeQueries, ...]
    loss: Loss
    answer_weights: Tensor
    new_rows: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, graph: Graph, *, recipe: Recipe | None = None) -> Self:
        """The context of a model trained by a recipe.

        Without a recipe, the loss is 1-vs-all, and the regularizer DURA with the usual weights.
        """
        bilinear = with_adjoint(model)
        bilinear.check_shape(graph.shape)
        regularizer: Regularizer = DURA(0.05, plain=0.5, mapped=1.5)
        loss: Loss = OneVsAll()
        if recipe is not None:
            regularizer = recipe.regularizer.build()
            loss = recipe.loss

        table = bilinear.head_table
        num_rows = 2 if bilinear.two_entity_tables else 1
        context = cls(
            model=bilinear,
            graph=graph,
            penalty=Penalty.of(regularizer),
            queries=tuple(training_queries(bilinear, graph.train)),
            loss=loss,
            answer_weights=table.new_empty(0),
            new_rows=table.new_empty(0, num_rows, table.shape[1]),
        )
        return context.with_new_entities(0, graph.train)

    def with_new_entities(self, num_new: int, train: Triples) -> Self:
        """The context with zero rows for new entities; `train` includes their triples."""
        new_rows = self.new_rows.new_zeros(num_new, *self.new_rows.shape[1:])
        weights = new_rows.new_ones(self.num_known + num_new)
        entity_weights = self.loss.entity_weights(train, len(weights))
        if entity_weights is not None:
            weights = entity_weights.to(new_rows)
            entities = torch.from_numpy(train[:, [0, 2]].reshape(-1)).long().to(weights.device)
            # Training divides by the sum of the weights of a batch.
            weights = weights / weights[entities].mean()
        return replace(self, new_rows=new_rows, answer_weights=weights)

    @property
    def num_known(self) -> int:
        return self.model.shape.num_entities

    def table(self, side: Side) -> Tensor:
        table = self.model.head_table if side == "head" else self.model.tail_table
        return table.detach()

    def vectors(self, entities: Tensor, side: Side) -> Tensor:
        """The rows of entities, known or new, `(batch, width)`."""
        vectors = lookup(self.table(side), entities.clamp(max=self.num_known - 1))
        is_new = entities >= self.num_known
        if bool(is_new.any()):
            vectors[is_new] = row_of(self.new_rows[entities[is_new] - self.num_known], side)
        return vectors

    def rows_of(self, entity: int) -> Tensor:
        """The rows of one entity, `(num_rows, width)`."""
        ids = torch.tensor([entity], device=self.model.device)
        num_rows = self.new_rows.shape[1]
        return torch.cat([self.vectors(ids, side) for side in SIDES[:num_rows]])


# -- the problem -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExampleGroup:
    """The training examples that have an entity of the batch on one side.

    A pair is an entity of the batch with one of its relations; several examples share it. With
    `candidates` `(num_candidates, width)` the entity is given by the query; without them it is the
    answer, and `normalizers` `(num_examples,)` are the log-normalizers of the other candidates.

    `positions` `(num_pairs,)` are the positions of the entities of pairs in the batch, and
    `relations` their relations. The other tensors have an entry per example: `pairs` and `triples`
    are the pair and the triple that it comes from, `vectors` the other entity, mapped by the
    relation, and `is_extra` whether the answer is none of the candidates.
    """

    side: Side
    candidates: Tensor | None
    normalizers: Tensor
    positions: Tensor
    relations: Tensor
    pairs: Tensor
    triples: Tensor
    vectors: Tensor
    is_extra: Tensor
    weights: Tensor
    penalty_weight: float

    def losses(self, rows: Tensor, context: FrozenContext) -> Tensor:
        """Loss and penalty of each example, `(num_examples,)`.

        The rows of the batch are `(batch, num_rows, width)`.
        """
        f = self._factors(row_of(rows, self.side), context)
        normalizers = self.normalizers
        if self.candidates is not None:
            mapped = f.mapped_head if self.side == "head" else f.mapped_tail
            normalizers = log_normalizers(mapped, self.candidates)[self.pairs]
        own = f.head if self.side == "head" else f.tail
        margins = normalizers - (self.vectors * own[self.pairs]).sum(-1)
        # The loss is log(exp(normalizer) + exp(score)) − score where the answer is no candidate,
        # and normalizer − score where it is one.
        losses = torch.where(self.is_extra, F.softplus(margins), margins)
        return self.weights * losses + self.penalty_weight * context.penalty(f)[self.pairs]

    def _factors(self, rows: Tensor, context: FrozenContext) -> Factors:
        """The pairs as factors.

        The other entity is 0, which leaves the part of a penalty that depends on the row.
        """
        f = Factors(context.model, None, self.relations, None)
        own = rows.expand(len(self.relations), -1) if len(rows) == 1 else rows[self.positions]
        zero = torch.zeros_like(own)
        # What depends on the relation alone is a constant of the problem.
        f.relation = zero
        f.relation_norm = zero[:, 0]
        if self.side == "head":
            f.head = own
            f.tail = zero
            f.mapped_tail = zero
        else:
            f.head = zero
            f.tail = own
            f.mapped_head = zero
        return f


@dataclass(frozen=True, eq=False)
class EmbeddingProblem:
    """One convex objective per entity of a batch, in its rows `(batch, num_rows, width)`.

    Each entity has a weight of the negative queries and a number of triples, `(batch,)` each.
    """

    context: FrozenContext
    groups: tuple[ExampleGroup, ...]
    negative_queries: tuple[NegativeQueries, ...]
    negative_weights: Tensor
    num_triples: Tensor

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
        """The problem of entities by the triples that join one of them to an embedded one.

        The triples are `(num_triples, 3)`; others of them are not used. No triple may join two of
        the entities. All are new, or there is a single known one, which is then excluded from the
        candidates. A triple of an entity with itself is not convex and left out. `embedded` marks
        the entities that have rows (default: all). The weight of negative queries is by default an
        entity's share of the mean degree, at most 1.
        """
        num_entities = context.num_known + len(context.new_rows)
        if embedded is None:
            embedded = torch.ones(num_entities, dtype=torch.bool, device=triples.device)
        position = torch.full((num_entities,), -1, device=triples.device)
        position[entities] = torch.arange(len(entities), device=triples.device)

        heads = triples[:, 0]
        tails = triples[:, 2]
        is_loop = heads == tails
        as_head = (position[heads] >= 0) & embedded[tails] & ~is_loop
        as_tail = (position[tails] >= 0) & embedded[heads] & ~is_loop

        members = torch.cat([heads[as_head], tails[as_tail], heads[is_loop & embedded[heads]]])
        degrees = torch.bincount(members, minlength=num_entities)[entities].to(context.new_rows)
        if negative_weight is None:
            weights = _shares_of_mean_degree(degrees, context)
        else:
            weights = torch.full_like(degrees, negative_weight)

        # Several entities are all new, and no new entity is among the candidates.
        excluded = int(entities[0]) if len(entities) == 1 else context.num_known
        groups = _example_groups(triples, as_head, as_tail, position, context, excluded=excluded)
        negative_queries = [queries.without(excluded, context) for queries in context.queries]
        return cls(context, tuple(groups), tuple(negative_queries), weights, degrees)

    def triple_losses(self, rows: Tensor, num_triples: int) -> Tensor:
        """The loss and penalty of each triple that the problem was made of, `(num_triples,)`."""
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

    def minimum(self, start: Tensor) -> Tensor:
        """The rows that minimize each objective, `(batch, num_rows, width)`, from a start on.

        The objectives have no rows in common, so the rows that minimize their sum minimize each.
        """
        rows = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [rows],
            max_iter=MAX_STEPS,
            history_size=HISTORY,
            tolerance_grad=TOLERANCE[rows.dtype],
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            # The sum is in float64, since the line search compares sums of many entities.
            total = (self(rows) / self.num_triples.clamp(min=1)).double().sum()
            total.backward()  # type: ignore[no-untyped-call]
            return total

        with torch.enable_grad():
            optimizer.step(loss)  # type: ignore[no-untyped-call]
        return rows.detach()

    def start(self) -> Tensor:
        """Initial rows: the mean of the vectors that each is multiplied with."""
        new_rows = self.context.new_rows
        sums = new_rows.new_zeros(len(self.num_triples), *new_rows.shape[1:])
        counts = sums.new_zeros(*sums.shape[:2], 1)
        for group in self.groups:
            positions = group.positions[group.pairs]
            ones = torch.ones_like(group.vectors[:, :1])
            row_of(sums, group.side).index_add_(0, positions, group.vectors)
            row_of(counts, group.side).index_add_(0, positions, ones)
        return sums / counts.clamp(min=1)


def _shares_of_mean_degree(degrees: Tensor, context: FrozenContext) -> Tensor:
    """The number of triples of each entity over the mean of the graph, at most 1."""
    mean_degree = 2 * len(context.graph.train) / max(context.num_known, 1)
    if not mean_degree:
        return torch.ones_like(degrees)
    return (degrees / mean_degree).clamp(max=1.0)


def _example_groups(
    triples: Tensor,
    as_head: Tensor,
    as_tail: Tensor,
    position: Tensor,
    context: FrozenContext,
    *,
    excluded: int,
) -> Iterator[ExampleGroup]:
    """Examples of the triples whose heads, and whose tails, are in the batch.

    There are examples for every query that training makes of a triple.
    """
    model = context.model
    numbers = torch.arange(len(triples), device=triples.device)
    inverse = triples[:, [2, 1, 0]] + triples.new_tensor([0, model.shape.num_relations, 0])
    # Without reciprocal relations each triple makes two queries.
    weight = 1.0 if model.reciprocal else 0.5
    targets: tuple[Side, ...] = ("tail",) if model.reciprocal else SIDES
    for target, side in product(targets, SIDES):
        is_own = as_head if side == "head" else as_tail
        sources = numbers[is_own]
        examples = triples[is_own]
        if model.reciprocal:
            is_inverse = as_tail if side == "head" else as_head
            sources = torch.cat([sources, numbers[is_inverse]])
            examples = torch.cat([examples, inverse[is_inverse]])
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

        table = context.table(target)
        if excluded < len(table):
            table = torch.cat([table[:excluded], table[excluded + 1 :]])
        candidates: Tensor | None
        if target != side:  # the query gives the entity of the batch
            answers = others
            candidates = table
            normalizers = vectors.new_empty(0)
            is_extra = answers >= context.num_known
        else:
            answers = entities
            candidates = None
            normalizers = log_normalizers(vectors, table)
            is_extra = torch.ones_like(answers, dtype=torch.bool)
        yield ExampleGroup(
            side=side,
            candidates=candidates,
            normalizers=normalizers,
            positions=position[distinct // model.num_relation_ids],
            relations=distinct % model.num_relation_ids,
            pairs=pairs,
            triples=sources,
            vectors=vectors,
            is_extra=is_extra,
            weights=weight * context.answer_weights[answers],
            penalty_weight=weight,
        )


# -- several entities --------------------------------------------------------


@torch.no_grad()
def embed_entities(triples: Triples, context: FrozenContext) -> Tensor:
    """Rows `(num_new, num_rows, width)` of new entities, each connected to a known entity.

    An entity is embedded as soon as one of its triples has an entity that has a row. Entities that
    have triples with each other are then embedded again, from each other's rows before, until
    nothing moves.
    """
    ids = torch.from_numpy(triples).long().to(context.model.device)
    rows = context.new_rows.clone()
    context = replace(context, new_rows=rows)  # later problems read the rows of earlier ones
    num_entities = context.num_known + len(rows)
    has_row = torch.arange(num_entities, device=ids.device) < context.num_known
    ends = ids[:, [0, 2]]

    def embed(entities: Tensor, *, again: bool = False) -> Tensor:
        """Rows of entities in batches whose scores fit in memory together."""
        num_triples = torch.bincount(ends.flatten(), minlength=num_entities)[entities]
        num_scores = 2 * num_triples.cumsum(0) * context.num_known
        sizes = torch.bincount(num_scores // MAX_SCORES)
        batches = torch.split(entities, sizes[sizes > 0].tolist())
        embedded = []
        for batch in batches:
            problem = EmbeddingProblem.of(batch, ids, context, embedded=has_row)
            start = rows[batch - context.num_known] if again else problem.start()
            embedded.append(problem.minimum(start))
        return torch.cat(embedded)

    while not bool(has_row.all()):
        end_has_row = has_row[ends]
        ready = torch.unique(ends[~end_has_row & end_has_row.flip(1)])
        if not len(ready):
            raise ValueError(
                "some inductive entities have no triples that connect them to a known entity"
            )
        rows[ready - context.num_known] = embed(ready)
        has_row[ready] = True

    is_pair = (ends >= context.num_known).all(1) & (ends[:, 0] != ends[:, 1])
    joined = torch.unique(ends[is_pair])
    for _ in range(MAX_ROUNDS if len(joined) else 0):
        before = rows.clone()
        rows[joined - context.num_known] = embed(joined, again=True)
        if float((rows - before).norm()) <= ROUND_TOLERANCE * float(before.norm()):
            break
    return rows

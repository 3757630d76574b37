"""The regularized problem of one entity, everything else fixed: smooth, and strongly convex.

An example is a triple (head, relation, tail) and which side of it is asked for: with reciprocal relations the tail of
both directions, without them the tail and the head. The entity is on one side of each of its examples. Its score is
⟨row, vector⟩, with the other entity's vector mapped to that side. What stands against it is the log-sum-exp of the
rivals' scores: a constant where the entity is asked for, a convex function of its row where it asks. To the queries of
others it is a wrong answer. docs/extend.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.answers.newcomers.queries import Queries
from dualkg.answers.newcomers.sums import log_sums, log_sums_with_slopes
from dualkg.answers.newcomers.surroundings import Surroundings
from dualkg.models.base import Side
from dualkg.models.factors import Factors

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

    def losses(self, rows: Tensor, around: Surroundings) -> Tensor:
        """Loss and penalty of each example, `(num_examples,)`, for a row `(width,)`, or one of each group."""
        f = self.factors(rows, around)
        rivals = self._rivals(f)[self.groups] if self.asks else self.rivals
        mine = f.head if self.side == "head" else f.tail
        gaps = rivals - (self.vectors * mine[self.groups]).sum(-1)
        # log(exp(rivals) + exp(score)) − score where the answer is none of the rivals; rivals − score where it is.
        losses = torch.where(self.apart, F.softplus(gaps), gaps)
        return self.weights * losses + self.share * around.penalty(f)[self.groups]

    def factors(self, rows: Tensor, around: Surroundings) -> Factors:
        """Rows with their relations. The other entity is 0, which leaves of a penalty the part of the row."""
        f = Factors(around.model, None, self.relations, None)
        mine = rows.expand(len(self.relations), -1)
        zero = torch.zeros_like(mine)
        f.relation, f.relation_norm = zero, zero[:, 0]  # constants, which would be found anew each time
        if self.side == "head":
            f.head, f.tail, f.mapped_tail = mine, zero, zero
        else:
            f.head, f.tail, f.mapped_head = zero, mine, zero
        return f

    def _rivals(self, f: Factors) -> Tensor:
        image = f.mapped_head if self.side == "head" else f.mapped_tail
        return log_sums_with_slopes(image, self.rivals)


@dataclass(frozen=True, eq=False)
class Bystander:
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

    around: Surroundings
    roles: tuple[Role, ...]
    bystanders: tuple[Bystander, ...]
    num_triples: int

    @classmethod
    @torch.no_grad()
    def of(cls, entity: int, triples: Tensor, around: Surroundings, *, bystanding: float = 1.0) -> Problem:
        """Of an entity by the triples `(num_triples, 3)` that it is in; of one with itself nothing convex is left.

        `bystanding` is how much the queries of others count.
        """
        as_head, as_tail = triples[:, 0] == entity, triples[:, 2] == entity
        roles = roles_in(triples, as_head & ~as_tail, as_tail & ~as_head, around, without=entity)
        return cls(around, roles, bystanders_of(entity, around, bystanding), len(triples))

    def losses(self, rows: Tensor) -> Tensor:
        """What each triple adds, `(num_triples,)`."""
        found = rows.new_zeros(self.num_triples)
        for role in self.roles:
            found = found.index_add(0, role.triples, role.losses(row_of(rows, role.side), self.around))
        return found

    def __call__(self, rows: Tensor) -> Tensor:
        """The objective, a scalar."""
        return self.losses(rows).sum() + sum(one.loss(row_of(rows, one.side)) for one in self.bystanders)

    def slope(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and its gradient."""
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            value = self(rows)
            (gradient,) = torch.autograd.grad(value, rows)
        return value.detach(), gradient

    def start(self) -> Tensor:
        """Rows to begin with: the mean of the vectors that each is multiplied with."""
        rows = self.around.newcomers.new_zeros(self.around.newcomers.shape[1:])
        counts = rows.new_zeros(len(rows), 1)
        for role in self.roles:
            row_of(rows, role.side).add_(role.vectors.sum(0))
            row_of(counts, role.side).add_(len(role.vectors))
        return rows / counts.clamp(min=1)


def row_of(rows: Tensor, side: Side) -> Tensor:
    """The row as head or as tail, of rows `(…, num_rows, width)`: one, or two."""
    return rows[..., 0 if side == "head" else -1, :]


def roles_in(
    triples: Tensor, as_head: Tensor, as_tail: Tensor, around: Surroundings, *, without: int
) -> tuple[Role, ...]:
    """The roles of the entities that are heads of these triples, and of those that are tails of those.

    `without` is an entity that is no rival; where there are several entities, one that the model does not know.
    """
    parts = _parts(triples, as_head, as_tail, around)
    return tuple(_role(part, around, without=without) for part in parts if len(part.triples))


def bystanders_of(entity: int, around: Surroundings, bystanding: float = 1.0) -> tuple[Bystander, ...]:
    """An entity as what it is to the queries of others."""
    return tuple(_bystander(entity, queries, around, bystanding) for queries in around.queries)


@dataclass(frozen=True)
class _Part:
    """Examples `(num_examples, 3)` of which `asked` is asked for, with an entity to be placed on `side` of each."""

    side: Side
    asked: Side
    triples: Tensor
    examples: Tensor
    share: float


def _parts(triples: Tensor, as_head: Tensor, as_tail: Tensor, around: Surroundings) -> Iterator[_Part]:
    numbers = torch.arange(len(triples), device=triples.device)
    if not around.model.reciprocal:
        for asked in SIDES:
            yield _Part("head", asked, numbers[as_head], triples[as_head], 0.5)
            yield _Part("tail", asked, numbers[as_tail], triples[as_tail], 0.5)
        return
    turned = triples[:, [2, 1, 0]] + triples.new_tensor([0, around.model.shape.num_relations, 0])
    for side, straight, back in zip(SIDES, (as_head, as_tail), (as_tail, as_head), strict=True):
        found, examples = torch.cat([numbers[straight], numbers[back]]), torch.cat([triples[straight], turned[back]])
        yield _Part(side, "tail", found, examples, 1.0)


def _role(part: _Part, around: Surroundings, *, without: int) -> Role:
    asks, num_relations = part.asked != part.side, around.model.num_relation_ids
    heads, relations, tails = part.examples.unbind(1)
    if part.side == "head":
        mine, others, vectors = heads, tails, around.model.map_tail(around.vectors(tails, "tail"), relations)
    else:
        mine, others, vectors = tails, heads, around.model.map_head(around.vectors(heads, "head"), relations)
    distinct, groups = torch.unique(mine * num_relations + relations, return_inverse=True)
    candidates = around.candidates(part.asked, without=without)
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
        apart=answers >= around.num_known if asks else torch.ones_like(answers, dtype=torch.bool),
        weights=part.share * around.weights_of(answers),
        share=part.share,
    )


def _bystander(entity: int, queries: Queries, around: Surroundings, bystanding: float) -> Bystander:
    weights = bystanding * queries.weights_without(entity, around.weights_of(queries.answers))
    known = entity < around.num_known
    rivals = queries.sums_without(row_of(around.rows_of(entity), queries.asked)) if known else queries.sums
    return Bystander(queries.asked, queries.images, rivals, weights)

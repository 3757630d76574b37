"""Models whose entity tables are split by rows over the processes of `torch.distributed`, a shard
on each.

Every process has the whole batch, the relations, and the rows of its shard. Rows of a batch are
fetched by an all-reduce, in which all but their owner add zeros. Each process scores its own
entities; gradients of the vectors that it scores them by are summed over all processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualkg.models.base import EmbeddingModel, Factors, Model, ScoreForm, Side, lookup
from dualkg.models.bilinear import BilinearModel

Reduction = Literal["sum", "max"]
TABLES = ("entities", "tails")  # which are split
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Shard:
    """The rows of one of `world_size` processes, of tables in a fixed order that spreads frequent
    entities.

    Entity i is row a·i mod `num_entities`, whatever the number of processes; process p has the p-th
    of equal parts of the rows, of which the last may be shorter or empty.
    """

    num_entities: int
    rank: int = 0
    world_size: int = 1

    @cached_property
    def multiplier(self) -> int:
        """a, near the golden section of the number of entities, and prime to it."""
        found = max(1, round(GOLDEN * self.num_entities))
        while math.gcd(found, self.num_entities) > 1:
            found += 1
        return found

    @cached_property
    def inverse(self) -> int:
        """Of a, so that row i is entity `inverse`·i mod `num_entities`."""
        return pow(self.multiplier, -1, self.num_entities) if self.num_entities > 1 else 0

    @property
    def part(self) -> int:
        return -(-self.num_entities // self.world_size)

    @property
    def first(self) -> int:
        return min(self.rank * self.part, self.num_entities)

    @property
    def size(self) -> int:
        """The number of rows of this process."""
        return min((self.rank + 1) * self.part, self.num_entities) - self.first

    def rows(self, ids: Tensor) -> Tensor:
        """The row of each entity in the whole tables."""
        return ids * self.multiplier % self.num_entities

    def positions(self, ids: Tensor) -> Tensor:
        """The row of each entity here, −1 for those of other processes."""
        rows = self.rows(ids) - self.first
        return torch.where((rows >= 0) & (rows < self.size), rows, -1)

    def entities(self, rows: Tensor) -> Tensor:
        """The entity of each row of the whole tables."""
        return rows * self.inverse % max(self.num_entities, 1)

    @property
    def ids(self) -> Tensor:
        """The entity of each row here."""
        return self.entities(torch.arange(self.first, self.first + self.size))

    # -- collectives ----------------------------------------------------------

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Replace values by their sum or maximum over all processes; every process has the same
        bits.
        """
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX)
        return values

    def sum_of_all(self, values: Tensor) -> Tensor:
        """The sum over all processes, whose gradient every process has."""
        return _all_reduce(values, self, "forward")

    def for_each(self, values: Tensor) -> Tensor:
        """Values that each process uses for its own entities: their gradient is the sum over all
        processes.
        """
        return _all_reduce(values, self, "backward")

    def own_rows(self, table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
        """Rows of entities that are owned here, and zeros for others, `(batch, width)`."""
        if not len(table):  # zeros with a gradient, as on other processes
            return table.new_zeros(len(ids), table.shape[1]) + table.sum()
        positions = self.positions(ids)
        return lookup(table, positions.clamp(min=0), sparse=sparse) * (positions >= 0).unsqueeze(-1)

    def fetch(self, table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
        """Rows of entities, which any process may own, `(batch, width)`."""
        return self.sum_of_all(self.own_rows(table, ids, sparse=sparse))

    def at(self, scores: Tensor, ids: Tensor) -> Tensor:
        """The score of one entity in each row of scores of the entities of each process,
        `(batch,)`.
        """
        positions = self.positions(ids)
        if not scores.shape[1]:
            return self.sum_of_all(scores.sum(1))
        return self.sum_of_all(
            torch.where(positions >= 0, scores.gather(1, positions.clamp(min=0)[:, None])[:, 0], 0)
        )

    def weighted_sum(self, scores: Tensor, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · score over some rows of scores and entities of all processes, `(n,)` each; a
        scalar.
        """
        positions = self.positions(ids)
        found = scores.sum() * 0
        if scores.shape[1]:
            found = (
                torch.where(positions >= 0, weights, 0) * scores[rows, positions.clamp(min=0)]
            ).sum()
        return self.sum_of_all(found)

    def log_normalizers(self, scores: Tensor) -> Tensor:
        """logsumexp over the entities of all processes, `(batch,)`."""
        top = (
            scores.detach().amax(1)
            if scores.shape[1]
            else scores.new_full((len(scores),), -torch.inf)
        )
        top = self.all_reduce(top, "max")
        return top + self.sum_of_all((scores - top[:, None]).exp().sum(1)).log()

    def add_rows(self, total: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add rows to those entities of a table that are owned here."""
        if len(total):
            positions = self.positions(ids)
            total.index_add_(0, positions.clamp(min=0), rows * (positions >= 0).unsqueeze(-1))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: Shard, direction: str) -> Tensor:
        ctx.shard = shard
        ctx.direction = direction
        return (
            shard.all_reduce(values.clone()) if direction == "forward" else values.view_as(values)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.direction == "backward":
            gradient = ctx.shard.all_reduce(gradient.contiguous().clone())
        return gradient, None, None


def _all_reduce(values: Tensor, shard: Shard, direction: Literal["forward", "backward"]) -> Tensor:
    """The same values, summed over all processes in one of the two passes of autograd."""
    found: Tensor = values if shard.world_size == 1 else _AllReduce.apply(values, shard, direction)  # type: ignore[no-untyped-call]
    return found


@dataclass
class ShardedFactors(Factors):
    """Vectors of a batch that every process has; rows of entities are fetched from their owners."""

    shard: Shard

    def fresh(self) -> Factors:
        found = replace(self)
        vars(found).update(
            {name: vars(self)[name] for name in ("head", "tail") if name in vars(self)}
        )
        return found

    @cached_property
    def head(self) -> Tensor:
        return self.shard.fetch(
            self.model.head_table, self.heads, sparse=self.model.sparse_gradients
        )

    @cached_property
    def tail(self) -> Tensor:
        return self.shard.fetch(
            self.model.tail_table, self.tails, sparse=self.model.sparse_gradients
        )


class _LocalFactors(Factors):
    """The vectors of a batch as this process uses them for its own entities."""

    def __init__(self, whole: Factors, shard: Shard, parameters: dict[str, Any]) -> None:
        super().__init__(whole.model, whole.given_heads, whole.given_relations, whole.given_tails)
        self.whole = whole
        self.shard = shard
        self.parameters = parameters

    def candidates(self, ids: Tensor, *, side: Side) -> Tensor:
        """Rows of this process."""
        return self.model.rows(
            self.model.tail_table if side == "tail" else self.model.head_table, ids
        )

    def _of_whole(self, name: str) -> Tensor:
        """A vector of the batch, computed with the parameters that every process has."""
        with _replaced(self.model, self.parameters):
            return self.shard.for_each(getattr(self.whole, name))

    head = cached_property(lambda self: self._of_whole("head"))
    tail = cached_property(lambda self: self._of_whole("tail"))
    mapped_head = cached_property(lambda self: self._of_whole("mapped_head"))
    mapped_tail = cached_property(lambda self: self._of_whole("mapped_tail"))


@contextmanager
def _replaced(module: nn.Module, parameters: dict[str, Any]) -> Iterator[None]:
    """A module with other parameters under the same names for a while."""
    before = {name: module._parameters[name] for name in parameters}
    module._parameters.update(parameters)
    try:
        yield
    finally:
        module._parameters.update(before)


class ShardedModel(Model):
    """A model with the entity rows of one process. `tail_scores` and `head_scores` are of its own
    entities.
    """

    def __init__(self, model: Model, shard: Shard) -> None:
        super().__init__(model.shape, reciprocal=model.reciprocal)
        self.model = model
        self.shard = shard
        self.score_arrays = model.score_arrays
        self._leaves: dict[str, Tensor] = {}
        self._columns: slice | None = None

    @property
    def embedding(self) -> EmbeddingModel:
        return self.model.embedding

    @property
    def config(self) -> dict[str, object]:
        return self.model.config

    @property
    def score_form(self) -> ScoreForm | None:
        return self.model.score_form

    @property
    def shares_candidates(self) -> bool:
        return self.model.shares_candidates

    def entity_vectors(self) -> Tensor:
        return self.model.entity_vectors()

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        return ShardedFactors(self.embedding, heads, relations, tails, self.shard)

    @contextmanager
    def local(self, f: Factors) -> Iterator[Factors]:
        """Vectors and parameters for scores of the entities of this process, with gradients summed
        over all.
        """
        parameters = {
            name: value for name, value in self.embedding._parameters.items() if value is not None
        }
        others: dict[str, Tensor] = {
            name: value for name, value in parameters.items() if name not in TABLES
        }
        if torch.is_grad_enabled():
            # Leaves with the same values, in which the gradients by the entities of this process
            # are summed.
            self._leaves = self._leaves or {
                name: value.detach().requires_grad_() for name, value in others.items()
            }
            others = self._leaves
        if self._columns is not None:
            others = others | {
                name: table[self._columns] for name, table in parameters.items() if name in TABLES
            }
        with _replaced(self.embedding, others):
            yield _LocalFactors(f, self.shard, parameters)

    def add_local_gradients(self, regularizer_reads_tables: bool) -> None:
        """After a backward pass: sum gradients of parameters by the entities of all processes, and
        add them.

        Scores of bilinear models use their relations only to map vectors that every process has.
        """
        leaves = self._leaves
        self._leaves = {}
        if isinstance(self.model, BilinearModel) and not regularizer_reads_tables:
            return
        for name, parameter in self.embedding._parameters.items():
            if parameter is not None and name not in TABLES:
                gradient = leaves[name].grad if name in leaves else None
                gradient = self.shard.all_reduce(
                    torch.zeros_like(parameter) if gradient is None else gradient
                )
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )

    def column_blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """Ranges of at most `size` rows of this process; one empty range where it has none."""
        for start in range(0, max(self.shard.size, 1), size):
            yield start, min(start + size, self.shard.size)

    @contextmanager
    def columns(self, start: int, stop: int) -> Iterator[None]:
        """For scores of some of the entities of this process, without a gradient."""
        self._columns = slice(start, stop)
        try:
            yield
        finally:
            self._columns = None

    def triple_scores(self, f: Factors) -> Tensor:
        return self.model.triple_scores(f)

    def relation_scores(self, f: Factors) -> Tensor:
        return self.model.relation_scores(f)

    def tail_scores(self, f: Factors) -> Tensor:
        with self.local(f) as here:
            return self.model.tail_scores(here)

    def head_scores(self, f: Factors) -> Tensor:
        with self.local(f) as here:
            return self.model.head_scores(here)

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        """Each process scores the candidates that it owns."""
        positions = self.shard.positions(candidates)
        batch = len(f.relations)
        num = candidates.shape[-1]
        with self.local(f) as here:
            if candidates.dim() == 1 and self.model.shares_candidates:
                columns = (positions >= 0).nonzero().squeeze(-1)
                found = self.model.candidate_scores(here, positions[columns], side)
                return self.shard.sum_of_all(
                    found.new_zeros(batch, num).index_copy(1, columns, found)
                )
            positions = positions.expand(batch, num)
            rows, columns = (positions >= 0).nonzero(as_tuple=True)
            found = self._scores_of_pairs(here, rows, positions[rows, columns], side)
            scores = found.new_zeros(batch * num).index_copy(0, rows * num + columns, found)
        return self.shard.sum_of_all(scores.view(batch, num))

    def _scores_of_pairs(self, f: Factors, rows: Tensor, positions: Tensor, side: Side) -> Tensor:
        """The score of one entity of this process for each of some rows of the batch."""
        vectors = f.candidates(positions, side=side)
        is_tail = side == "tail"
        if isinstance(self.model, BilinearModel):
            return (lookup(f.mapped_head if is_tail else f.mapped_tail, rows) * vectors).sum(-1)
        given = lookup(f.head if is_tail else f.tail, rows)
        heads, tails = (rows, positions) if is_tail else (positions, rows)
        pairs = Factors(self.embedding, heads, f.relations[rows], tails)
        pairs.head, pairs.tail = (given, vectors) if is_tail else (vectors, given)
        return self.model.triple_scores(pairs)

"""Tables that are divided by rows over the processes of `torch.distributed`, a shard for each.

Every process has the whole batch, the relations, and the rows of its shard. Rows of a batch are
fetched by an all-reduce in which all processes but their owner add zeros. Each process scores its
own entities. Gradients of the vectors that it scores them by are summed over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualkg.kernels.scores import RankTargets, count_in_columns
from dualkg.tables.base import (
    BLOCK_ROWS,
    TABLE_NAMES,
    CountBetter,
    Draw,
    EntityScores,
    EntityTables,
    Side,
)
from dualkg.tables.local import weighted_mean
from dualkg.tables.order import RowOrder

if TYPE_CHECKING:
    from dualkg.tables.bf16 import ShardedBf16Tables
    from dualkg.tables.gradients import ShardedGradientTables

Reduction = Literal["sum", "max"]
MAX_COLUMNS = 2**20  # rows of a shard that are scored at a time in a ranking


@dataclass(frozen=True)
class Shard:
    """The rows of one process, of tables in an order that spreads frequent entities.

    The order is the same for any number of processes. Process p has the p-th of equal parts of the
    rows; the last part may be shorter or empty.
    """

    num_entities: int
    process: int = 0
    num_processes: int = 1

    @cached_property
    def order(self) -> RowOrder:
        return RowOrder(self.num_entities)

    @property
    def part(self) -> int:
        """The number of rows of every process but the last ones."""
        return -(-self.num_entities // self.num_processes)

    @property
    def first(self) -> int:
        """The first row of this process in the whole table."""
        return min(self.process * self.part, self.num_entities)

    @property
    def size(self) -> int:
        """The number of rows of this process."""
        return min((self.process + 1) * self.part, self.num_entities) - self.first

    def positions(self, ids: Tensor) -> Tensor:
        """The row of each entity in this process, −1 for those of other processes."""
        rows = self.order.rows(ids) - self.first
        return torch.where((rows >= 0) & (rows < self.size), rows, -1)

    @property
    def ids(self) -> Tensor:
        """The entity of each row of this process."""
        return self.order.entities(torch.arange(self.first, self.first + self.size))

    # -- collectives ----------------------------------------------------------

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Replace values by their sum or maximum over all processes.

        Every process has the same bits afterwards.
        """
        if self.num_processes > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX)
        return values

    def sum_of_all(self, values: Tensor) -> Tensor:
        """The sum over all processes, whose gradient every process has."""
        if self.num_processes == 1:
            return values
        total: Tensor = _SumOfAll.apply(values, self)  # type: ignore[no-untyped-call]
        return total

    def own_rows(
        self, table: Tensor, ids: Tensor, read: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Rows of entities that are owned here, and zeros for others, `(batch, width)`."""
        if not len(table):
            # Zeros with a gradient, as other processes have them.
            return table.new_zeros(len(ids), table.shape[1]) + table.sum()
        positions = self.positions(ids)
        return read(table, positions.clamp(min=0)) * (positions >= 0).unsqueeze(-1)

    def fetch(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of entities that any process may own, `(batch, width)`, without a gradient."""
        rows = self.own_rows(table, ids, lambda own, positions: own[positions])
        return self.all_reduce(rows)

    def log_normalizers(self, scores: Tensor) -> Tensor:
        """logsumexp over the entities of all processes, `(batch,)`."""
        if scores.shape[1]:
            largest = scores.detach().amax(1)
        else:
            largest = scores.new_full((len(scores),), -torch.inf)
        largest = self.all_reduce(largest, "max")
        return largest + self.sum_of_all((scores - largest[:, None]).exp().sum(1)).log()

    def add_rows(self, total: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add rows to those entities of a table that are owned here."""
        if len(total):
            positions = self.positions(ids)
            total.index_add_(0, positions.clamp(min=0), rows * (positions >= 0).unsqueeze(-1))


class _SumOfAll(torch.autograd.Function):
    """The sum over all processes in the forward pass alone: its gradient is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: Shard) -> Tensor:
        return shard.all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient, None


class _Join(torch.autograd.Function):
    """Values that each process has computed for its own rows, as a part of the whole batch.

    The values have a graph of their own, which ends at `leaves`. They come in a list, so that
    autograd does not follow it. The backward pass goes through that graph, and sums the gradients
    of the first `num_summed` leaves over all processes. The other leaves are tables, of which each
    process has its own rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        held: list[Tensor],
        leaves: Sequence[Tensor],
        num_summed: int,
        shard: Shard,
        *inputs: Tensor,
    ) -> Tensor:
        (values,) = held
        ctx.values = values
        ctx.leaves = leaves
        ctx.num_summed = num_summed
        ctx.shard = shard
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = upstream
        gradients = torch.autograd.grad(ctx.values, ctx.leaves, gradient, allow_unused=True)
        summed = []
        for leaf, slope in zip(ctx.leaves, gradients[: ctx.num_summed], strict=False):
            # A process that owns no candidate may not have used a leaf that others have used.
            own = torch.zeros_like(leaf) if slope is None else slope.contiguous().clone()
            summed.append(ctx.shard.all_reduce(own))
        return None, None, None, None, *summed, *gradients[ctx.num_summed :]


class ShardedScores(EntityScores):
    """Scores of the entities of one process, `(batch, num_rows)`."""

    def __init__(self, values: Tensor, shard: Shard) -> None:
        super().__init__(values)
        self.shard = shard

    def all_entities(self) -> Tensor:
        """Every process gets the scores of all others: a loss of one's own may do anything."""
        ids = self.shard.ids.to(self.values.device)
        empty = self.values.new_zeros(len(self.values), self.shard.num_entities)
        return self.shard.sum_of_all(empty.index_copy(1, ids, self.values))

    def cross_entropy(
        self, answers: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
    ) -> Tensor:
        losses = self.logsumexp() - (1 - smoothing) * self._at(answers)
        if smoothing:
            total = self.shard.sum_of_all(self.values.sum(1))
            losses = losses - smoothing * total / self.shard.num_entities
        return weighted_mean(losses, weights, answers)

    def logsumexp(self) -> Tensor:
        return self.shard.log_normalizers(self.values)

    def mean(self) -> Tensor:
        return self.shard.sum_of_all(self.values.sum(1)) / self.shard.num_entities

    def weighted_sum(self, rows: Tensor, entities: Tensor, weights: Tensor) -> Tensor:
        total = self.values.sum() * 0
        if self.values.shape[1]:
            positions = self.shard.positions(entities)
            own_weights = torch.where(positions >= 0, weights, 0)
            total = (own_weights * self.values[rows, positions.clamp(min=0)]).sum()
        return self.shard.sum_of_all(total)

    def _at(self, ids: Tensor) -> Tensor:
        """The score of one entity in each row, `(batch,)`."""
        if not self.values.shape[1]:
            return self.shard.sum_of_all(self.values.sum(1))
        positions = self.shard.positions(ids)
        chosen = self.values.gather(1, positions.clamp(min=0)[:, None])[:, 0]
        return self.shard.sum_of_all(torch.where(positions >= 0, chosen, 0))


class ShardedTables(EntityTables):
    """The rows of one shard."""

    def __init__(
        self,
        shard: Shard,
        *,
        device: torch.device | None = None,
        initialize: bool = True,
        block_rows: int = BLOCK_ROWS,
        capturable: bool = True,
        max_columns: int = MAX_COLUMNS,
    ) -> None:
        """`max_columns` are the rows that are scored at a time in a ranking."""
        super().__init__(
            shard.num_entities, device=device, initialize=initialize, block_rows=block_rows
        )
        self.shard = shard
        self.max_columns = max_columns
        self._capturable = capturable

    @property
    def num_rows(self) -> int:
        return self.shard.size

    @property
    def has_all_entities(self) -> bool:
        return False

    @property
    def num_holders(self) -> int:
        return self.shard.num_processes

    @property
    def columns_at_once(self) -> int:
        """The same in all processes, so that they rank the same blocks of queries."""
        return min(self.shard.part, self.max_columns)

    @property
    def capturable(self) -> bool:
        return self._capturable

    def draw(self, width: int, draw: Draw) -> Tensor:
        table = torch.zeros(self.shard.size, width, device=self.device)
        if not self.initialize:
            return table
        for ids, block in self._drawn_blocks(width, draw):
            positions = self.shard.positions(ids)
            is_own = positions >= 0
            table[positions[is_own].to(table.device)] = block[is_own].to(table.device)
        return table

    def take(self, table: Tensor) -> Tensor:
        return table if len(table) == self.shard.size else table[self.shard.ids]

    @property
    def fetches_rows(self) -> bool:
        return True

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.shard.sum_of_all(self.shard.own_rows(table, ids, self.own_rows))

    def positions(self, ids: Tensor) -> Tensor:
        return self.shard.positions(ids)

    def scores(self, values: Tensor) -> ShardedScores:
        return ShardedScores(values, self.shard)

    def count_better(
        self,
        scores_of: Callable[[slice | None], Tensor],
        known: Tensor,
        targets: RankTargets,
        *,
        count: CountBetter,
    ) -> Tensor:
        """Count in blocks of rows of each process, and add the counts of all processes."""
        blocks = list(self._row_blocks())
        rows = targets.rows
        answers = self.shard.positions(targets.answers)
        values = torch.zeros(0)
        for number, block in enumerate(blocks):
            scores = scores_of(block)
            if number == 0:
                values = torch.zeros(len(rows), dtype=scores.dtype, device=rows.device)
            if scores.shape[1]:
                # One block of one process has the score of the answer.
                is_here = (answers >= block.start) & (answers < block.stop)
                columns = (answers - block.start).clamp(0, scores.shape[1] - 1)
                values = torch.where(is_here, scores[rows, columns], values)
        self.shard.all_reduce(values)
        counts = torch.zeros(len(rows), 3, dtype=torch.int64, device=rows.device)
        for block in blocks:
            if len(blocks) > 1:
                scores = scores_of(block)

            def columns_of(ids: Tensor, block: slice = block) -> Tensor:
                positions = self.shard.positions(ids)
                is_here = (positions >= block.start) & (positions < block.stop)
                return torch.where(is_here, positions - block.start, -1)

            counts += count_in_columns(scores, values, known, targets, columns_of)
        self.shard.all_reduce(counts)
        is_finite = (counts[:, 2] == 0) & values.isfinite()
        return counts[:, :2].masked_fill(~is_finite[:, None], -1).int()

    def _row_blocks(self) -> Iterator[slice]:
        """Ranges of at most `max_columns` rows; one empty range where there are none."""
        for start in range(0, max(self.shard.size, 1), self.max_columns):
            yield slice(start, min(start + self.max_columns, self.shard.size))

    def sum(self, values: Tensor) -> Tensor:
        return self.shard.sum_of_all(values)

    def join(
        self,
        values: Tensor,
        vectors: Sequence[tuple[Tensor, Tensor]],
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> Tensor:
        trained = [(name, table) for name, table in parameters if table.requires_grad]
        replicated = [table for name, table in trained if name not in TABLE_NAMES]
        own = [table for name, table in trained if name in TABLE_NAMES]
        inputs = [whole for whole, _ in vectors] + replicated + own
        leaves = [leaf for _, leaf in vectors] + replicated + own
        num_summed = len(leaves) - len(own)
        joined: Tensor = _Join.apply([values], leaves, num_summed, self.shard, *inputs)  # type: ignore[no-untyped-call]
        return joined

    def gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter], *, squared: bool, bf16: bool
    ) -> ShardedGradientTables:
        from dualkg.tables.gradients import ShardedGradientTables

        return ShardedGradientTables(parameters, self.shard, squared=squared, bf16=bf16)

    def bf16_tables(
        self, parameters: Mapping[str, nn.Parameter], *, sums: Mapping[str, Tensor], **options: Any
    ) -> ShardedBf16Tables:
        from dualkg.tables.bf16 import ShardedBf16Tables  # It imports Triton.

        return ShardedBf16Tables(parameters, shard=self.shard, sums=sums, **options)

    def synchronize(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy from process 0: a GPU may add up in another order in each process."""
        if self.shard.num_processes == 1:
            return
        for name, value in tensors.items():
            if name not in TABLE_NAMES and value.is_cuda:
                dist.broadcast(value, src=0)

    def all_reduce(self, values: Tensor) -> Tensor:
        return self.shard.all_reduce(values)

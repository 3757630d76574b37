"""Tables that are divided by rows over the processes of `torch.distributed`, a shard for each.

Every process has the whole batch, the relations, and the rows of its shard. Rows of a batch are
fetched by an all-reduce in which all processes but their owner add zeros. Each process scores its
own entities. Gradients of the vectors that it scores them by are summed over all processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualkg.kernels.scores import RankTargets
from dualkg.tables.base import (
    BLOCK_ROWS,
    LARGEST_IN_ORDER,
    CountBetter,
    Draw,
    EntityScores,
    EntityTables,
    count_in_blocks,
)
from dualkg.tables.local import left_out, weighted_mean
from dualkg.tables.lookup import TABLE_NAMES, Side
from dualkg.tables.shard import Shard

if TYPE_CHECKING:
    from dualkg.tables.bf16 import ShardedBf16Tables, ShardedSampledTables
    from dualkg.tables.gradients import ShardedGradientTables
    from dualkg.tables.row_gradients import ShardedRowGradientTables

MAX_COLUMNS = 2**20  # rows of a shard that are scored at a time in a ranking


class _Join(torch.autograd.Function):
    """Values that each process has computed for its own rows, as a part of the whole batch.

    The values have a graph of their own, which ends at `leaves`. They come in a list, so that
    autograd does not follow it. The backward pass goes through that graph, and sums the gradients
    of the first `num_summed` leaves over all processes: `num_vectors` vectors of the batch, and the
    tables that every process has. The other leaves are tables, of which each process has its own
    rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        held: list[Tensor],
        leaves: Sequence[Tensor],
        num_vectors: int,
        num_summed: int,
        shard: Shard,
        *inputs: Tensor,
    ) -> Tensor:
        (values,) = held
        ctx.values = values
        ctx.leaves = leaves
        ctx.num_vectors = num_vectors
        ctx.num_summed = num_summed
        ctx.shard = shard
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = upstream
        gradients = torch.autograd.grad(ctx.values, ctx.leaves, gradient, allow_unused=True)
        summed = []
        for number, leaf in enumerate(ctx.leaves[: ctx.num_summed]):
            slope = gradients[number]
            # A process that owns no candidate may not have used a leaf that others have used.
            own = torch.zeros_like(leaf) if slope is None else slope.contiguous().clone()
            # A batch has some of the relations, and all of its own vectors.
            is_table = number >= ctx.num_vectors
            summed.append(ctx.shard.sum_some_rows(own) if is_table else ctx.shard.all_reduce(own))
        return None, None, None, None, None, *summed, *gradients[ctx.num_summed :]


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
        losses = self.logsumexp() - (1 - smoothing) * self.of(answers)
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

    def of(self, entities: Tensor) -> Tensor:
        if not self.values.shape[1]:
            return self.shard.sum_of_all(self.values.sum(1))
        positions = self.shard.positions(entities)
        chosen = self.values.gather(1, positions.clamp(min=0)[:, None])[:, 0]
        return self.shard.sum_of_all(torch.where(positions >= 0, chosen, 0))

    def without(self, rows: Tensor, entities: Tensor, *, but: Tensor) -> ShardedScores:
        num_columns = self.values.shape[1]
        # Entities of other processes share a last column, so that no shape depends on the batch.
        columns, kept = (
            torch.where(positions < 0, num_columns, positions)
            for positions in (self.shard.positions(entities), self.shard.positions(but))
        )
        is_left_out = left_out(num_columns + 1, rows, columns, but=kept)[:, :-1]
        return ShardedScores(self.values.masked_fill(is_left_out, -torch.inf), self.shard)


class ShardedTables(EntityTables):
    """The rows of one shard."""

    def __init__(
        self,
        shard: Shard,
        *,
        device: torch.device | None = None,
        initialize: bool = True,
        block_rows: int = BLOCK_ROWS,
        largest_in_order: int = LARGEST_IN_ORDER,
        capturable: bool = True,
        max_columns: int = MAX_COLUMNS,
    ) -> None:
        """`max_columns` are the rows that are scored at a time in a ranking."""
        super().__init__(
            shard.num_entities,
            device=device,
            initialize=initialize,
            block_rows=block_rows,
            largest_in_order=largest_in_order,
        )
        if not capturable:
            # Gloo, with which processes share a GPU, is not asked for more than all-reduces there.
            shard = replace(shard, least_bytes=sys.maxsize)
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
    def is_first(self) -> bool:
        return self.shard.process == 0

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

    def entities_of(self, rows: slice) -> Tensor:
        return self.shard.order.entities(
            torch.arange(self.shard.first + rows.start, self.shard.first + rows.stop)
        )

    def take(self, table: Tensor) -> Tensor:
        return table if len(table) == self.shard.size else table[self.shard.ids]

    @property
    def fetches_rows(self) -> bool:
        return True

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.shard.rows(table, ids, self.own_rows)

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
        return count_in_blocks(
            scores_of,
            list(self._row_blocks()),
            known,
            targets,
            positions=self.shard.positions,
            all_reduce=self.shard.all_reduce,
        )

    def _row_blocks(self) -> Iterator[slice]:
        """Ranges of at most `max_columns` rows; one empty range where there are none."""
        for start in range(0, max(self.shard.size, 1), self.max_columns):
            yield slice(start, min(start + self.max_columns, self.shard.size))

    def sum(self, values: Tensor) -> Tensor:
        return self.shard.sum_of_all(values)

    def logsumexp(self, positives: Tensor, scores: Tensor) -> Tensor:
        return self.shard.log_normalizers(scores, positives)

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
        joined: Tensor = _Join.apply(
            [values], leaves, len(vectors), num_summed, self.shard, *inputs
        )  # type: ignore[no-untyped-call]
        return joined

    def gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter], *, squared: bool, bf16: bool
    ) -> ShardedGradientTables:
        from dualkg.tables.gradients import ShardedGradientTables

        return ShardedGradientTables(parameters, self.shard, squared=squared, bf16=bf16)

    def row_gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter]
    ) -> ShardedRowGradientTables:
        from dualkg.tables.row_gradients import ShardedRowGradientTables

        return ShardedRowGradientTables(parameters, self.shard)

    def bf16_tables(
        self, parameters: Mapping[str, nn.Parameter], *, sums: Mapping[str, Tensor], **options: Any
    ) -> ShardedBf16Tables:
        from dualkg.tables.bf16 import ShardedBf16Tables  # It imports Triton.

        return ShardedBf16Tables(parameters, shard=self.shard, sums=sums, **options)

    def sampled_tables(self) -> ShardedSampledTables:
        from dualkg.tables.bf16 import ShardedSampledTables  # It imports Triton.

        return ShardedSampledTables(self.shard)

    def released(self, model: nn.Module) -> None:
        """Nothing: the tables are on the device that computes."""

    def complete_updates(self) -> None:
        """Nothing: a step ends with its updates."""

    def synchronize(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy from process 0: devices of one kind or of several may add up in another order."""
        if self.shard.num_processes == 1:
            return
        for name, value in tensors.items():
            if name not in TABLE_NAMES:
                dist.broadcast(value, src=0)

    def all_reduce(self, values: Tensor) -> Tensor:
        return self.shard.all_reduce(values)

    def share(self, values: Tensor) -> Tensor:
        if self.shard.num_processes > 1:
            dist.broadcast(values, src=0)
        return values

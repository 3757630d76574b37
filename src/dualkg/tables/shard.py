"""A shard: the rows of one process, and the collectives by which processes exchange rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["sum", "max"]
ReadRows = Callable[[Tensor, Tensor], Tensor]  # rows of a table by their positions

GOLDEN = (math.sqrt(5) - 1) / 2
# To find out which way sends fewer bytes takes a message of its own, which costs as much as 64 KiB.
LEAST_BYTES = 2**16


@dataclass(frozen=True)
class RowOrder:
    """Entity i is row a·i mod `num_entities`, which spreads frequent entities over all rows."""

    num_entities: int

    @cached_property
    def multiplier(self) -> int:
        """The factor a: near the golden section of the number of entities, and prime to it."""
        factor = max(1, round(GOLDEN * self.num_entities))
        while math.gcd(factor, self.num_entities) > 1:
            factor += 1
        return factor

    @cached_property
    def inverse(self) -> int:
        """The inverse of the factor a: row i is entity `inverse`·i mod `num_entities`."""
        return pow(self.multiplier, -1, self.num_entities) if self.num_entities > 1 else 0

    def rows(self, ids: Tensor) -> Tensor:
        """The row of each entity."""
        return ids * self.multiplier % self.num_entities

    def entities(self, rows: Tensor) -> Tensor:
        """The entity of each row."""
        return rows * self.inverse % max(self.num_entities, 1)


@dataclass(frozen=True)
class Shard:
    """The rows of one process, of tables in an order that spreads frequent entities.

    The order is the same for any number of processes. Process p has the p-th of equal parts of the
    rows; the last part may be shorter or empty. A shard that `is_whole` has the rows of all
    entities in the order of their ids, and its collectives return their arguments.
    """

    num_entities: int
    process: int = 0
    num_processes: int = 1
    least_bytes: int = LEAST_BYTES
    is_whole: bool = False

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
        if self.is_whole:
            return ids
        rows = self.order.rows(ids) - self.first
        return torch.where((rows >= 0) & (rows < self.size), rows, -1)

    def entities(self, rows: slice) -> Tensor:
        """The entities of some rows of this process."""
        if self.is_whole:
            return torch.arange(rows.start, rows.stop)
        return self.order.entities(torch.arange(self.first + rows.start, self.first + rows.stop))

    @property
    def ids(self) -> Tensor:
        """The entity of each row of this process."""
        return self.entities(slice(0, self.size))

    # -- collectives ----------------------------------------------------------

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Replace values by their sum or maximum over all processes.

        Every process has the same bits afterwards.
        """
        if self.num_processes > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX)
        return values

    def share(self, values: Tensor) -> Tensor:
        """Replace values by those of the first process."""
        if self.num_processes > 1:
            dist.broadcast(values, src=0)
        return values

    def sum_of_all(self, values: Tensor) -> Tensor:
        """The sum over all processes, whose gradient every process has."""
        if self.num_processes == 1:
            return values
        total: Tensor = _SumOfAll.apply(values, self)  # type: ignore[no-untyped-call]
        return total

    def sum_some_rows(self, gradient: Tensor) -> Tensor:
        """Replace a gradient `(rows, …)` by the sum of all processes.

        If few rows are not zero, only these are sent. Processes agree on them by a byte for each
        row.
        """
        if gradient.dim() < 2 or gradient.nbytes < self.least_bytes or self.num_processes == 1:
            return self.all_reduce(gradient)
        touched = self.all_reduce(gradient.flatten(1).any(1).byte(), "max")
        rows = touched.nonzero().squeeze(-1)
        if len(gradient) + len(rows) * gradient[0].nbytes >= gradient.nbytes:
            return self.all_reduce(gradient)
        return gradient.index_copy_(0, rows, self.all_reduce(gradient[rows]))

    def rows(self, table: Tensor, ids: Tensor, read: ReadRows) -> Tensor:
        """Rows of entities that any process may own, `(…, width)`, with a gradient.

        They are sent by their owners, if that sends fewer bytes than an all-reduce. The sizes then
        depend on the batch, so that no CUDA graph can contain it.
        """
        num_bytes = ids.numel() * table.shape[1] * table.element_size()
        if self.num_processes > 1 and num_bytes >= self.least_bytes:
            sources = RowSources.of(self, ids.flatten())
            if self.sends_rows(ids.numel(), max(sources.counts)):
                own = read(table, self.positions(ids.flatten()[sources.own]))
                received: Tensor = _ReceivedRows.apply(own, sources, self)  # type: ignore[no-untyped-call]
                return received.view(*ids.shape, table.shape[1])
        return self.sum_of_all(self.own_rows(table, ids, read))

    def sends_rows(self, num_rows: int, most_rows: int) -> bool:
        """Whether rows are sent by their owners, rather than added up with the zeros of all others.

        The process with the most of the rows has `most_rows` of them, and the others wait for it.
        """
        sent_by_owner = (self.num_processes - 1) * most_rows
        sent_by_all_reduce = 2 * (self.num_processes - 1) / self.num_processes * num_rows
        return sent_by_owner < sent_by_all_reduce

    def own_rows(self, table: Tensor, ids: Tensor, read: ReadRows) -> Tensor:
        """Rows of entities that are owned here, and zeros for others, `(batch, width)`."""
        if self.is_whole:
            return read(table, ids)
        if not len(table):
            # Zeros with a gradient, as other processes have them.
            return table.new_zeros(len(ids), table.shape[1]) + table.sum()
        positions = self.positions(ids)
        return read(table, positions.clamp(min=0)) * (positions >= 0).unsqueeze(-1)

    def fetch(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of entities that any process may own, `(batch, width)`, without a gradient."""
        return self.rows(table, ids, lambda own, positions: own[positions])

    def log_normalizers(self, scores: Tensor, positives: Tensor | None = None) -> Tensor:
        """logsumexp over the entities of all processes, `(batch,)`.

        It has one more term for each of the `positives`, which every process has.
        """
        if self.is_whole:
            if positives is not None:
                scores = torch.cat([positives[:, None], scores], 1)
            return scores.logsumexp(-1)
        if scores.shape[1]:
            largest = scores.detach().amax(1)
        else:
            largest = scores.new_full((len(scores),), -torch.inf)
        if positives is not None:
            largest = torch.maximum(largest, positives.detach())
        largest = self.all_reduce(largest, "max")
        total = self.sum_of_all((scores - largest[:, None]).exp().sum(1))
        if positives is not None:
            total = total + (positives - largest).exp()
        return largest + total.log()

    def add_rows(self, total: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add rows to those entities of a table that are owned here."""
        if self.is_whole:
            total.index_add_(0, ids, rows)
        elif len(total):
            positions = self.positions(ids)
            total.index_add_(0, positions.clamp(min=0), rows * (positions >= 0).unsqueeze(-1))


class RowSources(NamedTuple):
    """Where rows of a batch come from, of which each process sends its own to all others.

    `own` are the numbers of the rows that this process has. `places` are those of all rows among
    the received ones, of which there are `counts` from each process.
    """

    own: Tensor
    places: Tensor
    counts: list[int]

    @staticmethod
    def of(shard: Shard, ids: Tensor) -> RowSources:
        owners = shard.order.rows(ids) // shard.part
        by_owner = owners.argsort(stable=True)
        places = torch.empty_like(by_owner)
        places[by_owner] = torch.arange(len(ids), device=ids.device)
        counts = torch.bincount(owners, minlength=shard.num_processes)
        own = (owners == shard.process).nonzero().squeeze(-1)
        return RowSources(own, places, counts.tolist())


class _ReceivedRows(torch.autograd.Function):
    """Rows of all processes; the gradient of a row belongs to its owner."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sources: RowSources, shard: Shard) -> Tensor:
        ctx.own = sources.own
        sent = own.detach().repeat(shard.num_processes, 1)
        received = own.new_empty(len(sources.places), own.shape[1])
        dist.all_to_all_single(received, sent, sources.counts, [len(own)] * shard.num_processes)
        return received[sources.places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient[ctx.own], None, None


class _SumOfAll(torch.autograd.Function):
    """The sum over all processes in the forward pass alone: its gradient is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: Shard) -> Tensor:
        return shard.all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient, None

"""Tables of the step on a GPU: bfloat16 copies for products, sparse and dense gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.gpu.elementwise import RowGradients, adagrad_
from dualkg.kernels.gpu.scores import (
    Sample,
    sampled_gradient_,
    sampled_softmax_gradient_,
    sampled_sums,
    softmax_gradient_,
)
from dualkg.kernels.scores import Targets, softmax_
from dualkg.tables.base import EntityTables, lookup
from dualkg.tables.gradients import Workspace
from dualkg.tables.shard import Shard

ALIGNED = 8  # bfloat16 numbers in 16 bytes, to which tensor cores want rows aligned
TILE = 128  # rows of a table that a product takes at once


def padded_shape(rows: int, width: int) -> tuple[int, int]:
    """The shape of a table in products."""
    return -(-rows // TILE) * TILE, -(-width // ALIGNED) * ALIGNED


class Bf16Table:
    """A table, the sparse part of its gradient, and for each row the step that last added to it.

    A table whose rows are all `scored` also has a bfloat16 copy for the products, and their dense
    gradient. Both are padded, so that products are aligned.
    """

    def __init__(self, parameter: nn.Parameter, sums: Tensor, *, scored: bool) -> None:
        rows, width = parameter.shape
        device = parameter.device
        self.parameter = parameter
        self.sums = sums
        self.rows = torch.zeros(rows, width, device=device)
        self.stamps = torch.zeros(rows, dtype=torch.int32, device=device)
        self.copy: Tensor | None = None
        self.product: Tensor | None = None
        if scored:
            shape = padded_shape(rows, width)
            self.copy, self.product = torch.zeros(2, *shape, dtype=torch.bfloat16, device=device)
            self.copy[:rows, :width] = parameter.detach()
        self.scores = Workspace()
        self.mapped = Workspace()
        self.weighted = Workspace()

    @property
    def row_gradients(self) -> RowGradients:
        return RowGradients(self.parameter.detach(), self.rows, self.stamps)

    def update(self, adagrad: Mapping[str, Any]) -> None:
        """Take a step of Adagrad, with the options of its kernel."""
        adagrad_(self.row_gradients, self.sums, product=self.product, copy=self.copy, **adagrad)


class BatchRows:
    """The rows of a batch as a table of its own, in which each head and each tail has a row."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self._table: Bf16Table | None = None

    @property
    def table(self) -> Bf16Table:
        assert self._table is not None
        return self._table

    def of(self, size: int) -> Tensor:
        """Space for the rows of heads and tails, `(2, size, width)`."""
        if self._table is None or len(self._table.rows) < 2 * size:
            rows = torch.zeros(2 * size, self.width, device=self.device)
            parameter = nn.Parameter(rows, requires_grad=False)
            self._table = Bf16Table(parameter, rows, scored=False)
        return self._table.parameter.detach()[: 2 * size].view(2, size, -1)

    def gradients(self, size: int) -> Tensor:
        """The gradients of these rows, `(2, size, width)`."""
        return self.table.rows[: 2 * size].view(2, size, -1)

    @staticmethod
    def numbered(batch: Tensor) -> Tensor:
        """The triples of a batch `(batch, 3)` by the rows of this table."""
        numbers = torch.arange(len(batch), device=batch.device)
        return torch.stack([numbers, batch[:, 1], numbers + len(batch)], dim=1)


class ScoredQueries(NamedTuple):
    """Queries of one or both sides that one table is scored for.

    `scores` and `mapped` have the queries of all sides one after the other. `columns` has the
    predicted column of a triple (0 or 2), `targets` the targets and `losses` the losses of each
    side. `query` is the query of each triple.
    """

    scores: Tensor
    mapped: Tensor
    columns: Sequence[int]
    targets: Sequence[Targets]
    losses: Sequence[Tensor]
    query: Tensor


class Bf16Tables:
    """The entity tables of a model, by the names of their parameters.

    All shapes are fixed, so that the step with its collectives can be one CUDA graph.
    """

    def __init__(
        self,
        shard: Shard,
        parameters: Mapping[str, nn.Parameter],
        *,
        sums: Mapping[str, Tensor],
        scored: set[str],
    ) -> None:
        self.shard = shard
        self.tables: dict[str, Bf16Table] = {}
        for name, parameter in parameters.items():
            self.tables[name] = Bf16Table(parameter, sums[name], scored=name in scored)
        table = parameters["entities"]
        self.batch_rows = BatchRows(table.shape[1], table.device)

    def by_column(self, column: int) -> Bf16Table:
        """The table of heads (column 0 of a triple) or of tails (column 2)."""
        return self.tables["tails" if column == 2 and "tails" in self.tables else "entities"]

    def source(self, column: int) -> Bf16Table:
        """The table from which rows of heads or of tails are read: that of the batch in a shard."""
        return self.by_column(column) if self.shard.is_whole else self.batch_rows.table

    def fetch(self, batch: Tensor) -> Tensor:
        """The triples `(batch, 3)` by the rows of their heads and tails in `source`."""
        if self.shard.is_whole:
            return batch
        fetched = self.batch_rows.of(len(batch))
        for column, rows in zip((0, 2), fetched, strict=True):
            table = self.by_column(column).parameter.detach()
            own = self.shard.own_rows(table, batch[:, column], lookup)
            rows.copy_(own)
        self.shard.all_reduce(fetched)
        return self.batch_rows.numbered(batch)

    def softmax(self, table: Bf16Table, queries: ScoredQueries) -> tuple[Tensor, Tensor]:
        """Overwrite scores by their gradient, and write losses.

        Returns the gradient of the mapped vectors, and what the scores are multiplied by to give
        the gradient of the table.
        """
        if not self.shard.is_whole:
            return self._shard_softmax(table, queries)
        assert table.copy is not None
        parts = queries.scores.view(len(queries.columns), -1, queries.scores.shape[1])
        for scores, targets, losses in zip(parts, queries.targets, queries.losses, strict=True):
            softmax_gradient_(scores, targets, self.shard.size, losses)
        upstream = torch.mm(queries.scores, table.copy, out_dtype=torch.float32)
        return upstream, queries.mapped

    def _shard_softmax(self, table: Bf16Table, queries: ScoredQueries) -> tuple[Tensor, Tensor]:
        """Scale the softmax over the rows of this process by their share of the sum of all.

        The formulas are those of `DenseGradients`.
        """
        assert table.copy is not None
        scores = queries.scores
        mapped = queries.mapped
        query = queries.query
        num_sides = len(queries.columns)
        size = len(scores) // num_sides
        if self.shard.size:
            own = softmax_(scores, self._own_gradient_)
        else:
            own = torch.full((len(scores),), -torch.inf, device=scores.device)
        normalizers = self.shard.log_normalizers(own[:, None])
        totals = torch.zeros(num_sides, size, device=scores.device)
        for total, targets in zip(totals, queries.targets, strict=True):
            total.index_add_(0, query, targets.weights)
        shares = (totals.flatten() * (own - normalizers).exp())[:, None]
        upstream = torch.mm(scores, table.copy, out_dtype=torch.float32).mul_(shares)
        self.shard.all_reduce(upstream)
        weighted = table.weighted.of(len(mapped), mapped.shape[1], mapped)
        torch.mul(mapped, shares, out=weighted)

        # The terms of the targets, which are rows of the batch.
        fetched = self.batch_rows.table
        width = self.batch_rows.width
        batch_size = len(query)
        for place, column in enumerate(queries.columns):
            first = batch_size if column == 2 else 0
            rows = slice(first, first + batch_size)
            part = slice(place * size, (place + 1) * size)
            weights = queries.targets[place].weights
            vectors = fetched.parameter[rows]
            of_queries = mapped[part, :width][query].float()
            at_targets = (of_queries * vectors).sum(-1)
            losses = weights * (normalizers[part][query] - at_targets)
            queries.losses[place].index_add_(0, query, losses)
            upstream[part, :width].index_add_(0, query, -weights[:, None] * vectors)
            fetched.rows[rows].sub_(weights[:, None] * of_queries)
        return upstream, weighted

    def _own_gradient_(self, scores: Tensor, targets: Targets) -> Tensor:
        losses = torch.zeros(len(scores), device=scores.device)
        softmax_gradient_(scores, targets, self.shard.size, losses)
        return losses

    def return_gradients(self, batch: Tensor, now: Tensor) -> None:
        """Add the gradients of the rows in `source` to those of the tables."""
        if self.shard.is_whole:
            return
        size = len(batch)
        gradients = self.batch_rows.gradients(size)
        for column, rows in zip((0, 2), gradients, strict=True):
            table = self.by_column(column)
            self.shard.add_rows(table.rows, batch[:, column], rows)
            if self.shard.size:
                positions = self.shard.positions(batch[:, column])
                table.stamps[positions.clamp(min=0)] = now.expand(size)
        gradients.zero_()

    def update(self, adagrad: Mapping[str, Any]) -> None:
        for table in self.tables.values():
            table.update(adagrad)


# -- sampled softmax -----------------------------------------------------------


class OwnNegatives(NamedTuple):
    """The negatives of a batch that this process scores, `(capacity,)` each.

    `positions` are their rows in the table of this process. Padding has −1 as id and position, and
    ∞ as log count.
    """

    ids: Tensor
    positions: Tensor
    log_counts: Tensor


class SampledTables:
    """Where the rows of a sampled softmax on a GPU are read, scored and updated.

    A process scores the negatives that it has. All shapes are fixed, so that the step can be one
    CUDA graph.
    """

    def __init__(self, tables: EntityTables) -> None:
        self.tables = tables
        self.shard = tables.shard

    def positions(self, ids: Tensor) -> Tensor:
        """The row of each entity in the table of this process, −1 for rows of others."""
        return self.tables.positions(ids)

    def fetch(self, table: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Write the rows of entities into `rows`, or those of this process and zeros."""
        if self.shard.is_whole:
            torch.index_select(table, 0, self.positions(ids), out=rows)
        else:
            rows.copy_(self.shard.own_rows(table, ids, lookup))

    def own(self, negatives: Tensor, log_counts: Tensor, *, capacity: int) -> OwnNegatives:
        """Those of the negatives, `(num,)`, that this process scores: at most `capacity`."""
        positions = self.positions(negatives)
        counts = log_counts.float().expand(len(negatives))
        if self.shard.is_whole:
            return OwnNegatives(negatives, positions, counts.contiguous())
        is_own = positions >= 0
        # Those of others go to one more slot, which is cut off.
        slots = torch.where(is_own, is_own.cumsum(0) - 1, capacity)
        own_ids = torch.full((capacity + 1,), -1, device=negatives.device)
        own_positions = own_ids.clone()
        corrections = torch.full((capacity + 1,), torch.inf, device=negatives.device)
        own_ids.scatter_(0, slots, negatives)
        own_positions.scatter_(0, slots, positions)
        corrections.scatter_(0, slots, counts)
        return OwnNegatives(own_ids[:capacity], own_positions[:capacity], corrections[:capacity])

    def rows_of(self, table: Tensor, negatives: OwnNegatives) -> Tensor:
        """The rows of own negatives, and any numbers for padding."""
        if self.shard.is_whole:
            return table[negatives.positions]
        if not len(table):
            return table.new_zeros(len(negatives.positions), table.shape[1])
        return table[negatives.positions.clamp(min=0)]

    def softmax_(
        self, scores: Tensor, answer_scores: Tensor, sample: Sample, weights: Tensor, losses: Tensor
    ) -> Tensor:
        """The kernel `sampled_softmax_gradient_` for the negatives of all processes.

        Processes exchange the largest score of each query, and the sum of exponentials relative to
        it.
        """
        if self.shard.is_whole:
            return sampled_softmax_gradient_(scores, answer_scores, sample, weights, losses)
        own_tops, totals = sampled_sums(scores, answer_scores, sample)
        tops = self.shard.all_reduce(own_tops.clone(), "max")
        self.shard.all_reduce(totals.mul_((own_tops - tops).exp_()))
        normalizers = tops + totals.add_((answer_scores - tops).exp_()).log_()
        sampled_gradient_(scores, normalizers, sample, weights)
        losses.copy_(weights * (normalizers - answer_scores))
        return weights * ((answer_scores - normalizers).exp_() - 1)

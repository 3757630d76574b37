"""Tables of the bfloat16 step on a GPU: copies for products, sparse and dense gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.gpu.elementwise import RowGradients, adagrad_
from dualkg.kernels.gpu.scores import softmax_gradient_
from dualkg.kernels.scores import Targets, softmax_
from dualkg.tables.gradients import Workspace
from dualkg.tables.lookup import lookup
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


class Bf16Tables(ABC):
    """The entity tables of a model, by the names of their parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        sums: Mapping[str, Tensor],
        scored: set[str],
        num_entities: int,
    ) -> None:
        self.num_entities = num_entities
        self.tables: dict[str, Bf16Table] = {}
        for name, parameter in parameters.items():
            self.tables[name] = Bf16Table(parameter, sums[name], scored=name in scored)

    def by_column(self, column: int) -> Bf16Table:
        """The table of heads (column 0 of a triple) or of tails (column 2)."""
        return self.tables["tails" if column == 2 and "tails" in self.tables else "entities"]

    @abstractmethod
    def source(self, column: int) -> Bf16Table:
        """The table from which rows of heads or of tails are read."""

    @abstractmethod
    def fetch(self, batch: Tensor) -> Tensor:
        """The triples `(batch, 3)` by the rows of their heads and tails in `source`."""

    @abstractmethod
    def softmax(self, table: Bf16Table, queries: ScoredQueries) -> tuple[Tensor, Tensor]:
        """Overwrite scores by their gradient, and write losses.

        Returns the gradient of the mapped vectors, and what the scores are multiplied by to give
        the gradient of the table.
        """

    @abstractmethod
    def return_gradients(self, batch: Tensor, now: Tensor) -> None:
        """Add the gradients of the rows in `source` to those of the tables."""

    def update(self, adagrad: Mapping[str, Any]) -> None:
        for table in self.tables.values():
            table.update(adagrad)


class LocalBf16Tables(Bf16Tables):
    """Tables with the rows of all entities."""

    def source(self, column: int) -> Bf16Table:
        return self.by_column(column)

    def fetch(self, batch: Tensor) -> Tensor:
        return batch

    def softmax(self, table: Bf16Table, queries: ScoredQueries) -> tuple[Tensor, Tensor]:
        assert table.copy is not None
        parts = queries.scores.view(len(queries.columns), -1, queries.scores.shape[1])
        for scores, targets, losses in zip(parts, queries.targets, queries.losses, strict=True):
            softmax_gradient_(scores, targets, self.num_entities, losses)
        upstream = torch.mm(queries.scores, table.copy, out_dtype=torch.float32)
        return upstream, queries.mapped

    def return_gradients(self, batch: Tensor, now: Tensor) -> None:
        """Nothing: the rows are those of the tables."""


class ShardedBf16Tables(Bf16Tables):
    """Tables with the rows of one process, by the formulas of `ShardedGradientTables`.

    All shapes are fixed, so that the step with its collectives can be one CUDA graph.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, shard: Shard, **options: Any
    ) -> None:
        super().__init__(parameters, **options)
        self.shard = shard
        table = parameters["entities"]
        self.batch_rows = BatchRows(table.shape[1], table.device)

    def source(self, column: int) -> Bf16Table:
        return self.batch_rows.table

    def fetch(self, batch: Tensor) -> Tensor:
        fetched = self.batch_rows.of(len(batch))
        for column, rows in zip((0, 2), fetched, strict=True):
            table = self.by_column(column).parameter.detach()
            own = self.shard.own_rows(table, batch[:, column], lookup)
            rows.copy_(own)
        self.shard.all_reduce(fetched)
        return self.batch_rows.numbered(batch)

    def softmax(self, table: Bf16Table, queries: ScoredQueries) -> tuple[Tensor, Tensor]:
        """Scale the softmax over the rows of this process by their share of the sum of all."""
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
        size = len(batch)
        gradients = self.batch_rows.gradients(size)
        for column, rows in zip((0, 2), gradients, strict=True):
            table = self.by_column(column)
            self.shard.add_rows(table.rows, batch[:, column], rows)
            if self.shard.size:
                positions = self.shard.positions(batch[:, column])
                table.stamps[positions.clamp(min=0)] = now.expand(size)
        gradients.zero_()

"""Tables of the fused step of a sampled softmax: gradients of the rows that a batch reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.scores import Targets
from dualkg.tables.gradients import BatchTables
from dualkg.tables.lookup import Side
from dualkg.tables.shard import Shard


class Negatives(NamedTuple):
    """Negatives that a batch shares.

    `ids` are distinct and ascending. `offsets` are added to their scores.
    """

    ids: Tensor
    offsets: Tensor

    def hits(self, answers: Tensor) -> Tensor:
        """The position of each answer among them, or −1."""
        if not len(self.ids):
            return torch.full_like(answers, -1)
        positions = torch.searchsorted(self.ids, answers.contiguous()).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[positions] == answers, positions, -1)


class RowGradientTables(ABC):
    """The entity tables of a model by side, and gradients of the rows that a batch reads.

    They are for losses over sampled entities, where most rows have none.
    """

    def __init__(self, parameters: Mapping[Side, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._positions: dict[Side, list[Tensor]] = {side: [] for side in parameters}
        self._rows: dict[Side, list[Tensor]] = {side: [] for side in parameters}

    # -- to be implemented ----------------------------------------------------

    @abstractmethod
    def rows(self, side: Side, ids: Tensor) -> Tensor:
        """The rows of entities, without a gradient."""

    @abstractmethod
    def of_batch(self, batch: Tensor) -> BatchTables:
        """Tables with the rows of the heads and tails of a batch, without a gradient."""

    @abstractmethod
    def own(self, negatives: Negatives) -> Negatives:
        """Those negatives that this process scores."""

    @abstractmethod
    def rows_of(self, side: Side, negatives: Negatives) -> Tensor:
        """The rows of negatives that this process scores."""

    @abstractmethod
    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        """Add rows to the gradient of a side's table."""

    @abstractmethod
    def sampled_softmax_(
        self, scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Overwrite the scores of negatives by the gradient of the sampled softmax.

        The arguments are those of the kernel. Returns the loss, a scalar, and the gradient of
        `positives`. Both are those of the negatives of all processes.
        """

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes of what each computed from its negatives."""

    # -- shared ---------------------------------------------------------------

    def take(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Each table with positions and rows of its gradient, which are discarded.

        Positions may repeat.
        """
        for side, table in self.parameters.items():
            if self._positions[side]:
                yield table, torch.cat(self._positions[side]), torch.cat(self._rows[side])
            self._positions[side].clear()
            self._rows[side].clear()

    def _add(self, side: Side, positions: Tensor, rows: Tensor) -> None:
        self._positions[self._own_side(side)].append(positions)
        self._rows[self._own_side(side)].append(rows)

    def _table(self, side: Side) -> Tensor:
        return self.parameters[self._own_side(side)].detach()

    def _own_side(self, side: Side) -> Side:
        return side if side in self.parameters else "head"


class LocalRowGradientTables(RowGradientTables):
    """Tables with the rows of all entities, or of those that a batch reads."""

    def __init__(
        self, parameters: Mapping[Side, nn.Parameter], positions: Callable[[Tensor], Tensor]
    ) -> None:
        """`positions` gives the row of each entity."""
        super().__init__(parameters)
        self.positions = positions

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        return self._table(side)[self.positions(ids)]

    def of_batch(self, batch: Tensor) -> BatchTables:
        heads, relations, tails = batch.unbind(1)
        triples = torch.stack([self.positions(heads), relations, self.positions(tails)], dim=1)
        return BatchTables(self._table("head"), self._table("tail"), triples)

    def own(self, negatives: Negatives) -> Negatives:
        return negatives

    def rows_of(self, side: Side, negatives: Negatives) -> Tensor:
        return self.rows(side, negatives.ids)

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        self._add(side, self.positions(ids), rows)

    def sampled_softmax_(
        self, scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        from dualkg.kernels.cpu import sampled_softmax_gradient_  # It imports numba.

        losses, to_positives = sampled_softmax_gradient_(scores, positives, hits, targets)
        return losses.sum(), to_positives

    def sum(self, values: Tensor) -> Tensor:
        return values


class ShardedRowGradientTables(RowGradientTables):
    """Tables with the rows of one process, which scores the negatives that it has.

    Processes exchange the largest score of each query, and for each target the sum of exponentials
    relative to it. Every process has the positive triples of the batch, and adds them itself.
    """

    def __init__(self, parameters: Mapping[Side, nn.Parameter], shard: Shard) -> None:
        super().__init__(parameters)
        self.shard = shard

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        return self.shard.fetch(self._table(side), ids)

    def of_batch(self, batch: Tensor) -> BatchTables:
        heads = self.rows("head", batch[:, 0])
        return BatchTables.of_rows(heads, self.rows("tail", batch[:, 2]), batch)

    def own(self, negatives: Negatives) -> Negatives:
        is_own = self.shard.positions(negatives.ids) >= 0
        return Negatives(negatives.ids[is_own], negatives.offsets[is_own])

    def rows_of(self, side: Side, negatives: Negatives) -> Tensor:
        return self._table(side)[self.shard.positions(negatives.ids)]

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        positions = self.shard.positions(ids)
        is_own = positions >= 0
        self._add(side, positions[is_own], rows[is_own])

    def sampled_softmax_(
        self, scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        from dualkg.kernels.cpu import sampled_exponentials_  # It imports numba.

        own_tops, totals = sampled_exponentials_(scores, positives, hits, targets)
        tops = self.shard.all_reduce(own_tops.clone(), "max")
        factors = (own_tops - tops).exp()
        queries = targets.queries
        self.shard.all_reduce(totals.mul_(factors[queries]))

        # In double precision: the share of a target is subtracted from the sum of its query, and
        # may be nearly all of it.
        distances = (positives - tops[queries]).double()
        weights = targets.weights.double()
        exponentials = distances.exp()
        normalizers = totals.double() + exponentials
        shares = weights / normalizers
        loss = (weights * (normalizers.log() - distances)).sum()
        to_positives = shares * exponentials - weights

        slopes = torch.zeros(len(scores), dtype=shares.dtype).index_add_(0, queries, shares)
        is_hit = hits >= 0
        rows = queries[is_hit]
        columns = hits[is_hit]
        # A negative is left out by those targets whose answer it is.
        _, cells = torch.unique(rows * scores.shape[1] + columns, return_inverse=True)
        left_out = shares.new_zeros(len(cells)).index_add_(0, cells, shares[is_hit])[cells]
        of_others = (slopes[rows] - left_out).clamp_(min=0) * factors[rows]
        at_hits = (scores[rows, columns] * of_others).to(scores.dtype)
        scores.mul_((slopes * factors).to(scores.dtype)[:, None])
        scores[rows, columns] = at_hits
        return loss.to(scores.dtype), to_positives.to(scores.dtype)

    def sum(self, values: Tensor) -> Tensor:
        return self.shard.all_reduce(values)

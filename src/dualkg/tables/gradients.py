"""Gradients of entity tables in the compiled step, without autograd.

A softmax over all entities has a gradient for every row, and a sampled softmax for the rows that a
batch reads.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.scores import Targets, softmax_
from dualkg.tables.base import EntityTables, Side

SCORE_BYTES = 32_000_000  # bytes of scores that exist at once on a CPU
LEAST_ROWS = 500  # rows of scores that make a full matrix product


class Workspace:
    """A buffer that grows to the largest size requested.

    New pages of memory cost as much as the work that is done on them.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """An array `(rows, columns)` with arbitrary content."""
        if self._buffer is None or self._buffer.numel() < rows * columns:
            self._buffer = torch.zeros(rows * columns, dtype=like.dtype, device=like.device)
        return self._buffer[: rows * columns].view(rows, columns)


class LossAndGradient(NamedTuple):
    """A loss, and its gradient with respect to the mapped vectors that were scored."""

    loss: Tensor
    mapped: Tensor


class BatchTables(NamedTuple):
    """Tables that have the rows of a batch, and its triples `(batch, 3)` by these rows."""

    heads: Tensor
    tails: Tensor
    triples: Tensor

    @staticmethod
    def of_rows(heads: Tensor, tails: Tensor, batch: Tensor) -> BatchTables:
        """Tables with a row for each triple."""
        numbers = torch.arange(len(batch), device=batch.device)
        triples = torch.stack([numbers, batch[:, 1], numbers], dim=1)
        return BatchTables(heads, tails, triples)


def rows_at_once(num_entities: int, bytes_of_score: int, device: torch.device) -> int:
    """How many rows of scores exist at once.

    On a CPU these are as many as fit in `SCORE_BYTES`, and enough for full products.
    """
    if device.type != "cpu":
        return sys.maxsize
    return max(LEAST_ROWS, SCORE_BYTES // max(bytes_of_score * num_entities, 1))


def softmax_gradient_(scores: Tensor, targets: Targets) -> Tensor:
    """Overwrite scores by the gradient of the cross entropy.

    Returns the loss of each query, `(queries,)`.
    """
    if scores.device.type == "cpu":
        from dualkg.kernels import cpu

        return cpu.softmax_gradient_(scores, targets, scores.shape[1])
    queries = targets.queries
    positions = (queries, targets.entities)
    losses = torch.zeros_like(scores[:, 0])
    weights = torch.zeros_like(losses).index_add_(0, queries, targets.weights)
    of_targets = scores.logsumexp(dim=-1)[queries] - scores[positions]
    losses.index_add_(0, queries, targets.weights * of_targets)
    torch.softmax(scores, dim=-1, out=scores)
    scores.mul_(weights[:, None]).index_put_(positions, -targets.weights, accumulate=True)
    return losses


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


class TableGradients(ABC):
    """The entity tables of a model by side, whose gradients a step computes.

    Heads and tails may be rows of one table.
    """

    def __init__(self, tables: EntityTables, parameters: Mapping[Side, nn.Parameter]) -> None:
        self.tables = tables
        self.shard = tables.shard
        self.parameters = dict(parameters)
        self.shared = "tail" not in parameters

    @abstractmethod
    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        """Add rows to the gradient of a side's table."""

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        """The rows of entities, without a gradient."""
        if self.shard.is_whole:
            return self._table(side)[self.tables.positions(ids)]
        return self.shard.fetch(self._table(side), ids)

    def of_batch(self, batch: Tensor) -> BatchTables:
        """Tables with the rows of the heads and tails of a batch, without a gradient."""
        heads, relations, tails = batch.unbind(1)
        if not self.shard.is_whole:
            return BatchTables.of_rows(self.rows("head", heads), self.rows("tail", tails), batch)
        triples = batch
        if not self.tables.has_all_entities:
            positions = self.tables.positions
            triples = torch.stack([positions(heads), relations, positions(tails)], dim=1)
        return BatchTables(self._table("head"), self._table("tail"), triples)

    def _own_side(self, side: Side) -> Side:
        return "head" if self.shared else side

    def _table(self, side: Side) -> Tensor:
        return self.parameters[self._own_side(side)].detach()


class DenseGradients(TableGradients):
    """A gradient of each whole table, and the products with the tables.

    With `squared`, a score is −‖x − t‖² rather than ⟨x, t⟩; its ‖x‖² has no effect on a softmax.
    With `bf16`, products are of bfloat16 copies, which Adagrad writes together with the tables.
    """

    def __init__(
        self,
        tables: EntityTables,
        parameters: Mapping[Side, nn.Parameter],
        *,
        squared: bool,
        bf16: bool,
    ) -> None:
        super().__init__(tables, parameters)
        self.squared = squared
        self.gradients: dict[Side, Tensor] = {}
        self.copies: dict[Side, Tensor] = {}
        for side, table in parameters.items():
            self.gradients[side] = torch.empty_like(table.detach())
            if bf16:
                self.copies[side] = table.detach().bfloat16()
        self._fetched: dict[Side, Tensor] = {}
        self._scores = Workspace()
        self._products = Workspace()

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        rows = super().rows(side, ids)
        if not self.shard.is_whole:
            self._fetched[side] = rows.detach()
        return rows

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        self.shard.add_rows(self.gradient(side), ids, rows)

    def gradient(self, side: Side) -> Tensor:
        """The gradient of a side's table."""
        return self.gradients[self._own_side(side)]

    def add_from_autograd(self) -> None:
        """Add the gradients of a regularizer that reads whole tables."""
        for side, table in self.parameters.items():
            if table.grad is not None:
                self.gradients[side] += table.grad

    def set_gradients(self) -> None:
        """Make the gradients those of the parameters, for an optimizer."""
        for side, table in self.parameters.items():
            table.grad = self.gradients[side]

    def cross_entropy(
        self, side: Side, mapped: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        """Σ weight · −log softmax(scores)[target] of mapped vectors `(queries, width)`.

        The gradient of the table is stored here, or added with `accumulate`. The scores are one
        array of queries × entities, which the gradient overwrites. On a CPU, it is made for a block
        of queries at a time. Autograd would store scores, their log-softmax and both gradients.
        """
        if self.squared:
            mapped = 2 * mapped
        if self.shard.is_whole:
            result = self._whole_cross_entropy(side, mapped, targets, accumulate=accumulate)
        else:
            result = self._shard_cross_entropy(side, mapped, targets, accumulate=accumulate)
        return result._replace(mapped=2 * result.mapped) if self.squared else result

    def _whole_cross_entropy(
        self, side: Side, mapped: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        table = self._scored(side)
        size = rows_at_once(len(table), table.element_size(), table.device)
        if len(mapped) <= size:
            return self._block(side, mapped, targets, accumulate=accumulate)
        blocks = []
        for first in range(0, len(mapped), size):
            part = mapped[first : first + size]
            part_targets = targets.part(first, first + len(part))
            is_later = accumulate or first > 0
            blocks.append(self._block(side, part, part_targets, accumulate=is_later))
        losses = torch.stack([block.loss for block in blocks])
        gradients = torch.cat([block.mapped for block in blocks])
        return LossAndGradient(losses.sum(), gradients)

    def _block(
        self, side: Side, mapped: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        """The cross entropy of queries that are scored at once."""
        table = self._scored(side)
        scores = self._scores_of(mapped, table)
        losses = softmax_gradient_(scores, targets)
        gradient = self.gradient(side)
        self._add_product_(gradient, scores.T, mapped.to(table.dtype), accumulate=accumulate)
        if self.squared:
            # The gradient of −‖t‖².
            gradient.addcmul_(scores.sum(0).unsqueeze(-1), table, value=-2)
        if table.dtype == mapped.dtype:
            upstream = scores @ table
        else:
            # Transposed, it is a third faster on a processor with AMX.
            upstream = torch.mm(table.T, scores.T).T.to(mapped.dtype)
        return LossAndGradient(losses.sum(), upstream)

    def _shard_cross_entropy(
        self, side: Side, mapped: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        """The cross entropy over the entities of all processes.

        The softmax over the entities of this process needs no other process. With their logsumexp
        Zₚ, that of all is Z = log Σₚ exp Zₚ, and the gradients by its entities are those of its own
        softmax, query by query times exp(Zₚ − Z). Targets are the fetched rows of the batch, which
        every process has.
        """
        table = self._scored(side)
        gradient = self.gradient(side)
        vectors = self._fetched[side]
        queries = targets.queries
        weights = torch.zeros_like(mapped[:, 0]).index_add_(0, queries, targets.weights)
        normalizers = torch.empty_like(weights)
        upstream = torch.empty_like(mapped)
        size = min(len(mapped), rows_at_once(len(table), table.element_size(), table.device))
        for first in range(0, len(mapped), size):
            block = slice(first, first + size)
            scores = self._scores_of(mapped[block], table)
            own = softmax_(scores, softmax_gradient_).to(mapped.dtype)
            normalizers[block] = self.shard.log_normalizers(own[:, None])
            shares = (weights[block] * (own - normalizers[block]).exp())[:, None]
            scaled = (shares * mapped[block]).to(table.dtype)
            self._add_product_(gradient, scores.T, scaled, accumulate=accumulate or first > 0)
            if self.squared:
                # The gradient of −‖t‖².
                gradient.addcmul_(scores.T @ shares, table, value=-2)
            upstream[block] = (scores @ table).to(mapped.dtype) * shares
        self.shard.all_reduce(upstream)

        # The terms of the targets, which are rows of the batch.
        target_weights = targets.weights[:, None]
        at_targets = (mapped[queries] * vectors).sum(-1)
        upstream.index_add_(0, queries, -target_weights * vectors)
        to_targets = -target_weights * mapped[queries]
        if self.squared:
            at_targets = at_targets - vectors.square().sum(-1)
            to_targets = to_targets + 2 * target_weights * vectors
        self.add_rows(side, targets.entities, to_targets)
        loss = (targets.weights * (normalizers[queries] - at_targets)).sum()
        return LossAndGradient(loss, upstream)

    def _scored(self, side: Side) -> Tensor:
        """The table of a side in the precision of its products."""
        return self.copies[self._own_side(side)] if self.copies else self._table(side)

    def _scores_of(self, mapped: Tensor, table: Tensor) -> Tensor:
        scores = self._scores.of(len(mapped), len(table), table)
        if self.squared:
            return torch.addmm(-table.square().sum(-1), mapped, table.T, out=scores)
        return torch.mm(mapped.to(table.dtype), table.T, out=scores)

    def _add_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, accumulate: bool
    ) -> None:
        """Add a product to `total`, or overwrite it; sums have the precision of the model."""
        if left.dtype == total.dtype:
            torch.addmm(total, left, right, beta=int(accumulate), out=total)
            return
        space = self._products.of(len(left), right.shape[1], left)
        product = torch.mm(left, right, out=space)
        if accumulate:
            total.add_(product)
        else:
            total.copy_(product)


class SparseGradients(TableGradients):
    """Gradients of the rows that a batch reads, for losses over sampled entities."""

    def __init__(self, tables: EntityTables, parameters: Mapping[Side, nn.Parameter]) -> None:
        super().__init__(tables, parameters)
        self._positions: dict[Side, list[Tensor]] = {side: [] for side in parameters}
        self._rows: dict[Side, list[Tensor]] = {side: [] for side in parameters}

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        positions = self.tables.positions(ids)
        if not self.shard.is_whole:
            is_own = positions >= 0
            positions = positions[is_own]
            rows = rows[is_own]
        self._positions[self._own_side(side)].append(positions)
        self._rows[self._own_side(side)].append(rows)

    def take(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Each table with positions and rows of its gradient, which are discarded.

        Positions may repeat.
        """
        for side, table in self.parameters.items():
            if self._positions[side]:
                yield table, torch.cat(self._positions[side]), torch.cat(self._rows[side])
            self._positions[side].clear()
            self._rows[side].clear()

    def own(self, negatives: Negatives) -> Negatives:
        """Those negatives that this process scores: the ones that it has."""
        if self.shard.is_whole:
            return negatives
        is_own = self.shard.positions(negatives.ids) >= 0
        return Negatives(negatives.ids[is_own], negatives.offsets[is_own])

    def rows_of(self, side: Side, negatives: Negatives) -> Tensor:
        """The rows of negatives that this process scores."""
        return self._table(side)[self.tables.positions(negatives.ids)]

    def sampled_softmax_(
        self, scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Overwrite the scores of negatives by the gradient of the sampled softmax.

        The arguments are those of the kernel. Returns the loss, a scalar, and the gradient of
        `positives`. Both are those of the negatives of all processes.
        """
        if not self.shard.is_whole:
            return self._shard_sampled_softmax_(scores, positives, hits, targets)
        from dualkg.kernels.cpu import sampled_softmax_gradient_  # It imports numba.

        losses, to_positives = sampled_softmax_gradient_(scores, positives, hits, targets)
        return losses.sum(), to_positives

    def _shard_sampled_softmax_(
        self, scores: Tensor, positives: Tensor, hits: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """The same where each process has scored its own negatives.

        Processes exchange the largest score of each query, and for each target the sum of
        exponentials relative to it. Every process has the positive triples of the batch, and adds
        them itself.
        """
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

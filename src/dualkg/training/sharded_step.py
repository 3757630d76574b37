"""Training steps on tables that are split by rows over several processes.

`ShardedReferenceStep` is autograd for every model, loss and regularizer. With `ShardedTables`, the fused step computes
the gradient of 1-vs-all without autograd. The number of processes changes the order of some sums, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.scores import Targets, softmax_
from dualkg.losses.base import BoundLoss
from dualkg.losses.negative_sampling import BoundSampledLoss
from dualkg.losses.softmax import BoundKvsAll, BoundOneVsAll, BoundSampledSoftmax
from dualkg.models.base import Factors, Model
from dualkg.models.sharded import Shard, ShardedModel
from dualkg.regularizers import Regularizer, UnweightedDURA
from dualkg.training.fused import LossAndGradient, Side, Tables, rows_at_once, softmax_gradient_
from dualkg.training.reference_step import ReferenceStep


def check_supported(regularizer: Regularizer) -> None:
    """Refuse what cannot be trained on several processes."""
    if regularizer.reads_whole_tables and type(regularizer) is not UnweightedDURA:
        name = type(regularizer).__name__
        raise RequestError(f"{name} reads whole tables, and each process has a part of them. Use DURA, or one process.")


@dataclass(kw_only=True)
class ShardedOneVsAll(BoundOneVsAll):
    """1-vs-all of scores of which each process has the columns of its entities."""

    shard: Shard

    def _of_entities(self, scores: Tensor, answers: Tensor) -> Tensor:
        losses = self.shard.log_normalizers(scores) - (1 - self.label_smoothing) * self.shard.at(scores, answers)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * self.shard.sum_of_all(scores.sum(1)) / self.shard.num_entities
        if self.entity_weights is None:
            return losses.mean()
        weights = self.entity_weights[answers]
        return (weights * losses).sum() / weights.sum()


@dataclass(kw_only=True)
class ShardedKvsAll(BoundKvsAll):
    """K-vs-all of scores of which each process has the columns of its entities."""

    shard: Shard

    def __call__(self, model: Model, f: Factors) -> Tensor:
        scores = model.tail_scores(self.dropouts(f))
        found = self.answers.of(f.heads, f.relations, capacity=self.max_answers)
        counts = found.counts.to(scores.dtype)
        weights = counts**self.count_exponent
        normalizers = self.shard.log_normalizers(scores)
        if self.label_smoothing:
            mean = self.shard.sum_of_all(scores.sum(1)) / self.shard.num_entities
            normalizers = normalizers - self.label_smoothing * mean
        positions = self.shard.positions(found.entities)
        here = found.valid & (positions >= 0)
        shares = torch.where(here, (weights / counts)[found.queries], 0)
        at_answers = scores.sum() * 0
        if scores.shape[1]:
            at_answers = (shares * scores[found.queries, positions.clamp(min=0)]).sum()
        gained = (1 - self.label_smoothing) * self.shard.sum_of_all(at_answers)
        return ((weights * normalizers).sum() - gained) / weights.sum()


def sharded_loss(loss: BoundLoss, shard: Shard) -> BoundLoss:
    """The same loss for a `ShardedModel`. Losses of sampled negatives need no change: each owner scores its own."""
    if type(loss) is BoundOneVsAll:
        return ShardedOneVsAll(**vars(loss), shard=shard)
    if type(loss) is BoundKvsAll:
        return ShardedKvsAll(**vars(loss), shard=shard)
    if isinstance(loss, (BoundSampledLoss, BoundSampledSoftmax)):
        return loss
    raise RequestError(f"{type(loss).__name__} is a loss that cannot be trained on several processes.")


@dataclass
class ShardedReferenceStep(ReferenceStep):
    """`ReferenceStep` of a `ShardedModel`: every process has the same objective, and the gradient of its own rows."""

    def objective(self, batch: Tensor) -> Tensor:
        assert isinstance(self.model, ShardedModel)
        if not (self.regularizer.weight and self.regularizer.reads_whole_tables):
            return super().objective(batch)
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        with self.model.local(factors) as here:
            return loss + self.model.shard.sum_of_all(self.regularizer(here))

    def gradients(self, batch: Tensor) -> Tensor:
        assert isinstance(self.model, ShardedModel)
        objective = super().gradients(batch)
        self.model.add_local_gradients(bool(self.regularizer.weight) and self.regularizer.reads_whole_tables)
        return objective


class ShardedTables(Tables):
    """`Tables` of the rows of one process.

    The softmax over its own entities needs no other process. With their logsumexp Zₚ, that of all is Z = log Σₚ exp Zₚ,
    and the gradients by its entities are those of its own softmax, query by query times exp(Zₚ − Z). Targets are the
    fetched rows of the batch, which every process has.
    """

    def __init__(self, *arguments: Any, shard: Shard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shard = shard
        self._fetched: dict[Side, Tensor] = {}

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        table = self.model.head_table if side == "head" else self.model.tail_table
        self._fetched[side] = self.shard.fetch(table.detach(), ids)
        return self._fetched[side].detach()

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        self.shard.add_rows(self.gradient(side), ids, rows)

    def cross_entropy(self, side: Side, images: Tensor, targets: Targets, *, accumulate: bool) -> LossAndGradient:
        table, vectors = self._scored(side), self._fetched[side]
        images = 2 * images if self.squared else images
        queries = targets.queries
        weights = torch.zeros_like(images[:, 0]).index_add_(0, queries, targets.weights)
        normalizers, upstream = torch.empty_like(weights), torch.empty_like(images)
        size = min(len(images), rows_at_once(self.model, table.element_size()))
        for first in range(0, len(images), size):
            block = slice(first, first + size)
            scores = self._scores_of(images[block], table)
            ours = softmax_(scores, softmax_gradient_).to(images.dtype)
            normalizers[block] = self.shard.log_normalizers(ours[:, None])
            shares = (weights[block] * (ours - normalizers[block]).exp())[:, None]
            scaled = (shares * images[block]).to(table.dtype)
            self._add_product_(self.gradient(side), scores.T, scaled, accumulate=accumulate or first > 0)
            if self.squared:  # the gradient of −‖t‖²
                self.gradient(side).addcmul_(scores.T @ shares, table, value=-2)
            upstream[block] = (scores @ table).to(images.dtype) * shares
        self.shard.all_reduce(upstream)
        weights, at_targets = targets.weights[:, None], (images[queries] * vectors).sum(-1)
        upstream.index_add_(0, queries, -weights * vectors)
        to_targets = -weights * images[queries]
        if self.squared:
            at_targets, to_targets = at_targets - vectors.square().sum(-1), to_targets + 2 * weights * vectors
        self.add_rows(side, targets.entities, to_targets)
        loss = (targets.weights * (normalizers[queries] - at_targets)).sum()
        return LossAndGradient(loss, 2 * upstream if self.squared else upstream)

"""Scores of a batch for all entities, where each process may have the scores of its own rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.tables.shard import Shard


def cross_entropy(
    scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
) -> Tensor:
    """Mean of −log softmax(scores)[target], weighted by w(target).

    It is divided by the summed weights of the batch. With `smoothing`, the weight is the target's
    too, where PyTorch would weight every candidate by its own.
    """
    if not smoothing:
        return F.cross_entropy(scores, targets, weight=weights)
    losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    return weighted_mean(losses, weights, targets)


def weighted_mean(losses: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
    """The mean of the losses of targets, `(batch,)`, with the weights of all entities."""
    if weights is None:
        return losses.mean()
    chosen = weights[targets]
    return (chosen * losses).sum() / chosen.sum()


class EntityScores:
    """Scores of a batch for the entities of one shard, `(batch, num_rows)`.

    The methods complete them to what they are over all entities.
    """

    def __init__(self, values: Tensor, shard: Shard) -> None:
        self.values = values
        self.shard = shard

    def all_entities(self) -> Tensor:
        """The scores of all entities in the order of their ids, `(batch, num_entities)`.

        Every process gets the scores of all others: the loss of a user may do anything with them.
        """
        if self.shard.is_whole:
            return self.values
        ids = self.shard.ids.to(self.values.device)
        empty = self.values.new_zeros(len(self.values), self.shard.num_entities)
        return self.shard.sum_of_all(empty.index_copy(1, ids, self.values))

    def cross_entropy(
        self, answers: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
    ) -> Tensor:
        """Mean of −log softmax(scores)[answer], weighted by the weight of the answer."""
        if self.shard.is_whole:
            return cross_entropy(self.values, answers, weights, smoothing=smoothing)
        losses = self.logsumexp() - (1 - smoothing) * self.of(answers)
        if smoothing:
            losses = losses - smoothing * self.mean()
        return weighted_mean(losses, weights, answers)

    def logsumexp(self) -> Tensor:
        """log Σ exp(score) over all entities, `(batch,)`."""
        return self.shard.log_normalizers(self.values)

    def mean(self) -> Tensor:
        """The mean score over all entities, `(batch,)`."""
        if self.shard.is_whole:
            return self.values.mean(-1)
        return self.shard.sum_of_all(self.values.sum(1)) / self.shard.num_entities

    def weighted_sum(self, rows: Tensor, entities: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · score of some rows of the batch and entities, `(n,)` each; a scalar."""
        num_columns = self.values.shape[1]
        if self.shard.is_whole:
            return (weights * self.values.flatten().gather(0, rows * num_columns + entities)).sum()
        total = self.values.sum() * 0
        if num_columns:
            positions = self.shard.positions(entities)
            own_weights = torch.where(positions >= 0, weights, 0)
            total = (own_weights * self.values[rows, positions.clamp(min=0)]).sum()
        return self.shard.sum_of_all(total)

    def of(self, entities: Tensor) -> Tensor:
        """The score of one entity for each row of the batch, `(batch,)`."""
        if self.shard.is_whole:
            return self.values.gather(1, entities[:, None])[:, 0]
        if not self.values.shape[1]:
            return self.shard.sum_of_all(self.values.sum(1))
        positions = self.shard.positions(entities)
        chosen = self.values.gather(1, positions.clamp(min=0)[:, None])[:, 0]
        return self.shard.sum_of_all(torch.where(positions >= 0, chosen, 0))

    def without(self, rows: Tensor, entities: Tensor, *, but: Tensor) -> EntityScores:
        """Scores that are −∞ for some rows of the batch and entities, `(n,)` each.

        The entities `but`, one for each row of the batch, keep theirs.
        """
        num_rows, num_columns = self.values.shape
        columns = self.shard.positions(entities)
        kept = self.shard.positions(but)
        num_more = 0
        if not self.shard.is_whole:
            # Entities of other processes share one more column: no shape depends on the batch.
            num_more = 1
            columns = torch.where(columns < 0, num_columns, columns)
            kept = torch.where(kept < 0, num_columns, kept)
        shape = (num_rows, num_columns + num_more)
        is_left_out = torch.zeros(shape, dtype=torch.bool, device=self.values.device)
        # A CUDA graph takes no values from the host.
        truth = torch.ones_like(is_left_out[:1, 0])
        all_rows = torch.arange(num_rows, device=self.values.device)
        is_left_out.index_put_((rows, columns), truth)
        is_left_out.index_put_((all_rows, kept), ~truth)
        values = self.values.masked_fill(is_left_out[:, :num_columns], -torch.inf)
        return EntityScores(values, self.shard)

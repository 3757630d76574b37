"""Rejected triples as hard negatives: an unlikelihood term added to any loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.losses.base import BoundLoss
from dualkg.models.base import Factors, Model
from dualkg.tables.base import Side
from dualkg.tables.scores import EntityScores

MAX_DRAWN = 128  # rejected triples of a step
MAX_PROBABILITY = 1 - 1e-6


@dataclass(frozen=True, eq=False)
class WithRejected:
    """A loss plus the mean of −log (1 − p) over rejected triples, `(num_rejected, 3)`.

    p is the softmax probability of a triple's answer among all entities, for both of its queries.
    Steps take turns on `MAX_DRAWN` triples, chosen by their batch, so that a training that is
    resumed takes the same ones.
    """

    loss: BoundLoss
    rejected: Tensor

    def __call__(self, model: Model, factors: Factors) -> Tensor:
        return self.loss(model, factors) + unlikelihood(model, self._drawn(factors))

    def _drawn(self, factors: Factors) -> Tensor:
        number = len(self.rejected)
        if number <= MAX_DRAWN:
            return self.rejected
        start = int(factors.heads.sum())
        places = torch.arange(start, start + MAX_DRAWN, device=self.rejected.device)
        return self.rejected[places % number]


def unlikelihood(model: Model, triples: Tensor) -> Tensor:
    """The mean of −log (1 − p) over triples `(n, 3)` and both of their queries."""
    heads, relations, tails = triples.unbind(1)
    of_tails = _predictions(model, heads, relations, "tail")
    of_heads = _predictions(model, tails, relations, "head")
    log_probabilities = torch.cat(
        [of_tails.of(tails) - of_tails.logsumexp(), of_heads.of(heads) - of_heads.logsumexp()]
    )
    probabilities = log_probabilities.exp().clamp(max=MAX_PROBABILITY)
    return -torch.log1p(-probabilities).mean()


def _predictions(model: Model, given: Tensor, relations: Tensor, side: Side) -> EntityScores:
    """The scores of all entities for queries whose `side` is missing."""
    if side == "head" and model.reciprocal:
        side = "tail"
        relations = relations + model.shape.num_relations
    return model.entity_scores(model.queries(given, relations, side), side)

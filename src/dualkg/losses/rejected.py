"""Rejected triples as hard negatives: an unlikelihood term added to any loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.losses.base import BoundLoss
from dualkg.models.base import Factors, Model

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
    of_tails = model.predict_tails(heads, relations).log_softmax(-1)
    of_heads = model.predict_heads(relations, tails).log_softmax(-1)
    places = torch.arange(len(triples), device=triples.device)
    log_probabilities = torch.cat([of_tails[places, tails], of_heads[places, heads]])
    probabilities = log_probabilities.exp().clamp(max=MAX_PROBABILITY)
    return -torch.log1p(-probabilities).mean()

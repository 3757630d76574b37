"""Losses: cross entropy over all entities, and over all relations as an optional second."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Triples
from dualkg.errors import RequestError
from dualkg.models.base import Factors, Model


def frequency_weights(train: Triples, num_entities: int, share: float) -> Tensor:
    """w(t) = share·#t / max # + (1 − share), `(num_entities,)`: Appendix D.1, `share` being its w0.

    #t counts an entity as head and as tail of the training triples, not again of their reciprocals.
    """
    if not 0 <= share <= 1:
        raise RequestError(f"The frequency weight w0 lies between 0 and 1; it is {share}.")
    counts = np.bincount(np.concatenate([train[:, 0], train[:, 2]]), minlength=num_entities)
    relative = torch.from_numpy(counts / max(int(counts.max(initial=0)), 1)).to(torch.get_default_dtype())
    return share * relative + (1 - share)


def cross_entropy(scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean of −log softmax(scores)[target]; weighted by w(target) and divided by the batch's summed weights."""
    return F.cross_entropy(scores, targets, weight=weights)


class CrossEntropy:
    """The loss of a batch of triples under a model.

    With reciprocal relations a batch holds both directions and tails alone are asked for; without them every
    triple is asked for its tail and for its head. `relation_weight` adds the cross entropy of the relation
    given head and tail, over all relation ids.
    """

    def __init__(self, *, entity_weights: Tensor | None = None, relation_weight: float = 0.0) -> None:
        if not relation_weight >= 0:
            raise RequestError(f"The weight of relation prediction is at least 0; it is {relation_weight}.")
        self.entity_weights = entity_weights
        self.relation_weight = relation_weight

    def __call__(self, model: Model, f: Factors) -> Tensor:
        """The loss of the triples whose factors these are, as the model scores them."""
        loss = cross_entropy(model.tail_scores(f), f.tails, self.entity_weights)
        if not model.reciprocal:
            back = cross_entropy(model.head_scores(f), f.heads, self.entity_weights)
            loss = (loss + back) / 2
        if self.relation_weight:
            loss = loss + self.relation_weight * cross_entropy(model.relation_scores(f), f.relations)
        return loss

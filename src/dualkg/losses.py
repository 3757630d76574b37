"""Losses: cross entropy over all entities, and over all relations as an optional second."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Triples
from dualkg.errors import RequestError
from dualkg.kernels.mixing import STEP, mixed, shifted
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


class Dropout:
    """Sets a share of each query's image to zero while it is scored, and makes the rest larger by as much.

    What is dropped follows from the seed, the entities of the triple and its place in the batch, which changes from
    epoch to epoch: the same on every device and by every engine, and a run that goes on need not know where it was. So
    a triple has as many masks as a batch has places, which is few where batches are small.
    """

    DIGITS = 24  # in which a drawn number is compared with the share

    def __init__(self, share: float, *, seed: int = 0) -> None:
        if not 0 <= share < 1:
            raise RequestError(f"The share that dropout sets to zero is at least 0 and below 1; it is {share}.")
        self.share = share
        self.seed = seed

    def mask(self, f: Factors, like: Tensor, *, backward: bool = False) -> Tensor:
        """Factors of images `like` these, `(batch, width)`: 0, or 1 / (1 − share); `backward` asks for heads."""
        rows = torch.arange(len(like), device=like.device)
        start = mixed(torch.full_like(rows, 2 * self.seed + backward) * STEP)
        for ids in (rows, f.heads, f.tails):
            start = mixed(start + ids * STEP)
        drawn = mixed(start[:, None] + torch.arange(like.shape[1], device=like.device) * STEP)
        kept: Tensor = shifted(drawn, 64 - self.DIGITS) >= round(self.share * 2**self.DIGITS)
        return kept.to(like.dtype) / (1 - self.share)


class CrossEntropy:
    """The loss of a batch of triples under a model.

    With reciprocal relations a batch holds both directions and tails alone are asked for; without them every
    triple is asked for its tail and for its head. `relation_weight` adds the cross entropy of the relation
    given head and tail, over all relation ids. `dropout` is for the images that entities are scored with.
    """

    def __init__(
        self, *, entity_weights: Tensor | None = None, relation_weight: float = 0.0, dropout: Dropout | None = None
    ) -> None:
        if not relation_weight >= 0:
            raise RequestError(f"The weight of relation prediction is at least 0; it is {relation_weight}.")
        self.entity_weights = entity_weights
        self.relation_weight = relation_weight
        self.dropout = dropout if dropout and dropout.share else None

    def __call__(self, model: Model, f: Factors) -> Tensor:
        """The loss of the triples whose factors these are, as the model scores them."""
        asked = self._dropped(f, both=not model.reciprocal)
        loss = cross_entropy(model.tail_scores(asked), f.tails, self.entity_weights)
        if not model.reciprocal:
            back = cross_entropy(model.head_scores(asked), f.heads, self.entity_weights)
            loss = (loss + back) / 2
        if self.relation_weight:
            loss = loss + self.relation_weight * cross_entropy(model.relation_scores(f), f.relations)
        return loss

    def _dropped(self, f: Factors, *, both: bool) -> Factors:
        """The same factors with images of which some is dropped: those that are scored."""
        if self.dropout is None:
            return f
        found = Factors(f.model, f.heads, f.relations, f.tails)
        found.mapped_head = f.mapped_head * self.dropout.mask(f, f.mapped_head)
        if both:
            found.mapped_tail = f.mapped_tail * self.dropout.mask(f, f.mapped_tail, backward=True)
        return found

"""Cross entropy over all entities, and over all relations as an optional second."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Triples
from dualkg.errors import RequestError
from dualkg.losses.dropout import Dropouts
from dualkg.models.base import Model
from dualkg.models.factors import Factors


def frequency_weights(train: Triples, num_entities: int, share: float) -> Tensor:
    """w(t) = share·#t / max # + (1 − share), `(num_entities,)`: Appendix D.1, `share` being its w0.

    #t counts an entity as head and as tail of the training triples, not again of their reciprocals.
    """
    if not 0 <= share <= 1:
        raise RequestError(f"The frequency weight w0 lies between 0 and 1; it is {share}.")
    counts = np.bincount(np.concatenate([train[:, 0], train[:, 2]]), minlength=num_entities)
    relative = torch.from_numpy(counts / max(int(counts.max(initial=0)), 1)).to(torch.get_default_dtype())
    return share * relative + (1 - share)


def cross_entropy(scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0) -> Tensor:
    """Mean of −log softmax(scores)[target]; weighted by w(target) and divided by the batch's summed weights.

    With `smoothing`, that share of each target is spread evenly over all candidates, the target among them. It is the
    target's weight that counts then too, where PyTorch would weigh every candidate by its own.
    """
    if not smoothing:
        return F.cross_entropy(scores, targets, weight=weights)
    losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    if weights is None:
        return losses.mean()
    chosen = weights[targets]
    return (chosen * losses).sum() / chosen.sum()


class CrossEntropy:
    """The loss of a batch of triples under a model.

    With reciprocal relations a batch holds both directions and tails alone are asked for; without them every
    triple is asked for its tail and for its head. `relation_weight` adds the cross entropy of the relation
    given head and tail, over all relation ids. `dropouts` are for what entities are scored with, and
    `label_smoothing` is for the answers among entities, not among relations. `by_question` says that neighbours in a
    batch which ask for tails of the same head and relation are one question.
    """

    def __init__(
        self,
        *,
        entity_weights: Tensor | None = None,
        relation_weight: float = 0.0,
        dropouts: Dropouts | None = None,
        label_smoothing: float = 0.0,
        by_question: bool = False,
    ) -> None:
        if not relation_weight >= 0:
            raise RequestError(f"The weight of relation prediction is at least 0; it is {relation_weight}.")
        if not 0 <= label_smoothing < 1:
            raise RequestError(f"The share of label smoothing is at least 0 and below 1; it is {label_smoothing}.")
        self.entity_weights = entity_weights
        self.relation_weight = relation_weight
        self.dropouts = dropouts or Dropouts()
        self.label_smoothing = label_smoothing
        self.by_question = by_question

    def __call__(self, model: Model, f: Factors) -> Tensor:
        """The loss of the triples whose factors these are, as the model scores them."""
        asked = self.dropouts(f, both=not model.reciprocal, by_question=self.by_question)
        loss = self._of_entities(model.tail_scores(asked), f.tails)
        if not model.reciprocal:
            loss = (loss + self._of_entities(model.head_scores(asked), f.heads)) / 2
        if self.relation_weight:
            loss = loss + self.relation_weight * cross_entropy(model.relation_scores(f), f.relations)
        return loss

    def _of_entities(self, scores: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy(scores, answers, self.entity_weights, smoothing=self.label_smoothing)

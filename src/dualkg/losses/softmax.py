"""Softmax losses over all entities: 1-vs-all with one answer at a time, K-vs-all with all answers of a query."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Graph, Triples
from dualkg.losses.base import Loss
from dualkg.losses.dropout import Dropouts
from dualkg.losses.training_answers import TrainingAnswers
from dualkg.models.base import Factors, Model


class OneVsAll(Loss):
    """Softmax cross entropy of each triple's answer against all entities (1-vs-all).

    With reciprocal relations a batch holds both directions and only tails are predicted; without them, the tail and
    the head of every triple. `frequency_weight` is w0 of Appendix D.1, which weights answers by how often they occur.
    `relation_weight` adds the cross entropy of the relation given head and tail. `dropout` is the share of each
    query's mapped vector that is set to zero, `head_dropout` that of the given entity before it is mapped.
    `label_smoothing` is for entities, not for relations.
    """

    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    def bind(
        self, model: Model, graph: Graph, *, batch_size: int, seed: int, grouped_by_query: bool = False
    ) -> BoundOneVsAll:
        weights = None
        if self.frequency_weight:
            weights = frequency_weights(graph.train, graph.shape.num_entities, self.frequency_weight)
            weights = weights.to(model.device, next(model.parameters()).dtype)
        return BoundOneVsAll(
            entity_weights=weights,
            relation_weight=self.relation_weight,
            dropouts=Dropouts.of(model, dropout=self.dropout, head_dropout=self.head_dropout, seed=seed),
            label_smoothing=self.label_smoothing,
            grouped_by_query=grouped_by_query,
        )

    @property
    def fast_step_obstacle(self) -> str | None:
        if type(self).bind is not OneVsAll.bind:
            return super().fast_step_obstacle
        return next((f"loss.{key}" for key in ("label_smoothing", "head_dropout") if getattr(self, key)), None)

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal and not self.relation_weight


class KvsAll(Loss):
    """Softmax cross entropy of each query against all entities, its answers sharing the target evenly (K-vs-all).

    A query with n answers is weighted by n to the power `count_exponent`: with 0 all queries count alike, with 1 all
    triples do, and the loss is then in the mean that of `OneVsAll`. The other settings are those of `OneVsAll`.
    """

    examples: ClassVar[Literal["triples", "queries"]] = "queries"
    dropout: float = Field(0.0, ge=0, lt=1)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    count_exponent: float = Field(0.0, ge=0, le=1)

    def bind(
        self, model: Model, graph: Graph, *, batch_size: int, seed: int, grouped_by_query: bool = False
    ) -> BoundKvsAll:
        return BoundKvsAll(
            TrainingAnswers(graph.train, graph.shape, device=model.device),
            batch_size=batch_size,
            count_exponent=self.count_exponent,
            dropouts=Dropouts.of(model, dropout=self.dropout, head_dropout=self.head_dropout, seed=seed),
            label_smoothing=self.label_smoothing,
        )

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal

    def numbers_per_example(self, model: Model, batch_size: int) -> int:
        return super().numbers_per_example(model, batch_size) + 2 * model.shape.num_entities  # to gather at answers


class BoundOneVsAll:
    """1-vs-all of a batch of triples; `entity_weights` is `(num_entities,)`."""

    def __init__(
        self,
        *,
        entity_weights: Tensor | None = None,
        relation_weight: float = 0.0,
        dropouts: Dropouts | None = None,
        label_smoothing: float = 0.0,
        grouped_by_query: bool = False,
    ) -> None:
        self.entity_weights = entity_weights
        self.relation_weight = relation_weight
        self.dropouts = dropouts or Dropouts()
        self.label_smoothing = label_smoothing
        self.grouped_by_query = grouped_by_query

    def __call__(self, model: Model, f: Factors) -> Tensor:
        dropped = self.dropouts(f, both=not model.reciprocal, grouped_by_query=self.grouped_by_query)
        loss = self._of_entities(model.tail_scores(dropped), f.tails)
        if not model.reciprocal:
            loss = (loss + self._of_entities(model.head_scores(dropped), f.heads)) / 2
        if self.relation_weight:
            loss = loss + self.relation_weight * cross_entropy(model.relation_scores(f), f.relations)
        return loss

    def _of_entities(self, scores: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy(scores, answers, self.entity_weights, smoothing=self.label_smoothing)


class BoundKvsAll:
    """K-vs-all of a batch of queries. The tails of the batch are not used, except for dropout masks."""

    def __init__(
        self,
        answers: TrainingAnswers,
        *,
        batch_size: int,
        count_exponent: float = 0.0,
        dropouts: Dropouts | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self.answers = answers
        self.room = answers.max_answers(batch_size)
        self.count_exponent = count_exponent
        self.dropouts = dropouts or Dropouts()
        self.label_smoothing = label_smoothing

    def __call__(self, model: Model, f: Factors) -> Tensor:
        scores = model.tail_scores(self.dropouts(f))
        found = self.answers.of(f.heads, f.relations, room=self.room)
        counts = found.counts.to(scores.dtype)
        weights = counts**self.count_exponent
        normalizers = scores.logsumexp(-1)
        if self.label_smoothing:
            normalizers = normalizers - self.label_smoothing * scores.mean(-1)
        at_answers = scores.flatten().gather(0, found.queries * scores.shape[1] + found.entities)
        shares = torch.where(found.valid, (weights / counts)[found.queries], 0)
        gained = (1 - self.label_smoothing) * (shares * at_answers).sum()
        return ((weights * normalizers).sum() - gained) / weights.sum()


def frequency_weights(train: Triples, num_entities: int, share: float) -> Tensor:
    """w(t) = share·#t / max # + (1 − share), `(num_entities,)`: Appendix D.1, `share` being its w0.

    #t counts an entity as head and as tail of the training triples, not again of their reciprocals.
    """
    counts = np.bincount(np.concatenate([train[:, 0], train[:, 2]]), minlength=num_entities)
    relative = torch.from_numpy(counts / max(int(counts.max(initial=0)), 1)).to(torch.get_default_dtype())
    return share * relative + (1 - share)


def cross_entropy(scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0) -> Tensor:
    """Mean of −log softmax(scores)[target], weighted by w(target) and divided by the batch's summed weights.

    With `smoothing`, that share of each target is spread evenly over all candidates, the target among them. The
    weight is the target's then too, where PyTorch would weight every candidate by its own.
    """
    if not smoothing:
        return F.cross_entropy(scores, targets, weight=weights)
    losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    if weights is None:
        return losses.mean()
    chosen = weights[targets]
    return (chosen * losses).sum() / chosen.sum()

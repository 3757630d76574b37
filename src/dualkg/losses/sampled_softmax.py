"""Sampled softmax: cross entropy against a sample of the entities, for graphs whose full softmax is too large."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.kernels.hashing import shift_right
from dualkg.losses.base import Loss
from dualkg.losses.negative_sampling import Draws, check_batch_size, numbers_per_negative, rows_of_negatives
from dualkg.losses.softmax import cross_entropy, entity_weights, weighted_mean
from dualkg.models.base import Factors, Model, Side
from dualkg.models.sharded import Shard

DIGITS = 53  # binary digits of a random number in [0, 1)


class SampledSoftmax(Loss):
    """Softmax cross entropy of each triple's answer against sampled entities, corrected for how they are sampled.

    A negative e with the expected count n·q(e) has the score s(e) − log(n·q(e)), so that the sum over the sample is an
    unbiased estimate of the sum over all entities (Bengio and Senécal, 2008). `distribution` q is `uniform`, or
    `log-uniform` in the frequency rank of an entity. With `shared`, a batch has one sample, and its scores are one
    matrix product. Samples are stratified: each negative is drawn from its own part of the entities, so that the
    processes of a distributed training own equally many uniform negatives. Negatives equal to the answer are left out.
    """

    num_negatives: int = Field(1000, ge=1)
    distribution: Literal["uniform", "log-uniform"] = "uniform"
    shared: bool = True
    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)

    def bind(self, model: Model, graph: Graph, *, seed: int, **_: Any) -> "BoundSampledSoftmax":
        num_entities, by_frequency = graph.shape.num_entities, None
        if self.distribution == "log-uniform":
            counts = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=num_entities)
            by_frequency = torch.from_numpy(np.argsort(-counts, kind="stable")).to(model.device)
        return BoundSampledSoftmax(
            self, num_entities, by_frequency, entity_weights(self.frequency_weight, model, graph), seed
        )

    def check_training(self, *, reciprocal: bool, batch_size: int) -> None:
        check_batch_size(batch_size)

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal and not self.relation_weight

    def numbers_per_example(self, model: Model, batch_size: int) -> int:
        sides = 1 if model.reciprocal else 2
        return sides * self.num_negatives * numbers_per_negative(model, shared=self.shared, integers=4)

    def rows_per_batch(self, model: Model, batch_size: int) -> int:
        """Heads, tails and negatives."""
        return 2 * batch_size + rows_of_negatives(model, batch_size, self.num_negatives, shared=self.shared)


@dataclass(frozen=True)
class BoundSampledSoftmax:
    """Sampled softmax of a batch of triples; `by_frequency` has the entities by decreasing frequency."""

    loss: SampledSoftmax
    num_entities: int
    by_frequency: Tensor | None = None
    entity_weights: Tensor | None = None
    seed: int = 0
    grouped_by_query: ClassVar[bool] = False

    @property
    def relation_weight(self) -> float:
        return self.loss.relation_weight

    def __call__(self, model: Model, f: Factors) -> Tensor:
        draws = Draws.of(f, seed=self.seed)
        loss = self._of_side(model, f, "tail", draws)
        if not model.reciprocal:
            loss = (loss + self._of_side(model, f, "head", draws.others())) / 2
        if self.relation_weight:
            loss = loss + self.relation_weight * cross_entropy(model.relation_scores(f), f.relations)
        return loss

    def _of_side(self, model: Model, f: Factors, side: Side, draws: Draws) -> Tensor:
        answers = f.answers(side)
        negatives, log_counts = self.sample(draws)
        scores = model.candidate_scores(f, negatives, side=side)
        scores = (scores - log_counts.to(scores.dtype)).masked_fill(negatives == answers[:, None], -torch.inf)
        positive = model.triple_scores(f)
        losses = torch.cat([positive[:, None], scores], 1).logsumexp(1) - positive
        return weighted_mean(losses, self.entity_weights, answers)

    def sample(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Negatives `(n,)`, or `(batch, n)` where they are not shared, and the logarithm of the expected count of each.

        The rank k of an entity has the probability log((k + 2) / (k + 1)) / log(num_entities + 1), k from 0. Negative j
        of n is from the j-th of n equal parts: uniform of the rows in the order of split tables, log-uniform of [0, 1).
        """
        num, size = self.loss.num_negatives, self.num_entities
        strata = torch.arange(num, device=draws.batch.device)
        if self.by_frequency is None:
            rows = (strata * size + draws.entities(num, size, shared=self.loss.shared)) // num
            in_order = Shard(self.num_entities).entities(rows)  # of split tables, for any number of processes
            return in_order, torch.full((), math.log(num / size), device=rows.device)
        drawn = draws.entities(num, 2**63 - 1, shared=self.loss.shared)
        uniform = (strata + shift_right(drawn, 63 - DIGITS).double() / 2**DIGITS) / num
        log_size = math.log(size + 1)
        ranks = ((uniform * log_size).exp().long() - 1).clamp(0, size - 1)
        log_probabilities = torch.log(torch.log1p(1 / (ranks + 1).double()) / log_size)
        return self.by_frequency[ranks], math.log(num) + log_probabilities

"""Softmax losses: over all entities, with one answer at a time (1-vs-all) or all (K-vs-all), and
over a sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64
from dualkg.losses.base import Loss
from dualkg.losses.negative_sampling import (
    Draws,
    check_batch_size,
    numbers_per_negative,
    rows_of_negatives,
)
from dualkg.losses.queries import QueryGroups, TrainingAnswers
from dualkg.models.base import Factors, Model, Side
from dualkg.models.sharded import Shard

DIGITS = 24  # binary digits in which a random number is compared with a share


class OneVsAll(Loss):
    """Softmax cross entropy of each triple's answer against all entities (1-vs-all).

    `frequency_weight` is w0 of Appendix D.1, which weights answers by how often they occur.
    `relation_weight` adds the cross entropy of the relation given head and tail. `dropout` is the
    share of each query's mapped vector that is set to zero, `head_dropout` that of the given entity
    before it is mapped. Labels of relations are not smoothed.
    """

    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    def bind(
        self, model: Model, graph: Graph, *, seed: int, grouped_by_query: bool = False, **_: Any
    ) -> BoundOneVsAll:
        return BoundOneVsAll(
            entity_weights=entity_weights(self.frequency_weight, model, graph),
            relation_weight=self.relation_weight,
            dropouts=Dropouts.of(model, self, seed=seed),
            label_smoothing=self.label_smoothing,
            grouped_by_query=grouped_by_query,
        )

    @property
    def fast_step_obstacle(self) -> str | None:
        if type(self).bind is not OneVsAll.bind:
            return super().fast_step_obstacle
        return next(
            (f"loss.{key}" for key in ("label_smoothing", "head_dropout") if getattr(self, key)),
            None,
        )

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal and not self.relation_weight


class KvsAll(Loss):
    """Softmax cross entropy of each query against all entities, its answers sharing the target
    evenly (K-vs-all).

    A query with n answers has the weight n to the power `count_exponent`. Other settings are those
    of `OneVsAll`.
    """

    examples: ClassVar[Literal["triples", "queries"]] = "queries"
    dropout: float = Field(0.0, ge=0, lt=1)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    count_exponent: float = Field(0.0, ge=0, le=1)

    def bind(
        self, model: Model, graph: Graph, *, batch_size: int, seed: int, **_: Any
    ) -> BoundKvsAll:
        answers = TrainingAnswers(graph.train, graph.shape, device=model.device)
        return BoundKvsAll(
            answers,
            max_answers=answers.max_answers(batch_size),
            count_exponent=self.count_exponent,
            dropouts=Dropouts.of(model, self, seed=seed),
            label_smoothing=self.label_smoothing,
        )

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal

    def numbers_per_example(self, model: Model, batch_size: int) -> int:
        return super().numbers_per_example(model, batch_size) + 2 * len(
            model.embedding.entities
        )  # at answers


class SampledSoftmax(Loss):
    """Softmax cross entropy of each triple's answer against sampled entities, corrected for how
    they are sampled.

    A negative e with the expected count n·q(e) has the score s(e) − log(n·q(e)), so that the sum
    over the sample is an unbiased estimate of the sum over all entities (Bengio and Senécal, 2008).
    `distribution` q is `uniform`, or `log-uniform` in the frequency rank of an entity. With
    `shared`, a batch has one sample, and its scores are one matrix product. Samples are stratified:
    each negative is drawn from its own part of the entities, so that the processes of a distributed
    training own equally many uniform negatives. Negatives equal to the answer are left out.
    """

    num_negatives: int = Field(1000, ge=1)
    distribution: Literal["uniform", "log-uniform"] = "uniform"
    shared: bool = True
    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)

    def bind(self, model: Model, graph: Graph, *, seed: int, **_: Any) -> BoundSampledSoftmax:
        num_entities = graph.shape.num_entities
        by_frequency = None
        if self.distribution == "log-uniform":
            counts = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=num_entities)
            by_frequency = torch.from_numpy(np.argsort(-counts, kind="stable")).to(model.device)
        return BoundSampledSoftmax(
            self,
            num_entities,
            by_frequency,
            entity_weights(self.frequency_weight, model, graph),
            seed,
        )

    def check_training(self, *, reciprocal: bool, batch_size: int) -> None:
        check_batch_size(batch_size)

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal and not self.relation_weight

    def numbers_per_example(self, model: Model, batch_size: int) -> int:
        sides = 1 if model.reciprocal else 2
        return (
            sides * self.num_negatives * numbers_per_negative(model, shared=self.shared, integers=4)
        )

    def rows_per_batch(self, model: Model, batch_size: int) -> int:
        """Heads, tails and negatives."""
        return 2 * batch_size + rows_of_negatives(
            model, batch_size, self.num_negatives, shared=self.shared
        )


@dataclass(frozen=True)
class Dropout:
    """Sets a share of each query's vector to zero while it is scored, and scales up the rest.

    The mask follows from the seed, the entities of the triple and its position in the batch: it is
    the same on every device and for every engine. A query with several answers has the mask of the
    first.
    """

    share: float
    seed: int = 0

    def mask(
        self, f: Factors, like: Tensor, *, backward: bool = False, groups: QueryGroups | None = None
    ) -> Tensor:
        """Factors 0 or 1 / (1 − share) for vectors `like` these, or those of query `groups`;
        `backward` for heads.
        """
        positions = (
            torch.arange(len(f.heads), device=like.device) if groups is None else groups.first
        )
        start = hash_columns(
            2 * self.seed + backward, positions, f.heads[positions], f.tails[positions]
        )
        drawn = splitmix64(start[:, None] + torch.arange(like.shape[1], device=like.device) * STEP)
        remains: Tensor = shift_right(drawn, 64 - DIGITS) >= round(self.share * 2**DIGITS)
        return remains.to(like.dtype) / (1 - self.share)

    def __call__(
        self, vectors: Tensor, f: Factors, *, backward: bool, groups: QueryGroups | None
    ) -> Tensor:
        """The vectors of all triples, `(batch, width)`, with some coordinates set to zero."""
        mask = self.mask(f, vectors, backward=backward, groups=groups)
        return vectors * (mask if groups is None else mask[groups.rows])


class Dropouts:
    """Dropout of the mapped vectors, and of the given entities before they are mapped."""

    def __init__(self, *, mapped: float = 0.0, given: float = 0.0, seed: int = 0) -> None:
        self.mapped = Dropout(mapped, seed=seed) if mapped else None
        self.given = (
            Dropout(given, seed=-1 - seed) if given else None
        )  # a seed that no mapped vector uses

    @classmethod
    def of(cls, model: Model, loss: OneVsAll | KvsAll, *, seed: int) -> Dropouts:
        """The dropouts of a loss, refused for models whose parameters are not coordinates."""
        for key in ("dropout", "head_dropout"):
            if getattr(loss, key) and not model.embedding.euclidean:
                raise RequestError(
                    f"Dropout sets coordinates to zero, and the numbers of {type(model).__name__} "
                    f"are not coordinates of a vector space. Set loss.{key} to 0."
                )
        return cls(mapped=loss.dropout, given=loss.head_dropout, seed=seed)

    def __call__(
        self, f: Factors, *, both: bool = False, grouped_by_query: bool = False
    ) -> Factors:
        """The same factors with dropout for tail prediction; with `both`, for head prediction
        too.
        """
        if self.mapped is None and self.given is None:
            return f
        found = f.fresh()
        groups = QueryGroups.of(f.heads, f.relations) if grouped_by_query else None
        for name in ("head", "tail") if both else ("head",):
            options: dict[str, Any] = {
                "backward": name == "tail",
                "groups": groups if name == "head" else None,
            }
            if self.given is not None:
                setattr(found, name, self.given(getattr(f, name), f, **options))
            mapped = getattr(
                f if self.given is None else found, f"mapped_{name}"
            )  # f's may have been computed already
            setattr(
                found,
                f"mapped_{name}",
                mapped if self.mapped is None else self.mapped(mapped, f, **options),
            )
        return found


def target_weights(
    entity_weights: Tensor | None, entities: Tensor, *, scale: float, dtype: torch.dtype
) -> Tensor:
    """The weight of each target in the mean, `(batch,)`, in total `scale`."""
    if entity_weights is None:
        return torch.full(
            entities.shape, scale / len(entities), dtype=dtype, device=entities.device
        )
    chosen = entity_weights[entities]
    return chosen / (chosen.sum() / scale)


@dataclass(kw_only=True)
class BoundOneVsAll:
    """1-vs-all of a batch of triples; `entity_weights` is `(num_entities,)`.

    With a `shard`, scores have the columns of the entities of this process.
    """

    entity_weights: Tensor | None = None
    relation_weight: float = 0.0
    dropouts: Dropouts = field(default_factory=Dropouts)
    label_smoothing: float = 0.0
    grouped_by_query: bool = False
    shard: Shard | None = None

    def __call__(self, model: Model, f: Factors) -> Tensor:
        dropped = self.dropouts(
            f, both=not model.reciprocal, grouped_by_query=self.grouped_by_query
        )
        loss = self._of_entities(model.tail_scores(dropped), f.tails)
        if not model.reciprocal:
            loss = (loss + self._of_entities(model.head_scores(dropped), f.heads)) / 2
        return with_relations(loss, self.relation_weight, model, f)

    def _of_entities(self, scores: Tensor, answers: Tensor) -> Tensor:
        if self.shard is None:
            return cross_entropy(
                scores, answers, self.entity_weights, smoothing=self.label_smoothing
            )
        losses = self.shard.log_normalizers(scores) - (1 - self.label_smoothing) * self.shard.at(
            scores, answers
        )
        if self.label_smoothing:
            losses = (
                losses
                - self.label_smoothing
                * self.shard.sum_of_all(scores.sum(1))
                / self.shard.num_entities
            )
        return weighted_mean(losses, self.entity_weights, answers)


@dataclass
class BoundKvsAll:
    """K-vs-all of queries with at most `max_answers` answers in total; their tails only determine
    dropout masks.

    With a `shard`, scores have the columns of the entities of this process.
    """

    answers: TrainingAnswers
    max_answers: int
    count_exponent: float = 0.0
    dropouts: Dropouts = field(default_factory=Dropouts)
    label_smoothing: float = 0.0
    shard: Shard | None = None

    def __call__(self, model: Model, f: Factors) -> Tensor:
        scores = model.tail_scores(self.dropouts(f))
        shard = self.shard
        found = self.answers.of(f.heads, f.relations, capacity=self.max_answers)
        counts = found.counts.to(scores.dtype)
        weights = counts**self.count_exponent
        normalizers = shard.log_normalizers(scores) if shard else scores.logsumexp(-1)
        if self.label_smoothing:
            mean = (
                shard.sum_of_all(scores.sum(1)) / shard.num_entities if shard else scores.mean(-1)
            )
            normalizers = normalizers - self.label_smoothing * mean
        shares = torch.where(found.valid, (weights / counts)[found.queries], 0)
        if shard:
            at_answers = shard.weighted_sum(scores, found.queries, found.entities, shares)
        else:
            at_answers = (
                shares
                * scores.flatten().gather(0, found.queries * scores.shape[1] + found.entities)
            ).sum()
        return (
            (weights * normalizers).sum() - (1 - self.label_smoothing) * at_answers
        ) / weights.sum()


@dataclass(frozen=True)
class BoundSampledSoftmax:
    """Sampled softmax of a batch of triples; `by_frequency` has the entities by decreasing
    frequency.
    """

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
        return with_relations(loss, self.relation_weight, model, f)

    def _of_side(self, model: Model, f: Factors, side: Side, draws: Draws) -> Tensor:
        answers = f.answers(side)
        negatives, log_counts = self.sample(draws)
        scores = model.candidate_scores(f, negatives, side=side)
        scores = (scores - log_counts.to(scores.dtype)).masked_fill(
            negatives == answers[:, None], -torch.inf
        )
        positive = model.triple_scores(f)
        losses = torch.cat([positive[:, None], scores], 1).logsumexp(1) - positive
        return weighted_mean(losses, self.entity_weights, answers)

    def sample(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Negatives `(n,)`, or `(batch, n)` where they are not shared, and the logarithm of the
        expected count of each.

        The rank k of an entity has the probability log((k + 2) / (k + 1)) / log(num_entities + 1),
        k from 0. Negative j of n is from the j-th of n equal parts: uniform of the rows in the
        order of split tables, log-uniform of [0, 1).
        """
        num = self.loss.num_negatives
        size = self.num_entities
        strata = torch.arange(num, device=draws.batch.device)
        if self.by_frequency is None:
            rows = (strata * size + draws.entities(num, size, shared=self.loss.shared)) // num
            in_order = Shard(self.num_entities).entities(
                rows
            )  # of split tables, for any number of processes
            return in_order, torch.full((), math.log(num / size), device=rows.device)
        drawn = draws.entities(num, 2**63 - 1, shared=self.loss.shared)
        uniform = (
            strata + shift_right(drawn, 63 - 53).double() / 2**53
        ) / num  # of 53 binary digits
        log_size = math.log(size + 1)
        ranks = ((uniform * log_size).exp().long() - 1).clamp(0, size - 1)
        log_probabilities = torch.log(torch.log1p(1 / (ranks + 1).double()) / log_size)
        return self.by_frequency[ranks], math.log(num) + log_probabilities


def frequency_weights(train: Triples, num_entities: int, share: float) -> Tensor:
    """w(t) = share·#t / max # + (1 − share), `(num_entities,)`: Appendix D.1, `share` being its
    w0.
    """
    counts = np.bincount(np.concatenate([train[:, 0], train[:, 2]]), minlength=num_entities)
    relative = torch.from_numpy(counts / max(int(counts.max(initial=0)), 1)).to(
        torch.get_default_dtype()
    )
    return share * relative + (1 - share)


def entity_weights(share: float, model: Model, graph: Graph) -> Tensor | None:
    """`frequency_weights` as numbers of a model."""
    if not share:
        return None
    weights = frequency_weights(graph.train, graph.shape.num_entities, share)
    return weights.to(model.device, next(model.parameters()).dtype)


def cross_entropy(
    scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
) -> Tensor:
    """Mean of −log softmax(scores)[target], weighted by w(target) and divided by the batch's summed
    weights.

    With `smoothing`, the weight is the target's too, where PyTorch would weight every candidate by
    its own.
    """
    if not smoothing:
        return F.cross_entropy(scores, targets, weight=weights)
    losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    return weighted_mean(losses, weights, targets)


def with_relations(loss: Tensor, weight: float, model: Model, f: Factors) -> Tensor:
    """A loss, and the weighted cross entropy of relation prediction."""
    return loss + weight * cross_entropy(model.relation_scores(f), f.relations) if weight else loss


def weighted_mean(losses: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
    """The mean of the losses of targets, `(batch,)` each, with the weights of all entities,
    `(num_entities,)`.
    """
    if weights is None:
        return losses.mean()
    chosen = weights[targets]
    return (chosen * losses).sum() / chosen.sum()

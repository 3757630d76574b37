"""Softmax losses: 1-vs-all and K-vs-all over all entities, and sampled softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from dualkg.data.graph import Graph, Triples
from dualkg.data.triples import inverse_relations
from dualkg.errors import RequestError
from dualkg.kernels.hashing import STEP, hash_columns, reaches_share, shift_right, splitmix64
from dualkg.losses.base import LOSSES, Loss
from dualkg.losses.negative_sampling import (
    Draws,
    check_batch_size,
    rows_of_negatives,
)
from dualkg.losses.queries import QueryGroups, TrainingAnswers
from dualkg.models.base import Factors, Model
from dualkg.tables.base import Side
from dualkg.tables.scores import EntityScores, cross_entropy, weighted_mean
from dualkg.tables.shard import RowOrder

__all__ = ["KvsAll", "OneVsAll", "SampledSoftmax"]


@LOSSES.register
class OneVsAll(Loss):
    """Softmax cross entropy of each triple's answer against all entities (1-vs-all).

    Attributes:
        frequency_weight: w0 of Appendix D.1, which weights answers by how often they occur.
        relation_weight: Weight of the cross entropy of the relation given head and tail; 0 leaves
            it out.
        dropout: Fraction of each query's mapped vector that is set to zero.
        head_dropout: Fraction of each given entity's vector that is set to zero before it is
            mapped.
        label_smoothing: Fraction of each target that is spread over all entities; relations are not
            smoothed.
        exclude_known: Whether the other answers of a query in train are left out of its softmax.

    Examples:
        >>> loss = kg.OneVsAll(relation_weight=0.5, label_smoothing=0.1)
        >>> kg.train("ComplEx", graph, loss=loss, epochs=1).recipe.loss.relation_weight
        0.5
    """

    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "relation_weight": (0.0, 0.5, 4.0),
        "frequency_weight": (0.0, 0.9),
    }

    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    exclude_known: bool = False

    @model_validator(mode="after")
    def _smoothed_labels_are_candidates(self) -> OneVsAll:
        if self.exclude_known and self.label_smoothing:
            raise ValueError(
                "label_smoothing gives all entities a share, and exclude_known leaves some out; "
                "set one of them"
            )
        return self

    def bind(
        self,
        model: Model,
        graph: Graph,
        *,
        batch_size: int,
        seed: int,
        grouped_by_query: bool = False,
        **_: Any,
    ) -> BoundOneVsAll:
        known = None
        max_known = 0
        if self.exclude_known:
            known = TrainingAnswers(graph.train, graph.shape, device=model.device)
            # Each triple of a batch may have the query with the most answers.
            max_known = batch_size * known.max_answers(1)
        return BoundOneVsAll(
            known=known,
            max_known=max_known,
            entity_weights=_entity_weights(self, model, graph),
            relation_weight=self.relation_weight,
            dropouts=Dropouts.of(model, self, seed=seed),
            label_smoothing=self.label_smoothing,
            grouped_by_query=grouped_by_query,
        )

    @property
    def fast_step_obstacle(self) -> str | None:
        if type(self).bind is not OneVsAll.bind:
            return super().fast_step_obstacle
        for key in ("label_smoothing", "head_dropout", "exclude_known"):
            if getattr(self, key):
                return f"loss.{key}"
        return None

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal and not self.relation_weight

    @property
    def predicts_relations(self) -> bool:
        return self.relation_weight > 0

    def entity_weights(self, train: Triples, num_entities: int) -> Tensor | None:
        if not self.frequency_weight:
            return None
        return frequency_weights(train, num_entities, self.frequency_weight)

    def check_model(self, model: Model) -> None:
        """Refuse settings of embeddings for a model that reads the graph.

        Triples whose relation is predicted would be read from there.
        """
        if not model.reads_graph:
            return
        for key in ("relation_weight", "dropout", "head_dropout"):
            if getattr(self, key):
                raise RequestError(
                    f"`loss.{key}` applies to embeddings, and {type(model).__name__} has none. Set "
                    "it to 0."
                )


@LOSSES.register
class KvsAll(Loss):
    """Softmax cross entropy of each query against all entities (K-vs-all).

    The answers of a query share the target evenly. A query with n answers has the weight n to the
    power `count_exponent`. Other settings are those of `OneVsAll`.

    Attributes:
        dropout: As in `OneVsAll`.
        head_dropout: As in `OneVsAll`.
        label_smoothing: As in `OneVsAll`.
        count_exponent: A query with n answers has the weight n to this power.

    Examples:
        >>> run = kg.train("ComplEx", graph, loss=kg.KvsAll(label_smoothing=0.1), epochs=1)
        >>> run.recipe.loss.label_smoothing
        0.1
    """

    examples: ClassVar[Literal["triples", "queries"]] = "queries"
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "label_smoothing": (0.0, 0.1, 0.3),
        "dropout": (0.0, 0.2, 0.4),
    }

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


@LOSSES.register
class SampledSoftmax(Loss):
    """Softmax cross entropy of each triple's answer against sampled entities.

    It is corrected for how they are sampled. A negative e with the expected count n·q(e) has the
    score s(e) − log(n·q(e)), so that the sum over the sample is an unbiased estimate of the sum
    over all entities (Bengio and Senécal, 2008). `distribution` q is `uniform`, or `log-uniform` in
    the frequency rank of an entity. With `shared`, a batch has one sample, and its scores are one
    matrix product. Samples are stratified: each negative is drawn from its own part of the
    entities, so that the processes of a distributed training own equally many uniform negatives.
    Negatives equal to the answer are left out.

    Attributes:
        num_negatives: Number of sampled entities.
        distribution: q, "uniform" or "log-uniform" in the frequency rank of an entity.
        shared: Whether a batch has one sample, so that its scores are one matrix product.
        frequency_weight: As in `OneVsAll`.
        relation_weight: As in `OneVsAll`.

    Examples:
        >>> loss = kg.SampledSoftmax(num_negatives=100)
        >>> kg.train("ComplEx", graph, loss=loss, epochs=1).recipe.loss.num_negatives
        100
    """

    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = OneVsAll.tuned

    num_negatives: int = Field(1000, ge=1)
    distribution: Literal["uniform", "log-uniform"] = "uniform"
    shared: bool = True
    frequency_weight: float = Field(0.0, ge=0, le=1)
    relation_weight: float = Field(0.0, ge=0)

    def bind(
        self, model: Model, graph: Graph, *, seed: int, grouped_by_query: bool = False, **_: Any
    ) -> BoundSampledSoftmax:
        num_entities = graph.shape.num_entities
        by_frequency = None
        if self.distribution == "log-uniform":
            counts = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=num_entities)
            by_frequency = torch.from_numpy(np.argsort(-counts, kind="stable")).to(model.device)
        return BoundSampledSoftmax(
            self,
            num_entities,
            by_frequency,
            _entity_weights(self, model, graph),
            seed,
            grouped_by_query=grouped_by_query and model.device.type == "cpu",
        )

    def check_training(self, *, reciprocal: bool, batch_size: int) -> None:
        check_batch_size(batch_size)

    def most_negatives(self, num_rows: int, num_entities: int) -> int:
        """The most negatives of a batch that are among `num_rows` neighbours in `RowOrder`.

        Uniform ones are stratified by rows. Log-uniform ones may all be there.
        """
        if self.distribution != "uniform":
            return self.num_negatives
        return min(self.num_negatives, num_rows * self.num_negatives // num_entities + 2)

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal and not self.relation_weight

    @property
    def predicts_relations(self) -> bool:
        return self.relation_weight > 0

    def entity_weights(self, train: Triples, num_entities: int) -> Tensor | None:
        if not self.frequency_weight:
            return None
        return frequency_weights(train, num_entities, self.frequency_weight)

    def num_candidates(self, batch_size: int) -> int:
        return self.num_negatives

    def rows_per_batch(self, model: Model, batch_size: int) -> int:
        """Heads, tails and negatives."""
        num = self.num_negatives
        negatives = rows_of_negatives(model, batch_size, num, shared=self.shared)
        return 2 * batch_size + negatives


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
        """Factors 0 or 1 / (1 − share) for vectors `like` these, or those of query `groups`.

        With `backward`, they are those of head prediction.
        """
        if groups is None:
            positions = torch.arange(len(f.heads), device=like.device)
        else:
            positions = groups.first
        seed = 2 * self.seed + backward
        start = hash_columns(seed, positions, f.heads[positions], f.tails[positions])
        columns = torch.arange(like.shape[1], device=like.device)
        drawn = splitmix64(start[:, None] + columns * STEP)
        return reaches_share(drawn, self.share).to(like.dtype) / (1 - self.share)

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
        # The seed is one that no mapped vector uses.
        self.given = Dropout(given, seed=-1 - seed) if given else None

    @classmethod
    def of(cls, model: Model, loss: OneVsAll | KvsAll, *, seed: int) -> Dropouts:
        """The dropouts of a loss, refused for models whose parameters are not coordinates."""
        for key in ("dropout", "head_dropout"):
            if getattr(loss, key) and not model.embedding.euclidean:
                name = type(model.whole).__name__
                raise RequestError(
                    f"Dropout sets coordinates to zero, and the numbers of {name} are not "
                    f"coordinates of a vector space. Set `loss.{key}` to 0."
                )
        return cls(mapped=loss.dropout, given=loss.head_dropout, seed=seed)

    def __call__(
        self, f: Factors, *, both: bool = False, grouped_by_query: bool = False
    ) -> Factors:
        """The same factors with dropout for tail prediction; with `both`, also for heads."""
        if self.mapped is None and self.given is None:
            return f
        dropped = f.fresh()
        groups = QueryGroups.of(f.heads, f.relations) if grouped_by_query else None
        for name in ("head", "tail") if both else ("head",):
            options: dict[str, Any] = {
                "backward": name == "tail",
                "groups": groups if name == "head" else None,
            }
            if self.given is not None:
                setattr(dropped, name, self.given(getattr(f, name), f, **options))
            # Without dropout of the given vectors, the batch may have been mapped already.
            mapped = getattr(f if self.given is None else dropped, f"mapped_{name}")
            if self.mapped is not None:
                mapped = self.mapped(mapped, f, **options)
            setattr(dropped, f"mapped_{name}", mapped)
        return dropped


def target_weights(
    entity_weights: Tensor | None, entities: Tensor, *, scale: float, dtype: torch.dtype
) -> Tensor:
    """The weight of each target in the mean, `(batch,)`, in total `scale`."""
    if entity_weights is None:
        weight = scale / len(entities)
        return torch.full(entities.shape, weight, dtype=dtype, device=entities.device)
    chosen = entity_weights[entities]
    return chosen / (chosen.sum() / scale)


@dataclass(kw_only=True)
class BoundOneVsAll:
    """1-vs-all of a batch of triples; `entity_weights` is `(num_entities,)`.

    `known` are answers that are no candidates, at most `max_known` of a batch.
    """

    entity_weights: Tensor | None = None
    known: TrainingAnswers | None = None
    max_known: int = 0
    relation_weight: float = 0.0
    dropouts: Dropouts = field(default_factory=Dropouts)
    label_smoothing: float = 0.0
    grouped_by_query: bool = False

    def __call__(self, model: Model, f: Factors) -> Tensor:
        both = not model.reciprocal
        dropped = self.dropouts(f, both=both, grouped_by_query=self.grouped_by_query)
        loss = self._of_side(model, dropped, "tail")
        if not model.reciprocal:
            loss = (loss + self._of_side(model, dropped, "head")) / 2
        return with_relations(loss, self.relation_weight, model, f)

    def _of_side(self, model: Model, f: Factors, side: Side) -> Tensor:
        scores = model.entity_scores(f, side)
        answers = f.answers(side)
        if self.known is not None:
            scores = self._without_known(scores, model, f, side)
        return scores.cross_entropy(answers, self.entity_weights, smoothing=self.label_smoothing)

    def _without_known(
        self, scores: EntityScores, model: Model, f: Factors, side: Side
    ) -> EntityScores:
        """Scores that are −∞ for the other known answers of each query."""
        assert self.known is not None
        relations = f.relations
        if side == "head":
            relations = inverse_relations(relations, model.shape.num_relations)
        known = self.known.of(f.given(side), relations, capacity=self.max_known)
        # Padding repeats an answer of the last query.
        return scores.without(known.queries, known.entities, but=f.answers(side))


@dataclass
class BoundKvsAll:
    """K-vs-all of queries with at most `max_answers` answers in total.

    The tail of a query only determines its dropout mask.
    """

    answers: TrainingAnswers
    max_answers: int
    count_exponent: float = 0.0
    dropouts: Dropouts = field(default_factory=Dropouts)
    label_smoothing: float = 0.0

    def __call__(self, model: Model, f: Factors) -> Tensor:
        scores = model.entity_scores(self.dropouts(f), "tail")
        answers = self.answers.of(f.heads, f.relations, capacity=self.max_answers)
        counts = answers.counts.to(scores.values.dtype)
        weights = counts**self.count_exponent
        normalizers = scores.logsumexp()
        if self.label_smoothing:
            normalizers = normalizers - self.label_smoothing * scores.mean()
        shares = torch.where(answers.valid, (weights / counts)[answers.queries], 0)
        at_answers = scores.weighted_sum(answers.queries, answers.entities, shares)
        total = (weights * normalizers).sum() - (1 - self.label_smoothing) * at_answers
        return total / weights.sum()


@dataclass(frozen=True)
class BoundSampledSoftmax:
    """Sampled softmax of a batch of triples.

    `by_frequency` has the entities by decreasing frequency.
    """

    loss: SampledSoftmax
    num_entities: int
    by_frequency: Tensor | None = None
    entity_weights: Tensor | None = None
    seed: int = 0
    # Whether neighbours in a batch may answer one query, which is then scored once on a CPU.
    grouped_by_query: bool = False

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
        scores, columns = model.own_candidate_scores(f, negatives, side)
        log_counts = log_counts.expand(negatives.shape)[..., columns]
        is_answer = negatives[..., columns] == answers[:, None]
        corrected = scores - log_counts.to(scores.dtype)
        positive = model.triple_scores(f)
        scores = corrected.masked_fill(is_answer, -torch.inf)
        losses = model.tables.logsumexp(positive, scores) - positive
        return weighted_mean(losses, self.entity_weights, answers)

    def entities_read(self, model: Model, f: Factors) -> Tensor:
        """The entities whose rows a batch reads, `(n,)`; they may repeat."""
        draws = Draws.of(f, seed=self.seed)
        ids = [f.heads, f.tails, self.sample(draws)[0].flatten()]
        if not model.reciprocal:
            ids.append(self.sample(draws.others())[0].flatten())
        return torch.cat(ids)

    def sample(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Negatives and the logarithm of the expected count of each.

        Negatives are `(n,)`, or `(batch, n)` where they are not shared. Log-uniform, an entity of
        frequency rank k = 0, 1, … has the probability log((k + 2) / (k + 1)) / log(num_entities +
        1). Negative j of n is from the j-th of n equal parts: of the rows in `RowOrder` if uniform,
        of the interval [0, 1) if log-uniform.
        """
        num = self.loss.num_negatives
        size = self.num_entities
        strata = torch.arange(num, device=draws.batch.device)
        if self.by_frequency is None:
            rows = (strata * size + draws.entities(num, size, shared=self.loss.shared)) // num
            negatives = RowOrder(self.num_entities).entities(rows)
            return negatives, torch.full((), math.log(num / size), device=rows.device)
        drawn = draws.entities(num, 2**63 - 1, shared=self.loss.shared)
        fractions = shift_right(drawn, 63 - 53).double() / 2**53  # 53 binary digits
        uniform = (strata + fractions) / num
        log_size = math.log(size + 1)
        ranks = ((uniform * log_size).exp().long() - 1).clamp(0, size - 1)
        log_probabilities = torch.log(torch.log1p(1 / (ranks + 1).double()) / log_size)
        return self.by_frequency[ranks], math.log(num) + log_probabilities


def frequency_weights(train: Triples, num_entities: int, share: float) -> Tensor:
    """w(t) = share·#t / max # + (1 − share), `(num_entities,)`.

    It is the weight of Appendix D.1, where `share` is called w0.
    """
    counts = np.bincount(np.concatenate([train[:, 0], train[:, 2]]), minlength=num_entities)
    largest = max(int(counts.max(initial=0)), 1)
    relative = torch.from_numpy(counts / largest).to(torch.get_default_dtype())
    return share * relative + (1 - share)


def _entity_weights(loss: Loss, model: Model, graph: Graph) -> Tensor | None:
    """The weights of a loss as numbers of a model."""
    weights = loss.entity_weights(graph.train, graph.shape.num_entities)
    if weights is None:
        return None
    return weights.to(model.device, next(model.parameters()).dtype)


def with_relations(loss: Tensor, weight: float, model: Model, f: Factors) -> Tensor:
    """A loss, and the weighted cross entropy of relation prediction."""
    if not weight:
        return loss
    return loss + weight * cross_entropy(model.relation_scores(f), f.relations)

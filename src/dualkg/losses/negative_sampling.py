"""Losses over sampled negatives: triples of which one entity was replaced."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Graph
from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64
from dualkg.losses.base import Loss
from dualkg.losses.queries import TrainingAnswers
from dualkg.models.base import Factors, Model, Side

SamplerKind = Literal["uniform", "shared", "in-batch"]
NUM_NEGATIVES = 64
REDRAWS = 2  # how often a known answer is drawn again before it gets no weight
DIGITS = 24  # binary digits in which a random number is compared with a probability


class SampledLoss(Loss):
    """Settings that all losses over sampled negatives share.

    `sampler` draws negatives for each triple (`uniform`), once for a batch (`shared`), or takes the answers of the
    other triples in the batch (`in-batch`). `filtered` leaves out negatives that are known answers in train.
    `corruption` replaces head or tail with equal probability (`uniform`), by the relation's cardinality (`bernoulli`),
    or one after the other (`both`); with reciprocal relations it is always the tail. `margin` is γ. `subsampling`
    weights triples by how rare their queries are.
    """

    num_negatives: int = Field(NUM_NEGATIVES, ge=1)
    sampler: SamplerKind = "uniform"
    corruption: Literal["uniform", "bernoulli", "both"] = "uniform"
    margin: float = Field(1.0, ge=0)
    subsampling: bool = False
    filtered: bool = True

    @model_validator(mode="after")
    def _num_negatives_is_used(self) -> SampledLoss:
        if self.sampler == "in-batch" and self.num_negatives != NUM_NEGATIVES:
            raise ValueError("loss.num_negatives has no effect with loss.sampler = 'in-batch'; leave it out")
        return self

    @abstractmethod
    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        """Scores of triples `(batch,)`, of negatives `(batch, n)`, and which are allowed `(batch, n)` → `(batch,)`."""

    def bind(
        self, model: Model, graph: Graph, *, batch_size: int, seed: int, grouped_by_query: bool = False
    ) -> BoundSampledLoss:
        bernoulli = self.corruption == "bernoulli" and not model.reciprocal
        needed = self.filtered or self.subsampling or bernoulli
        answers = TrainingAnswers(graph.train, graph.shape, device=model.device) if needed else None
        known = answers if self.filtered else None
        sampler = Sampler(self.sampler, graph.shape.num_entities, num_negatives=self.num_negatives, known=known)
        probabilities = answers.head_corruption_probabilities() if answers and bernoulli else None
        return BoundSampledLoss(
            self,
            sampler,
            corruption=Corruption(probabilities, both=self.corruption == "both"),
            subsampling=answers if self.subsampling else None,
            seed=seed,
        )

    def check_training(self, *, reciprocal: bool, batch_size: int) -> None:
        if batch_size < 2:
            raise ValueError(
                "negatives are drawn by what a batch holds, and a triple alone would draw the same in every epoch, so "
                "training.batch_size should be at least 2; it is 1"
            )
        if self.corruption != "uniform" and reciprocal:
            raise ValueError(
                f"with reciprocal relations only tails are corrupted, so loss.corruption = '{self.corruption}' is for "
                f"model.reciprocal = false; it is true"
            )

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal or self.corruption == "both"

    def numbers_per_example(self, model: Model, batch_size: int) -> int:
        """For each negative its score, integers to draw it by, and copies of its vector unless a batch shares it."""
        num = batch_size if self.sampler == "in-batch" else self.num_negatives
        num *= 2 if self.corruption == "both" else 1
        if self.sampler != "uniform" and model.shares_candidates:
            return num * (10 + 2 * model.score_arrays)
        return num * (14 + (3 if model.score_form == "products" else 8) * model.embedding.entities.shape[1])

    def rows_per_batch(self, model: Model, batch_size: int) -> int:
        """Heads and tails, which a corrupted part reads again, and negatives as `SampledSoftmax` counts them."""
        num = (batch_size if self.sampler == "in-batch" else self.num_negatives) * (1 if model.reciprocal else 2)
        shared = self.sampler != "uniform" and model.shares_candidates
        return 4 * batch_size + num * (1 if shared else 2 * batch_size)


class NegativeSampling(SampledLoss):
    """[−log σ(γ + s⁺) − Σ p_i log σ(−γ − s⁻_i)] / 2, with p the softmax of temperature · s⁻ (Sun et al., 2019).

    p has no gradient. With `adversarial_temperature` 0 all negatives have the same weight.
    """

    margin: float = Field(9.0, ge=0)
    adversarial_temperature: float = Field(1.0, ge=0)

    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        of_positive = F.logsigmoid(self.margin + positive)
        of_negatives = (self.weights(negative, allowed) * F.logsigmoid(-self.margin - negative)).sum(-1)
        return -(of_positive + of_negatives) / 2

    @torch.no_grad()
    def weights(self, negative: Tensor, allowed: Tensor) -> Tensor:
        """p, `(batch, n)`: rows sum to 1, or to 0 where no negative is allowed."""
        logits = (self.adversarial_temperature * negative).masked_fill(~allowed, -torch.inf)
        return logits.softmax(-1).masked_fill(~allowed, 0.0)  # a row of −inf alone has become NaN


class MarginRanking(SampledLoss):
    """max(0, γ − s⁺ + s⁻), the mean over the allowed negatives (Bordes et al., 2013); 0 where there is none."""

    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        violations = F.relu(self.margin - positive[:, None] + negative)
        return (violations * allowed).sum(-1) / allowed.sum(-1).clamp(min=1)


@dataclass
class BoundSampledLoss:
    """The mean of a sampled loss over the triples of a batch; weighted by query frequency with `subsampling`."""

    loss: SampledLoss
    sampler: Sampler
    corruption: Corruption = field(default_factory=lambda: Corruption())
    subsampling: TrainingAnswers | None = None
    seed: int = 0

    def __call__(self, model: Model, batch: Factors) -> Tensor:
        losses, weights = [], []
        for part in self.corruption(model, batch, Draws.of(batch, seed=self.seed)):
            f, (candidates, allowed) = part.factors, self.sampler(part)
            negative = model.candidate_scores(f, candidates, side=part.side)
            losses.append(self.loss.per_triple(model.triple_scores(f), negative, allowed))
            if self.subsampling is not None:
                weights.append(self.subsampling.subsampling_weights(f.heads, f.relations, f.tails))
        joined = torch.cat(losses)
        shares = torch.cat(weights).to(joined.dtype) if weights else torch.ones_like(joined)
        return (shares * joined).sum() / shares.sum()


class Draws(NamedTuple):
    """Pseudorandom integers: some for `each` triple of a batch, some for the `batch` as a whole.

    They follow from the seed and the content of the batch in its order, which changes with the epoch: so negatives
    differ between epochs, every device draws the same, and a resumed run needs no random state. A triple that is
    always alone in its batch would draw the same in every epoch; recipes refuse batches of one.
    """

    each: Tensor
    batch: Tensor

    @staticmethod
    def of(f: Factors, *, seed: int) -> Draws:
        positions = torch.arange(len(f.heads), device=f.heads.device)
        each = hash_columns(seed, positions, f.heads, f.relations, f.tails)
        batch = splitmix64(each.sum())
        return Draws(splitmix64(each + batch), batch)

    def at(self, rows: Tensor) -> Draws:
        """The draws of some triples of the batch."""
        return Draws(self.each[rows], self.batch)

    def others(self) -> Draws:
        """Draws that are independent of these."""
        return Draws(splitmix64(~self.each), splitmix64(~self.batch))

    def sides(self) -> Tensor:
        """A number of `DIGITS` binary digits for each triple, `(batch,)`: from column 0, which no candidate uses."""
        return shift_right(splitmix64(self.each), 64 - DIGITS)

    def entities(self, num: int, num_entities: int, *, redraw: int = 0, shared: bool = False) -> Tensor:
        """Entities for each triple, `(batch, num)`, or `shared` by the batch, `(num,)`; others with each `redraw`."""
        start = self.batch if shared else self.each[:, None]
        columns = torch.arange(1 + redraw * num, 1 + (redraw + 1) * num, device=start.device)
        # The bias of a remainder of 63 bits among a million entities is 1 in 10^13.
        return shift_right(splitmix64(start + columns * STEP), 1) % num_entities


@dataclass(frozen=True)
class CorruptedSide:
    """Triples of a batch and the side to replace; `batch_answers` are the answers of the whole batch, `(batch,)`."""

    factors: Factors
    side: Side
    draws: Draws
    batch_answers: Tensor

    @property
    def given(self) -> Tensor:
        """The entities that stay."""
        return self.factors.heads if self.side == "tail" else self.factors.tails

    @property
    def answers(self) -> Tensor:
        return self.factors.tails if self.side == "tail" else self.factors.heads


class Corruption:
    """Chooses the side of each triple to replace: the head with the probability of its relation, or 0.5.

    With `both`, both sides one after the other, with different negatives. With reciprocal relations a batch holds both
    directions of every triple, and only tails are replaced.
    """

    def __init__(self, head_probabilities: Tensor | None = None, *, both: bool = False) -> None:
        """Probabilities `(num_relations,)`, as `TrainingAnswers.head_corruption_probabilities` returns them."""
        self.limits = None if head_probabilities is None else (head_probabilities * 2**DIGITS).round().long()
        self.both = both

    def __call__(self, model: Model, f: Factors, draws: Draws) -> list[CorruptedSide]:
        """The batch, or its two parts, each with one side to replace; empty parts are left out."""
        if model.reciprocal:
            return [CorruptedSide(f, "tail", draws, f.tails)]
        if self.both:
            return [CorruptedSide(f, "tail", draws, f.tails), CorruptedSide(f, "head", draws.others(), f.heads)]
        limits = 2 ** (DIGITS - 1) if self.limits is None else self.limits[f.relations]
        corrupt_head = draws.sides() < limits
        sides: list[tuple[Tensor, Side, Tensor]] = [(~corrupt_head, "tail", f.tails), (corrupt_head, "head", f.heads)]
        parts = ((chosen.nonzero().squeeze(-1), side, answers) for chosen, side, answers in sides)
        return [
            CorruptedSide(model.factors(f.heads[rows], f.relations[rows], f.tails[rows]), side, draws.at(rows), answers)
            for rows, side, answers in parts
            if len(rows)
        ]


class Negatives(NamedTuple):
    """Entities in place of the answers, `(batch, n)` or `(n,)` for all; which of them are allowed, `(batch, n)`."""

    candidates: Tensor
    allowed: Tensor


class Sampler:
    """Finds negatives. A triple's own answer is never allowed, nor are answers in `known` where it is given.

    `uniform` draws negatives for each triple, and draws answers again, a few times. `shared` draws once for all triples
    of a batch, so that scores are one product with a small table. `in-batch` takes the answers of the other triples in
    the batch, so that frequent answers are frequent negatives.
    """

    def __init__(
        self,
        kind: SamplerKind,
        num_entities: int,
        *,
        num_negatives: int = NUM_NEGATIVES,
        known: TrainingAnswers | None = None,
    ) -> None:
        self.kind = kind
        self.num_entities = num_entities
        self.num_negatives = num_negatives
        self.known = known

    def __call__(self, part: CorruptedSide) -> Negatives:
        """The negatives of triples with one side to replace."""
        if self.kind == "in-batch":
            candidates = part.batch_answers
        else:
            candidates = part.draws.entities(self.num_negatives, self.num_entities, shared=self.kind == "shared")
        is_answer = self._is_answer(part, candidates)
        if self.kind == "uniform":
            for redraw in range(1, REDRAWS + 1):
                others = part.draws.entities(self.num_negatives, self.num_entities, redraw=redraw)
                candidates = torch.where(is_answer, others, candidates)
                is_answer = self._is_answer(part, candidates)
        return Negatives(candidates, ~is_answer)

    def _is_answer(self, part: CorruptedSide, candidates: Tensor) -> Tensor:
        """Which candidates are answers, and so not allowed, `(batch, n)`."""
        own = candidates == part.answers[:, None]
        if self.known is None:
            return own
        relations = part.factors.relations
        if part.side == "head":  # heads are known as the tails of the inverse
            relations = relations + self.known.shape.num_relations
        return own | self.known.contain(part.given, relations, candidates)

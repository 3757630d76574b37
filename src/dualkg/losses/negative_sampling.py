"""Losses over sampled negatives: triples of which one entity was replaced."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.graph import Graph
from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64
from dualkg.losses.base import LOSSES, Loss
from dualkg.losses.queries import TrainingAnswers
from dualkg.models.base import SIDES, Factors, Model
from dualkg.tables.base import Side

__all__ = ["MarginRanking", "NegativeSampling"]

NUM_NEGATIVES = 64
REDRAWS = 2  # how often a known answer is drawn again before it gets no weight
DIGITS = 24  # binary digits in which a random number is compared with a probability


class SampledLoss(Loss):
    """Settings that all losses over sampled negatives share.

    `sampler` draws negatives for each triple (`uniform`), once for a batch (`shared`), or takes the
    answers of the other triples in the batch (`in-batch`). `filtered` leaves out negatives that are
    known answers in train. `corruption` replaces head or tail with equal probability (`uniform`),
    by the relation's cardinality (`bernoulli`), or one after the other (`both`); with reciprocal
    relations it is always the tail. `margin` is γ. `subsampling` weights triples by how rare their
    queries are.
    """

    num_negatives: int = Field(NUM_NEGATIVES, ge=1)
    sampler: Literal["uniform", "shared", "in-batch"] = "uniform"
    corruption: Literal["uniform", "bernoulli", "both"] = "uniform"
    margin: float = Field(1.0, ge=0)
    subsampling: bool = False
    filtered: bool = True

    @model_validator(mode="after")
    def _num_negatives_is_used(self) -> SampledLoss:
        if self.sampler == "in-batch" and self.num_negatives != NUM_NEGATIVES:
            raise ValueError(
                "loss.num_negatives has no effect with loss.sampler = 'in-batch'; leave it out"
            )
        return self

    @abstractmethod
    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        """The loss of each triple, `(batch,)`.

        `positive` has the scores of the triples, `(batch,)`. `negative` has those of their
        negatives and `allowed` says which of these count, `(batch, n)` each.
        """

    def bind(self, model: Model, graph: Graph, *, seed: int, **_: Any) -> BoundSampledLoss:
        bernoulli = self.corruption == "bernoulli" and not model.reciprocal
        needed = self.filtered or self.subsampling or bernoulli
        answers = TrainingAnswers(graph.train, graph.shape, device=model.device) if needed else None
        probabilities = answers.head_corruption_probabilities() if answers and bernoulli else None
        return BoundSampledLoss(self, graph.shape.num_entities, answers, probabilities, seed)

    def check_training(self, *, reciprocal: bool, batch_size: int) -> None:
        check_batch_size(batch_size)
        if self.corruption != "uniform" and reciprocal:
            raise ValueError(
                "with reciprocal relations only tails are corrupted, so loss.corruption = "
                f"'{self.corruption}' is for model.reciprocal = false; it is true"
            )

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        return reciprocal or self.corruption == "both"

    def num_candidates(self, batch_size: int) -> int:
        return batch_size if self.sampler == "in-batch" else self.num_negatives

    def rows_per_batch(self, model: Model, batch_size: int) -> int:
        """Heads and tails, which a corrupted part reads again, and negatives."""
        num = batch_size if self.sampler == "in-batch" else self.num_negatives
        is_shared = self.sampler != "uniform"
        return 4 * batch_size + rows_of_negatives(model, batch_size, num, shared=is_shared)


def check_batch_size(batch_size: int) -> None:
    if batch_size < 2:
        raise ValueError(
            "negatives are drawn by what a batch holds, and a triple alone would draw the same "
            "in every epoch, so training.batch_size should be at least 2; it is 1"
        )


def rows_of_negatives(model: Model, batch_size: int, num: int, *, shared: bool) -> int:
    """Models that do not share candidates read the given entity with each of them."""
    num_sides = 1 if model.reciprocal else 2
    rows_per_negative = 1 if shared and model.shares_candidates else 2 * batch_size
    return num * num_sides * rows_per_negative


@LOSSES.register
class NegativeSampling(SampledLoss):
    """[−log σ(γ + s⁺) − Σ p_i log σ(−γ − s⁻_i)] / 2, with p the softmax of temperature · s⁻ (Sun et
    al., 2019).

    p has no gradient. With `adversarial_temperature` 0 all negatives have the same weight.

    Attributes:
        num_negatives: Number of negatives of a triple.
        sampler: "uniform" samples them for each triple, "shared" once for a batch, "in-batch" takes
            the other answers of the batch.
        corruption: The side that is replaced without reciprocal relations: "uniform", "bernoulli"
            or "both".
        margin: γ.
        subsampling: Whether triples of frequent queries have a lower weight.
        filtered: Whether known answers in train are excluded from the negatives.
        adversarial_temperature: Temperature of the weights p; with 0 all negatives have the same
            weight.

    Examples:
        >>> loss = kg.NegativeSampling(num_negatives=16, margin=6.0)
        >>> adam = kg.Optimizer("Adam", learning_rate=0.01)
        >>> model = kg.RotatE(graph.shape, dim=8)
        >>> run = kg.train(model, graph, loss=loss, optimizer=adam, epochs=1)
    """

    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "margin": (1.0, 3.0, 6.0, 9.0, 12.0, 18.0),
        "adversarial_temperature": (0.5, 1.0),
    }

    margin: float = Field(9.0, ge=0)
    adversarial_temperature: float = Field(1.0, ge=0)

    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        of_positive = F.logsigmoid(self.margin + positive)
        of_negatives = (
            self.weights(negative, allowed) * F.logsigmoid(-self.margin - negative)
        ).sum(-1)
        return -(of_positive + of_negatives) / 2

    @torch.no_grad()
    def weights(self, negative: Tensor, allowed: Tensor) -> Tensor:
        """p, `(batch, n)`: rows sum to 1, or to 0 where no negative is allowed."""
        logits = (self.adversarial_temperature * negative).masked_fill(~allowed, -torch.inf)
        return logits.softmax(-1).masked_fill(~allowed, 0.0)  # a row of −inf alone has become NaN


@LOSSES.register
class MarginRanking(SampledLoss):
    """max(0, γ − s⁺ + s⁻), the mean over the allowed negatives (Bordes et al., 2013); 0 where there
    is none.

    Attributes:
        num_negatives: As in `NegativeSampling`.
        sampler: As in `NegativeSampling`.
        corruption: As in `NegativeSampling`.
        margin: γ.
        subsampling: As in `NegativeSampling`.
        filtered: As in `NegativeSampling`.

    Examples:
        >>> loss = kg.MarginRanking(num_negatives=16)
        >>> run = kg.train(kg.TransE(graph.shape, dim=8), graph, loss=loss, epochs=1)
    """

    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        violations = F.relu(self.margin - positive[:, None] + negative)
        return (violations * allowed).sum(-1) / allowed.sum(-1).clamp(min=1)


class Draws(NamedTuple):
    """Pseudorandom integers: some for the `triples` of a batch, one for the `batch` as a whole.

    They follow from the seed and the content of the batch in its order, which changes with the
    epoch: so negatives differ between epochs, every device draws the same, and a resumed run needs
    no random state.
    """

    triples: Tensor
    batch: Tensor

    @staticmethod
    def of(f: Factors, *, seed: int) -> Draws:
        positions = torch.arange(len(f.heads), device=f.heads.device)
        hashes = hash_columns(seed, positions, f.heads, f.relations, f.tails)
        batch = splitmix64(hashes.sum())
        return Draws(splitmix64(hashes + batch), batch)

    def at(self, rows: Tensor) -> Draws:
        """The draws of some triples of the batch."""
        return Draws(self.triples[rows], self.batch)

    def others(self) -> Draws:
        """Draws that are independent of these."""
        return Draws(splitmix64(~self.triples), splitmix64(~self.batch))

    def sides(self) -> Tensor:
        """A number of `DIGITS` binary digits for each triple, `(batch,)`: from column 0, which no
        candidate uses.
        """
        return shift_right(splitmix64(self.triples), 64 - DIGITS)

    def entities(
        self, num: int, num_entities: int, *, redraw: int = 0, shared: bool = False
    ) -> Tensor:
        """Entities for each triple, `(batch, num)`, or `shared` by the batch, `(num,)`; others with
        each `redraw`.
        """
        start = self.batch if shared else self.triples[:, None]
        columns = torch.arange(1 + redraw * num, 1 + (redraw + 1) * num, device=start.device)
        # The bias of a remainder of 63 bits among a million entities is 1 in 10^13.
        return shift_right(splitmix64(start + columns * STEP), 1) % num_entities


class CorruptedSide(NamedTuple):
    """Triples of a batch and the side to replace.

    `batch_answers` are the answers of the whole batch, `(batch,)`.
    """

    factors: Factors
    side: Side
    draws: Draws
    batch_answers: Tensor


@dataclass
class BoundSampledLoss:
    """The mean of a sampled loss over the triples of a batch.

    With `subsampling`, it is weighted by the frequency of queries. `answers` are those in train,
    if they are needed. `head_probabilities` are those of replacing the head, `(num_relations,)`;
    None is 0.5.
    """

    loss: SampledLoss
    num_entities: int
    answers: TrainingAnswers | None = None
    head_probabilities: Tensor | None = None
    seed: int = 0

    def __call__(self, model: Model, batch: Factors) -> Tensor:
        losses = []
        weights = []
        for part in self.corrupt(model, batch):
            f = part.factors
            candidates, allowed = self.negatives(part)
            negative = model.candidate_scores(f, candidates, side=part.side)
            losses.append(self.loss.per_triple(model.triple_scores(f), negative, allowed))
            if self.loss.subsampling and self.answers is not None:
                weights.append(self.answers.subsampling_weights(f.heads, f.relations, f.tails))
        joined = torch.cat(losses)
        shares = torch.cat(weights).to(joined.dtype) if weights else torch.ones_like(joined)
        return (shares * joined).sum() / shares.sum()

    def entities_read(self, model: Model, f: Factors) -> Tensor:
        """The entities whose rows a batch reads, `(n,)`; they may repeat."""
        negatives = [self.negatives(part)[0].flatten() for part in self.corrupt(model, f)]
        return torch.cat([f.heads, f.tails, *negatives])

    def corrupt(self, model: Model, f: Factors) -> list[CorruptedSide]:
        """The batch, or its two parts, each with one side to replace; empty parts are left out."""
        draws = Draws.of(f, seed=self.seed)
        if model.reciprocal:
            # The examples have both directions of every triple.
            return [CorruptedSide(f, "tail", draws, f.tails)]
        if self.loss.corruption == "both":
            return [
                CorruptedSide(f, "tail", draws, f.tails),
                CorruptedSide(f, "head", draws.others(), f.heads),
            ]
        limits: int | Tensor = 2 ** (DIGITS - 1)
        if self.head_probabilities is not None:
            limits = (self.head_probabilities * 2**DIGITS).round()[f.relations]
        corrupt_head = draws.sides() < limits
        parts = []
        for side, chosen in zip(SIDES, (~corrupt_head, corrupt_head), strict=True):
            rows = chosen.nonzero().squeeze(-1)
            if len(rows):
                factors = model.factors(f.heads[rows], f.relations[rows], f.tails[rows])
                parts.append(CorruptedSide(factors, side, draws.at(rows), f.answers(side)))
        return parts

    def negatives(self, part: CorruptedSide) -> tuple[Tensor, Tensor]:
        """Entities in place of the answers, and which of them are allowed, `(batch, n)`.

        The entities are `(batch, n)`, or `(n,)` where a batch shares them.
        """
        kind = self.loss.sampler
        num = self.loss.num_negatives
        if kind == "in-batch":
            candidates = part.batch_answers
        else:
            candidates = part.draws.entities(num, self.num_entities, shared=kind == "shared")
        is_answer = self._is_answer(part, candidates)
        for redraw in range(1, REDRAWS + 1 if kind == "uniform" else 1):
            others = part.draws.entities(num, self.num_entities, redraw=redraw)
            candidates = torch.where(is_answer, others, candidates)
            is_answer = self._is_answer(part, candidates)
        return candidates, ~is_answer

    def _is_answer(self, part: CorruptedSide, candidates: Tensor) -> Tensor:
        f = part.factors
        side = part.side
        own = candidates == f.answers(side)[:, None]
        if not self.loss.filtered or self.answers is None:
            return own
        # Heads are known as the tails of the inverse.
        relations = f.relations + (self.answers.shape.num_relations if side == "head" else 0)
        return own | self.answers.contain(f.given(side), relations, candidates)

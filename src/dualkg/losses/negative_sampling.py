"""Losses that hold a triple against a few others, of which one entity was exchanged: not against all entities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.errors import RequestError
from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64
from dualkg.losses.softmax import TrainingAnswers
from dualkg.models.base import Factors, Model, Side

NUM_NEGATIVES = 64
REDRAWS = 2  # how often a known answer is drawn again before it is left without weight
DIGITS = 24  # in which a drawn number is compared with a chance


class Draws:
    """Whole numbers that look drawn, in columns: some for each triple of a batch, some for the batch as a whole.

    All follow from the seed and from what the batch holds, in its order, which is another in every epoch: so a triple
    meets other negatives each time, every device draws the same, and a run that goes on need not know where it was.
    A triple that is always alone in its batch would draw the same for ever; recipes refuse batches of one.
    """

    def __init__(self, each: Tensor, batch: Tensor) -> None:
        self.each = each
        self.batch = batch

    @classmethod
    def of(cls, f: Factors, *, seed: int) -> Draws:
        places = torch.arange(len(f.heads), device=f.heads.device)
        each = hash_columns(seed, places, f.heads, f.relations, f.tails)
        batch = splitmix64(each.sum())
        return cls(splitmix64(each + batch), batch)

    def at(self, rows: Tensor) -> Draws:
        """Those of some triples of the batch."""
        return Draws(self.each[rows], self.batch)

    def others(self) -> Draws:
        """Numbers that have nothing to do with these."""
        return Draws(splitmix64(~self.each), splitmix64(~self.batch))

    def sides(self) -> Tensor:
        """A number of `DIGITS` binary digits for each triple, `(batch,)`: from column 0, which no candidate has."""
        return shift_right(splitmix64(self.each), 64 - DIGITS)

    def entities(self, num: int, num_entities: int, *, redraw: int = 0) -> Tensor:
        """Entities for each triple, `(batch, num)`, others with each `redraw`."""
        return self._entities(self.each[:, None], num, num_entities, redraw)

    def shared_entities(self, num: int, num_entities: int) -> Tensor:
        """Entities for all triples of the batch, `(num,)`."""
        return self._entities(self.batch, num, num_entities, 0)

    @staticmethod
    def _entities(start: Tensor, num: int, num_entities: int, redraw: int) -> Tensor:
        columns = torch.arange(1 + redraw * num, 1 + (redraw + 1) * num, device=start.device)
        # A remainder of 63 bits: what it prefers among a million entities, it prefers by 1 in 10^13.
        return shift_right(splitmix64(start + columns * STEP), 1) % num_entities


@dataclass(frozen=True)
class Asked:
    """Triples of a batch of which one side is asked for; `of_batch` are the answers of all triples, `(batch,)`."""

    factors: Factors
    side: Side
    draws: Draws
    of_batch: Tensor

    @property
    def given(self) -> Tensor:
        """The entities that are not asked for."""
        return self.factors.heads if self.side == "tail" else self.factors.tails

    @property
    def answers(self) -> Tensor:
        return self.factors.tails if self.side == "tail" else self.factors.heads


class Negatives(NamedTuple):
    """Entities in the place of the answers, `(batch, n)` or `(n,)` for all; which of them count, `(batch, n)`."""

    candidates: Tensor
    allowed: Tensor


class Sampler(ABC):
    """Finds the negatives of triples. Their own answers never count, nor do those of `known` where it is given."""

    def __init__(self, *, known: TrainingAnswers | None = None) -> None:
        self.known = known

    @abstractmethod
    def __call__(self, asked: Asked) -> Negatives:
        """The negatives of triples of which one side is asked for."""

    def answered(self, asked: Asked, candidates: Tensor) -> Tensor:
        """Which candidates are answers, and so no negatives, `(batch, n)`."""
        own = candidates == asked.answers[:, None]
        if self.known is None:
            return own
        relations = asked.factors.relations
        if asked.side == "head":  # heads are known as the tails of the inverse
            relations = relations + self.known.shape.num_relations
        return own | self.known.contain(asked.given, relations, candidates)


class DrawingSampler(Sampler):
    """A sampler that draws `num_negatives` among all entities."""

    def __init__(
        self, num_entities: int, *, num_negatives: int = NUM_NEGATIVES, known: TrainingAnswers | None = None
    ) -> None:
        if num_negatives < 1:
            raise RequestError(f"A triple needs at least one negative; num_negatives is {num_negatives}.")
        super().__init__(known=known)
        self.num_entities = num_entities
        self.num_negatives = num_negatives


class UniformSampler(DrawingSampler):
    """Draws for each triple its own. What turns out to be an answer is drawn again, a few times."""

    def __call__(self, asked: Asked) -> Negatives:
        candidates = asked.draws.entities(self.num_negatives, self.num_entities)
        answered = self.answered(asked, candidates)
        for redraw in range(1, REDRAWS + 1):
            others = asked.draws.entities(self.num_negatives, self.num_entities, redraw=redraw)
            candidates = torch.where(answered, others, candidates)
            answered = self.answered(asked, candidates)
        return Negatives(candidates, ~answered)


class SharedSampler(DrawingSampler):
    """Draws once for all triples of a batch, so that scores are one product with a small table."""

    def __call__(self, asked: Asked) -> Negatives:
        candidates = asked.draws.shared_entities(self.num_negatives, self.num_entities)
        return Negatives(candidates, ~self.answered(asked, candidates))


class BatchSampler(Sampler):
    """Takes the answers of the other triples in the batch: an entity is met as often as it is an answer."""

    def __call__(self, asked: Asked) -> Negatives:
        return Negatives(asked.of_batch, ~self.answered(asked, asked.of_batch))


class Sides:
    """Chooses which side of each triple is corrupted: the head with the chance of its relation, or with one half.

    Or `both`, one after the other, with negatives of their own. With reciprocal relations a batch holds both directions
    of every triple, and tails alone are corrupted.
    """

    def __init__(self, head_chances: Tensor | None = None, *, both: bool = False) -> None:
        """Chances `(num_relations,)`, as `TrainingAnswers.head_chances` gives them."""
        self.limits = None if head_chances is None else (head_chances * 2**DIGITS).round().long()
        self.both = both

    def __call__(self, model: Model, f: Factors, draws: Draws) -> list[Asked]:
        """The batch, or its two parts, each asked for one side; a part without triples is left out."""
        if model.reciprocal:
            return [Asked(f, "tail", draws, f.tails)]
        if self.both:
            return [Asked(f, "tail", draws, f.tails), Asked(f, "head", draws.others(), f.heads)]
        limits = 2 ** (DIGITS - 1) if self.limits is None else self.limits[f.relations]
        corrupt_head = draws.sides() < limits
        sides: list[tuple[Tensor, Side, Tensor]] = [(~corrupt_head, "tail", f.tails), (corrupt_head, "head", f.heads)]
        parts = ((chosen.nonzero().squeeze(-1), side, answers) for chosen, side, answers in sides)
        return [
            Asked(model.factors(f.heads[rows], f.relations[rows], f.tails[rows]), side, draws.at(rows), answers)
            for rows, side, answers in parts
            if len(rows)
        ]


class SampledLoss(ABC):
    """The loss of a batch of triples and of their negatives: the mean over the triples.

    With `subsampling` it is a weighted mean, by how often training asks the two queries of each triple.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        margin: float,
        sides: Sides | None = None,
        subsampling: TrainingAnswers | None = None,
        seed: int = 0,
    ) -> None:
        if not margin >= 0:
            raise RequestError(f"The margin of a loss is at least 0; it is {margin}.")
        self.sampler = sampler
        self.margin = margin
        self.sides = sides or Sides()
        self.subsampling = subsampling
        self.seed = seed

    @abstractmethod
    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        """Scores of triples `(batch,)`, of negatives `(batch, n)`, and which are allowed `(batch, n)` → `(batch,)`."""

    def __call__(self, model: Model, f: Factors) -> Tensor:
        """The loss of the triples whose factors these are, as the model scores them."""
        losses, weights = [], []
        for asked in self.sides(model, f, Draws.of(f, seed=self.seed)):
            candidates, allowed = self.sampler(asked)
            negative = model.candidate_scores(asked.factors, candidates, side=asked.side)
            losses.append(self.per_triple(model.triple_scores(asked.factors), negative, allowed))
            weights.append(self._weights(asked.factors, like=losses[-1]))
        joined, shares = torch.cat(losses), torch.cat(weights)
        return (shares * joined).sum() / shares.sum()

    def _weights(self, f: Factors, *, like: Tensor) -> Tensor:
        if self.subsampling is None:
            return torch.ones_like(like)
        return self.subsampling.subsampling_weights(f.heads, f.relations, f.tails).to(like.dtype)


class NegativeSampling(SampledLoss):
    """[−log σ(γ + s⁺) − Σ p_i log σ(−γ − s⁻_i)] / 2, with p the softmax of temperature · s⁻ (Sun et al., 2019).

    A negative that scores high counts more, but p itself is not learned from: it has no gradient. With temperature 0
    all negatives count alike. A triple of which no negative counts has its first half alone.
    """

    MARGIN = 9.0

    def __init__(
        self,
        sampler: Sampler,
        *,
        margin: float = MARGIN,
        temperature: float = 1.0,
        sides: Sides | None = None,
        subsampling: TrainingAnswers | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(sampler, margin=margin, sides=sides, subsampling=subsampling, seed=seed)
        if not temperature >= 0:
            raise RequestError(f"The temperature of negatives is at least 0; it is {temperature}.")
        self.temperature = temperature

    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        sought = F.logsigmoid(self.margin + positive)
        avoided = (self.shares(negative, allowed) * F.logsigmoid(-self.margin - negative)).sum(-1)
        return -(sought + avoided) / 2

    @torch.no_grad()
    def shares(self, negative: Tensor, allowed: Tensor) -> Tensor:
        """p, `(batch, n)`: rows add up to 1, or are all 0 where nothing counts."""
        logits = (self.temperature * negative).masked_fill(~allowed, -torch.inf)
        return logits.softmax(-1).masked_fill(~allowed, 0.0)  # a row of −inf alone has become NaN


class MarginRanking(SampledLoss):
    """max(0, γ − s⁺ + s⁻), the mean over the negatives that count (Bordes et al., 2013); 0 where none does."""

    MARGIN = 1.0

    def __init__(
        self,
        sampler: Sampler,
        *,
        margin: float = MARGIN,
        sides: Sides | None = None,
        subsampling: TrainingAnswers | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(sampler, margin=margin, sides=sides, subsampling=subsampling, seed=seed)

    def per_triple(self, positive: Tensor, negative: Tensor, allowed: Tensor) -> Tensor:
        lacking = F.relu(self.margin - positive[:, None] + negative)
        return (lacking * allowed).sum(-1) / allowed.sum(-1).clamp(min=1)

"""Losses that hold a triple against a few others, of which one entity was exchanged: not against all entities."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.errors import RequestError
from dualkg.losses.sampling import Draws, Sampler, Sides
from dualkg.losses.training_answers import TrainingAnswers
from dualkg.models.base import Model
from dualkg.models.factors import Factors


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

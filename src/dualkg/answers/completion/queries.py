"""The two queries that a triple answers, (head, relation, ?) and (?, relation, tail), by blocks of one relation."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.answers.completion.normalizers import log_sums
from dualkg.errors import DivergedError
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel

# Scores that are held at once: on a CPU few enough to stay near it, on a GPU enough to keep it busy.
SCORES = {"cpu": 2**22, "cuda": 2**26}


class Queries:
    """All queries of a relation that ask for tails, or for heads; and how likely an answer is among all entities.

    log p(answer | query) is its score less the query's normalizer: the logarithm of the sum of exp(score) over all
    entities, which is found once.
    """

    def __init__(self, model: Model, relation: int, side: Side, *, asked: Tensor | None = None) -> None:
        self.model, self.relation, self.side = model, relation, side
        if asked is None:
            asked = torch.zeros(2, model.shape.num_entities)
            asked[0] = torch.nan
        # Of every query the normalizer, and the largest logarithm of a probability; before it is asked, NaN and 0.
        self.asked = asked.to(model.device)

    @property
    def normalizers(self) -> Tensor:
        return self.asked[0]

    @property
    def largest(self) -> Tensor:
        """What no answer's log-probability is above."""
        return self.asked[1]

    @property
    def at_once(self) -> int:
        """How many queries are asked together."""
        return max(1, SCORES[self.model.device.type] // self.model.shape.num_entities)

    def scores(self, given: Tensor) -> Tensor:
        """Of every entity as answer, `(batch, num_entities)`."""
        relations = torch.full_like(given, self.relation)
        if self.side == "tail":
            scores = self.model.ask_tails(given, relations)
        else:
            scores = self.model.ask_heads(relations, given)
        normalizers = log_sums(scores)
        self.normalizers[given], self.largest[given] = normalizers, scores.amax(-1) - normalizers
        if not bool(normalizers.isfinite().all()):
            raise DivergedError(
                "The model scores NaN or infinity, so it cannot say which triples are plausible. Its training has "
                "diverged: lower the learning rate or raise the regularizer's weight."
            )
        return scores

    def ask(self, given: Tensor) -> None:
        """See that queries have their normalizers."""
        for fresh in torch.split(given[self.normalizers[given].isnan()], self.at_once):
            if len(fresh):
                self.scores(fresh)

    def scores_of(self, given: Tensor, answers: Tensor) -> Tensor:
        """Of some entities as answers, `(batch, num_answers)`."""
        parts = [self._some(part, answers) for part in torch.split(given, self._size(len(answers)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, given: Tensor, answers: Tensor) -> Tensor:
        model, relations = self.model, torch.full_like(given, self.relation)
        if self.side == "tail":
            return model.candidate_scores(model.factors(given, relations, None), answers, "tail")
        if model.reciprocal:
            inverse = relations + model.shape.num_relations
            return model.candidate_scores(model.factors(given, inverse, None), answers, "tail")
        return model.candidate_scores(model.factors(None, relations, given), answers, "head")

    def _size(self, num_answers: int) -> int:
        """How many queries are answered together: in some models a score takes as much memory as a vector."""
        bilinear = isinstance(self.model, BilinearModel)
        numbers = num_answers * (1 if bilinear else self.model.embedding.entities.shape[1])
        return max(1, SCORES[self.model.device.type] // max(1, numbers))

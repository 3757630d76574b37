"""Evidence of one model asked for again and again: what a question's scores sum to is remembered.

Most of the work for the probability of an answer is log Σ exp over all entities, of the question that the answer would
ask. That depends on one entity and one relation alone, and popular answers come again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.evidence import Ids, queries_at_once
from dualkg.evaluation.ranking import evaluating, full_precision
from dualkg.models.base import Model, Side

MOST = 2**20  # sums that are remembered; some 150 MB


class RepeatedEvidence:
    """Called with triples `(n, 3)` it gives what `evidence_of` gives, but for rounding."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sums: dict[tuple[Side, int, int], float] = {}

    @torch.no_grad()
    def __call__(self, triples: Ids) -> Tensor:
        model = self._model
        heads, relations, tails = torch.from_numpy(np.ascontiguousarray(triples)).to(model.device).unbind(1)
        with full_precision(), evaluating(model):
            forward = backward = model.score(heads, relations, tails)
            if model.reciprocal:
                backward = model.score(tails, relations + model.shape.num_relations, heads)
            of_tails = forward - self._summed("tail", triples[:, 0], triples[:, 1])
            of_heads = backward - self._summed("head", triples[:, 2], triples[:, 1])
        return (of_tails + of_heads) / 2

    def _summed(self, side: Side, given: Ids, relations: Ids) -> Tensor:
        """log Σ exp of the scores of each question, `(n,)`; each is summed once."""
        keys = [(side, entity, relation) for entity, relation in zip(given.tolist(), relations.tolist(), strict=True)]
        missing = [key for key in dict.fromkeys(keys) if key not in self._sums]
        if len(self._sums) + len(missing) > MOST:
            self._sums.clear()
            missing = list(dict.fromkeys(keys))
        size = queries_at_once(self._model)
        for block in (missing[start : start + size] for start in range(0, len(missing), size)):
            entity, relation = (
                torch.tensor(ids, device=self._model.device) for ids in list(zip(*block, strict=True))[1:]
            )
            asks_tails = side == "tail"
            scores = self._model.ask_tails(entity, relation) if asks_tails else self._model.ask_heads(relation, entity)
            self._sums.update(zip(block, scores.logsumexp(-1).tolist(), strict=True))
        return torch.tensor([self._sums[key] for key in keys], device=self._model.device)

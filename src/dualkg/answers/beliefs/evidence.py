"""What a model says of a triple, on a scale that compares across questions.

A score compares only with the scores of the same question: softmax training leaves what all answers share undetermined.
So a triple is measured by how likely it makes its answer among all entities, from both ends:

    evidence(h, r, t) = ½ log p(t | h, r) + ½ log p(h | r, t)

each p a softmax over the scores of all entities; the second comes from the inverse relation where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.evaluation.ranking import evaluating, full_precision
from dualkg.models.base import Model

Ids = npt.NDArray[np.int64]
SCORES_AT_ONCE = {"cpu": 2**23, "cuda": 2**28}


def queries_at_once(model: Model) -> int:
    """How many questions have all their scores in memory together."""
    return max(1, SCORES_AT_ONCE[model.device.type] // model.shape.num_entities)


@torch.no_grad()
def evidence_of(model: Model, triples: Ids) -> Tensor:
    """Triples `(n, 3)` of ids → their evidence `(n,)`; a question is scored once, however many triples share it."""
    heads, relations, tails = np.asarray(triples, dtype=np.int64).T
    with full_precision(), evaluating(model):
        of_tails = _log_probabilities(model, model.ask_tails, (heads, relations), tails)
        of_heads = _log_probabilities(model, model.ask_heads, (relations, tails), heads)
    return (of_tails + of_heads) / 2


def _log_probabilities(model: Model, ask: Callable[..., Tensor], asked: tuple[Ids, Ids], answers: Ids) -> Tensor:
    """log p(answer | question) of each, by blocks of distinct questions."""
    distinct, inverse = np.unique(np.stack(asked), axis=1, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    found = torch.empty(len(answers), device=model.device)
    size = queries_at_once(model)
    for first in range(0, distinct.shape[1], size):
        block = [torch.from_numpy(ids[first : first + size].copy()).to(model.device) for ids in distinct]
        scores = ask(*block)
        there = order[np.searchsorted(inverse[order], first) : np.searchsorted(inverse[order], first + size)]
        rows, chosen = (torch.from_numpy(ids).to(model.device) for ids in (inverse[there] - first, answers[there]))
        found[torch.from_numpy(there).to(model.device)] = scores[rows, chosen] - scores.logsumexp(-1)[rows]
    return found

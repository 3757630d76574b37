"""Scores and log-probabilities of queries, computed in blocks of bounded memory.

A query is an entity and a relation id, as in `KnownAnswers`: relation `r` for the tails of (entity,
r, ?), and `r + num_relations` for the heads of (?, r, entity).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.errors import DivergedError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.logs import ProgressLog
from dualkg.models.base import Model

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BLOCK_SCORES = {"cpu": 2**23, "cuda": 2**28}  # scores held in memory at once
MAX_CACHED = 2**20  # normalizers in a cache; about 150 MB


def query_block_size(model: Model) -> int:
    """The number of queries whose scores fit in memory together."""
    return max(1, BLOCK_SCORES[model.device.type] // model.shape.num_entities)


@torch.no_grad()
def score_queries(model: Model, entities: Ids, relations: Ids) -> Tensor:
    """Score every entity as an answer to each query, `(num_queries, num_entities)`, all in one
    block.
    """
    given, ids = (
        torch.from_numpy(np.ascontiguousarray(one)).to(model.device)
        for one in (entities, relations)
    )
    inverse = relations >= model.shape.num_relations
    num_relations = model.shape.num_relations
    with full_precision(), eval_mode(model):
        if not inverse.any():
            return model.predict_tails(given, ids)
        if inverse.all():
            return model.predict_heads(ids - num_relations, given)
        backward = torch.from_numpy(inverse).to(model.device)
        tails = model.predict_tails(given[~backward], ids[~backward])
        scores = torch.empty(
            len(given), model.shape.num_entities, dtype=tails.dtype, device=model.device
        )
        scores[~backward] = tails
        scores[backward] = model.predict_heads(ids[backward] - num_relations, given[backward])
        return scores


def score_blocks(model: Model, entities: Ids, relations: Ids) -> Iterator[tuple[slice, Tensor]]:
    """Score queries `(num_queries,)` block by block: which queries, and the scores `(block,
    num_entities)`.
    """
    size = query_block_size(model)
    log = ProgressLog("Scoring", first=False)
    for start in range(0, len(entities), size):
        block = slice(start, min(start + size, len(entities)))
        yield block, score_queries(model, entities[block], relations[block])
        log(lambda done=block.stop: f"{done:,} of {len(entities):,} queries")  # type: ignore[misc]


def check_finite(scores: Tensor) -> None:
    """Refuse the scores, or log-probabilities, of a model that has diverged."""
    if not bool(scores.isfinite().all()):
        raise DivergedError(
            "The model scores NaN or infinity for some query, so it has no probabilities. Its "
            "training has diverged: lower the learning rate or raise the regularizer's weight."
        )


def triple_log_probabilities(model: Model, triples: Ids) -> Tensor:
    """The mean of log p(tail | head, relation) and log p(head | relation, tail) of triples `(n,
    3)`, `(n,)`.

    Each p is a softmax over all entities. Triples that share a query share its scores.
    """
    heads, relations, tails = np.asarray(triples, dtype=np.int64).T
    of_tails = _answer_log_probabilities(model, heads, relations, tails)
    of_heads = _answer_log_probabilities(model, tails, relations + model.shape.num_relations, heads)
    found = (of_tails + of_heads) / 2
    check_finite(found)
    return found


def _answer_log_probabilities(model: Model, entities: Ids, relations: Ids, answers: Ids) -> Tensor:
    num_entities = model.shape.num_entities
    queries, inverse = np.unique(relations * num_entities + entities, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    found = torch.empty(len(answers), device=model.device)
    for block, scores in score_blocks(model, queries % num_entities, queries // num_entities):
        here = order[slice(*np.searchsorted(inverse[order], [block.start, block.stop]))]
        rows, columns, places = (
            torch.from_numpy(ids).to(model.device)
            for ids in (inverse[here] - block.start, answers[here], here)
        )
        found[places] = scores[rows, columns] - scores.logsumexp(-1)[rows]
    return found


class CachedLogProbabilities:
    """`triple_log_probabilities`, up to rounding, of one model, with a cache of the normalizers of
    queries.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._normalizers: dict[
            int, float
        ] = {}  # by query; only added to, since several threads may use it

    @torch.no_grad()
    def __call__(self, triples: Ids) -> Tensor:
        """Triples `(n, 3)` → log-probabilities `(n,)`."""
        model = self._model
        num_relations = self._model.shape.num_relations
        heads, relations, tails = (
            torch.from_numpy(np.ascontiguousarray(triples)).to(model.device).unbind(1)
        )
        with full_precision(), eval_mode(model):
            forward = backward = model.score(heads, relations, tails)
            if model.reciprocal:
                backward = model.score(tails, relations + num_relations, heads)
        of_tails = forward - self._normalizers_of(triples[:, 0], triples[:, 1])
        of_heads = backward - self._normalizers_of(triples[:, 2], triples[:, 1] + num_relations)
        return (of_tails + of_heads) / 2

    def _normalizers_of(self, entities: Ids, relations: Ids) -> Tensor:
        """log Σ exp of the scores of each query, `(n,)`."""
        num_entities = self._model.shape.num_entities
        keys = (relations * num_entities + entities).tolist()
        known = self._normalizers if len(self._normalizers) + len(keys) <= MAX_CACHED else {}
        missing = np.array([key for key in dict.fromkeys(keys) if key not in known], dtype=np.int64)
        for block, scores in score_blocks(
            self._model, missing % num_entities, missing // num_entities
        ):
            known.update(zip(missing[block].tolist(), scores.logsumexp(-1).tolist(), strict=True))
        self._normalizers = known
        return torch.tensor([known[key] for key in keys], device=self._model.device)

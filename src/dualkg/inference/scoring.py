"""Scores and log-probabilities of queries, computed in blocks of bounded memory.

A query is an entity and a relation id, as in `KnownAnswers`: relation `r` for the tails of (entity,
r, ?), and `r + num_relations` for the heads of (?, r, entity).

Of a symmetric relation both ask who is related to the entity: with `symmetric`, flags
`(num_relations,)`, their scores are the mean of both, so that (h, r, t) and (t, r, h) have the same
log-probability.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.errors import DataError, DivergedError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.logs import ProgressLog
from dualkg.models.base import Model

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class MissingTriples(DataError):
    """A split has no triples, and something cannot be computed without them.

    `purpose` begins the sentence ("Calibration"). With `only_there`, triples that another split
    also contains do not count.
    """

    def __init__(self, graph: str, split: str, *, purpose: str, only_there: bool = False) -> None:
        missing = f"{graph} has none"
        if only_there:
            missing += " that are not in another split too"
        super().__init__(
            f"{purpose} needs {split} triples, and {missing}. Split the graph so that {split} has "
            "some."
        )
        self.graph = graph
        self.split = split
        self.purpose = purpose


class ProbabilitiesNotFinite(DivergedError):
    """A model scores NaN or infinity for some query, so that it has no probabilities."""

    def __init__(self) -> None:
        super().__init__(
            "The model scores NaN or infinity for some query, so it has no probabilities. Its "
            "training has diverged: lower the learning rate or raise the regularizer's weight."
        )


# Scores that are held in memory at once, by the type of the device.
BLOCK_SCORES = {"cpu": 2**23, "cuda": 2**28}
# Normalizers in a cache. So many take about 150 MB.
MAX_CACHED = 2**20


def query_block_size(model: Model, *, max_scores: int | None = None) -> int:
    """The number of queries whose scores fit in memory together."""
    if max_scores is None:
        max_scores = BLOCK_SCORES[model.device.type]
    return max(1, max_scores // model.shape.num_entities)


@torch.no_grad()
def score_queries(
    model: Model, entities: Ids, relations: Ids, *, symmetric: Flags | None = None
) -> Tensor:
    """Score all entities as answers to queries, `(num_queries, num_entities)`, in one block."""
    scores = _score_queries(model, entities, relations)
    if symmetric is None:
        return scores
    num_relations = model.shape.num_relations
    rows = np.flatnonzero(symmetric[relations % num_relations])
    if len(rows):
        opposite = (relations[rows] + num_relations) % (2 * num_relations)
        places = torch.from_numpy(rows).to(scores.device)
        # Not in place, since a model may return a tensor that it keeps.
        both = scores[places] + _score_queries(model, entities[rows], opposite)
        scores = scores.index_copy(0, places, both / 2)
    return scores


def _score_queries(model: Model, entities: Ids, relations: Ids) -> Tensor:
    num_relations = model.shape.num_relations
    given = torch.from_numpy(np.ascontiguousarray(entities)).to(model.device)
    relation_ids = torch.from_numpy(np.ascontiguousarray(relations)).to(model.device)
    is_inverse = relations >= num_relations

    with full_precision(), eval_mode(model):
        if not is_inverse.any():
            return model.predict_tails(given, relation_ids)
        if is_inverse.all():
            return model.predict_heads(relation_ids - num_relations, given)

        backward = torch.from_numpy(is_inverse).to(model.device)
        forward = ~backward
        tail_scores = model.predict_tails(given[forward], relation_ids[forward])
        scores = torch.empty(
            len(given), model.shape.num_entities, dtype=tail_scores.dtype, device=model.device
        )
        scores[forward] = tail_scores
        scores[backward] = model.predict_heads(
            relation_ids[backward] - num_relations, given[backward]
        )
        return scores


def score_blocks(
    model: Model,
    entities: Ids,
    relations: Ids,
    *,
    symmetric: Flags | None = None,
    max_scores: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Score queries `(num_queries,)` block by block.

    Yields which queries a block has, and their scores `(block, num_entities)`. A block has at most
    `max_scores` scores, or as many as suit the device.
    """
    num_queries = len(entities)
    block_size = query_block_size(model, max_scores=max_scores)
    log = ProgressLog("Scoring", first=False)

    for start in range(0, num_queries, block_size):
        block = slice(start, min(start + block_size, num_queries))
        yield (
            block,
            score_queries(model, entities[block], relations[block], symmetric=symmetric),
        )
        log(partial("{:,} of {:,} queries".format, block.stop, num_queries))


def check_finite(scores: Tensor) -> None:
    """Refuse the scores, or log-probabilities, of a model that has diverged."""
    if not bool(scores.isfinite().all()):
        raise ProbabilitiesNotFinite


def triple_log_probabilities(
    model: Model,
    triples: Ids,
    *,
    symmetric: Flags | None = None,
    max_scores: int | None = None,
) -> Tensor:
    """The log-probabilities of triples `(n, 3)`, `(n,)`.

    They are the means of log p(tail | head, relation) and log p(head | relation, tail), where each
    p is a softmax over all entities. Triples that share a query share its scores.
    """
    heads, relations, tails = np.asarray(triples, dtype=np.int64).T
    inverse_relations = relations + model.shape.num_relations

    of_answers = partial(
        _answer_log_probabilities, model, symmetric=symmetric, max_scores=max_scores
    )
    of_tails = of_answers((heads, relations), tails)
    of_heads = of_answers((tails, inverse_relations), heads)
    log_probabilities = (of_tails + of_heads) / 2
    check_finite(log_probabilities)
    return log_probabilities


def _answer_log_probabilities(
    model: Model,
    queries: tuple[Ids, Ids],
    answers: Ids,
    *,
    symmetric: Flags | None,
    max_scores: int | None,
) -> Tensor:
    """log p(answer | query), `(n,)`, of queries as entities and relation ids, both `(n,)`."""
    entities, relations = queries
    num_entities = model.shape.num_entities
    keys, query_of_answer = np.unique(relations * num_entities + entities, return_inverse=True)

    # The answers in the order of their queries, so that those of a block are next to each other.
    order = np.argsort(query_of_answer, kind="stable")
    ordered_queries = query_of_answer[order]

    log_probabilities = torch.empty(len(answers), device=model.device)
    blocks = score_blocks(
        model,
        keys % num_entities,
        keys // num_entities,
        symmetric=symmetric,
        max_scores=max_scores,
    )
    for block, scores in blocks:
        first, last = np.searchsorted(ordered_queries, [block.start, block.stop])
        in_block = order[first:last]
        rows = torch.from_numpy(query_of_answer[in_block] - block.start).to(model.device)
        columns = torch.from_numpy(answers[in_block]).to(model.device)
        places = torch.from_numpy(in_block).to(model.device)
        log_probabilities[places] = scores[rows, columns] - scores.logsumexp(-1)[rows]
    return log_probabilities


class CachedLogProbabilities:
    """`triple_log_probabilities` of one model, up to rounding, with a cache.

    The cache holds the log-normalizers of at most `max_size` queries.
    """

    def __init__(
        self, model: Model, *, symmetric: Flags | None = None, max_size: int = MAX_CACHED
    ) -> None:
        self._model = model
        self._symmetric = symmetric
        self._max_size = max_size
        # By the key of a query. Entries are only added, since several threads may use the cache.
        self._normalizers: dict[int, float] = {}

    @property
    def num_cached(self) -> int:
        """The number of queries in the cache."""
        return len(self._normalizers)

    @torch.no_grad()
    def __call__(self, triples: Ids) -> Tensor:
        """Triples `(n, 3)` → log-probabilities `(n,)`."""
        model = self._model
        num_relations = model.shape.num_relations
        with full_precision(), eval_mode(model):
            tail_scores = self._tail_scores(triples)
            head_scores = tail_scores
            if model.reciprocal:
                head_scores = self._head_scores(triples)
            rows = self._symmetric_rows(triples)
            if len(rows):
                # The answers to one query of a symmetric relation have the mean of both scores.
                places = torch.from_numpy(rows).to(tail_scores.device)
                swapped = triples[rows][:, ::-1]
                of_tails = tail_scores[places] + self._head_scores(swapped)
                of_heads = head_scores[places] + self._tail_scores(swapped)
                tail_scores = tail_scores.index_copy(0, places, of_tails / 2)
                head_scores = head_scores.index_copy(0, places, of_heads / 2)

        of_tails = tail_scores - self._normalizers_of(triples[:, 0], triples[:, 1])
        of_heads = head_scores - self._normalizers_of(triples[:, 2], triples[:, 1] + num_relations)
        return (of_tails + of_heads) / 2

    def _symmetric_rows(self, triples: Ids) -> Ids:
        if self._symmetric is None:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self._symmetric[triples[:, 1]])

    def _tail_scores(self, triples: Ids) -> Tensor:
        """The scores of tails as answers to (head, relation, ?)."""
        ids = torch.from_numpy(np.ascontiguousarray(triples)).to(self._model.device)
        heads, relations, tails = ids.unbind(1)
        return self._model.score(heads, relations, tails)

    def _head_scores(self, triples: Ids) -> Tensor:
        """The scores of heads as answers to (?, relation, tail)."""
        if not self._model.reciprocal:
            return self._tail_scores(triples)
        ids = torch.from_numpy(np.ascontiguousarray(triples)).to(self._model.device)
        heads, relations, tails = ids.unbind(1)
        return self._model.score(tails, relations + self._model.shape.num_relations, heads)

    def _normalizers_of(self, entities: Ids, relations: Ids) -> Tensor:
        """log Σ exp of the scores of each query, `(n,)`."""
        num_entities, num_relations = self._model.shape
        if self._symmetric is not None:
            relations = relations % num_relations + np.where(
                self._symmetric[relations % num_relations],
                0,
                relations // num_relations * num_relations,
            )
        keys = (relations * num_entities + entities).tolist()

        normalizers = self._normalizers
        if len(normalizers) + len(keys) > self._max_size:
            normalizers = {}

        missing = np.array(
            [key for key in dict.fromkeys(keys) if key not in normalizers], dtype=np.int64
        )
        blocks = score_blocks(
            self._model,
            missing % num_entities,
            missing // num_entities,
            symmetric=self._symmetric,
        )
        for block, scores in blocks:
            sums = scores.logsumexp(-1).tolist()
            normalizers.update(zip(missing[block].tolist(), sums, strict=True))

        self._normalizers = normalizers
        return torch.tensor([normalizers[key] for key in keys], device=self._model.device)

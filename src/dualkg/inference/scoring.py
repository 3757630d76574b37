"""Scores of queries, computed in blocks of bounded memory.

A query is an entity and a relation id, as in `KnownAnswers`: relation `r` for the tails of (entity,
r, ?), and `r + num_relations` for the heads of (?, r, entity).
"""

from collections.abc import Callable, Iterator
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


# Scores that are held in memory at once, by the type of the device: 32 MB on a CPU, whose caches
# are small, and 1 GB on a GPU.
BLOCK_SCORES = {"cpu": 2**23, "cuda": 2**28}


def query_block_size(model: Model, *, max_scores: int | None = None) -> int:
    """The number of queries whose scores fit in memory together."""
    if max_scores is None:
        max_scores = BLOCK_SCORES[model.device.type]
    return max(1, max_scores // model.shape.num_entities)


@torch.no_grad()
def score_queries(model: Model, entities: Ids, relations: Ids) -> Tensor:
    """Score all entities as answers to queries, `(num_queries, num_entities)`, in one block."""
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
    score: Callable[[Model, Ids, Ids], Tensor] = score_queries,
    max_scores: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Score queries `(num_queries,)` block by block.

    Yields the places of the queries of a block, and their scores `(block, num_entities)`. A block
    has at most `max_scores` scores, or as many as suit the device.
    """
    num_queries = len(entities)
    block_size = query_block_size(model, max_scores=max_scores)
    log = ProgressLog("Scoring", first=False)

    for start in range(0, num_queries, block_size):
        block = slice(start, min(start + block_size, num_queries))
        yield block, score(model, entities[block], relations[block])
        log(partial("{:,} of {:,} queries".format, block.stop, num_queries))


def check_finite(scores: Tensor) -> None:
    """Refuse the scores, or log-probabilities, of a model that has diverged."""
    if not bool(scores.isfinite().all()):
        raise DivergedError(
            "The model scores NaN or infinity for some query, so it has no probabilities. Its "
            "training has diverged: lower the learning rate or raise the regularizer's weight."
        )

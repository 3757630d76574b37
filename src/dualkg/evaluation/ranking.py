"""Ranks: where each true answer stands among all entities, other known answers left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import Graph, Split, Triples
from dualkg.data.known import KnownAnswers
from dualkg.errors import DivergedError
from dualkg.models.base import Model

Counts = npt.NDArray[np.int64]

BLOCK_ELEMENTS = 16_000_000  # scores held at once: 64 MB in float32


@dataclass(frozen=True)
class Ranks:
    """The ranks of the tail and of the head of every triple, at their best and at their worst among ties.

    Arrays are `(2, num_triples)`: row 0 asks (head, relation, ?), row 1 asks (?, relation, tail).
    """

    triples: Triples
    optimistic: Counts
    pessimistic: Counts

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Ties at the mean of the best and the worst place."""
        return (self.optimistic + self.pessimistic) / 2


def rank(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    known: KnownAnswers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ranks:
    """Rank every triple of a split in both directions, filtered by all three splits.

    A query is scored once however many of its answers are asked for. Memory is bounded by `BLOCK_ELEMENTS`
    scores, whatever the number of queries.
    """
    model.check_shape(graph.shape)
    triples = graph.split(split)
    known = known or KnownAnswers.of(graph)
    turned = triples[:, [2, 1, 0]]
    found = []
    for direction, asked in enumerate((triples, turned)):

        def report(done: int, direction: int = direction) -> None:
            if progress:
                progress(direction * len(triples) + done, 2 * len(triples))

        found.append(_rank_direction(model, asked, known, backward=direction == 1, report=report))
    better, tied = np.stack(found, axis=1)
    return Ranks(triples, better + 1, better + tied + 1)


def _rank_direction(
    model: Model, asked: Triples, known: KnownAnswers, *, backward: bool, report: Callable[[int], None]
) -> tuple[Counts, Counts]:
    """How many candidates stand above each answer, and how many beside it. `asked` is (given, relation, answer)."""
    num_entities, num_relations = model.shape
    relation_key = asked[:, 1] + (num_relations if backward else 0)
    order = np.argsort(known.keys(asked[:, 0], relation_key), kind="stable")
    better, tied = np.zeros(len(asked), dtype=np.int64), np.zeros(len(asked), dtype=np.int64)
    block = max(1, BLOCK_ELEMENTS // num_entities)
    for start in range(0, len(order), block):
        chosen = order[start : start + block]
        better[chosen], tied[chosen] = _rank_block(model, asked[chosen], known, backward=backward)
        report(start + len(chosen))
    return better, tied


@torch.no_grad()
def _rank_block(model: Model, asked: Triples, known: KnownAnswers, *, backward: bool) -> tuple[Counts, Counts]:
    """`asked` is sorted by query, so that equal queries stand together and are scored once."""
    num_relations, device = model.shape.num_relations, model.device
    fresh = np.ones(len(asked), dtype=bool)
    fresh[1:] = (asked[1:, :2] != asked[:-1, :2]).any(axis=1)
    queries = asked[fresh]
    given, relations = ids_on(queries[:, 0], device), ids_on(queries[:, 1], device)
    scores = model.ask_heads(relations, given) if backward else model.ask_tails(given, relations)
    refuse_nonfinite(scores, lambda row: _as_asked(queries[row], backward))

    row = ids_on(np.cumsum(fresh) - 1, device)
    answers = ids_on(asked[:, 2], device)
    per_row = scores[row] if len(queries) < len(asked) else scores
    relation_key = asked[:, 1] + (num_relations if backward else 0)
    which, others = (ids_on(found, device) for found in known(asked[:, 0], relation_key))
    return count_above(per_row, answers, which, others)


def count_above(scores: Tensor, answers: Tensor, which: Tensor, others: Tensor) -> tuple[Counts, Counts]:
    """How many candidates stand above the answer of each row, and how many beside it; known ones do not count.

    `scores` is `(batch, num_candidates)`; `which` and `others` are the rows and the candidates that are known.
    """
    target = scores.gather(1, answers[:, None])
    better, tied = (scores > target).sum(1), (scores == target).sum(1)
    theirs, against = scores[which, others], target[which, 0]
    # The answer itself stays in, among its own ties, until the end: it may be missing from a filter of others.
    apart = others != answers[which]
    better -= torch.zeros_like(better).index_add_(0, which, ((theirs > against) & apart).long())
    tied -= torch.zeros_like(tied).index_add_(0, which, ((theirs == against) & apart).long()) + 1
    return better.cpu().numpy(), tied.cpu().numpy()


def refuse_nonfinite(scores: Tensor, query: Callable[[int], str]) -> None:
    """NaN compares as false with everything and would rank first, so it must never be counted."""
    finite = torch.isfinite(scores)
    if not finite.all():
        bad = int((~finite).any(dim=1).nonzero()[0, 0])
        raise DivergedError(
            f"The model scores NaN or infinity for the query {query(bad)}, so it cannot be ranked. "
            f"Its training has diverged: lower the learning rate or raise the regularizer's weight."
        )


def _as_asked(query: Triples, backward: bool) -> str:
    given, relation = query[:2].tolist()
    return f"(?, {relation}, {given})" if backward else f"({given}, {relation}, ?)"


def ids_on(values: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

"""A relation's triples in parts, each of which is asked about from the end that costs less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dualkg.answers.beliefs.prospects import Prospects
from dualkg.answers.completion.narrowing import Ids, Narrowing
from dualkg.models.base import Side

EITHER = (0, 1)


@dataclass(frozen=True)
class Part:
    """The pairs of some heads and some tails of a relation; `side` is what its queries ask for.

    Of what they give all is new to its side in train, or nothing is; answers may be of both kinds.
    """

    relation: int
    side: Side
    new_given: int  # 0 or 1
    new_answers: tuple[int, ...]
    num_queries: int
    promise: float  # the larger, the likelier it has the best triples


class Parts:
    """How the triples of a narrowing are divided.

    Without prospects a relation is one part. With them nearly all that can be among the best has an entity that train
    has on its side: so the few heads that it has there are asked about, then the few tails for heads that are new, and
    at last what is left, where both are new.
    """

    def __init__(self, narrowing: Narrowing, prospects: Prospects | None = None) -> None:
        self.narrowing, self.prospects = narrowing, prospects

    def in_order(self) -> list[Part]:
        """What is found first rules out more of the rest: so first what promises most, then what costs least."""
        found = [
            part for relation in self.narrowing.relations.tolist() for part in self._of(relation) if part.num_queries
        ]
        return sorted(found, key=lambda part: (-part.promise, part.num_queries, part.relation))

    def ends(self, part: Part) -> tuple[Ids, Ids, Ids]:
        """What the queries of a part give, the answers that count, each in order; and which answers are new, 0 or 1."""
        given, answers = self._sides(part.relation, part.side)
        new_given, new_answers = self._newness(part.relation, part.side)
        given = given[new_given[given] == part.new_given]
        return given, answers[np.isin(new_answers[answers], part.new_answers)], new_answers

    def _newness(self, relation: int, side: Side) -> tuple[Ids, Ids]:
        """Which entities are new where queries give one, and where they ask for one: 0 or 1, `(num_entities,)`.

        Without prospects none is told apart.
        """
        found = []
        for column in (0, 2):
            new = np.full(self.narrowing.graph.shape.num_entities, int(self.prospects is not None))
            new[self.narrowing.train_of(relation)[:, column]] = 0
            found.append(new)
        return (found[0], found[1]) if side == "tail" else (found[1], found[0])

    def _sides(self, relation: int, side: Side) -> tuple[Ids, Ids]:
        heads, tails = self.narrowing.heads_of(relation), self.narrowing.tails_of(relation)
        return (heads, tails) if side == "tail" else (tails, heads)

    def _of(self, relation: int) -> Iterator[Part]:
        heads, tails = self._sides(relation, "tail")
        if not len(heads) or not len(tails):
            return
        newness = self._newness(relation, "tail")
        counts = [np.bincount(new[ids], minlength=2) for new, ids in zip(newness, (heads, tails), strict=True)]
        side = self._cheaper(relation, int(counts[0][0]), int(counts[1][0]))
        other: Side = "head" if side == "tail" else "tail"
        yield self._part(relation, side, 0, EITHER, counts)
        if self.prospects is not None:
            yield self._part(relation, other, 0, (1,), counts)
            yield self._part(relation, side, 1, (1,), counts)

    def _cheaper(self, relation: int, num_heads: int, num_tails: int) -> Side:
        """What is asked for: by the fewer queries, or of as many by those with more answers in train.

        The more answers a query has, the less likely is each, and the fewer pass.
        """
        tails_a_head, heads_a_tail = self.narrowing.answers_per_query(relation)
        return "tail" if (num_heads, heads_a_tail) <= (num_tails, tails_a_head) else "head"

    def _part(self, relation: int, side: Side, new: int, answers: tuple[int, ...], counts: list[Ids]) -> Part:
        given, asked = counts if side == "tail" else counts[::-1]
        number = int(given[new]) if asked[list(answers)].any() else 0
        promise = 0.0
        if self.prospects is not None:
            shares = self.prospects.shares[relation].reshape(2, 2).T  # by head, then by tail
            promise = float((shares if side == "tail" else shares.T)[new, list(answers)].max())
        return Part(relation, side, new, answers, number, promise)

"""The search through all triples of a graph: relation by relation, in blocks of the queries that rule out most."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.prospects import Prospects
from dualkg.answers.completion.block import Asked, best_of
from dualkg.answers.completion.narrowing import Ids, Narrowing
from dualkg.answers.completion.pool import Found, Pool
from dualkg.answers.completion.precision import Precision, exactly, margin_of
from dualkg.answers.completion.queries import Queries
from dualkg.kernels.precision import products_in
from dualkg.models.base import Model, Side


@dataclass(frozen=True, eq=False)
class State:
    """How far a search is: all that going on needs."""

    pool: Pool
    num_done: int = 0  # of the first queries of all relations
    asked: Tensor | None = None  # of the second queries of the relation that is under way


class Search:
    """A model asked about the triples of a narrowing."""

    def __init__(
        self,
        model: Model,
        narrowing: Narrowing,
        prospects: Prospects | None = None,
        *,
        precision: Precision = "float32",
    ) -> None:
        self.model, self.narrowing, self.precision = model, narrowing, precision
        self.by_kind = prospects is not None
        # What is found first rules out more of the rest: so first those whose triples may be most probable, and of
        # these the ones with few entities, which cost little.
        sides = {relation: self._first_side(relation) for relation in narrowing.relations.tolist()}
        promise = {relation: prospects.promise(relation) if prospects else 0.0 for relation in sides}
        self._sides = dict(sorted(sides.items(), key=lambda item: (-promise[item[0]], item[1][1], item[0])))

    @property
    def num_queries(self) -> int:
        """Of the sides that are asked first."""
        return sum(num for _, num in self._sides.values())

    def _first_side(self, relation: int) -> tuple[Side, int]:
        """What is asked for first, and by how many queries: the fewer; of as many, those with more answers in train.

        The more answers a query has, the less likely is each, and the fewer pass.
        """
        num_heads, num_tails = len(self.narrowing.heads_of(relation)), len(self.narrowing.tails_of(relation))
        if not num_heads or not num_tails:
            return "tail", 0
        tails_a_head, heads_a_tail = self.narrowing.answers_per_query(relation)
        by_heads = (num_heads, heads_a_tail) <= (num_tails, tails_a_head)
        return ("tail", num_heads) if by_heads else ("head", num_tails)

    def run(self, state: State) -> Iterator[State]:
        """Go on from a state; the states after each block of queries."""
        before = 0
        for relation, (side, num_queries) in self._sides.items():
            if before + num_queries > state.num_done:
                state = yield from self._relation(relation, side, before, state)
            before += num_queries

    def _relation(self, relation: int, side: Side, before: int, state: State) -> Generator[State, None, State]:
        skipped = max(0, state.num_done - before)
        given, asked = self._asked(relation, side, state.asked if skipped else None)
        margin = margin_of(asked, given, self.precision) if self._worthwhile(relation, state.pool) else 0.0
        for block in self._blocks(given, asked, skipped):
            found = self._best_of(asked, block, relation, state.pool, margin)
            pool = state.pool.joined(exactly(found, self.model) if margin else found)
            skipped += len(block)
            state = State(pool, before + skipped, asked.second.asked.clone())
            yield state
        return state

    @staticmethod
    def _worthwhile(relation: int, pool: Pool) -> bool:
        """Whether any triple of a relation may still be among the best: evidence is never above 0."""
        return bool((pool.needed(relation) <= 0).any())

    @staticmethod
    def _blocks(given: Tensor, asked: Asked, skipped: int) -> Iterator[Tensor]:
        """The queries after the first so many: those that give what train has on that side, then those of others."""
        for new in (0, 1):
            part = given[asked.new_given[given] == new]
            yield from torch.split(part[skipped:], asked.first.at_once) if skipped < len(part) else ()
            skipped = max(0, skipped - len(part))

    def _best_of(self, asked: Asked, block: Tensor, relation: int, pool: Pool, margin: float) -> Found:
        """The triples of a block that may be among the best of all; none is looked at that needs evidence above 0."""
        needed = pool.needed(relation)
        needed = (needed if asked.first.side == "tail" else needed.T)[int(asked.new_given[block[0]])]
        possible = (needed - margin <= 0).to(block.device)
        answers = asked.answers[possible[asked.new_answers[asked.answers]]]
        if not len(answers):
            return Found.none()
        with products_in(self.precision):
            return best_of(replace(asked, answers=answers), block, needed=needed.float(), top=pool.top, margin=margin)

    def _asked(self, relation: int, side: Side, already: Tensor | None) -> tuple[Tensor, Asked]:
        """What the first queries give, and what is asked of them."""
        other: Side = "head" if side == "tail" else "tail"
        ends = [self.narrowing.heads_of(relation), self.narrowing.tails_of(relation)]
        new = [self._new(relation, column) for column in (0, 2)]
        ruled_out = self.narrowing.ruled_out(relation)
        if side == "head":
            ends, new = ends[::-1], new[::-1]
            ruled_out = ruled_out[np.argsort(ruled_out[:, 1], kind="stable"), ::-1].copy()
        given, answers, pairs, *newness = (
            torch.from_numpy(ids).to(self.model.device) for ids in (*ends, ruled_out, *new)
        )
        second = Queries(self.model, relation, other, asked=already)
        return given, Asked(Queries(self.model, relation, side), second, answers, pairs, *newness)

    def _new(self, relation: int, column: int) -> Ids:
        """Which entities train does not have on a side of a relation, 1 or 0; without prospects none is told apart."""
        new = np.full(self.model.shape.num_entities, int(self.by_kind))
        new[self.narrowing.train_of(relation)[:, column]] = 0
        return new

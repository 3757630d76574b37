"""The search through all triples of a graph: part by part, in blocks of the queries that rule out most."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.prospects import Prospects
from dualkg.answers.completion.block import Asked, best_of
from dualkg.answers.completion.narrowing import Narrowing
from dualkg.answers.completion.parts import Part, Parts
from dualkg.answers.completion.pool import Found, Pool
from dualkg.answers.completion.queries import Queries
from dualkg.models.base import Model, Side


@dataclass(frozen=True, eq=False)
class State:
    """How far a search is: all that going on needs."""

    pool: Pool
    num_done: int = 0  # of the first queries of all parts
    asked: Tensor | None = None  # of the second queries of the part that is under way


class Search:
    """A model asked about the triples of a narrowing."""

    def __init__(self, model: Model, narrowing: Narrowing, prospects: Prospects | None = None) -> None:
        self.model, self.narrowing = model, narrowing
        self._parts = Parts(narrowing, prospects)
        self._in_order = self._parts.in_order()

    @property
    def num_queries(self) -> int:
        """Of the sides that are asked first."""
        return sum(part.num_queries for part in self._in_order)

    def run(self, state: State) -> Iterator[State]:
        """Go on from a state; the states after each block of queries."""
        before = 0
        for part in self._in_order:
            if before + part.num_queries > state.num_done:
                state = yield from self._part(part, before, state)
            before += part.num_queries

    def _part(self, part: Part, before: int, state: State) -> Generator[State, None, State]:
        skipped = max(0, state.num_done - before)
        if not self._possible(part, state.pool).any():
            state = State(state.pool, before + part.num_queries)
            yield state
            return state
        given, asked = self._asked(part, state.asked if skipped else None)
        for block in torch.split(given[skipped:], asked.first.at_once):
            pool = state.pool.joined(self._best_of(part, asked, block, state.pool))
            skipped += len(block)
            state = State(pool, before + skipped, asked.second.asked.clone())
            yield state
        return state

    @staticmethod
    def _needed(part: Part, pool: Pool) -> Tensor:
        """The evidence that triples of a part need, by whether their answers are new, `(2,)`."""
        needed = pool.needed(part.relation)
        return (needed if part.side == "tail" else needed.T)[part.new_given]

    def _possible(self, part: Part, pool: Pool) -> Tensor:
        """Whether answers that are new or not may make triples among the best: evidence is never above 0."""
        asked_for = torch.zeros(2, dtype=torch.bool)
        asked_for[list(part.new_answers)] = True
        return asked_for & (self._needed(part, pool) <= 0)

    def _best_of(self, part: Part, asked: Asked, block: Tensor, pool: Pool) -> Found:
        """The triples of a block that may be among the best of all."""
        possible = self._possible(part, pool).to(block.device)
        answers = asked.answers[possible[asked.new_answers[asked.answers]]]
        if not len(answers):
            return Found.none()
        needed = self._needed(part, pool).float()
        return best_of(replace(asked, answers=answers), block, needed=needed, top=pool.top)

    def _asked(self, part: Part, already: Tensor | None) -> tuple[Tensor, Asked]:
        """What the first queries give, and what is asked of them."""
        other: Side = "head" if part.side == "tail" else "tail"
        ruled_out = self.narrowing.ruled_out(part.relation)
        if part.side == "head":
            ruled_out = ruled_out[np.argsort(ruled_out[:, 1], kind="stable"), ::-1].copy()
        given, answers, new, pairs = (
            torch.from_numpy(ids).to(self.model.device) for ids in (*self._parts.ends(part), ruled_out)
        )
        first = Queries(self.model, part.relation, part.side)
        second = Queries(self.model, part.relation, other, asked=already)
        return given, Asked(first, second, answers, pairs, new)

"""The search through all triples of a graph: relation by relation, in blocks of the queries that rule out most."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.completion.block import Asked, Handicaps, best_of
from dualkg.answers.completion.narrowing import Narrowing
from dualkg.answers.completion.pool import Pool
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

    def __init__(self, model: Model, narrowing: Narrowing, *, precision: Precision = "float32") -> None:
        self.model, self.narrowing, self.precision = model, narrowing, precision
        # Those with few entities first: they cost little, and what is found in them rules out more of the others.
        sides = {relation: self._first_side(relation) for relation in narrowing.relations.tolist()}
        self._sides = dict(sorted(sides.items(), key=lambda item: (item[1][1], item[0])))

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
        asked = replace(asked, handicaps=self._handicaps(relation, side, state.pool.calibration))
        margin = margin_of(asked, given, self.precision)
        for block in torch.split(given[skipped:], asked.first.at_once):
            pool = state.pool
            with products_in(self.precision):
                found = best_of(asked, block, least=pool.least_evidence(relation), top=pool.top, margin=margin)
            pool = pool.joined(exactly(found, self.model) if margin else found)
            skipped += len(block)
            state = State(pool, before + skipped, asked.second.asked.clone())
            yield state
        return state

    def _asked(self, relation: int, side: Side, already: Tensor | None) -> tuple[Tensor, Asked]:
        """What the first queries give, and what is asked of them."""
        other: Side = "head" if side == "tail" else "tail"
        ends = [self.narrowing.heads_of(relation), self.narrowing.tails_of(relation)]
        ruled_out = self.narrowing.ruled_out(relation)
        if side == "head":
            ends, ruled_out = ends[::-1], ruled_out[np.argsort(ruled_out[:, 1], kind="stable"), ::-1].copy()
        given, answers, pairs = (torch.from_numpy(ids).to(self.model.device) for ids in (*ends, ruled_out))
        second = Queries(self.model, relation, other, asked=already)
        return given, Asked(Queries(self.model, relation, side), second, answers, pairs)

    def _handicaps(self, relation: int, side: Side, calibration: Calibration | None) -> Handicaps | None:
        """By what the first queries give, then by their answers."""
        if calibration is None:
            return None
        by_kind, ends = calibration.handicaps(relation), []
        for column in (0, 2):
            new = torch.ones(self.model.shape.num_entities, dtype=torch.int64)
            new[torch.from_numpy(self.narrowing.train_of(relation)[:, column])] = 0
            ends.append(new)
        if side == "head":
            by_kind, ends = by_kind.T, ends[::-1]
        return Handicaps(*(table.to(self.model.device) for table in (by_kind, *ends)))

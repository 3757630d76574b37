"""The best triples found so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.answers.beliefs.prospects import Prospects, log_odds_of

Column = npt.NDArray[Any]
SLACK = 1e-3  # of evidence: more than rounding can take from a triple that is as good as the last


class Found(NamedTuple):
    """Triples by column, `(num_triples,)` each."""

    heads: Column  # ids in int64
    relations: Column
    tails: Column
    score: Column  # in float32
    evidence: Column

    @classmethod
    def none(cls) -> Found:
        ids, numbers = np.empty(0, np.int64), np.empty(0, np.float32)
        return cls(ids, ids, ids, numbers, numbers)

    @property
    def number(self) -> int:
        return len(self.heads)

    def chosen(self, which: Column) -> Found:
        return Found(*(column[which] for column in self))


@dataclass(frozen=True, eq=False)
class Pool:
    """At most `top` triples, none less probable than `least`; of what has been seen, no better one is left out.

    Better is of larger probability, or without prospects of more evidence; where these are the same, of more evidence
    and at last of the smaller ids.
    """

    top: int
    prospects: Prospects | None = None
    least: float = 0.0
    found: Found = field(default_factory=Found.none)
    known: Column | None = None  # what the found are worth, where that was asked before

    def worth(self, found: Found) -> Column:
        """What triples are ordered by: log odds, or evidence without prospects."""
        if self.prospects is None:
            return found.evidence.astype(np.float64)
        return self.prospects.log_odds(*self._judged(self.prospects, found)).numpy()

    @cached_property
    def _worth(self) -> Column:
        return self.worth(self.found) if self.known is None else self.known

    def probability(self, found: Found) -> Column | None:
        """None without prospects."""
        if self.prospects is None:
            return None
        return self.prospects.probability(*self._judged(self.prospects, found)).numpy()

    def as_answer(self, found: Found) -> Column | None:
        """The probability of each if its questions are known to lack an answer."""
        if self.prospects is None:
            return None
        return self.prospects.calibration.probability(*self._judged(self.prospects, found)).numpy()

    @staticmethod
    def _judged(prospects: Prospects, found: Found) -> tuple[Tensor, Tensor, Tensor]:
        """What is asked of triples: evidence, relations and kinds."""
        kinds = prospects.kinds(np.stack([found.heads, found.relations, found.tails], axis=1))
        return torch.from_numpy(found.evidence).double(), torch.from_numpy(found.relations), torch.from_numpy(kinds)

    def needed(self, relation: int) -> Tensor:
        """The evidence that triples of a relation need to be among the best, `(2, 2)`: by head, then tail, 1 if new."""
        worth = float(self._worth.min()) if self.found.number >= self.top else -inf
        if self.prospects is None:
            needed = torch.full((2, 2), worth, dtype=torch.float64)
        else:
            needed = self.prospects.needed(max(worth, self._least_worth), relation)
        return torch.where(needed.isfinite(), needed - SLACK * (1 + needed.abs()), needed)

    @property
    def _least_worth(self) -> float:
        """Of a triple that is probable enough."""
        return -inf if self.prospects is None else log_odds_of(self.least)

    def joined(self, others: Found) -> Pool:
        """The best of these and others."""
        if not others.number:
            return self
        both = Found(*map(np.concatenate, zip(self.found, others, strict=True)))
        worth = np.concatenate([self._worth, self.worth(others)])
        if self.least > 0 and (probability := self.probability(both)) is not None:
            enough = probability >= self.least
            both, worth = both.chosen(enough), worth[enough]
        if both.number > self.top:
            chosen = worth >= np.partition(worth, -self.top)[-self.top]
            both, worth = both.chosen(chosen), worth[chosen]
        if both.number > self.top:  # some are as good as the last
            chosen = _best_first(both, worth)[: self.top]
            both, worth = both.chosen(chosen), worth[chosen]
        return replace(self, found=both, known=worth)

    def ordered(self) -> Found:
        """The triples, best first."""
        return self.found.chosen(_best_first(self.found, self._worth))


def _best_first(found: Found, worth: Column) -> Column:
    return np.lexsort((found.tails, found.relations, found.heads, -found.evidence, -worth))

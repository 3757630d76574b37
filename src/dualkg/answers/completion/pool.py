"""The best triples found so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dualkg.answers.beliefs.calibration import Calibration

Column = npt.NDArray[Any]
NEARLY_SURE = 1 - 2.0**-50  # a probability of 1 would ask for evidence without end
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

    Better is more probable; where that is the same, or there is no calibration, of more evidence; and at last of
    the smaller ids.
    """

    top: int
    calibration: Calibration | None = None
    least: float = 0.0
    found: Found = field(default_factory=Found.none)

    def worth(self, found: Found) -> Column:
        """What triples are ordered by: probability, or evidence without a calibration."""
        evidence = torch.from_numpy(found.evidence).double()
        if self.calibration is None:
            return evidence.numpy()
        return self.calibration.probability(evidence, torch.from_numpy(found.relations)).numpy()

    def least_evidence(self, relation: int) -> float:
        """What a triple of a relation needs to be among the best."""
        needed = float(self.worth(self.found).min()) if self.found.number >= self.top else -inf
        if self.calibration is not None:
            probability = min(max(needed, self.least), NEARLY_SURE)
            needed = self.calibration.least_evidence(probability, relation) if probability > 0 else -inf
        return needed - SLACK * (1 + abs(needed))

    def joined(self, others: Found) -> Pool:
        """The best of these and others."""
        if self.calibration is not None and self.least > 0:
            others = others.chosen(self.worth(others) >= self.least)
        both = Found(*map(np.concatenate, zip(self.found, others, strict=True)))
        if both.number > self.top:
            worth = self.worth(both)
            last = np.partition(worth, -self.top)[-self.top]
            both = both.chosen(worth >= last)
        if both.number > self.top:  # some are as good as the last
            both = self._ordered(both).chosen(np.arange(self.top))
        return replace(self, found=both)

    def ordered(self) -> Found:
        """The triples, best first."""
        return self._ordered(self.found)

    def _ordered(self, found: Found) -> Found:
        keys = (found.tails, found.relations, found.heads, -found.evidence, -self.worth(found))
        return found.chosen(np.lexsort(keys))

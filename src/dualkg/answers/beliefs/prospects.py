"""How probable any triple is, of all that a graph might lack.

A calibration is learned from the questions of the valid split, each of which lacks an answer. Of all questions that a
graph could be asked most lack none: no film has a mayor. There are as many true triples among the candidates of the one
as of the other, but the false ones are more by 1 / share, where the share is how many of such questions lack an answer.
So over a whole graph

    P / (1 − P) = share · p / (1 − p)

where p is what the calibration says of an answer. The share is the mean of that of (h, r, ?) and of (?, r, t), since
the calibration's candidates come from both. It is counted in valid, for each relation and side, apart for entities
that train has on that side and for those that are new to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.evidence import Ids
from dualkg.answers.beliefs.kinds import NUM_KINDS, Kinds
from dualkg.data.graph import Graph, GraphShape
from dualkg.models.base import Side

ROUNDING = 1e-9  # by which two log odds are taken to be the same


@dataclass(frozen=True, eq=False)
class Prospects:
    """A calibration, and the shares of questions that lack an answer."""

    calibration: Calibration
    kinds: Kinds
    heads: Tensor  # of the questions (h, r, ?), `(num_relations, 2)`: of heads that train has there, and of new ones
    tails: Tensor  # of the questions (?, r, t)

    @classmethod
    def of(cls, calibration: Calibration, graph: Graph) -> Prospects:
        there, asked = Kinds.of(graph), Kinds.of_triples(graph.valid, graph.shape.num_entities)
        heads = _shares(there.heads, asked.heads, graph.shape)
        tails = _shares(there.tails, asked.tails, graph.shape)
        return cls(calibration, there, heads, tails)

    @cached_property
    def shares(self) -> Tensor:
        """By relation and kind, `(num_relations, 4)`."""
        kinds = torch.arange(NUM_KINDS)
        return (self.heads[:, kinds % 2] + self.tails[:, kinds // 2]) / 2

    def log_odds(self, evidence: Tensor, relations: Tensor, kinds: Tensor) -> Tensor:
        """Evidence, relation ids of the graph and kinds, which broadcast → log odds of triples."""
        odds = self.calibration.log_odds(evidence, relations, kinds).double()
        return odds.clamp(max=self._ceiling) + self.shares[relations, kinds].log()

    @property
    def _ceiling(self) -> float:
        """The log odds that no answer is above."""
        return log_odds_of(self.calibration.ceiling)

    def probability(self, evidence: Tensor, relations: Tensor, kinds: Tensor) -> Tensor:
        return self.log_odds(evidence, relations, kinds).sigmoid()

    def needed(self, log_odds: float, relation: int) -> Tensor:
        """The evidence that a triple of each kind needs for such log odds, `(2, 2)`: by head, then by tail, 1 if new.

        Infinite where no evidence is enough.
        """
        answers = log_odds - self.shares[relation].log()
        found = (answers - self.calibration.offsets[relation]) / self.calibration.slopes[relation]
        return torch.where(answers > self._ceiling + ROUNDING, inf, found.double()).reshape(2, 2).T

    def of_questions(self, entity: int, relations: Tensor, side: Side) -> Tensor:
        """The shares of the questions that give an entity as head or as tail, `(num_relations asked,)`."""
        shares, given = (self.heads, self.kinds.heads) if side == "head" else (self.tails, self.kinds.tails)
        new = ~np.isin(relations.numpy() * self.kinds.num_entities + entity, given, assume_unique=True)
        return shares[relations, torch.from_numpy(new).long()]


def log_odds_of(probability: float) -> float:
    """Infinite where it is sure."""
    return log(probability / (1 - probability)) if 0 < probability < 1 else inf if probability else -inf


def _shares(there: Ids, asked: Ids, shape: GraphShape) -> Tensor:
    """Of the questions that give an entity of a side of train, and of those that give another, how many valid asks.

    A relation with few of them is drawn to all: as if one question more, which lacks an answer, came with as many
    others as it does over all relations.
    """
    new = ~np.isin(asked, there)
    lacking = np.stack([_by_relation(asked[which], shape) for which in (~new, new)])
    in_train = _by_relation(there, shape)
    number = np.stack([in_train, shape.num_entities - in_train])
    # Where valid has none at all, one is imagined: nothing is impossible.
    pooled = np.maximum(lacking.sum(1), 1) / np.maximum(number.sum(1), 1)
    return torch.from_numpy(np.minimum((lacking + 1) / (number + 1 / pooled[:, None]), 1.0).T.copy())


def _by_relation(keys: Ids, shape: GraphShape) -> Ids:
    return np.bincount(keys // shape.num_entities, minlength=shape.num_relations)

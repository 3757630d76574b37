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
from math import inf, log
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.kinds import NUM_KINDS, Kinds
from dualkg.data.graph import Graph, Triples

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
        heads, tails = (_shares(graph, column) for column in (0, 2))
        return cls(calibration, Kinds.of(graph), heads, tails)

    @property
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

    def of_questions(self, entity: int, relations: Tensor, side: Literal["head", "tail"]) -> Tensor:
        """The shares of the questions that give an entity as head or as tail, `(num_relations asked,)`."""
        shares, given = (self.heads, self.kinds.heads) if side == "head" else (self.tails, self.kinds.tails)
        new = ~np.isin(relations.numpy() * self.kinds.num_entities + entity, given, assume_unique=True)
        return shares[relations, torch.from_numpy(new).long()]


def log_odds_of(probability: float) -> float:
    """Infinite where it is sure."""
    return log(probability / (1 - probability)) if 0 < probability < 1 else inf if probability else -inf


def _shares(graph: Graph, column: int) -> Tensor:
    """Of the questions that give an entity of this column, how many have an answer in valid.

    A relation with few of them is drawn to all: as if one question more, which lacks an answer, came with as many
    others as it does over all relations.
    """
    num_entities, num_relations = graph.shape.num_entities, graph.shape.num_relations
    there, asked = (_given(triples, column, num_entities) for triples in (graph.train, graph.valid))
    new = ~np.isin(asked, there)
    lacking = np.stack([np.bincount(asked[which] // num_entities, minlength=num_relations) for which in (~new, new)])
    in_train = np.bincount(there // num_entities, minlength=num_relations)
    number = np.stack([in_train, num_entities - in_train])
    # Where valid has none at all, one is imagined: nothing is impossible.
    pooled = np.maximum(lacking.sum(1), 1) / np.maximum(number.sum(1), 1)
    return torch.from_numpy(np.minimum((lacking + 1) / (number + 1 / pooled[:, None]), 1.0).T.copy())


def _given(triples: Triples, column: int, num_entities: int) -> np.ndarray:
    """Pairs of relation and entity, as sorted keys."""
    found: np.ndarray = np.unique(triples[:, 1].astype(np.int64) * num_entities + triples[:, column])
    return found

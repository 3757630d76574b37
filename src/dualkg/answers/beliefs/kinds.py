"""Four kinds of triples: whether train has the head as a head of the relation, and the tail as a tail.

A softmax compares entities that are nothing alike, and a model knows little of an entity where it never stood. So of
two triples with the same evidence the kind still tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualkg.answers.beliefs.evidence import Ids
from dualkg.data.graph import Graph, Triples

NUM_KINDS = 4


@dataclass(frozen=True, eq=False)
class Kinds:
    """Which entities triples, those of train, have on each side of a relation, as sorted keys."""

    num_entities: int
    heads: Ids
    tails: Ids

    @classmethod
    def of(cls, graph: Graph) -> Kinds:
        return cls.of_triples(graph.train, graph.shape.num_entities)

    @classmethod
    def of_triples(cls, triples: Triples, num_entities: int) -> Kinds:
        relations = triples[:, 1].astype(np.int64) * num_entities
        return cls(num_entities, *(np.unique(relations + triples[:, column]) for column in (0, 2)))

    def __call__(self, triples: Ids) -> Ids:
        """Triples `(n, 3)` → their kinds `(n,)`: 1 where the head is new to its side, and 2 where the tail is."""
        heads, relations, tails = np.asarray(triples, dtype=np.int64).T
        keys = relations * self.num_entities
        return 1 * _missing(self.heads, keys + heads) + 2 * _missing(self.tails, keys + tails)


def _missing(present: Ids, keys: Ids) -> npt.NDArray[np.bool_]:
    if not len(present):
        return np.ones(len(keys), dtype=bool)
    found: npt.NDArray[np.bool_] = present[np.searchsorted(present, keys).clip(max=len(present) - 1)] != keys
    return found

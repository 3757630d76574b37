"""Which triples may be new: of which relations, with which heads and tails, and in no split that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.data.loops import looping_relations
from dualkg.data.vocabulary import Vocabulary

Ids = npt.NDArray[np.int64]
Names = Sequence[str | int]


class ByRelation:
    """Triples looked up by their relation."""

    def __init__(self, triples: Triples, num_relations: int) -> None:
        self._triples = triples[np.argsort(triples[:, 1], kind="stable")].astype(np.int64)
        self._starts = np.searchsorted(self._triples[:, 1], np.arange(num_relations + 1))

    def __getitem__(self, relation: int) -> Ids:
        return self._triples[self._starts[relation] : self._starts[relation + 1]]


@dataclass(frozen=True, eq=False)
class Narrowing:
    """The triples that are asked about: of each of `relations` the pairs of a head and a tail, but for known ones.

    With `types`, an entity is a head or a tail of a relation only where train has it so. An entity is not both of one
    triple unless such loops of the relation are common in train, and train has the entity in one of its triples:
    symmetric relations find nothing as plausible, and where loops are the rule, nothing else tells who has one.
    """

    graph: Graph
    relations: Ids
    heads: Ids | None  # all where None
    types: bool = False
    loops: bool = False  # of all relations
    known: tuple[str, ...] = SPLITS  # the splits whose triples are not new

    @classmethod
    def of(
        cls,
        graph: Graph,
        *,
        relations: Names | None = None,
        heads: Names | None = None,
        types: bool = False,
        loops: bool = False,
        known: Sequence[str] = SPLITS,
    ) -> Narrowing:
        """Relations and heads by name, label or id."""
        every = np.arange(graph.shape.num_relations)
        chosen = every if relations is None else _ids(graph.relations, relations)
        some = None if heads is None else _ids(graph.entities, heads)
        return cls(graph, chosen, some, types, loops, tuple(known))

    @cached_property
    def _train(self) -> ByRelation:
        return ByRelation(self.graph.train, self.graph.shape.num_relations)

    @cached_property
    def _looping(self) -> frozenset[int]:
        return looping_relations(self.graph)

    @cached_property
    def _known(self) -> ByRelation:
        joined = np.concatenate([self.graph.split(name) for name in self.known])
        return ByRelation(joined, self.graph.shape.num_relations)

    def heads_of(self, relation: int) -> Ids:
        """The heads asked about, in order."""
        found = self._side(relation, 0)
        return found if self.heads is None else np.intersect1d(found, self.heads)

    def tails_of(self, relation: int) -> Ids:
        return self._side(relation, 2)

    def _side(self, relation: int, column: int) -> Ids:
        if self.types:
            return np.unique(self._train[relation][:, column])
        return np.arange(self.graph.shape.num_entities)

    def train_of(self, relation: int) -> Ids:
        return self._train[relation]

    def ruled_out(self, relation: int) -> Ids:
        """The pairs of head and tail that are known or loops, `(num_pairs, 2)`, in order."""
        num_entities = self.graph.shape.num_entities
        pairs = [self._known[relation][:, [0, 2]]]
        if not self.loops:
            pairs.append(self._idle_loops(relation).repeat(2).reshape(-1, 2))
        heads, tails = np.concatenate(pairs).T
        return np.stack(np.divmod(np.unique(heads * num_entities + tails), num_entities), axis=1)

    def _idle_loops(self, relation: int) -> Ids:
        """The entities of which a loop is not worth asking about."""
        every = np.arange(self.graph.shape.num_entities)
        return np.setdiff1d(every, self._train[relation][:, [0, 2]]) if relation in self._looping else every

    def answers_per_query(self, relation: int) -> tuple[float, float]:
        """How many tails a head of the relation has in train, and how many heads a tail has."""
        triples = self._train[relation]
        heads, tails = (max(1, len(np.unique(triples[:, column]))) for column in (0, 2))
        return len(triples) / heads, len(triples) / tails

    def among_asked(self, pairs: Ids, relation: int) -> npt.NDArray[np.bool_]:
        """Which pairs of head and tail are asked about, or would be if they were not ruled out."""
        asked = self.heads_of(relation), self.tails_of(relation)
        return np.isin(pairs[:, 0], asked[0]) & np.isin(pairs[:, 1], asked[1])

    def holds(self, triples: Triples) -> npt.NDArray[np.bool_]:
        """Which of some triples may be among the new ones."""
        found, num_entities = np.zeros(len(triples), dtype=bool), self.graph.shape.num_entities
        for relation in self.relations.tolist():
            here = np.flatnonzero(triples[:, 1] == relation)
            pairs = triples[here][:, [0, 2]].astype(np.int64)
            keys, ruled_out = (one[:, 0] * num_entities + one[:, 1] for one in (pairs, self.ruled_out(relation)))
            found[here] = self.among_asked(pairs, relation) & ~np.isin(keys, ruled_out)
        return found


def _ids(vocabulary: Vocabulary, names: Names) -> Ids:
    return np.unique(np.array([vocabulary.id(name) for name in names], dtype=np.int64))

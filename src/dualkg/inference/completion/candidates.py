"""Which triples are candidates of a completion."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from dualkg.data.graph import SPLITS, Graph, Triples, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.inference.probability import query_classes
from dualkg.inference.query_classes import QueryClasses, is_unusual
from dualkg.inference.scoring import Ids

Names = Sequence[str | int]


class CandidateFilter:
    """The candidate triples: for each of `relations` all pairs of a head and a tail, except known
    triples.

    Relations and heads are given by name, label or id. With `types`, neither head nor tail may be
    of an unusual type: by `query_classes`, as in the remarks on new triples. Self-loops are
    excluded, without `loops`, unless they are common among the relation's training triples and one
    of these has the entity: models of symmetric relations find them the most plausible triples.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        relations: Names | None = None,
        heads: Names | None = None,
        types: bool = False,
        loops: bool = False,
        known: Sequence[str] = SPLITS,
        query_classes: QueryClasses | None = None,
    ) -> None:
        num_relations = graph.shape.num_relations
        self.graph = graph
        self.types = types
        self._query_classes = query_classes
        self.loops = loops
        self.known = known
        self.relations = np.arange(num_relations)
        if relations is not None:
            self.relations = _ids(graph.relations, relations)
        self.heads = None if heads is None else _ids(graph.entities, heads)

        known_triples = np.concatenate([graph.split(name) for name in known])
        self.train = _by_relation(graph.train, num_relations)
        self._known = _by_relation(known_triples, num_relations)
        self._with_self_loops = relations_with_self_loops(graph)
        self.symmetric = graph.symmetric_relations

    @cached_property
    def query_classes(self) -> QueryClasses:
        """The given ones, or those without types of entities, which only `types` needs."""
        return self._query_classes or query_classes(self.graph)

    def heads_and_tails(self, relation: int) -> tuple[Ids, Ids]:
        """The candidate heads and tails of a relation, ascending."""
        if self.types:
            classes = self.query_classes.of_relation(relation)
            heads, tails = (np.flatnonzero(~is_unusual(of_side)) for of_side in classes)
        else:
            heads = np.arange(self.graph.shape.num_entities)
            tails = heads
        if self.heads is not None:
            heads = np.intersect1d(heads, self.heads)
        return heads, tails

    def excluded_pairs(self, relation: int) -> Ids:
        """The pairs of head and tail that are known or self-loops, `(num_pairs, 2)`, ascending."""
        num_entities = self.graph.shape.num_entities
        keys = self._known[relation][:, [0, 2]] @ np.array([num_entities, 1])
        if not self.loops:
            without_loop = np.arange(num_entities)
            if relation in self._with_self_loops:
                without_loop = np.setdiff1d(without_loop, self.train[relation][:, [0, 2]])
            loop_keys = without_loop * (num_entities + 1)
            keys = np.concatenate([keys, loop_keys])
        return np.stack(np.divmod(np.unique(keys), num_entities), axis=1)

    def new_to(self, relation: int) -> Ids:
        """Whether entities are new (1) to the domain and to the range of a relation in train.

        The domain is the first row of `(2, num_entities)`, the range the second. They are the same
        if the relation is symmetric.
        """
        heads, _, tails = self.train[relation].T
        new = np.ones((2, self.graph.shape.num_entities), dtype=np.int64)
        new[0, heads] = 0
        new[1, tails] = 0
        if self.symmetric[relation]:
            new[:] = new.min(axis=0)
        return new


def _ids(vocabulary: Vocabulary, names: Names | str) -> Ids:
    if isinstance(names, str):
        names = [names]
    return np.unique(np.array([vocabulary.id(name) for name in names], dtype=np.int64))


def _by_relation(triples: Triples, num_relations: int) -> list[Ids]:
    """The triples of each relation."""
    ordered = triples[np.argsort(triples[:, 1], kind="stable")].astype(np.int64)
    starts = np.searchsorted(ordered[:, 1], np.arange(1, num_relations))
    return np.split(ordered, starts)

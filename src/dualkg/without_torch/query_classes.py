"""Classes of queries by what train says about them: how many answers they have, or whether their
entity is of the type that the relation has at that end.

A role is an end of a relation: `r` for its heads, and `r + num_relations` for its tails. So a role
and an entity are a query, as in `inference.scoring`: for tails if the entity is a head, else for
heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import Graph, Split
from dualkg.without_torch.scores import Flags, Floats, Ids

# Queries with answers in train: the smallest number of answers of each class.
KNOWN_ANSWERS = (1, 2, 4, 8)
NUM_KNOWN = len(KNOWN_ANSWERS)
# Queries without answers in train: the least evidence of each class, see `QueryClasses`.
EVIDENCE = (0.5, 0.1, 0.0)
NUM_CLASSES = NUM_KNOWN + len(EVIDENCE)
ROUNDING = 1e-12  # error of a mean of shares, which must not change the class
# In graphs with more relations, or whose evidence takes more additions, queries without answers are
# one class.
MAX_RELATIONS = 1500
MAX_ADDITIONS = 2**31


@dataclass(frozen=True, eq=False)
class QueryClasses:
    """The class of every role and entity, by the triples of train.

    The first four are of queries with 1, 2 to 3, 4 to 7, and 8 or more known answers. The others
    are of queries without any, by the evidence that the entity is of the type. It is a mean over
    the roles that the entity has: of the entities with such a role, the share that has the role in
    question, too. The ends of a symmetric relation are one role.

    The evidence of an entity with `types` is the mean over its types instead: of the entities of
    the type, the share that has the role in question.

    `keys` are the distinct numbers entity · num_roles + role, ascending, and `counts` the number of
    triples of each. `saved_shares` are the `shares`, if they need not be computed.
    """

    num_entities: int
    num_relations: int
    keys: Ids
    counts: Ids
    symmetric: Flags
    types: EntityTypes | None = None
    saved_shares: Floats | None = None

    @classmethod
    def of(cls, graph: Graph, *, split: Split = "train", types: EntityTypes | None = None) -> Self:
        shape = graph.shape
        symmetric = graph.symmetric_relations
        heads, relations, tails = graph.split(split).astype(np.int64).T
        is_symmetric = symmetric[relations]
        tail_roles = relations + np.where(is_symmetric, 0, shape.num_relations)

        num_roles = 2 * shape.num_relations
        as_heads = heads * num_roles + relations
        as_tails = tails * num_roles + tail_roles
        keys, counts = np.unique(np.concatenate([as_heads, as_tails]), return_counts=True)
        return cls(shape.num_entities, shape.num_relations, keys, counts, symmetric, types)

    @property
    def num_roles(self) -> int:
        return 2 * self.num_relations

    def roles(self, relations: Ids, *, tails: bool) -> Ids:
        """The roles of heads, or of `tails`, of relations."""
        if not tails:
            return relations
        roles: Ids = np.where(self.symmetric[relations], relations, relations + self.num_relations)
        return roles

    def of_pairs(self, entities: Ids, roles: Ids) -> Ids:
        """The classes of some entities in some roles, `(n,)`."""
        pairs = entities * self.num_roles + roles
        distinct, inverse = np.unique(pairs, return_inverse=True)
        classes: Ids = self._of_distinct(*np.divmod(distinct, self.num_roles))
        of_pairs: Ids = classes[inverse.reshape(-1)]
        return of_pairs

    def _of_distinct(self, entities: Ids, roles: Ids) -> Ids:
        keys = entities * self.num_roles + roles
        counts = np.zeros(len(keys), dtype=np.int64)
        if len(self.keys):
            places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            counts = np.where(self.keys[places] == keys, self.counts[places], 0)

        evidence: Floats = np.zeros(len(keys))
        if self.has_evidence:
            marks = self._evidence
            starts = marks.starts[entities]
            sizes = marks.starts[entities + 1] - starts
            # The places of all marks of the first entity, then of the second, and so on.
            ends = np.cumsum(sizes)
            rows = np.repeat(np.arange(len(keys)), sizes)
            places = np.arange(len(rows)) - np.repeat(ends - sizes, sizes) + starts[rows]
            shares = self.shares[roles[rows], marks.columns[places]]
            sums = np.bincount(rows, weights=shares, minlength=len(keys))
            evidence = sums / np.maximum(sizes, 1)
        return _classes(counts, evidence)

    def of_role(self, role: int) -> Ids:
        """The classes of all entities in one role, `(num_entities,)`."""
        counts = np.zeros(self.num_entities, dtype=np.int64)
        has_role = self._roles == role
        counts[self._entities[has_role]] = self.counts[has_role]
        evidence: Floats = np.zeros(self.num_entities)
        if self.has_evidence:
            marks = self._evidence
            shares = self.shares[role, marks.columns]
            sums = np.bincount(marks.entities, weights=shares, minlength=self.num_entities)
            evidence = sums / np.maximum(np.diff(marks.starts), 1)
        return _classes(counts, evidence)

    def num_queries(self) -> Ids:
        """The number of entities of each class in each role, `(num_roles, NUM_CLASSES)`.

        The roles of the tails of symmetric relations have the numbers of the heads.
        """
        numbers = np.zeros((self.num_roles, NUM_CLASSES), dtype=np.int64)
        if self.has_evidence:
            for role in range(self.num_roles):
                numbers[role] = np.bincount(self.of_role(role), minlength=NUM_CLASSES)
        else:
            classes = _classes(self.counts, np.zeros(len(self.keys)))
            np.add.at(numbers, (self._roles, classes), 1)
            numbers[:, -1] = self.num_entities - numbers.sum(1)
        return self._with_symmetric(numbers)

    def num_answered(self, answered: "QueryClasses") -> Ids:
        """The number of queries of each class that other triples answer, as `num_queries`."""
        entities, roles = np.divmod(answered.keys, max(self.num_roles, 1))
        numbers = np.zeros((self.num_roles, NUM_CLASSES), dtype=np.int64)
        np.add.at(numbers, (roles, self.of_pairs(entities, roles)), 1)
        return self._with_symmetric(numbers)

    def _with_symmetric(self, numbers: Ids) -> Ids:
        symmetric = np.flatnonzero(self.symmetric)
        numbers[symmetric + self.num_relations] = numbers[symmetric]
        return numbers

    def of_relation(self, relation: int) -> Ids:
        """The classes of all entities as heads and as tails of a relation, `(2, num_entities)`."""
        roles = [int(self.roles(np.array(relation), tails=tails)) for tails in (False, True)]
        heads = self.of_role(roles[0])
        return np.stack([heads, heads if roles[0] == roles[1] else self.of_role(roles[1])])

    @property
    def has_evidence(self) -> bool:
        """Whether queries without answers are of several classes."""
        num_types = 0 if self.types is None else len(self.types.types)
        num_additions = self.num_roles * (len(self.keys) + self.num_entities + num_types)
        return self.num_relations <= MAX_RELATIONS and num_additions <= MAX_ADDITIONS

    @cached_property
    def _entities(self) -> Ids:
        return self.keys // max(self.num_roles, 1)

    @cached_property
    def _roles(self) -> Ids:
        return self.keys % max(self.num_roles, 1)

    @cached_property
    def _marks(self) -> "_Marks":
        """The roles and types of all entities."""
        if self.types is None:
            return _Marks.of(self._entities, self._roles, self.num_entities)
        entities = np.concatenate([self._entities, self.types.entities])
        columns = np.concatenate([self._roles, self.num_roles + self.types.types])
        order = np.lexsort((columns, entities))
        return _Marks.of(entities[order], columns[order], self.num_entities)

    @cached_property
    def _evidence(self) -> "_Marks":
        """The types of entities that have some, and the roles of the others."""
        marks = self._marks
        if self.types is None:
            return marks
        is_typed = np.zeros(self.num_entities, dtype=bool)
        is_typed[self.types.entities] = True
        kept = (marks.columns >= self.num_roles) | ~is_typed[marks.entities]
        return _Marks.of(marks.entities[kept], marks.columns[kept], self.num_entities)

    @property
    def num_columns(self) -> int:
        """The number of roles and types."""
        return self.num_roles + (0 if self.types is None else len(self.types.names))

    @cached_property
    def shares(self) -> Floats:
        """The share of the entities with one role or type, by column, that have a role, by row."""
        if self.saved_shares is not None:
            return self.saved_shares
        entities, columns, starts = self._marks
        num_columns = self.num_columns
        num_both = np.zeros((self.num_roles, num_columns))
        sizes = np.diff(starts)
        for distance in range(1, int(sizes.max(initial=0))):
            first = np.arange(len(entities) - distance)
            first = first[entities[first] == entities[first + distance]]
            a = columns[first]
            b = columns[first + distance]
            for row, column in ((a, b), (b, a)):
                is_role = row < self.num_roles
                np.add.at(num_both, (row[is_role], column[is_role]), 1)
        num_entities = np.bincount(columns, minlength=num_columns)
        shares: Floats = num_both / np.maximum(num_entities, 1)
        return shares


class _Marks(NamedTuple):
    """Entities, ascending, and the columns of their roles and types, both `(num_marks,)`.

    A type has its id after all roles. `starts` has the place of the first mark of each entity, and
    the number of all.
    """

    entities: Ids
    columns: Ids
    starts: Ids

    @classmethod
    def of(cls, entities: Ids, columns: Ids, num_entities: int) -> Self:
        return cls(entities, columns, np.searchsorted(entities, np.arange(num_entities + 1)))


def is_unusual(classes: Ids) -> Flags:
    """Which classes are of queries whose entity is of an unusual type for the relation."""
    unusual: Flags = classes == NUM_CLASSES - 1
    return unusual


def _classes(counts: Ids, evidence: Floats) -> Ids:
    known = np.searchsorted(KNOWN_ANSWERS, counts, side="right") - 1
    # EVIDENCE falls, and `searchsorted` needs what rises.
    least = np.array(EVIDENCE[::-1]) - ROUNDING
    new = NUM_CLASSES - np.searchsorted(least, evidence, side="right")
    classes: Ids = np.where(counts > 0, known, new)
    return classes

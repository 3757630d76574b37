"""Classes of queries by what train says about them, and the prior of each class.

A class says how many answers a query has in train, or whether its entity is of the type that the
relation has at that end. A role is an end of a relation: `r` for its heads, and a number for its
tails (see `probability.tail_roles`). So a role and an entity are a query, as in `scoring`: for
tails if the entity is a head, else for heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import InvalidValue

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Queries with answers in train: the smallest number of answers of each class.
KNOWN_ANSWERS = (1, 2, 4, 8)
NUM_KNOWN = len(KNOWN_ANSWERS)
# Queries without answers in train: the least evidence of each class, see `QueryClasses`.
EVIDENCE = (0.5, 0.1, 0.0)
NUM_CLASSES = NUM_KNOWN + len(EVIDENCE)
ROUNDING = 1e-12  # error of a mean of shares, which must not change the class
# In graphs with more relations, or whose evidence takes more additions, queries without answers are
# one class. 2³¹ additions take some seconds.
MAX_RELATIONS = 1500
MAX_ADDITIONS = 2**31


@dataclass(frozen=True, eq=False)
class QueryClasses:
    """The class of every role and entity, by the triples that are counted.

    The first four classes are of queries with 1, 2 to 3, 4 to 7, and 8 or more known answers. The
    others are of queries without any, by the evidence that the entity is of the type. The evidence
    is a mean over the roles that the entity has: the share of the entities with such a role that
    also have the role in question.

    The evidence of an entity with `types` is the mean over its types instead: the share of the
    entities of the type that have the role in question.

    `keys` are the distinct numbers entity · num_roles + role, ascending, and `counts` the number of
    triples of each. `tail_roles` `(num_relations,)` has the role of the tails of each relation.
    """

    num_entities: int
    tail_roles: Ids
    keys: Ids
    counts: Ids
    types: EntityTypes | None = None

    @classmethod
    def of(
        cls,
        num_entities: int,
        tail_roles: Ids,
        *,
        entities: Ids,
        roles: Ids,
        types: EntityTypes | None = None,
    ) -> Self:
        """Count pairs of an entity and a role; a pair may be there several times."""
        keys, counts = np.unique(entities * 2 * len(tail_roles) + roles, return_counts=True)
        return cls(num_entities, tail_roles, keys, counts, types)

    @property
    def num_relations(self) -> int:
        return len(self.tail_roles)

    @property
    def num_roles(self) -> int:
        return 2 * self.num_relations

    def num_answers(self, entities: Ids, roles: Ids) -> Ids:
        """The number of known answers to some queries, `(n,)`."""
        if not len(self.keys):
            return np.zeros(len(entities), dtype=np.int64)
        keys = entities * self.num_roles + roles
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        counts: Ids = np.where(self.keys[places] == keys, self.counts[places], 0)
        return counts

    def of_pairs(self, entities: Ids, roles: Ids) -> Ids:
        """The classes of some entities in some roles, `(n,)`."""
        pairs = entities * self.num_roles + roles
        distinct, inverse = np.unique(pairs, return_inverse=True)
        classes: Ids = self._of_distinct(*np.divmod(distinct, self.num_roles))
        of_pairs: Ids = classes[inverse.reshape(-1)]
        return of_pairs

    def _of_distinct(self, entities: Ids, roles: Ids) -> Ids:
        counts = self.num_answers(entities, roles)
        evidence: Floats = np.zeros(len(entities))
        if self.has_evidence:
            marks = self._evidence
            starts = marks.starts[entities]
            sizes = marks.starts[entities + 1] - starts
            # The places of all marks of the first entity, then of the second, and so on.
            ends = np.cumsum(sizes)
            rows = np.repeat(np.arange(len(entities)), sizes)
            places = np.arange(len(rows)) - np.repeat(ends - sizes, sizes) + starts[rows]
            shares = self._shares[roles[rows], marks.columns[places]]
            sums = np.bincount(rows, weights=shares, minlength=len(entities))
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
            shares = self._shares[role, marks.columns]
            sums = np.bincount(marks.entities, weights=shares, minlength=self.num_entities)
            evidence = sums / np.maximum(np.diff(marks.starts), 1)
        return _classes(counts, evidence)

    def of_relation(self, relation: int) -> Ids:
        """The classes of all entities as heads and as tails of a relation, `(2, num_entities)`."""
        tail_role = int(self.tail_roles[relation])
        heads = self.of_role(relation)
        return np.stack([heads, heads if tail_role == relation else self.of_role(tail_role)])

    def num_queries(self) -> Ids:
        """The number of entities of each class in each role, `(num_roles, NUM_CLASSES)`.

        The first rows are for the heads of relations, the others for their tails.
        """
        numbers = np.zeros((self.num_roles, NUM_CLASSES), dtype=np.int64)
        if self.has_evidence:
            for role in range(self.num_roles):
                numbers[role] = np.bincount(self.of_role(role), minlength=NUM_CLASSES)
        else:
            classes = _classes(self.counts, np.zeros(len(self.keys)))
            np.add.at(numbers, (self._roles, classes), 1)
            numbers[:, -1] = self.num_entities - numbers.sum(1)
        return self._by_end(numbers)

    def num_answered(self, answered: "QueryClasses") -> Ids:
        """The number of queries of each class that other triples answer, as `num_queries`."""
        entities, roles = np.divmod(answered.keys, max(self.num_roles, 1))
        numbers = np.zeros((self.num_roles, NUM_CLASSES), dtype=np.int64)
        np.add.at(numbers, (roles, self.of_pairs(entities, roles)), 1)
        return self._by_end(numbers)

    def _by_end(self, numbers: Ids) -> Ids:
        """Numbers by role, for the heads and then for the tails of each relation."""
        return np.concatenate([numbers[: self.num_relations], numbers[self.tail_roles]])

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
        """The types of the entities that have types, and the roles of the others."""
        marks = self._marks
        if self.types is None:
            return marks
        is_typed = np.zeros(self.num_entities, dtype=bool)
        is_typed[self.types.entities] = True
        kept = (marks.columns >= self.num_roles) | ~is_typed[marks.entities]
        return _Marks.of(marks.entities[kept], marks.columns[kept], self.num_entities)

    @cached_property
    def _shares(self) -> Floats:
        """The share of the entities with a role or type, by column, that have a role, by row."""
        entities, columns, starts = self._marks
        num_columns = self.num_roles + (0 if self.types is None else len(self.types.names))
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
    the number of all marks.
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
    # EVIDENCE falls, and `searchsorted` needs ascending values.
    least = np.array(EVIDENCE[::-1]) - ROUNDING
    new = NUM_CLASSES - np.searchsorted(least, evidence, side="right")
    classes: Ids = np.where(counts > 0, known, new)
    return classes


# -- priors ------------------------------------------------------------------


def answered_shares(train: QueryClasses, valid: QueryClasses) -> tuple[Floats, Floats]:
    """The shares of queries with a valid answer by class, for heads and for tails.

    Both are `(num_relations, NUM_CLASSES)`. Additive smoothing towards the share of the class in
    all relations adds one answered query to 1 / share queries. If no relation has an answered query
    of a class, one is assumed.
    """
    num_queries = train.num_queries()
    num_answered = train.num_answered(valid)
    share_of_all = np.maximum(num_answered.sum(0), 1) / np.maximum(num_queries.sum(0), 1)
    shares = (num_answered + 1) / (num_queries + 1 / share_of_all)
    priors = np.minimum(shares, 1.0)
    return priors[: train.num_relations], priors[train.num_relations :]


class AssumedMissing(NamedTuple):
    """The true triples that a graph is taken to lack: their number, their share of all true
    triples, and their number for each validation triple.
    """

    number: float
    share: float
    per_valid: float

    @classmethod
    def of(cls, graph: Graph, missing_share: float | None) -> Self:
        """As many triples as valid has, if no share is given."""
        num_known = sum(len(graph.split(name)) for name in SPLITS)
        num_valid = len(graph.valid)
        if missing_share is None:
            share = num_valid / max(1, num_known + num_valid)
            return cls(float(num_valid), share, per_valid=1.0)
        number = num_known * missing_share / (1 - missing_share)
        return cls(number, missing_share, per_valid=number / max(1, num_valid))


def check_missing_share(share: float) -> None:
    """Refuse a share of the true triples that cannot be missing."""
    if not 0 < share < 1:
        raise InvalidValue(
            "missing_share", expected="above 0 and below 1, such as 0.4", found=share
        )

"""A knowledge graph: triples of ids in three splits, and the names behind them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError

Triples = npt.NDArray[np.int32]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class GraphShape(NamedTuple):
    """What a model must know of a graph before it can be made."""

    num_entities: int
    num_relations: int


@dataclass(frozen=True)
class Notes:
    """What was noticed while reading, for people."""

    duplicates: dict[str, int] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """One sentence for each thing worth knowing; none for a clean graph."""
        found = [
            f"{n:,} {'triple stands' if n == 1 else 'triples stand'} more than once in {split}."
            for split, n in self.duplicates.items()
            if n
        ]
        found += [
            f"{n:,} {'triple stands' if n == 1 else 'triples stand'} in both {pair}."
            for pair, n in self.overlaps.items()
            if n
        ]
        return found + list(self.remarks)


@dataclass(frozen=True, eq=False)
class Graph:
    """Triples `(num_triples, 3)` of head, relation and tail ids, as train, valid and test."""

    name: str
    entities: Vocabulary
    relations: Vocabulary
    train: Triples
    valid: Triples
    test: Triples
    source: str = "memory"
    fingerprint: str = ""
    catalogued: bool = False
    notes: Notes = Notes()
    read_options: dict[str, Any] = field(default_factory=dict)  # the choices of a recipe's [data] that it was read by

    @property
    def shape(self) -> GraphShape:
        return GraphShape(len(self.entities), len(self.relations))

    def split(self, name: str) -> Triples:
        if name not in SPLITS:
            raise RequestError(f"The splits of a graph are {', '.join(SPLITS)}; '{name}' was asked for.")
        triples: Triples = getattr(self, name)
        return triples

    @property
    def counts(self) -> dict[str, int]:
        """Entities, relations, and triples by split: what the catalogue compares."""
        return {
            "entities": len(self.entities),
            "relations": len(self.relations),
            **{name: len(self.split(name)) for name in SPLITS},
        }

    def __repr__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.counts.items())
        return f"Graph({self.name!r}: {counts})"


def triple_keys(triples: Triples, shape: GraphShape) -> npt.NDArray[np.int64]:
    """One number a triple, equal for equal triples, in the order of (head, relation, tail)."""
    num_entities, num_relations = shape
    if not _fits(shape):
        _, keys = np.unique(triples, axis=0, return_inverse=True)
        return keys.reshape(-1).astype(np.int64)
    keys = triples[:, 0].astype(np.int64)
    keys *= num_relations
    keys += triples[:, 1]
    keys *= num_entities
    keys += triples[:, 2]
    return keys


def _fits(shape: GraphShape) -> bool:
    """Whether each possible triple can have a 63-bit number of its own."""
    return shape.num_entities**2 * shape.num_relations < 2**63


def distinct_triples(triples: Triples, shape: GraphShape) -> Triples:
    """Each triple once, in the order of (head, relation, tail)."""
    if not _fits(shape):
        return np.unique(triples, axis=0)
    keys = sorted_distinct(triple_keys(triples, shape))
    distinct = np.empty((len(keys), 3), dtype=np.int32)
    keys, distinct[:, 2] = np.divmod(keys, max(shape.num_entities, 1))
    distinct[:, 0], distinct[:, 1] = np.divmod(keys, max(shape.num_relations, 1))
    return distinct


def count_repeats(splits: dict[str, Triples], shape: GraphShape, remarks: Iterable[str] = ()) -> Notes:
    """Count the triples that stand twice in one split, and those that stand in two."""
    joined = np.concatenate(list(splits.values()))
    ends = np.cumsum([len(triples) for triples in splits.values()])[:-1]
    keys = dict(zip(splits, np.split(triple_keys(joined, shape), ends), strict=True))
    distinct = {name: sorted_distinct(found) for name, found in keys.items()}
    duplicates = {name: len(keys[name]) - len(distinct[name]) for name in splits}
    overlaps = {
        f"{one} and {other}": _num_common(distinct[one], distinct[other]) for one, other in combinations(splits, 2)
    }
    return Notes(duplicates, overlaps, tuple(remarks))


def sorted_distinct(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each key once, in order; several times faster than `np.unique`, which hashes."""
    keys = np.sort(keys)
    fresh = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return keys[fresh]


def _num_common(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    if not len(one):
        return 0
    place = np.minimum(np.searchsorted(one, other), len(one) - 1)
    return int((one[place] == other).sum())


LOOPS = 0.01  # the least share of a relation's triples that are loops, for another one to be worth asking about


def relations_with_self_loops(graph: Graph) -> frozenset[int]:
    """The relations by which train relates entities to themselves, more often than by mistake.

    By any other an entity is no new answer to a question about it, though models like it: of a relation that is its own
    inverse, nothing scores higher.
    """
    counts = [
        np.bincount(triples[:, 1], minlength=graph.shape.num_relations)
        for triples in (graph.train, graph.train[graph.train[:, 0] == graph.train[:, 2]])
    ]
    return frozenset(np.flatnonzero((counts[1] > 0) & (counts[1] >= LOOPS * counts[0])).tolist())

"""Arrays of triples of ids: shape of a graph, distinct triples, repeated triples, and notes on
them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Triples = npt.NDArray[np.int32]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
MAX_KEYS = 2**63  # if there are more possible triples, the queries that occur are numbered first
NO_TRIPLES: Triples = np.empty((0, 3), np.int32)


class GraphShape(NamedTuple):
    """The sizes of a graph that determine the shape of a model."""

    num_entities: int
    num_relations: int


@dataclass(frozen=True)
class Notes:
    """Repeated triples and remarks of the readers."""

    duplicates: dict[str, int] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """One sentence for each irregularity; none for a clean graph."""
        counts = [(n, f"more than once in {split}") for split, n in self.duplicates.items()]
        counts += [(n, f"in both {pair}") for pair, n in self.overlaps.items()]
        found = [
            f"{n:,} {'triple occurs' if n == 1 else 'triples occur'} {where}."
            for n, where in counts
            if n
        ]
        return found + list(self.remarks)


def triple_keys(triples: Triples, shape: GraphShape) -> npt.NDArray[np.int64]:
    """One number per triple, ordered like (head, relation, tail).

    If 63 bits are too few for all possible triples, it depends on the others: only keys of one call
    can be compared.
    """
    num_entities, num_relations = shape
    keys = triples[:, 0].astype(np.int64)
    keys *= num_relations
    keys += triples[:, 1]
    if num_entities**2 * num_relations >= MAX_KEYS:
        _, keys = np.unique(keys, return_inverse=True)
    keys *= num_entities
    keys += triples[:, 2]
    return keys


def distinct_triples(triples: Triples, shape: GraphShape) -> Triples:
    """The distinct triples, sorted by (head, relation, tail)."""
    if shape.num_entities**2 * shape.num_relations >= MAX_KEYS:
        _, first = np.unique(triple_keys(triples, shape), return_index=True)
        found: Triples = triples[first]
        return found
    keys = sorted_distinct(triple_keys(triples, shape))
    distinct = np.empty((len(keys), 3), dtype=np.int32)
    keys, distinct[:, 2] = np.divmod(keys, max(shape.num_entities, 1))
    distinct[:, 0], distinct[:, 1] = np.divmod(keys, max(shape.num_relations, 1))
    return distinct


def count_repeats(
    splits: dict[str, Triples], shape: GraphShape, remarks: Iterable[str] = ()
) -> Notes:
    """Count the triples that occur twice in one split, or in two splits."""
    joined = np.concatenate(list(splits.values()))
    ends = np.cumsum([len(triples) for triples in splits.values()])[:-1]
    return count_repeated_keys(
        dict(zip(splits, np.split(triple_keys(joined, shape), ends), strict=True)), remarks
    )


def count_repeated_keys(
    keys: dict[str, npt.NDArray[np.int64]], remarks: Iterable[str] = ()
) -> Notes:
    """Count the triples that occur twice, by their keys in each split."""
    distinct = {name: sorted_distinct(found) for name, found in keys.items()}
    duplicates = {name: len(keys[name]) - len(distinct[name]) for name in keys}
    common = {
        (one, other): is_among(distinct[other], distinct[one])
        for one, other in combinations(keys, 2)
    }
    overlaps = {" and ".join(pair): int(found.sum()) for pair, found in common.items()}
    return Notes(duplicates, overlaps, tuple(remarks))


def sorted_distinct(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The distinct keys, sorted; several times faster than `np.unique`, which hashes."""
    keys = np.sort(keys)
    fresh = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return keys[fresh]


def is_among(keys: npt.NDArray[np.int64], table: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each key is in a sorted table; `np.isin` would sort the keys."""
    found: npt.NDArray[np.bool_] = np.append(table, -1)[np.searchsorted(table, keys)] == keys
    return found

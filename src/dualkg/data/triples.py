"""Arrays of triples of ids: shape of a graph, distinct triples, and notes on repeated ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Triples = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
ROWS = 1 << 20  # of a large array that are copied at a time: some 10 MiB
MAX_KEYS = 2**63  # possible triples; of larger graphs, the queries that occur are numbered first
NO_TRIPLES: Triples = np.empty((0, 3), np.int32)


class GraphShape(NamedTuple):
    """The sizes of a graph that determine the shape of a model.

    Attributes:
        num_entities: Number of entities.
        num_relations: Number of relations, without inverses.

    Examples:
        >>> graph.shape.num_entities, graph.shape.num_relations
        (1945, 15)
    """

    num_entities: int
    num_relations: int


def inverse_relations(relations: Tensor, num_relations: int) -> Tensor:
    """The ids of the inverses of relation ids: r + num_relations of r, and r of that."""
    return (relations + num_relations) % (2 * num_relations)


def slices(size: int, step: int = 0) -> Iterator[slice]:
    """The rows of a large array, a part at a time."""
    step = step or ROWS
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def triple_keys(triples: Triples, shape: GraphShape) -> Keys:
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
    num_entities, num_relations = shape
    if num_entities**2 * num_relations >= MAX_KEYS:
        _, first = np.unique(triple_keys(triples, shape), return_index=True)
        in_order: Triples = triples[first]
        return in_order

    keys = sorted_distinct(triple_keys(triples, shape))
    distinct = np.empty((len(keys), 3), dtype=np.int32)
    keys, distinct[:, 2] = np.divmod(keys, max(num_entities, 1))
    distinct[:, 0], distinct[:, 1] = np.divmod(keys, max(num_relations, 1))
    return distinct


def notes_on_repeats(splits: Mapping[str, Triples], shape: GraphShape) -> list[str]:
    """A sentence for the triples that occur twice in a split, and one for those in two splits."""
    joined = np.concatenate(list(splits.values()))
    ends = np.cumsum([len(triples) for triples in splits.values()])[:-1]
    keys = dict(zip(splits, np.split(triple_keys(joined, shape), ends), strict=True))
    distinct = {split: sorted_distinct(split_keys) for split, split_keys in keys.items()}

    numbers = {}
    for split in splits:
        numbers[f"more than once in {split}"] = len(keys[split]) - len(distinct[split])
    for first, second in combinations(splits, 2):
        is_common = is_among(distinct[second], distinct[first])
        numbers[f"in both {first} and {second}"] = int(is_common.sum())

    return [note_on_repeats(number, place) for place, number in numbers.items() if number]


def note_on_repeats(number: int, place: str) -> str:
    """A sentence such as `2 triples occur in both train and test.`"""
    occurring = "1 triple occurs" if number == 1 else f"{number:,} triples occur"
    return f"{occurring} {place}."


def sorted_distinct(keys: Keys) -> Keys:
    """The distinct keys, sorted; several times faster than `np.unique`, which hashes."""
    keys = np.sort(keys)
    is_new = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
    return keys[is_new]


def is_among(keys: Keys, table: Keys) -> npt.NDArray[np.bool_]:
    """Whether each key is in a sorted table; `np.isin` would sort the keys."""
    candidates = np.append(table, -1)[np.searchsorted(table, keys)]
    is_equal: npt.NDArray[np.bool_] = candidates == keys
    return is_equal

"""Split triples into train, valid and test without leaking test triples into train."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.encoding import ReadTriples
from dualkg.data.triples import SPLITS, GraphShape, Notes, Triples, count_repeats, sorted_distinct, triple_keys
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError

Positions = npt.NDArray[np.int64]
Fractions = tuple[float, float, float]


def parse_split(split: str) -> Fractions:
    """`80/10/10` → (0.8, 0.1, 0.1)."""
    try:
        parts = [float(part) for part in split.split("/")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or parts[0] == 0 or not abs(sum(parts) - 100) <= 1e-6:
        raise RequestError(f"A split is three percentages that add up to 100, as in 80/10/10; '{split}' was given.")
    return parts[0] / 100, parts[1] / 100, parts[2] / 100


def check_seed(seed: int) -> None:
    if seed < 0:
        raise RequestError(f"A seed is a whole number, 0 or more; {seed} was given.")


def graph_fields(
    read: ReadTriples, name: str, fractions: Fractions, *, seed: int, labels: Mapping[str, str], where: str, advice: str
) -> dict[str, Any]:
    """The fields of a graph that was read with its splits, or as `triples` to be split.

    `where` and `advice` are for the error of triples that cannot be split: their name, and what to give instead.
    """
    shape = GraphShape(len(read.entities), len(read.relations))
    if "triples" in read.triples:
        splits, remarks = _split_distinct(where, read.triples["triples"], shape, fractions, seed, advice)
        notes = Notes(remarks=(*read.remarks, *remarks))
    else:
        splits = {split: read.triples[split] for split in SPLITS}
        notes = count_repeats(splits, shape, read.remarks)
    labels = read.labels | dict(labels)
    entities = Vocabulary(read.entities, labels or None, kind="entity")
    relations = Vocabulary(read.relations, labels or None, kind="relation")
    return {"name": name, "entities": entities, "relations": relations, "notes": notes, **splits}


def _split_distinct(
    name: str, triples: Triples, shape: GraphShape, fractions: Fractions, seed: int, advice: str
) -> tuple[dict[str, Triples], list[str]]:
    """Split triples after removing duplicates: a copy in test of a triple in train would be known."""
    remarks = []
    keys = triple_keys(triples, shape)
    if num_repeated := len(keys) - len(sorted_distinct(keys)):
        _, first = np.unique(keys, return_index=True)  # several times slower than `sorted_distinct`
        remarks.append(f"{num_repeated:,} duplicate {'triple was' if num_repeated == 1 else 'triples were'} removed.")
        triples = triples[np.sort(first)]
    parts: dict[str, Triples] = dict(zip(SPLITS, split_triples(triples, fractions, seed=seed), strict=True))
    for (split, part), fraction in zip(parts.items(), fractions, strict=True):
        if fraction and not len(part):
            raise DataError(
                f"{name} cannot be split: of its {len(triples):,} triples none can go to {split} without leaving an "
                f"entity or a relation unseen in train (triples of the same two entities stay together). Give more "
                f"triples, or {advice}."
            )
    held_out, requested = len(triples) - len(parts["train"]), sum(fractions[1:]) * len(triples)
    if held_out < 0.9 * requested:
        remarks.append(
            f"valid and test have {held_out:,} triples of the {requested:,.0f} requested: the others are the only ones "
            f"of some entity or relation."
        )
    return parts, remarks


def split_triples(triples: Triples, fractions: Fractions, *, seed: int) -> tuple[Triples, Triples, Triples]:
    """Split `(num_triples, 3)` distinct triples into train, valid and test, each in the order given.

    Triples that join the same two entities, in either direction, stay together: one of them in train would reveal the
    other in test. Every entity and relation of valid and test also occurs in train, so both may be smaller than their
    fractions in a sparse graph; then they share the available triples in proportion.
    """
    if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(f"Fractions of train, valid and test must be at least 0 and add up to 1; got {fractions}.")
    if not len(triples):
        return triples[:0], triples[:0], triples[:0]
    positions = _shuffled_pairs(triples, seed)
    sizes = np.bincount(positions)
    spare = np.flatnonzero(~_needed_in_train(triples, positions))
    free = spare
    _, valid_fraction, test_fraction = fractions
    wanted = np.array([valid_fraction, test_fraction]) * len(triples)
    # A pair with more triples than a whole split would block all pairs after it.
    spare = spare[sizes[spare] <= wanted.max()]
    filled = np.cumsum(sizes[spare])
    available = int(filled[-1]) if len(filled) else 0
    wanted = np.rint(wanted * min(1.0, available / max(wanted.sum(), 1.0)))
    # 0 is train, 1 valid, 2 test.
    split_of_pair = np.zeros(len(sizes), dtype=np.int8)
    first = filled <= wanted[0]
    split_of_pair[spare[first]] = 1
    filled = filled - sizes[spare[first]].sum()  # what valid left over does not go to test
    split_of_pair[spare[~first & (filled <= wanted[1])]] = 2
    _leave_none_empty(split_of_pair, free, fractions)
    split = split_of_pair[positions]
    return triples[split == 0], triples[split == 1], triples[split == 2]


def _leave_none_empty(split_of_pair: npt.NDArray[np.int8], free: Positions, fractions: Fractions) -> None:
    """Give valid and test one pair each if rounding left them none and there are pairs to give."""
    for split in (1, 2):
        if fractions[split] and not (split_of_pair == split).any():
            left = free[split_of_pair[free] == 0]
            if not len(left):
                left = free[split_of_pair[free] == 3 - split][1:]
            split_of_pair[left[:1]] = split


def _shuffled_pairs(triples: Triples, seed: int) -> Positions:
    """For each triple, the position of its unordered pair of entities in the shuffled order of pairs."""
    head, tail = triples[:, 0].astype(np.int64), triples[:, 2]
    keys = np.minimum(head, tail) * (int(max(head.max(), tail.max())) + 1)
    keys += np.maximum(head, tail)
    pairs, pair = np.unique(keys, return_inverse=True)
    order: Positions = np.random.default_rng(seed).permutation(len(pairs))
    return order[pair]


def _needed_in_train(triples: Triples, positions: Positions) -> npt.NDArray[np.bool_]:
    """For each position, whether an entity or relation occurs there first."""
    num_positions = int(positions.max()) + 1
    needed = np.zeros(num_positions, dtype=np.bool_)
    for columns in ((0, 2), (1,)):
        num_ids = 1 + max(int(triples[:, column].max()) for column in columns)
        first = np.full(num_ids, num_positions, dtype=np.int64)
        for column in columns:
            np.minimum.at(first, triples[:, column], positions)
        needed[first[first < num_positions]] = True
    return needed

"""Split triples into train, valid and test without leaking test triples into train."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.encoding import ReadTriples
from dualkg.data.spill import (
    Column,
    PairedTriples,
    count_repeats_on_disk,
    is_mapped,
    mapped_triples,
    release,
    slices,
)
from dualkg.data.triples import (
    SPLITS,
    GraphShape,
    Notes,
    Triples,
    count_repeats,
    sorted_distinct,
    triple_keys,
)
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError

Positions = npt.NDArray[Any]
Fractions = tuple[float, float, float]
Splitting = tuple[Fractions, int]  # and a seed


def parse_split(split: str, seed: int = 0) -> Fractions:
    """`80/10/10` → (0.8, 0.1, 0.1); a seed that is no number of a generator is refused too."""
    if seed < 0:
        raise RequestError(f"A seed is a whole number, 0 or more; {seed} was given.")
    try:
        parts = [float(part) for part in split.split("/")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or parts[0] == 0 or not abs(sum(parts) - 100) <= 1e-6:
        raise RequestError(
            f"A split is three percentages that add up to 100, as in 80/10/10; '{split}' was given."
        )
    return parts[0] / 100, parts[1] / 100, parts[2] / 100


def graph_fields(
    read: ReadTriples,
    name: str,
    splitting: Splitting,
    *,
    labels: Mapping[str, str],
    where: str,
    advice: str,
) -> dict[str, Any]:
    """The fields of a graph that was read with its splits, or as `triples` to be split.

    `where` and `advice` are for the error of triples that cannot be split: their name, and what to
    give instead.
    """
    shape = GraphShape(len(read.entities), len(read.relations))
    if "triples" in read.triples:
        splits, remarks = _split_distinct(where, read.triples["triples"], shape, splitting, advice)
        notes = Notes(remarks=(*read.remarks, *remarks))
    else:
        splits = {split: read.triples[split] for split in SPLITS}
        count = count_repeats_on_disk if any(map(is_mapped, splits.values())) else count_repeats
        notes = count(splits, shape, read.remarks)
    labels = read.labels | dict(labels)
    entities = Vocabulary(read.entities, labels or None, kind="entity")
    relations = Vocabulary(read.relations, labels or None, kind="relation")
    return {"name": name, "entities": entities, "relations": relations, "notes": notes, **splits}


def _split_distinct(
    name: str, triples: Triples, shape: GraphShape, splitting: Splitting, advice: str
) -> tuple[dict[str, Triples], list[str]]:
    """Split triples after removing duplicates: a copy in test of a triple in train would be
    known.
    """
    (fractions, seed), remarks = splitting, []
    if is_mapped(triples):
        found = _split_on_disk(triples, shape, fractions, seed)
    else:
        keys = triple_keys(triples, shape)
        if len(keys) > len(sorted_distinct(keys)):
            _, first = np.unique(
                keys, return_index=True
            )  # several times slower than `sorted_distinct`
            found = split_triples(triples[np.sort(first)], fractions, seed=seed)
        else:
            del keys
            found = split_triples(triples, fractions, seed=seed)
    parts: dict[str, Triples] = dict(zip(SPLITS, found, strict=True))
    num_triples = sum(map(len, found))
    if num_repeated := len(triples) - num_triples:
        remarks.append(
            f"{num_repeated:,} duplicate {'triple was' if num_repeated == 1 else 'triples were'} "
            "removed."
        )
    for (split, part), fraction in zip(parts.items(), fractions, strict=True):
        if fraction and not len(part):
            raise DataError(
                f"{name} cannot be split: of its {num_triples:,} triples none can go to {split} "
                "without leaving an entity or a relation unseen in train (triples of the same "
                f"two entities stay together). Give more triples, or {advice}."
            )
    held_out = num_triples - len(parts["train"])
    requested = sum(fractions[1:]) * num_triples
    if held_out < 0.9 * requested:
        remarks.append(
            f"valid and test have {held_out:,} triples of the {requested:,.0f} requested: the "
            "others are the only ones of some entity or relation."
        )
    return parts, remarks


def split_triples(
    triples: Triples, fractions: Fractions, *, seed: int
) -> tuple[Triples, Triples, Triples]:
    """Split `(num_triples, 3)` distinct triples into train, valid and test, each in the order
    given.

    Triples that join the same two entities, in either direction, stay together: one of them in
    train would reveal the other in test. Every entity and relation of valid and test also occurs in
    train, so both may be smaller than their fractions in a sparse graph; then they share the
    available triples in proportion.
    """
    if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(
            "Fractions of train, valid and test must be at least 0 and add up to 1; got "
            f"{fractions}."
        )
    if not len(triples):
        return triples[:0], triples[:0], triples[:0]
    head = triples[:, 0].astype(np.int64)
    tail = triples[:, 2]
    num_ids = 1 + int(max(head.max(), tail.max())), 1 + int(triples[:, 1].max())
    keys = np.minimum(head, tail) * num_ids[0]
    keys += np.maximum(head, tail)
    pairs, pair = np.unique(keys, return_inverse=True)
    positions = np.random.default_rng(seed).permutation(len(pairs))[pair]
    firsts = [np.full(num, len(pairs)) for num in num_ids]
    _update_firsts(firsts, triples, positions)
    needed = _mark(firsts, len(pairs))
    split = _choose_pairs(np.bincount(positions), needed, fractions, len(triples))[positions]
    return triples[split == 0], triples[split == 1], triples[split == 2]


def _split_on_disk(
    triples: Triples, shape: GraphShape, fractions: Fractions, seed: int
) -> tuple[Triples, Triples, Triples]:
    """`split_triples` of triples larger than memory, of which some may be duplicates."""
    paired = PairedTriples([triples], shape)
    sizes = Column(np.int32)
    num_triples = 0
    for number, pairs, keys in paired.partitions():
        _, first = np.unique(keys, return_index=True)
        distinct = np.full(len(pairs), -1, np.int64)
        distinct[first] = sizes.size + pairs[first]
        paired.table.write("pair", number, distinct)
        sizes.append(np.bincount(pairs[first]))
        num_triples += len(first)
    num_pairs = sizes.size
    kind = np.int32 if num_pairs < 2**31 - 1 else np.int64
    order, sizes_at = (Column(kind, num_pairs).map(writable=True) for _ in range(2))
    for part in slices(num_pairs):
        order[part] = np.arange(part.start, part.stop)
    np.random.default_rng(seed).shuffle(np.asarray(order))  # as `permutation` does
    for part in slices(num_pairs):
        sizes_at[order[part]] = sizes.read(part.start, part.stop)
    positions = Column(kind)
    firsts = [np.full(num, num_pairs, kind) for num in shape]
    for number, part in enumerate(slices(len(triples))):
        pairs = paired.table.chunk("pair", number)
        here = np.empty(len(pairs), kind)
        here[paired.table.chunk("row", number)] = np.where(pairs < 0, num_pairs, order[pairs])
        positions.append(here)
        _update_firsts(firsts, triples[part], here)
    needed = _mark(firsts, num_pairs)
    del order, paired, firsts
    split_of_pair = np.append(
        _choose_pairs(sizes_at, needed, fractions, num_triples), np.int8(len(SPLITS))
    )
    parts = [Column(np.int32) for _ in SPLITS]
    for part in slices(len(triples)):
        split = split_of_pair[positions.read(part.start, part.stop)]
        rows = triples[part]
        for number, found in enumerate(parts):
            found.append(rows[split == number].reshape(-1))
    release(triples)
    train, valid, test = (mapped_triples(column) for column in parts)
    return train, valid, test


def _choose_pairs(
    sizes: npt.NDArray[np.integer],
    needed: npt.NDArray[np.bool_],
    fractions: Fractions,
    num_triples: int,
) -> npt.NDArray[np.int8]:
    """The split of each pair by its position: 0 is train, 1 valid, 2 test."""
    split_of_pair = np.zeros(len(sizes), dtype=np.int8)
    wanted = np.array(fractions[1:]) * num_triples
    # A pair with more triples than a whole split would block all pairs after it.
    most = wanted.max()
    parts = list(slices(len(sizes)))
    available = sum(int(sizes[part][~needed[part] & (sizes[part] <= most)].sum()) for part in parts)
    wanted = np.rint(wanted * min(1.0, available / max(wanted.sum(), 1.0)))
    filled = in_valid = 0
    for part in parts:
        spare = part.start + np.flatnonzero(~needed[part] & (sizes[part] <= most))
        total = filled + np.cumsum(sizes[spare], dtype=np.int64)
        first = total <= wanted[0]
        split_of_pair[spare[first]] = 1
        in_valid += int(sizes[spare[first]].sum())  # what valid left over does not go to test
        split_of_pair[spare[~first & (total - in_valid <= wanted[1])]] = 2
        filled = int(total[-1]) if len(total) else filled
    for split in (1, 2):  # one pair each if rounding left none and there are pairs to give
        if fractions[split] and not (split_of_pair == split).any():
            free = np.flatnonzero(~needed)
            left = free[split_of_pair[free] == 0]
            if not len(left):
                left = free[split_of_pair[free] == 3 - split][1:]
            split_of_pair[left[:1]] = split
    return split_of_pair


def _update_firsts(firsts: Sequence[Positions], triples: Triples, positions: Positions) -> None:
    """Enter the first position of each entity and of each relation."""
    for column in range(3):
        np.minimum.at(firsts[column % 2], triples[:, column], positions)


def _mark(firsts: Sequence[Positions], num_positions: int) -> npt.NDArray[np.bool_]:
    """For each position, whether an entity or relation occurs there first, so that it is needed in
    train.
    """
    needed = np.zeros(num_positions + 1, dtype=np.bool_)
    for first in firsts:
        needed[first] = True
    return needed[:-1]

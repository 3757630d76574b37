"""Split triples into train, valid and test without leaking test triples into train."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualkg.data.encoding import ReadTriples
from dualkg.data.errors import CannotSplit
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
    NO_TRIPLES,
    SPLITS,
    GraphShape,
    Notes,
    Triples,
    count_repeats,
    sorted_distinct,
    triple_keys,
)
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import InvalidValue, Sentence

Positions = npt.NDArray[Any]
Fractions = tuple[float, float, float]
DROPPED = np.int8(len(SPLITS))  # the split of a duplicate, which goes nowhere


class Splitting(NamedTuple):
    """How triples are split: fractions of train, valid and test, and a seed."""

    fractions: Fractions
    seed: int


def parse_split(split: str, seed: int = 0) -> Fractions:
    """`80/10/10` → (0.8, 0.1, 0.1); a seed that is no number of a generator is refused too."""
    if seed < 0:
        raise InvalidValue("seed", expected="a whole number, 0 or more", found=seed)

    try:
        percentages = [float(part) for part in split.split("/")]
    except ValueError:
        percentages = []
    is_valid = len(percentages) == 3 and min(percentages) >= 0 and percentages[0] != 0
    if not is_valid or not abs(sum(percentages) - 100) <= 1e-6:
        expected = "three percentages that add up to 100, as in 80/10/10"
        raise InvalidValue("split", expected=expected, found=split)
    train, valid, test = percentages
    return train / 100, valid / 100, test / 100


def graph_fields(
    read: ReadTriples,
    name: str,
    splitting: Splitting,
    *,
    labels: Mapping[str, str],
    where: str,
    alternative: str,
) -> dict[str, Any]:
    """The fields of a graph that was read with its splits, or as `triples` to be split.

    `where` and `alternative` are for the error of triples that cannot be split: their name, and
    what to give instead.
    """
    shape = GraphShape(len(read.entities), len(read.relations))
    if "triples" in read.triples:
        splits, remarks = _split_distinct(read.triples["triples"], shape, splitting)
        _check_splits(splits, splitting, where=where, alternative=alternative)
        notes = Notes(remarks=(*read.remarks, *remarks))
    else:
        splits = {split: read.triples.get(split, NO_TRIPLES) for split in SPLITS}
        if any(is_mapped(triples) for triples in splits.values()):
            notes = count_repeats_on_disk(splits, shape, read.remarks)
        else:
            notes = count_repeats(splits, shape, read.remarks)

    all_labels = read.labels | dict(labels)
    entities = Vocabulary(read.entities, all_labels or None, kind="entity")
    relations = Vocabulary(read.relations, all_labels or None, kind="relation")
    return {"name": name, "entities": entities, "relations": relations, "notes": notes, **splits}


def _split_distinct(
    triples: Triples, shape: GraphShape, splitting: Splitting
) -> tuple[dict[str, Triples], list[Sentence]]:
    """Split triples without their duplicates, and remark on what was removed or not possible.

    A copy in test of a triple in train would be known.
    """
    if is_mapped(triples):
        parts = _split_on_disk(triples, shape, splitting)
    else:
        parts = split_triples(_without_duplicates(triples, shape), *splitting)

    remarks = []
    num_triples = sum(len(part) for part in parts)
    num_repeated = len(triples) - num_triples
    if num_repeated:
        noun = "triple was" if num_repeated == 1 else "triples were"
        remarks.append(Sentence(f"{num_repeated:,} duplicate {noun} removed."))

    num_held_out = num_triples - len(parts[0])
    num_requested = sum(splitting.fractions[1:]) * num_triples
    if num_held_out < 0.9 * num_requested:
        text = (
            f"valid and test have {num_held_out:,} triples of the {num_requested:,.0f} requested: "
            "the others are the only ones of some entity or relation."
        )
        remarks.append(Sentence(text))
    return dict(zip(SPLITS, parts, strict=True)), remarks


def _without_duplicates(triples: Triples, shape: GraphShape) -> Triples:
    """The first occurrence of each triple, in the order given."""
    keys = triple_keys(triples, shape)
    if len(keys) == len(sorted_distinct(keys)):
        return triples
    # Several times slower than `sorted_distinct`.
    _, first = np.unique(keys, return_index=True)
    return triples[np.sort(first)]


def _check_splits(
    splits: Mapping[str, Triples], splitting: Splitting, *, where: str, alternative: str
) -> None:
    """Refuse an empty split that was requested."""
    num_triples = sum(len(part) for part in splits.values())
    for (split, part), fraction in zip(splits.items(), splitting.fractions, strict=True):
        if fraction and not len(part):
            raise CannotSplit(where, split, num_triples=num_triples, alternative=alternative)


def split_triples(
    triples: Triples, fractions: Fractions, seed: int
) -> tuple[Triples, Triples, Triples]:
    """Split `(num_triples, 3)` distinct triples into train, valid and test, in the order given.

    Triples that join the same two entities, in either direction, stay together: one of them in
    train would reveal the other in test. Every entity and relation of valid and test also occurs in
    train, so both may be smaller than their fractions in a sparse graph; then they share the
    available triples in proportion.
    """
    if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        expected = "fractions of train, valid and test must be at least 0 and add up to 1"
        raise ValueError(f"{expected}; got {fractions}")
    if not len(triples):
        return triples[:0], triples[:0], triples[:0]

    heads = triples[:, 0].astype(np.int64)
    tails = triples[:, 2]
    num_entities = 1 + int(max(heads.max(), tails.max()))
    num_relations = 1 + int(triples[:, 1].max())
    keys = np.minimum(heads, tails) * num_entities
    keys += np.maximum(heads, tails)
    pairs, pair = np.unique(keys, return_inverse=True)

    # Each pair of entities has a random position, and the first positions of entities and
    # relations are needed in train.
    positions = np.random.default_rng(seed).permutation(len(pairs))[pair]
    firsts = [np.full(number, len(pairs)) for number in (num_entities, num_relations)]
    _update_firsts(firsts, triples, positions)
    needed = _mark(firsts, len(pairs))
    split_of_pair = _choose_pairs(np.bincount(positions), needed, fractions, len(triples))
    split = split_of_pair[positions]
    return triples[split == 0], triples[split == 1], triples[split == 2]


def _split_on_disk(
    triples: Triples, shape: GraphShape, splitting: Splitting
) -> tuple[Triples, Triples, Triples]:
    """`split_triples` of triples larger than memory, of which some may be duplicates."""
    paired = PairedTriples([triples], shape)
    sizes, num_triples = _number_pairs(paired)
    num_pairs = sizes.size
    position_type = np.int32 if num_pairs < 2**31 - 1 else np.int64
    order = _shuffled(num_pairs, position_type, seed=splitting.seed)
    sizes_at = Column(position_type, num_pairs).map(writable=True)
    for part in slices(num_pairs):
        sizes_at[order[part]] = sizes.read(part.start, part.stop)

    positions = Column(position_type)
    firsts = [np.full(number, num_pairs, position_type) for number in shape]
    for number, part in enumerate(slices(len(triples))):
        pairs = paired.table.chunk("pair", number)
        rows = paired.table.chunk("row", number)
        positions_of_part = np.empty(len(pairs), position_type)
        positions_of_part[rows] = np.where(pairs < 0, num_pairs, order[pairs])
        positions.append(positions_of_part)
        _update_firsts(firsts, triples[part], positions_of_part)
    needed = _mark(firsts, num_pairs)
    del order, paired, firsts

    split_of_pair = _choose_pairs(sizes_at, needed, splitting.fractions, num_triples)
    split_of_pair = np.append(split_of_pair, DROPPED)  # at the position of duplicates
    columns = [Column(np.int32) for _ in SPLITS]
    for part in slices(len(triples)):
        split = split_of_pair[positions.read(part.start, part.stop)]
        rows = triples[part]
        for number, column in enumerate(columns):
            column.append(rows[split == number].reshape(-1))
    release(triples)
    train, valid, test = (mapped_triples(column) for column in columns)
    return train, valid, test


def _number_pairs(paired: PairedTriples) -> tuple[Column, int]:
    """Write the number of each triple's pair, −1 for a duplicate.

    Returns the number of distinct triples of each pair, and of all pairs.
    """
    sizes = Column(np.int32)
    num_triples = 0
    for number, pairs, keys in paired.partitions():
        _, first = np.unique(keys, return_index=True)
        pair_of_triple = np.full(len(pairs), -1, np.int64)
        pair_of_triple[first] = sizes.size + pairs[first]
        paired.table.write("pair", number, pair_of_triple)
        sizes.append(np.bincount(pairs[first]))
        num_triples += len(first)
    return sizes, num_triples


def _shuffled(size: int, dtype: npt.DTypeLike, *, seed: int) -> Positions:
    """`default_rng(seed).permutation(size)`, on disk."""
    order = Column(dtype, size).map(writable=True)
    for part in slices(size):
        order[part] = np.arange(part.start, part.stop)
    np.random.default_rng(seed).shuffle(np.asarray(order))
    return order


def _choose_pairs(
    sizes: npt.NDArray[np.integer],
    needed: npt.NDArray[np.bool_],
    fractions: Fractions,
    num_triples: int,
) -> npt.NDArray[np.int8]:
    """The split of each pair by its position: 0 is train, 1 valid, 2 test."""
    split_of_pair = np.zeros(len(sizes), dtype=np.int8)
    wanted = np.array(fractions[1:]) * num_triples
    largest = wanted.max()  # a pair with more triples would block all pairs after it
    parts = list(slices(len(sizes)))

    def is_spare(part: slice) -> npt.NDArray[np.bool_]:
        fits: npt.NDArray[np.bool_] = sizes[part] <= largest
        return ~needed[part] & fits

    available = sum(int(sizes[part][is_spare(part)].sum()) for part in parts)
    wanted = np.rint(wanted * min(1.0, available / max(wanted.sum(), 1.0)))
    num_seen = 0
    num_in_valid = 0
    for part in parts:
        spare = part.start + np.flatnonzero(is_spare(part))
        total = num_seen + np.cumsum(sizes[spare], dtype=np.int64)
        in_valid = total <= wanted[0]
        split_of_pair[spare[in_valid]] = 1
        # What valid left over does not go to test.
        num_in_valid += int(sizes[spare[in_valid]].sum())
        in_test = ~in_valid & (total - num_in_valid <= wanted[1])
        split_of_pair[spare[in_test]] = 2
        num_seen = int(total[-1]) if len(total) else num_seen

    # If rounding left a split empty, it gets one pair of those that can be given.
    for split in (1, 2):
        if fractions[split] and not (split_of_pair == split).any():
            free = np.flatnonzero(~needed)
            candidates = free[split_of_pair[free] == 0]
            if not len(candidates):
                other_split = 3 - split
                candidates = free[split_of_pair[free] == other_split][1:]
            split_of_pair[candidates[:1]] = split
    return split_of_pair


def _update_firsts(firsts: Sequence[Positions], triples: Triples, positions: Positions) -> None:
    """Enter the first position of each entity and of each relation."""
    for column in range(3):
        np.minimum.at(firsts[column % 2], triples[:, column], positions)


def _mark(firsts: Sequence[Positions], num_positions: int) -> npt.NDArray[np.bool_]:
    """For each position, whether an entity or relation occurs there first: train needs it."""
    needed = np.zeros(num_positions + 1, dtype=np.bool_)
    for first in firsts:
        needed[first] = True
    return needed[:-1]

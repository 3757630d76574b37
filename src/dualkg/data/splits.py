"""Split triples into train, valid and test without leaking test triples into train."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualkg.data.encoding import ReadTriples
from dualkg.data.triples import (
    NO_TRIPLES,
    SPLITS,
    GraphShape,
    Triples,
    notes_on_repeats,
    sorted_distinct,
    triple_keys,
)
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, InvalidValue

Fractions = tuple[float, float, float]


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
        splits, notes = _split_distinct(read.triples["triples"], shape, splitting)
        _check_splits(splits, splitting, where=where, alternative=alternative)
        notes = [*read.notes, *notes]
    else:
        splits = {split: read.triples.get(split, NO_TRIPLES) for split in SPLITS}
        notes = [*notes_on_repeats(splits, shape), *read.notes]

    all_labels = read.labels | dict(labels)
    entities = Vocabulary(read.entities, all_labels or None, kind="entity")
    relations = Vocabulary(read.relations, all_labels or None, kind="relation")
    fields = {"name": name, "entities": entities, "relations": relations, **splits}
    return {**fields, "notes": tuple(notes)}


def _split_distinct(
    triples: Triples, shape: GraphShape, splitting: Splitting
) -> tuple[dict[str, Triples], list[str]]:
    """Split triples without their duplicates; notes say what was removed or not possible.

    A copy in test of a triple in train would be known.
    """
    parts = split_triples(_without_duplicates(triples, shape), *splitting)

    notes = []
    num_triples = sum(len(part) for part in parts)
    num_repeated = len(triples) - num_triples
    if num_repeated:
        noun = "triple was" if num_repeated == 1 else "triples were"
        notes.append(f"{num_repeated:,} duplicate {noun} removed.")

    num_held_out = num_triples - len(parts[0])
    num_requested = sum(splitting.fractions[1:]) * num_triples
    if num_held_out < 0.9 * num_requested:
        notes.append(
            f"valid and test have {num_held_out:,} triples of the {num_requested:,.0f} requested: "
            "the others are the only ones of some entity or relation."
        )
    return dict(zip(SPLITS, parts, strict=True)), notes


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
            raise DataError(
                f"{where} cannot be split: of its {num_triples:,} triples none can go to {split} "
                "without leaving an entity or a relation unseen in train (triples of the same two "
                f"entities stay together). Give more triples, or {alternative}."
            )


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
    num_pairs = len(pairs)
    positions = np.random.default_rng(seed).permutation(num_pairs)[pair]
    firsts = [np.full(number, num_pairs) for number in (num_entities, num_relations)]
    for column in range(3):
        np.minimum.at(firsts[column % 2], triples[:, column], positions)
    needed = np.zeros(num_pairs + 1, dtype=np.bool_)  # the last is that of numbers without triples
    needed[np.concatenate(firsts)] = True
    split_of_pair = _choose_pairs(np.bincount(positions), needed[:-1], fractions, len(triples))
    split = split_of_pair[positions]
    return triples[split == 0], triples[split == 1], triples[split == 2]


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
    spare = np.flatnonzero(~needed & (sizes <= largest))
    total = np.cumsum(sizes[spare], dtype=np.int64)
    available = total[-1] if len(total) else 0
    wanted = np.rint(wanted * min(1.0, available / max(wanted.sum(), 1.0)))

    in_valid = total <= wanted[0]
    split_of_pair[spare[in_valid]] = 1
    # What valid left over does not go to test.
    num_in_valid = sizes[spare[in_valid]].sum()
    in_test = ~in_valid & (total - num_in_valid <= wanted[1])
    split_of_pair[spare[in_test]] = 2

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

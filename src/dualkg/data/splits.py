"""Cut a graph into train, valid and test so that no test triple has its answer in train."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import Triples

Places = npt.NDArray[np.int64]


def split_triples(
    triples: Triples, shares: tuple[float, float, float], *, seed: int
) -> tuple[Triples, Triples, Triples]:
    """Split `(num_triples, 3)` distinct triples into train, valid and test, each in the order given.

    Triples that join the same two entities, in either direction, stay together: one of them in train would
    give its twin in test away. Every entity and relation of valid and test also occurs in train, so both may
    come out smaller than their shares when the graph is thin; then they divide what there is in proportion.
    """
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"Shares of train, valid and test must be at least 0 and add up to 1; got {shares}.")
    if not len(triples):
        return triples[:0], triples[:0], triples[:0]
    places = _shuffled_pairs(triples, seed)
    sizes = np.bincount(places)
    spare = np.flatnonzero(~_needed_in_train(triples, places))
    free = spare
    _, valid_share, test_share = shares
    wanted = np.array([valid_share, test_share]) * len(triples)
    # A pair with more triples than a whole split would block the way for all pairs after it.
    spare = spare[sizes[spare] <= wanted.max()]
    filled = np.cumsum(sizes[spare])
    available = int(filled[-1]) if len(filled) else 0
    wanted = np.rint(wanted * min(1.0, available / max(wanted.sum(), 1.0)))
    # 0 is train, 1 valid, 2 test.
    split_of_pair = np.zeros(len(sizes), dtype=np.int8)
    first = filled <= wanted[0]
    split_of_pair[spare[first]] = 1
    filled = filled - sizes[spare[first]].sum()  # what valid left of its share is not test's
    split_of_pair[spare[~first & (filled <= wanted[1])]] = 2
    _leave_none_empty(split_of_pair, free, shares)
    split = split_of_pair[places]
    return triples[split == 0], triples[split == 1], triples[split == 2]


def _leave_none_empty(split_of_pair: npt.NDArray[np.int8], free: Places, shares: tuple[float, float, float]) -> None:
    """Give valid and test one pair each where rounding left them none, as long as there are pairs to give."""
    for split in (1, 2):
        if shares[split] and not (split_of_pair == split).any():
            left = free[split_of_pair[free] == 0]
            if not len(left):
                left = free[split_of_pair[free] == 3 - split][1:]
            split_of_pair[left[:1]] = split


def _shuffled_pairs(triples: Triples, seed: int) -> Places:
    """For each triple, where its unordered pair of entities comes in the shuffled order of the pairs."""
    head, tail = triples[:, 0].astype(np.int64), triples[:, 2]
    keys = np.minimum(head, tail) * (int(max(head.max(), tail.max())) + 1)
    keys += np.maximum(head, tail)
    pairs, pair = np.unique(keys, return_inverse=True)
    order: Places = np.random.default_rng(seed).permutation(len(pairs))
    return order[pair]


def _needed_in_train(triples: Triples, places: Places) -> npt.NDArray[np.bool_]:
    """For each place, whether some entity or relation is met there for the first time."""
    num_places = int(places.max()) + 1
    needed = np.zeros(num_places, dtype=np.bool_)
    for columns in ((0, 2), (1,)):
        num_ids = 1 + max(int(triples[:, column].max()) for column in columns)
        first = np.full(num_ids, num_places, dtype=np.int64)
        for column in columns:
            np.minimum.at(first, triples[:, column], places)
        needed[first[first < num_places]] = True
    return needed

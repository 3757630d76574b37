"""Splitting a graph: every triple once, no leaks, no unseen entities or relations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.graph import Triples
from dualkg.data.splits import split_triples

SHARES = (0.8, 0.1, 0.1)


@st.composite
def graphs(draw: st.DrawFn) -> Triples:
    """Distinct triples in any order, dense enough that twins, self-loops and lone entities all come
    up.
    """
    num_entities = draw(st.integers(1, 12))
    entity = st.integers(0, num_entities - 1)
    relation = st.integers(0, 2)
    rows = draw(st.lists(st.tuples(entity, relation, entity), max_size=80, unique=True))
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


def easy_graph(num_triples: int = 20_000) -> Triples:
    """Many triples on few entities, so that nearly every pair may be withheld."""
    rng = np.random.default_rng(7)
    triples = np.stack([rng.integers(0, n, 2 * num_triples) for n in (300, 5, 300)], axis=1)
    return np.unique(triples, axis=0)[:num_triples].astype(np.int32)


def rows(triples: Triples) -> list[tuple[int, ...]]:
    return [tuple(row) for row in triples.tolist()]


def pairs(triples: Triples) -> set[tuple[int, ...]]:
    return {tuple(sorted((head, tail))) for head, _, tail in triples.tolist()}


@given(graphs(), st.integers(0, 5))
def test_every_triple_is_in_exactly_one_split(triples: Triples, seed: int) -> None:
    parts = split_triples(triples, SHARES, seed=seed)
    assert sorted(rows(np.concatenate(parts))) == sorted(rows(triples))


@given(graphs(), st.integers(0, 5))
def test_each_split_keeps_the_given_order(triples: Triples, seed: int) -> None:
    position = {row: place for place, row in enumerate(rows(triples))}
    for part in split_triples(triples, SHARES, seed=seed):
        places = [position[row] for row in rows(part)]
        assert places == sorted(places)


@given(graphs(), st.integers(0, 5))
def test_valid_and_test_hold_nothing_that_train_has_not_seen(triples: Triples, seed: int) -> None:
    train, *withheld = split_triples(triples, (0.2, 0.4, 0.4), seed=seed)
    for part in withheld:
        assert set(part[:, [0, 2]].flat) <= set(train[:, [0, 2]].flat)
        assert set(part[:, 1].flat) <= set(train[:, 1].flat)


@given(graphs(), st.integers(0, 5))
def test_triples_that_join_the_same_pair_stay_together(triples: Triples, seed: int) -> None:
    train, valid, test = map(pairs, split_triples(triples, (0.2, 0.4, 0.4), seed=seed))
    assert not train & valid
    assert not train & test
    assert not valid & test


@given(graphs(), st.integers(0, 5))
def test_valid_and_test_meet_their_fractions_and_are_not_empty(triples: Triples, seed: int) -> None:
    _, valid, test = split_triples(triples, SHARES, seed=seed)
    for held_out in (valid, test):
        pairs = {tuple(sorted((head, tail))) for head, _, tail in held_out.tolist()}
        assert (
            len(held_out) <= np.rint(0.1 * len(triples)) or len(pairs) == 1
        )  # one pair, rather than none
    if (len(valid) > 0) != (len(test) > 0):
        assert (
            len(
                {tuple(sorted((head, tail))) for head, _, tail in [*valid.tolist(), *test.tolist()]}
            )
            == 1
        )


def test_the_rest_of_valid_does_not_go_to_test() -> None:
    """Pairs of 1, 2 and 1 triples for two splits of 2: valid takes one, and test the two, not
    three.
    """
    tails = {
        (0, 0): range(7),
        (0, 1): range(4),
        (0, 2): range(2),
        (1, 0): range(5),
        (1, 1): range(1),
        (3, 0): [1],
    }
    triples = np.array(
        [(head, relation, tail) for (head, relation), ids in tails.items() for tail in ids],
        np.int32,
    )
    _, valid, test = split_triples(triples, SHARES, seed=1)
    assert (len(valid), len(test)) == (1, 2)


def test_the_fractions_are_met_if_the_graph_allows_it() -> None:
    triples = easy_graph()
    train, valid, test = split_triples(triples, (0.7, 0.2, 0.1), seed=0)
    assert len(train) == pytest.approx(0.7 * len(triples), abs=20)
    assert len(valid) == pytest.approx(0.2 * len(triples), abs=20)
    assert len(test) == pytest.approx(0.1 * len(triples), abs=20)


def test_a_sparse_graph_divides_the_available_triples_in_proportion() -> None:
    # A ring: each entity has two triples, so only about a third can be spared, and fewer than
    # requested.
    num_entities = 3_000
    ring = np.arange(num_entities, dtype=np.int32)
    triples = np.stack([ring, np.zeros_like(ring), np.roll(ring, -1)], axis=1)
    train, valid, test = split_triples(triples, (0.1, 0.6, 0.3), seed=0)
    assert len(train) > 0.5 * num_entities
    assert len(test) > 200
    assert len(valid) == pytest.approx(2 * len(test), abs=3)


def test_the_split_depends_on_the_seed() -> None:
    triples = easy_graph(2_000)
    once, again, other = (split_triples(triples, SHARES, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(one, two) for one, two in zip(once, again, strict=True))
    assert not np.array_equal(once[2], other[2])


def test_the_split_does_not_depend_on_the_order_of_the_input() -> None:
    triples = easy_graph(2_000)
    straight, reverse = (split_triples(given, SHARES, seed=0) for given in (triples, triples[::-1]))
    for one, other in zip(straight, reverse, strict=True):
        assert rows(one) == rows(other)[::-1]


def test_a_pair_larger_than_a_split_does_not_block_the_others() -> None:
    # Two pairs in 300 relations each: the second could be spared, but is more than valid and test
    # may hold.
    crowds = [(head, relation, head + 1) for head in (0, 2) for relation in range(1, 301)]
    others = [(head, 0, tail) for head in range(40) for tail in range(head)]
    triples = np.array(crowds + others, dtype=np.int32)
    for seed in range(10):
        _, valid, test = split_triples(triples, SHARES, seed=seed)
        assert len(valid) + len(test) == pytest.approx(0.2 * len(triples), abs=2)


def test_all_to_train_leaves_valid_and_test_empty() -> None:
    triples = easy_graph(100)
    train, valid, test = split_triples(triples, (1.0, 0.0, 0.0), seed=0)
    assert np.array_equal(train, triples)
    assert valid.shape == test.shape == (0, 3)


def test_no_triples_give_three_empty_splits() -> None:
    assert [part.shape for part in split_triples(np.empty((0, 3), np.int32), SHARES, seed=0)] == [
        (0, 3)
    ] * 3


@pytest.mark.parametrize("shares", [(0.8, 0.1, 0.2), (1.1, -0.1, 0.0)])
def test_invalid_fractions_are_refused(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="at least 0 and add up to 1; got"):
        split_triples(easy_graph(10), shares, seed=0)


def test_inverse_triples_alone_can_be_split() -> None:
    """Seven pairs of inverse twins among few entities: every requested split gets a pair."""
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)]
    triples = np.array(
        [(h, 0, t) for h, t in pairs] + [(t, 1, h) for h, t in pairs], dtype=np.int32
    )
    for seed in range(20):
        train, valid, test = split_triples(triples, SHARES, seed=seed)
        assert len(valid) > 0
        assert len(test) > 0
        assert set(train[:, [0, 2]].reshape(-1).tolist()) == set(range(5))

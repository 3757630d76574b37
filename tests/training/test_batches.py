"""The order of an epoch."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.filters import with_reciprocals
from dualkg.kernels.hashing import splitmix64
from dualkg.losses.queries import QueryGroups
from dualkg.training import batches
from dualkg.training.batches import (
    MAX_GROUP,
    ComputedExamples,
    GroupedByQuery,
    in_keyed_order,
    most_queries,
    shuffled,
)

CPU = torch.device("cpu")


def splitmix(state: int) -> int:
    """SplitMix64's output function in whole numbers of Python."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * factor % 2**64
    return state ^ (state >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_splitmix64_is_as_published(states):
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    assert [value % 2**64 for value in splitmix64(signed).tolist()] == [
        splitmix(state) for state in states
    ]


@given(st.integers(0, 200), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_shuffled_is_a_permutation(size, seed, epoch):
    order = shuffled(size, seed=seed, epoch=epoch, device=CPU)
    assert sorted(order.tolist()) == list(range(size))


def test_seeds_and_epochs_differ_and_repeat():
    orders = {
        (seed, epoch): tuple(shuffled(50, seed=seed, epoch=epoch, device=CPU).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(set(orders.values())) == 400
    assert orders[3, 4] == tuple(shuffled(50, seed=3, epoch=4, device=CPU).tolist())


def test_positions_are_uniform():
    """The mean place of the first number over many orders: 49.5 ± 4 standard errors of 100 / √12 /
    √2000.
    """
    places = [
        shuffled(100, seed=1, epoch=epoch, device=CPU).tolist().index(0) for epoch in range(2000)
    ]
    assert abs(sum(places) / len(places) - 49.5) < 4 * 100 / 12**0.5 / 2000**0.5


TRIPLES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=120
)


@given(TRIPLES, st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_answers_of_a_query_are_grouped_up_to_the_maximum(triples, seed, epoch):
    triples = torch.tensor(triples)
    order = GroupedByQuery(triples).shuffled(seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(triples)))
    queries = [tuple(query) for query in triples[order, :2].tolist()]
    runs = [(query, len(list(run))) for query, run in itertools.groupby(queries)]
    for query in set(queries):
        lengths = [length for other, length in runs if other == query]
        # Groups of the same query may be neighbours by chance, but there are no more runs than
        # groups.
        assert len(lengths) <= -(-sum(lengths) // MAX_GROUP)


def test_grouped_orders_differ_between_seeds_and_epochs():
    triples = torch.cartesian_prod(torch.arange(4), torch.arange(3), torch.arange(5))
    orders = {
        tuple(GroupedByQuery(triples).shuffled(seed=seed, epoch=epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_groups_of_a_large_query_differ_between_epochs():
    """Forty answers are three groups; the group of the first changes from epoch to epoch."""
    triples = torch.stack([torch.zeros(40), torch.zeros(40), torch.arange(40)], dim=-1).long()
    other = torch.cat([triples, torch.tensor([[1, 0, 0]] * 200)])
    companions = set()
    for epoch in range(10):
        order = GroupedByQuery(other).shuffled(seed=0, epoch=epoch).tolist()
        place = order.index(0)
        companions.add(
            frozenset(number for number in order[place - 15 : place + 16] if number < 40)
        )
    assert len(companions) == 10


@given(TRIPLES, st.integers(1, 40))
def test_most_queries_of_a_batch(triples, batch_size):
    triples = torch.tensor(triples)
    counted = [
        len(torch.unique_consecutive(batch[:, :2], dim=0)) for batch in triples.split(batch_size)
    ]
    assert most_queries(triples, batch_size) == max(counted)


@given(TRIPLES, st.integers(0, 5))
def test_query_groups_of_a_batch(triples, more):
    heads, relations, _ = torch.tensor(triples).unbind(-1)
    found = QueryGroups.of(heads, relations)
    runs = [len(list(run)) for _, run in itertools.groupby(triples, key=lambda triple: triple[:2])]
    assert found.starts.diff().tolist() == runs
    assert found.rows.tolist() == [row for row, length in enumerate(runs) for _ in range(length)]
    assert [row for row in found.rows_of_first.tolist() if row >= 0] == list(range(len(runs)))
    assert found.rows_of_first[found.first].tolist() == list(range(len(runs)))
    padded = QueryGroups.of(heads, relations, capacity=len(runs) + more)
    assert padded.starts.diff().tolist() == [*runs, *[0] * more]
    assert padded.rows_of_first.tolist() == found.rows_of_first.tolist()
    assert len(padded.first) == len(runs) + more
    assert int(padded.first.max()) < len(heads)


@given(st.integers(0, 300), st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(1, 50))
def test_a_keyed_order_is_a_permutation_in_any_parts(size, seed, epoch, step):
    positions = torch.arange(size)
    parts = [
        in_keyed_order(part, size, seed=seed, epoch=epoch).tolist()
        for part in positions.split(step)
    ]
    assert sorted(itertools.chain(*parts)) == list(range(size))
    assert (
        list(itertools.chain(*parts))
        == in_keyed_order(positions, size, seed=seed, epoch=epoch).tolist()
    )


def test_keyed_orders_differ_and_are_uniform():
    positions = torch.arange(100)
    times = itertools.product(range(2), range(100))
    orders = [
        in_keyed_order(positions, 100, seed=seed, epoch=epoch).tolist() for seed, epoch in times
    ]
    assert len(set(map(tuple, orders))) == 200
    for number in (0, 57, 99):
        mean = sum(order.index(number) for order in orders) / len(orders)
        assert abs(mean - 49.5) < 4 * 100 / 12**0.5 / len(orders) ** 0.5
    pairs = [
        abs(order.index(10) - order.index(11)) for order in orders
    ]  # neighbours do not stay together
    assert abs(sum(pairs) / len(pairs) - 101 / 3) < 4 * 100 / 18**0.5 / len(pairs) ** 0.5
    large = 676_000_000
    assert (
        in_keyed_order(torch.arange(large - 5, large), large, seed=0, epoch=0).unique().numel() == 5
    )


@given(st.integers(1, 40), st.booleans(), st.integers(1, 9), st.integers(1, 30))
def test_batches_of_computed_examples_have_every_example_once(num, reciprocal, batch_size, at_once):
    triples = np.stack([np.arange(num), np.arange(num) % 3, np.arange(num) + 100], axis=1).astype(
        np.int32
    )
    examples = ComputedExamples(triples, 3, reciprocal=reciprocal)
    before = batches.EXAMPLES_AT_ONCE
    batches.EXAMPLES_AT_ONCE = {"cpu": at_once}
    try:
        found = list(examples.batches(batch_size, seed=1, epoch=2))
    finally:
        batches.EXAMPLES_AT_ONCE = before
    expected = with_reciprocals(triples, 3) if reciprocal else triples
    assert sorted(torch.cat(found).tolist()) == sorted(expected.tolist())
    assert {len(batch) for batch in found[:-1]} <= {batch_size}
    order = in_keyed_order(torch.arange(len(expected)), len(expected), seed=1, epoch=2)
    assert torch.cat(found).tolist() == expected[order.numpy()].tolist()

"""The order of an epoch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.kernels.mixing import mixed
from dualkg.training.order import shuffled

CPU = torch.device("cpu")


def splitmix(state: int) -> int:
    """SplitMix64's output function in whole numbers of Python."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * factor % 2**64
    return state ^ (state >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_bits_are_mixed_as_published(states):
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    assert [value % 2**64 for value in mixed(signed).tolist()] == [splitmix(state) for state in states]


@given(st.integers(0, 200), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_every_number_comes_once(size, seed, epoch):
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
    """The mean place of the first number over many orders: 49.5 ± 4 standard errors of 100 / √12 / √2000."""
    places = [shuffled(100, seed=1, epoch=epoch, device=CPU).tolist().index(0) for epoch in range(2000)]
    assert abs(sum(places) / len(places) - 49.5) < 4 * 100 / 12**0.5 / 2000**0.5

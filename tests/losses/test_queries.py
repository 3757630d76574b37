"""What the training split knows, held against a set of triples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.losses.queries import TrainingAnswers

CPU = torch.device("cpu")


def answers_of(triples, num_entities: int, num_relations: int) -> TrainingAnswers:
    array = np.array(triples, dtype=np.int32).reshape(-1, 3)
    return TrainingAnswers(array, kg.GraphShape(num_entities, num_relations), device=CPU)


def test_known_answers_by_hand():
    """(0, r0, 1), (0, r0, 2), (3, r1, 0) of four entities: tails of the two queries, and heads of
    the inverses.
    """
    known = answers_of([(0, 0, 1), (0, 0, 2), (3, 1, 0)], 4, 2)
    found = known.contain(
        torch.tensor([0, 3, 3, 1, 0, 2]),
        torch.tensor([0, 1, 0, 2, 3, 3]),
        torch.tensor([0, 1, 2, 3]),
    )
    assert found.int().tolist() == [
        [0, 1, 1, 0],  # (0, r0, ?)
        [1, 0, 0, 0],  # (3, r1, ?)
        [0, 0, 0, 0],  # (3, r0, ?) is not known
        [1, 0, 0, 0],  # (?, r0, 1), r0's inverse being relation 2
        [0, 0, 0, 1],  # (?, r1, 0)
        [0, 0, 0, 0],  # (?, r1, 2)
    ]


def test_candidates_may_differ_by_query():
    known = answers_of([(0, 0, 1), (0, 0, 2), (3, 1, 0)], 4, 2)
    found = known.contain(
        torch.tensor([0, 3]), torch.tensor([0, 1]), torch.tensor([[2, 0], [2, 0]])
    )
    assert found.int().tolist() == [[1, 0], [0, 1]]


def test_repeated_triples_count_once():
    known = answers_of([(0, 0, 1), (0, 0, 1), (0, 0, 2)], 3, 1)
    assert known.counts(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1])).tolist() == [2, 0, 1]


def test_subsampling_weights_by_hand():
    """(0, r, 1), (0, r, 2), (3, r, 2): two tails of 0 and one head of 1 are counts of 5 and 4, and
    so on.
    """
    known = answers_of([(0, 0, 1), (0, 0, 2), (3, 0, 2)], 4, 1)
    heads = torch.tensor([0, 0, 3])
    relations = torch.tensor([0, 0, 0])
    tails = torch.tensor([1, 2, 2])
    expected = [1 / math.sqrt(5 + 4), 1 / math.sqrt(5 + 5), 1 / math.sqrt(4 + 5)]
    assert known.subsampling_weights(heads, relations, tails).tolist() == pytest.approx(expected)
    assert known.subsampling_weights(tails, relations + 1, heads).tolist() == pytest.approx(
        expected
    )  # reciprocals


def test_head_corruption_probabilities_by_hand():
    """One head with three tails has tph 3 and hpt 1, so the head is corrupted three times in
    four.
    """
    known = answers_of([(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 1), (1, 1, 0)], 4, 3)
    assert known.head_corruption_probabilities().tolist() == [
        0.75,
        0.5,
        0.5,
    ]  # 0.5 for a relation without triples


triples = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=40
)


@given(triples)
def test_contain_equals_membership_of_a_set(found):
    known = answers_of(found, 7, 3)
    grid = torch.cartesian_prod(torch.arange(7), torch.arange(3))
    tails = known.contain(grid[:, 0], grid[:, 1], torch.arange(7))
    heads = known.contain(grid[:, 0], grid[:, 1] + 3, torch.arange(7))
    for place, (entity, relation) in enumerate(grid.tolist()):
        assert tails[place].tolist() == [(entity, relation, other) in found for other in range(7)]
        assert heads[place].tolist() == [(other, relation, entity) in found for other in range(7)]


def test_large_graphs_do_not_overflow():
    """Of 2³¹ entities and 10⁵ relations, (h·R + r)·E + t would not fit into 64 bits; numbered
    queries do.
    """
    large = 2**31 - 1
    known = answers_of([(large - 1, 99_999, large - 2), (3, 0, 4)], large, 100_000)
    found = known.contain(
        torch.tensor([large - 1, 3]), torch.tensor([99_999, 0]), torch.tensor([large - 2, 4, 5])
    )
    assert found.int().tolist() == [[1, 0, 0], [0, 1, 0]]

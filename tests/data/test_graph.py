"""Triples of ids: their keys, repeats and counts."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.triples import (
    SPLITS,
    GraphShape,
    Triples,
    distinct_triples,
    notes_on_repeats,
    sorted_distinct,
    triple_keys,
)
from dualkg.errors import InvalidValue
from tests.conftest import graph_of

SHAPE = GraphShape(5, 2)
HUGE = GraphShape(2**31 - 1, 1000)  # more triples are possible than there are 63-bit numbers
Row = tuple[int, int, int]


def rows(shape: GraphShape) -> st.SearchStrategy[list[Row]]:
    """Triples of which many stand twice."""
    entity = st.sampled_from([0, 1, 2, shape.num_entities - 2, shape.num_entities - 1])
    relation = st.sampled_from([0, shape.num_relations - 1])
    return st.lists(st.tuples(entity, relation, entity), max_size=40)


def array(triples: list[Row]) -> Triples:
    return np.array(triples, dtype=np.int32).reshape(-1, 3)


shapes_and_rows = st.sampled_from([SHAPE, HUGE]).flatmap(
    lambda shape: st.tuples(st.just(shape), rows(shape))
)


@given(shapes_and_rows)
def test_keys_have_the_order_of_triples(case: tuple[GraphShape, list[Row]]) -> None:
    shape, triples = case
    keys = triple_keys(array(triples), shape)
    assert keys.dtype == np.int64
    assert keys.shape == (len(triples),)
    for (one, first), (other, second) in combinations(zip(keys.tolist(), triples, strict=True), 2):
        assert (one < other, one == other) == (first < second, first == second)


def test_keys_are_exact_up_to_63_bits() -> None:
    shape = GraphShape(2**31 - 1, 2)
    assert shape.num_entities**2 * shape.num_relations < 2**63
    last = (shape.num_entities - 1, 1, shape.num_entities - 1)
    assert triple_keys(array([last]), shape).tolist() == [shape.num_entities**2 * 2 - 1]


def test_keys_do_not_change_the_triples() -> None:
    triples = array([(1, 1, 2), (4, 0, 3)])
    triple_keys(triples, SHAPE)
    assert triples.tolist() == [[1, 1, 2], [4, 0, 3]]


@given(shapes_and_rows)
def test_distinct_triples_are_a_sorted_set(case: tuple[GraphShape, list[Row]]) -> None:
    shape, triples = case
    distinct = distinct_triples(array(triples), shape)
    assert distinct.dtype == np.int32
    assert [tuple(row) for row in distinct.tolist()] == sorted(set(triples))


def test_distinct_triples_of_an_empty_graph() -> None:
    assert distinct_triples(array([]), GraphShape(0, 0)).shape == (0, 3)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3)))
def test_sorted_distinct_is_a_sorted_set(numbers: list[int]) -> None:
    assert sorted_distinct(np.array(numbers, dtype=np.int64)).tolist() == sorted(set(numbers))


@given(
    st.sampled_from([SHAPE, HUGE]).flatmap(
        lambda shape: st.tuples(st.just(shape), *[rows(shape)] * 3)
    )
)
def test_repeats_are_counted_like_sets(
    case: tuple[GraphShape, list[Row], list[Row], list[Row]],
) -> None:
    shape, *parts = case
    splits = dict(zip(SPLITS, parts, strict=True))
    numbers = {
        f"more than once in {name}": len(part) - len(set(part)) for name, part in splits.items()
    }
    for one, other in combinations(SPLITS, 2):
        common = set(splits[one]) & set(splits[other])
        numbers[f"in both {one} and {other}"] = len(common)
    expected = [
        f"{'1 triple occurs' if number == 1 else f'{number} triples occur'} {place}."
        for place, number in numbers.items()
        if number
    ]
    arrays = {name: array(part) for name, part in splits.items()}
    assert notes_on_repeats(arrays, shape) == expected


def test_counts_and_shape_of_a_graph() -> None:
    graph = graph_of([(0, 0, 1), (1, 0, 2)], [(0, 1, 2)], [])
    assert graph.shape == GraphShape(num_entities=3, num_relations=2)
    assert graph.counts == {"entities": 3, "relations": 2, "train": 2, "valid": 1, "test": 0}
    assert repr(graph) == "Graph('made': 3 entities, 2 relations, 2 train, 1 valid, 0 test)"


def test_a_split_is_found_by_its_name_only() -> None:
    graph = graph_of([(0, 0, 1)], [(1, 0, 0)])
    assert graph.split("valid").tolist() == [[1, 0, 0]]
    with pytest.raises(InvalidValue) as caught:
        graph.split("name")
    assert str(caught.value) == "`split` should be train, valid or test; 'name' was given."

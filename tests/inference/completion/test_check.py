"""The number of test triples among the best, and of the baselines."""

import numpy as np
import pytest

import dualkg as kg
from dualkg.inference.completion import check_completion, complete, sizes_up_to
from tests.conftest import graph_of
from tests.inference.completion.brute_force import (
    MODELS,
    every_new_triple,
    random_calibration,
    random_graph,
)

KNOWN = ("train", "valid")


@pytest.mark.parametrize(
    "filters", [{}, {"types": True}, {"relations": [0, 2], "heads": [0, 1, 2, 3, 4, 5, 6]}]
)
def test_the_numbers_are_those_counted_by_hand(filters):
    graph = random_graph(3)
    calibration = random_calibration(3)
    model = MODELS["ComplEx"](graph.shape)
    sizes = [1, 5, 20, 1000]
    check = check_completion(model, graph, sizes=sizes, calibration=calibration, **filters)

    completion = complete(model, graph, calibration=calibration, known=KNOWN, **filters)
    test = as_set(graph.test)
    is_hit = [tuple(triple) in test for triple in completion.triples.tolist()]
    assert check.found == [sum(is_hit[:size]) for size in sizes]
    expected = [float(completion.probability[:size].sum()) for size in sizes]
    assert check.expected == pytest.approx(expected, rel=1e-5)

    candidates = as_set(every_new_triple(graph, known=KNOWN, **filters))
    assert check.num_triples == len(candidates)
    assert check.num_test == len(candidates & test)
    share = check.num_test / check.num_triples
    at_random = [min(size, len(candidates)) * share for size in sizes]
    assert check.at_random == pytest.approx(at_random)


@pytest.mark.parametrize("filters", [{}, {"types": True}, {"heads": [1, 2, 3, 4], "loops": True}])
def test_the_baseline_by_degree_is_the_mean_over_shuffled_ties(filters):
    """The closed form, compared with the mean over all orders of ties."""
    graph = random_graph(4)
    sizes = [3, 10, 40, 1000]
    check = check_completion(MODELS["CP"](graph.shape), graph, sizes=sizes, **filters)

    triples = every_new_triple(graph, known=KNOWN, **filters).tolist()
    degrees = np.array([degree_product(graph, triple) for triple in triples])
    test = as_set(graph.test)
    is_hit = np.array([tuple(triple) in test for triple in triples], dtype=float)
    descending = np.sort(degrees)[::-1]
    for size, by_degree in zip(sizes, check.by_degree, strict=True):
        num_taken = min(size, len(degrees))
        last = descending[num_taken - 1]
        above = degrees > last
        tied = degrees == last
        num_taken_of_tied = num_taken - above.sum()
        assert by_degree == pytest.approx(
            is_hit[above].sum() + num_taken_of_tied * is_hit[tied].mean()
        )


def as_set(triples: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(triple) for triple in triples.tolist()}


def degree_product(graph: kg.Graph, triple: list[int]) -> int:
    head, relation, tail = triple
    of_relation = graph.train[graph.train[:, 1] == relation]
    head_degree = (of_relation[:, 0] == head).sum()
    tail_degree = (of_relation[:, 2] == tail).sum()
    return head_degree * tail_degree


def test_two_triples_by_hand():
    """r0 has 0→1, 0→2 and 3→1. Of the other pairs without loops, 3→2 is the most likely by degree:
    1 · 1.
    """
    graph = graph_of([(0, 0, 1), (0, 0, 2), (3, 0, 1)], [], [(3, 0, 2)], num_entities=4)
    check = check_completion(kg.CP(graph.shape, dim=1, init_scale=0.0), graph, sizes=[1, 9])
    assert check.num_triples == 12 - 3
    assert check.by_degree == [1.0, 1.0]
    assert check.at_random == pytest.approx([1 / 9, 1.0])
    assert check.found == [0, 1]
    assert check.expected is None
    assert check.as_dict()["num_test"] == 1


def test_no_test_triples_to_find_is_refused():
    graph = graph_of([(0, 0, 1)], [], [(1, 1, 0)], num_entities=2)
    with pytest.raises(kg.DataError, match="None of the 1 test triples of made is a candidate"):
        check_completion(MODELS["CP"](graph.shape), graph, relations=["r0"])


def test_sizes_are_powers_of_ten_up_to_the_largest():
    assert sizes_up_to(100_000) == [100, 1_000, 10_000, 100_000]
    assert sizes_up_to(5_000) == [100, 1_000, 5_000]
    assert sizes_up_to(7) == [7]

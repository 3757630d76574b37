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
    found = check_completion(model, graph, sizes=sizes, calibration=calibration, **filters)
    listed = complete(model, graph, calibration=calibration, known=KNOWN, **filters)
    made = listed.triples.tolist()
    test = {tuple(triple) for triple in graph.test.tolist()}
    assert found.found == [sum(tuple(triple) in test for triple in made[:size]) for size in sizes]
    assert found.expected == pytest.approx(
        [float(listed.probability[:size].sum()) for size in sizes], rel=1e-5
    )
    may_be = {tuple(triple) for triple in every_new_triple(graph, known=KNOWN, **filters).tolist()}
    assert (found.num_triples, found.num_test) == (len(may_be), len(may_be & test))
    chance = found.num_test / found.num_triples
    assert found.at_random == pytest.approx([min(size, len(may_be)) * chance for size in sizes])


@pytest.mark.parametrize("filters", [{}, {"types": True}, {"heads": [1, 2, 3, 4], "loops": True}])
def test_the_baseline_by_degree_is_the_mean_over_shuffled_ties(filters):
    """The closed form, compared with the mean over all orders of ties."""
    graph = random_graph(4)
    sizes = [3, 10, 40, 1000]
    found = check_completion(MODELS["CP"](graph.shape), graph, sizes=sizes, **filters)
    triples = every_new_triple(graph, known=KNOWN, **filters)
    degrees = [
        sum((graph.train[:, 1] == r) & (graph.train[:, 0] == h))
        * sum((graph.train[:, 1] == r) & (graph.train[:, 2] == t))
        for h, r, t in triples.tolist()
    ]
    test = {tuple(triple) for triple in graph.test.tolist()}
    hit = np.array([tuple(triple) in test for triple in triples.tolist()], dtype=float)
    for size, expected in zip(sizes, found.by_degree, strict=True):
        order = np.argsort(-np.array(degrees), kind="stable")
        last = degrees[order[min(size, len(order)) - 1]]
        above = np.array(degrees) > last
        tied = np.array(degrees) == last
        room = min(size, len(order)) - above.sum()
        assert expected == pytest.approx(hit[above].sum() + room * hit[tied].mean())


def test_two_triples_by_hand():
    """r0 has 0→1, 0→2, 3→1; without loops 3→2, 1→2, … are left. 3→2 is the most likely by degree: 1
    · 1.
    """
    graph = graph_of([(0, 0, 1), (0, 0, 2), (3, 0, 1)], [], [(3, 0, 2)], num_entities=4)
    found = check_completion(kg.CP(graph.shape, dim=1, init_scale=0.0), graph, sizes=[1, 9])
    assert found.num_triples == 12 - 3
    assert found.by_degree == [1.0, 1.0]
    assert found.at_random == pytest.approx([1 / 9, 1.0])
    assert found.found == [0, 1]
    assert found.expected is None
    assert found.as_dict()["num_test"] == 1


def test_no_test_triples_to_find_is_refused():
    graph = graph_of([(0, 0, 1)], [], [(1, 1, 0)], num_entities=2)
    with pytest.raises(kg.RequestError, match="None of the 1 test triples of made is a candidate"):
        check_completion(MODELS["CP"](graph.shape), graph, relations=["r0"])


def test_sizes_are_powers_of_ten_up_to_the_largest():
    assert sizes_up_to(100_000) == [100, 1_000, 10_000, 100_000]
    assert sizes_up_to(5_000) == [100, 1_000, 5_000]
    assert sizes_up_to(7) == [7]

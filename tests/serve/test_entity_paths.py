"""Paths between two entities, worked out by hand."""

from itertools import pairwise

import pytest

import dualkg as kg
from dualkg.errors import RequestError
from dualkg.inference.predictor import Predictor
from dualkg.serve.entity_paths import (
    Neighbours,
    known_paths,
    predicted_paths,
)
from tests.conftest import graph_of

LIKES, KNOWS, BORDERS = range(3)


def inner(paths):
    return [path.entities[1:-1] for path in paths]


def test_known_paths_are_the_shortest_over_entities_with_few_triples():
    """From 0 to 9: over 1 (a hub) or 2, and over 3 and 4, or 5, 6 and 7."""
    train = [
        *[(0, LIKES, 1), (1, KNOWS, 9), *((1, LIKES, other) for other in (10, 11, 12))],
        *[(0, LIKES, 2), (9, KNOWS, 2), (0, KNOWS, 2)],
        *[(0, LIKES, 3), (3, LIKES, 4), (9, LIKES, 4)],
        *[(0, LIKES, 5), (5, LIKES, 6), (6, LIKES, 7)],
    ]
    graph = graph_of(train, test=[(7, LIKES, 9)], num_entities=13)
    neighbours = Neighbours.of(graph)
    paths = known_paths(neighbours, 0, 9, k=10)
    assert inner(paths) == [(2,), (1,), (3, 4), (5, 6, 7)]
    assert inner(known_paths(neighbours, 9, 0, k=10)) == [(2,), (1,), (4, 3), (7, 6, 5)]
    assert inner(known_paths(neighbours, 0, 9, k=2)) == [(2,), (1,)]

    first, last = paths[0].steps
    triples = [(fact.head, fact.relation, fact.tail, fact.split) for fact in first]
    assert triples == [(0, LIKES, 2, "train"), (0, KNOWS, 2, "train")]
    assert [(fact.head, fact.tail) for fact in last] == [(9, 2)]
    assert paths[3].steps[3][0].split == "test"
    assert all(path.probability is None for path in paths)


def test_a_path_has_no_shortcut():
    """1 and 2 are next to both ends, so that no path goes over both."""
    train = [(0, LIKES, 1), (0, LIKES, 2), (1, LIKES, 3), (2, LIKES, 3), (1, LIKES, 2)]
    graph = graph_of([*train, (0, KNOWS, 3)], num_entities=5)
    assert inner(known_paths(Neighbours.of(graph), 0, 3, k=10)) == [(), (1,), (2,)]
    assert known_paths(Neighbours.of(graph), 0, 4, k=10) == []


def test_a_symmetric_fact_joins_two_entities_once():
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    train = [triple for a, b in pairs for triple in ((a, 0, b), (b, 0, a))]
    graph = graph_of(train)
    assert graph.symmetric_relations.tolist() == [True]
    [path] = known_paths(Neighbours.of(graph), 1, 0, k=10)
    assert len(path.steps[0]) == 1


@pytest.fixture(scope="module")
def predictor():
    """A calibrated predictor on `world`, trained a little."""
    graph = kg.load_graph("world")
    run = kg.train(kg.ComplEx(graph.shape, dim=8), graph, regularizer=kg.DURA(0.05), epochs=2)
    return Predictor.of(run)


def test_predicted_paths_have_a_predicted_triple(predictor):
    graph = predictor.graph
    neighbours = Neighbours.of(graph)
    start, end = graph.entities.id("France"), graph.entities.id("Germany")
    paths = predicted_paths(predictor, neighbours, start, end, k=30)
    assert paths
    for path in paths:
        assert (path.entities[0], path.entities[-1]) == (start, end)
        pairs = pairwise(path.entities)
        for pair, step in zip(pairs, path.steps, strict=True):
            assert all({fact.head, fact.tail} == set(pair) for fact in step)
        predicted = [fact for step in path.steps for fact in step if fact.split is None]
        assert predicted
        rows = graph.train.tolist()
        assert all([fact.head, fact.relation, fact.tail] not in rows for fact in predicted)
    rejected = predicted_paths(
        predictor, neighbours, start, end, k=30, is_rejected=lambda fact: True
    )
    assert rejected == []


def test_a_large_graph_is_refused():
    class Large:
        is_large = True
        name = "huge"

    with pytest.raises(RequestError, match="larger than memory"):
        Neighbours.of(Large())  # type: ignore[arg-type]

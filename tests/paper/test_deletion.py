"""Deletion of supporting paths: a network that needs them loses its predictions without them."""

import numpy as np
import pytest

import dualkg as kg
from paper.deletion import correct_triples, delete_paths
from tests.models.test_paths import chain


@pytest.fixture(scope="module")
def network() -> kg.Run:
    """`second` follows from two steps along `next`."""
    graph = chain(16)
    return kg.train(kg.PathNetwork(graph, dim=16, steps=2), graph, epochs=40, batch_size=8)


def test_predictions_depend_on_their_supporting_paths(network):
    graph = network.graph
    triples = correct_triples(network.model, graph, max_triples=20)
    assert 1 < len(triples) <= len(graph.test)
    assert {tuple(row) for row in triples.tolist()} <= {tuple(row) for row in graph.test.tolist()}

    results = list(delete_paths(network.model, graph, triples, counts=(1,), seed=3))
    by_kind = {(result.deleted, result.paths): result for result in results}
    assert list(by_kind) == [
        ("nothing", 0),
        ("supporting paths", 1),
        ("neighbours", 1),
        ("random", 1),
    ]
    nothing = by_kind["nothing", 0]
    assert (nothing.num_deleted, nothing.score_drop, nothing.mrr) == (0, 0, 1)
    supporting = by_kind["supporting paths", 1]
    assert supporting.num_deleted == 2  # both steps of the only path
    assert supporting.score_drop > 2 * by_kind["random", 1].score_drop
    assert supporting.score_drop > by_kind["neighbours", 1].score_drop > 0
    assert supporting.mrr < by_kind["random", 1].mrr
    assert {result.num_triples for result in results} == {len(triples)}
    assert supporting.as_dict()["deleted"] == "supporting paths"

    again = list(delete_paths(network.model, graph, triples, counts=(1,), seed=3))
    assert again == results


def test_correct_predictions_are_limited_and_have_the_first_rank(network):
    graph = network.graph
    [triple] = correct_triples(network.model, graph, max_triples=1).tolist()
    ranks = kg.rank(network.model, graph).mean[0]
    assert ranks[(graph.test == np.array(triple)).all(1)].tolist() == [1]
    untrained = kg.PathNetwork(graph, dim=16, steps=1)
    # One step does not reach the answers, which are then equal to others.
    assert len(correct_triples(untrained, graph, max_triples=5)) == 0

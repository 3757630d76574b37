"""What a graph says about a relation, worked out by hand."""

import numpy as np
import pytest

import dualkg as kg
from dualkg.evaluation.ranking import Ranks
from dualkg.serve.relations import profile_of
from dualkg.serve.schemas import RelationPage
from tests.conftest import graph_of

LIVES, BORN, KNOWS = range(3)


def triples(*rows):
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


@pytest.fixture
def graph() -> kg.Graph:
    """Ann and Bob live in Rome, Cid in Oslo; Ann was born in Rome; Ann and Bob know each other."""
    return kg.Graph(
        "people",
        kg.Vocabulary(["Ann", "Bob", "Cid", "Rome", "Oslo"]),
        kg.Vocabulary(["lives", "born", "knows"], kind="relation"),
        train=triples((0, LIVES, 3), (0, BORN, 3), (0, KNOWS, 1), (1, KNOWS, 0)),
        valid=triples((1, LIVES, 3)),
        test=triples((2, LIVES, 4), (0, KNOWS, 2)),
    )


def profile(graph, relation, ranks=None) -> RelationPage:
    return profile_of(graph, relation, inspection=graph.inspect(), ranks=ranks)


def roles(end):
    return [(role.relation.id, role.end, role.share) for role in end.roles]


def ids(triple):
    return triple.head.id, triple.relation.id, triple.tail.id


def test_ends_are_counted_on_all_splits(graph):
    lives = profile(graph, LIVES)
    assert lives.counts == {"train": 1, "valid": 1, "test": 1}
    assert (lives.domain.num_entities, lives.range.num_entities) == (3, 2)
    # Rome in two triples, Oslo in one
    assert [(item.name, item.num_triples) for item in lives.range.common] == [
        ("Rome", 2),
        ("Oslo", 1),
    ]
    # Of Ann, Bob and Cid, all three are known by somebody, two know somebody, one was born.
    assert roles(lives.domain) == [
        (KNOWS, "tail", 1.0),
        (KNOWS, "head", pytest.approx(2 / 3)),
        (BORN, "head", pytest.approx(1 / 3)),
    ]
    assert roles(lives.range) == [(BORN, "tail", 0.5)]


def test_both_ends_of_a_symmetric_relation_have_the_same_other_roles():
    pairs = [(a, b) for a in range(5) for b in range(5) if a != b]
    train = [(a, 0, b) for a, b in pairs] + [(a, 1, 5) for a in range(4)]
    graph = graph_of(train, num_entities=6)
    assert graph.symmetric_relations.tolist() == [True, False]
    page = profile(graph, 0)
    assert roles(page.domain) == roles(page.range) == [(1, "head", 0.8)]


def test_metrics_and_hardest_queries_are_those_of_the_relation(graph):
    ranks = np.array([[4, 1], [2, 3]])  # of tails, then of heads, for both test triples
    lives = profile(graph, LIVES, Ranks(graph.test, ranks, ranks))
    assert lives.metrics["tail"]["mrr"] == pytest.approx(1 / 4)
    assert lives.metrics["head"]["mrr"] == pytest.approx(1 / 2)
    hardest = [(ids(query), query.direction, query.rank) for query in lives.hardest]
    assert hardest == [((2, LIVES, 4), "tail", 4.0), ((2, LIVES, 4), "head", 2.0)]
    born = profile(graph, BORN, Ranks(graph.test, ranks, ranks))
    assert (born.metrics, born.hardest) == ({}, [])


def test_examples_are_triples_of_the_relation(graph):
    examples = [ids(triple) for triple in profile(graph, LIVES).examples]
    assert examples == [(0, LIVES, 3), (1, LIVES, 3), (2, LIVES, 4)]

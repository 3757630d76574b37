"""What a graph says about a relation, worked out by hand."""

import numpy as np
import pytest

import dualkg as kg
from dualkg.data.roles import Role
from dualkg.evaluation.ranking import Ranks
from dualkg.inference.relation_profile import RelationProfile
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


def profile(graph, relation, ranks=None) -> RelationProfile:
    return RelationProfile.of(graph, relation, inspection=graph.inspect(), ranks=ranks)


def test_ends_are_counted_on_all_splits(graph):
    lives = profile(graph, LIVES)
    assert (lives.facts.train, lives.facts.valid, lives.facts.test) == (1, 1, 1)
    domain, range_ = lives.ends["head"], lives.ends["tail"]
    assert (domain.num_entities, range_.num_entities) == (3, 2)
    assert range_.common == [(3, 2), (4, 1)]  # Rome in two triples, Oslo in one
    # Of Ann, Bob and Cid, all three are known by somebody, two know somebody, one was born.
    assert domain.roles == [
        (Role(KNOWS, "tail"), 1.0),
        (Role(KNOWS, "head"), pytest.approx(2 / 3)),
        (Role(BORN, "head"), pytest.approx(1 / 3)),
    ]
    assert range_.roles == [(Role(BORN, "tail"), 0.5)]


def test_both_ends_of_a_symmetric_relation_have_the_same_other_roles():
    pairs = [(a, b) for a in range(5) for b in range(5) if a != b]
    train = [(a, 0, b) for a, b in pairs] + [(a, 1, 5) for a in range(4)]
    graph = graph_of(train, num_entities=6)
    assert graph.symmetric_relations.tolist() == [True, False]
    ends = profile(graph, 0).ends
    assert ends["head"].roles == ends["tail"].roles == [(Role(1, "head"), 0.8)]


def test_metrics_and_hardest_queries_are_those_of_the_relation(graph):
    ranks = np.array([[4, 1], [2, 3]])  # of tails, then of heads, for both test triples
    lives = profile(graph, LIVES, Ranks(graph.test, ranks, ranks))
    assert lives.metrics["tail"].mrr == pytest.approx(1 / 4)
    assert lives.metrics["head"].mrr == pytest.approx(1 / 2)
    assert lives.hardest == [((2, LIVES, 4), "tail", 4.0), ((2, LIVES, 4), "head", 2.0)]
    born = profile(graph, BORN, Ranks(graph.test, ranks, ranks))
    assert (born.metrics, born.hardest) == ({}, [])


def test_examples_are_triples_of_the_relation(graph):
    assert profile(graph, LIVES).examples == [(0, LIVES, 3), (1, LIVES, 3), (2, LIVES, 4)]

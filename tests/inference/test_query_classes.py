"""Classes of queries, worked out by hand and compared with a loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.entity_types import EntityTypes
from dualkg.inference import query_classes as module
from dualkg.inference.probability import query_classes
from dualkg.inference.query_classes import EVIDENCE, KNOWN_ANSWERS, NUM_CLASSES
from tests.conftest import graph_of
from tests.inference.completion.brute_force import (
    graph_with_a_symmetric_relation,
    random_graph,
)

LIKELY, POSSIBLE, OTHER = range(len(KNOWN_ANSWERS), NUM_CLASSES)
CURRENCY, CAPITAL, NEAR = range(3)


def test_a_country_without_a_capital_is_of_the_type_of_its_heads():
    """Entities 0 to 3 are countries with a currency, of which 0, 1 and 2 have a capital. The
    cities 4 and 5 are near each other, and are capitals; 6 is near 4.
    """
    currencies = [(country, CURRENCY, 7) for country in range(4)]
    capitals = [(0, CAPITAL, 4), (1, CAPITAL, 5), (2, CAPITAL, 5)]
    near = [(4, NEAR, 5), (5, NEAR, 4), (6, NEAR, 4)]
    graph = graph_of(currencies + capitals + near, num_entities=9, num_relations=3)
    heads, tails = query_classes(graph).of_relation(CAPITAL)

    # Three of the four entities with a currency have a capital.
    assert heads.tolist() == [0, 0, 0, LIKELY, OTHER, OTHER, OTHER, OTHER, OTHER]
    # 5 is the capital of two countries. Two of the three heads of `near` are capitals; 6 is one of
    # these heads.
    assert tails.tolist() == [OTHER, OTHER, OTHER, OTHER, 0, 1, LIKELY, OTHER, OTHER]


def test_the_types_of_an_entity_are_evidence_in_place_of_its_roles():
    """Entities 0 to 3 are countries, of which 0, 1 and 2 have a capital; 4 and 5 are cities."""
    capitals = [(0, CAPITAL, 4), (1, CAPITAL, 5), (2, CAPITAL, 5)]
    near = [(3, NEAR, 4), (6, NEAR, 7)]
    graph = graph_of(capitals + near, num_entities=9, num_relations=3)
    countries = [(entity, 0) for entity in (0, 1, 2, 3, 7)]
    cities = [(entity, 1) for entity in (4, 5, 6, 8)]
    pairs = np.array(countries + cities)
    types = EntityTypes.of_pairs("a file", ["country", "city"], pairs[:, 0], pairs[:, 1])
    classes = query_classes(graph, types=types)

    # Three of five countries have a capital, and half of the cities are one.
    heads, tails = classes.of_relation(CAPITAL)
    assert heads.tolist() == [0, 0, 0, LIKELY, OTHER, OTHER, OTHER, LIKELY, OTHER]
    assert tails.tolist() == [OTHER, OTHER, OTHER, OTHER, 0, 1, LIKELY, OTHER, LIKELY]
    for end, expected in enumerate((heads, tails)):
        roles = np.full(9, classes.tail_roles[CAPITAL] if end else CAPITAL)
        assert classes.of_pairs(np.arange(9), roles).tolist() == expected.tolist()
    assert query_classes(graph).of_relation(CAPITAL)[0][7] == OTHER


@pytest.mark.parametrize(("number", "expected"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_known_answers_are_counted(number, expected):
    triples = [(0, 0, tail) for tail in range(1, number + 1)]
    heads, _ = query_classes(graph_of(triples, num_entities=12, num_relations=1)).of_relation(0)
    assert heads[0] == expected


def by_loop(graph, entity: int, relation: int, *, is_tail: bool) -> int:
    """The class by its definition."""
    symmetric = graph.symmetric_relations

    roles: dict[int, set] = {id: set() for id in range(graph.shape.num_entities)}
    count = 0
    wanted = (relation, is_tail and not symmetric[relation])
    for head, of_triple, tail in graph.train.tolist():
        ends = [(head, of_triple, False), (tail, of_triple, not symmetric[of_triple])]
        for end, *role in ends:
            roles[end].add(tuple(role))
            count += end == entity and tuple(role) == wanted
    if count:
        return sum(count >= least for least in KNOWN_ANSWERS) - 1

    shares = []
    for role in roles[entity]:
        members = [id for id, of_id in roles.items() if role in of_id]
        shares.append(sum(wanted in roles[id] for id in members) / len(members))
    evidence = sum(shares) / max(1, len(shares))
    return len(KNOWN_ANSWERS) + next(
        place for place, least in enumerate(EVIDENCE) if evidence >= least - 1e-12
    )


@given(seed=st.integers(0, 100), symmetric=st.booleans())
def test_all_classes_are_those_of_the_definition(seed, symmetric):
    graph = graph_with_a_symmetric_relation(seed) if symmetric else random_graph(seed)
    classes = query_classes(graph)
    numbers = np.zeros((2 * graph.shape.num_relations, NUM_CLASSES), dtype=int)
    for relation in range(graph.shape.num_relations):
        of_relation = classes.of_relation(relation)
        for end, is_tail in enumerate([False, True]):
            expected = [by_loop(graph, id, relation, is_tail=is_tail) for id in range(9)]
            assert of_relation[end].tolist() == expected
            roles = np.full(9, classes.tail_roles[relation] if is_tail else relation)
            assert classes.of_pairs(np.arange(9), roles).tolist() == expected
            for one in expected:
                numbers[relation + end * graph.shape.num_relations, one] += 1
    assert classes.num_queries().tolist() == numbers.tolist()


def test_a_graph_with_very_many_relations_has_no_evidence(monkeypatch):
    monkeypatch.setattr(module, "MAX_RELATIONS", 2)
    graph = random_graph(3)
    classes = query_classes(graph)
    numbers = classes.num_queries()
    assert numbers[:, [LIKELY, POSSIBLE]].sum() == 0
    assert (numbers.sum(axis=1) == graph.shape.num_entities).all()
    for relation in range(3):
        heads = classes.of_relation(relation)[0]
        assert np.bincount(heads, minlength=NUM_CLASSES).tolist() == numbers[relation].tolist()

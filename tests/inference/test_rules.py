"""Rules counted in train: by hand, and against walking all paths."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference import rules
from dualkg.inference.rules import RuleCount, count_rule
from tests.conftest import graph_of

# Relations of the hand-made graph, and the number that makes an inverse of each.
LOCATED, CURRENCY, SPEAKS = range(3)
INVERSE = 3


@pytest.fixture
def cities():
    """Cities 0 to 4 in the countries 5 and 6, with the currencies 7 and 8."""
    located = [(0, LOCATED, 5), (1, LOCATED, 5), (2, LOCATED, 5), (3, LOCATED, 6), (4, LOCATED, 6)]
    of_countries = [(5, CURRENCY, 7), (6, CURRENCY, 8)]
    of_cities = [(0, CURRENCY, 7), (1, CURRENCY, 7), (3, CURRENCY, 8)]
    spoken = [(4, SPEAKS, 4), (0, SPEAKS, 1), (1, SPEAKS, 0)]
    return graph_of([*located, *of_countries, *of_cities, *spoken])


def test_a_rule_by_hand(cities):
    """Five cities have a country with a currency, and three of them a currency of their own."""
    body = (LOCATED, CURRENCY)
    # City 2 has none. Its prediction is no case, so that four are left.
    assert count_rule(body, (2, CURRENCY, 7), cities) == RuleCount(4, 3)
    assert count_rule(body, (2, CURRENCY, 7), cities).confidence == 0.75
    # A known triple is no case of its own rule, and supports nothing.
    assert count_rule(body, (0, CURRENCY, 7), cities) == RuleCount(4, 2)
    # Any other relation has all cases but that of the entities.
    assert count_rule(body, (2, SPEAKS, 7), cities) == RuleCount(4, 0)


def test_rules_of_one_and_three_steps(cities):
    # 0 and 1 speak with each other; a loop is no case.
    assert count_rule((SPEAKS + INVERSE,), (2, SPEAKS, 3), cities) == RuleCount(2, 2)
    # Without (0, SPEAKS, 1), only these two are joined, and they are no case.
    assert count_rule((SPEAKS + INVERSE,), (0, SPEAKS, 1), cities) == RuleCount(0, 0)

    # Cities of one country have the currencies of each other: 0 and 1 have that of the other one,
    # 2 that of both, and 4 that of 3. 3 has its own, but nobody else's.
    body = (LOCATED, LOCATED + INVERSE, CURRENCY)
    assert count_rule(body, (3, CURRENCY, 7), cities) == RuleCount(4, 2)
    # From the other end.
    inverse = (CURRENCY + INVERSE, LOCATED, LOCATED + INVERSE)
    assert count_rule(inverse, (7, CURRENCY + INVERSE, 3), cities) == RuleCount(4, 2)


def test_a_rule_without_a_case_has_no_confidence(cities):
    count = count_rule((CURRENCY, CURRENCY), (0, CURRENCY, 7), cities)
    assert count == RuleCount(0, 0)
    assert count.confidence is None


def test_what_is_not_counted(cities, monkeypatch):
    long = count_rule((0, 1, 0, 1), (0, CURRENCY, 7), cities)
    assert long == RuleCount(None, None, "it has more than 3 steps")
    assert long.confidence is None
    loop = count_rule((0, 1), (4, SPEAKS, 4), cities)
    assert loop == RuleCount(None, None, "head and tail are the same entity")
    # Five paths lead from cities to currencies.
    monkeypatch.setattr(rules, "MAX_PRODUCTS", 5)
    assert count_rule((LOCATED, CURRENCY), (2, CURRENCY, 7), cities).num_cases == 4
    monkeypatch.setattr(rules, "MAX_PRODUCTS", 4)
    many = count_rule((LOCATED, CURRENCY), (2, CURRENCY, 7), cities)
    assert many == RuleCount(None, None, "it has more than 4 paths")


def test_the_rules_of_the_docs():
    graph = kg.load_graph("world")
    borders, near, located = graph.relations.ids(["borders", "near", "located_in"])
    triple = (graph.entities.id("Laos"), borders, graph.entities.id("Thailand"))
    first = count_rule((borders, borders), triple, graph)
    assert (f"{first.confidence:.0%}", first.num_cases) == ("26%", 1255)
    located_inverse = located + len(graph.relations)
    second = count_rule((located_inverse, near, located), triple, graph)
    assert (f"{second.confidence:.0%}", second.num_cases) == ("54%", 225)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_counts_are_those_of_walking_all_paths(seed, length):
    random = np.random.default_rng(seed)
    drawn = np.stack([random.integers(0, number, 40) for number in (7, 2, 7)], axis=1)
    graph = graph_of(drawn, num_entities=7, num_relations=2)
    body = random.integers(0, 4, length).tolist()
    triple = tuple(drawn[0].tolist()) if seed % 2 else (1, 0, 2)
    if triple[0] == triple[2]:
        triple = (1, 0, 2)

    known = {tuple(row) for row in drawn.tolist()} - {triple}
    edges = known | {(tail, relation + 2, head) for head, relation, tail in known}
    cases = set()
    for entities in itertools.permutations(range(7), length + 1):
        steps = zip(entities, body, entities[1:], strict=False)
        if all(step in edges for step in steps):
            cases.add((entities[0], entities[-1]))
    cases.discard((triple[0], triple[2]))
    num_true = sum((first, triple[1], second) in known for first, second in cases)
    assert count_rule(body, triple, graph) == RuleCount(len(cases), num_true)

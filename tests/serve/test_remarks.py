"""Remarks on new triples, worked out by hand."""

import numpy as np

from dualkg.data.filters import KnownAnswers
from dualkg.serve.entity_facts import Remarker
from tests.conftest import graph_of

CURRENCY, CAPITAL, BORDERS = range(3)


def test_a_second_capital_is_marked_with_the_first():
    """Countries 0 to 3 have the currency 7; 0, 1 and 2 have the capitals 4, 5 and 6, of which test
    has the last. 0 borders 1, 2 and 3.
    """
    train = [
        *[(country, CURRENCY, 7) for country in range(4)],
        *[(0, CAPITAL, 4), (1, CAPITAL, 5)],
        *[(0, BORDERS, other) for other in (1, 2, 3)],
    ]
    graph = graph_of(train, [], [(2, CAPITAL, 6)], num_entities=8, num_relations=3)
    remarker = Remarker.of(graph, KnownAnswers.of(graph))
    second, third, of_a_currency, second_currency, neighbour = remarker.of_triples(
        np.array(
            [(0, CAPITAL, 5), (2, CAPITAL, 4), (7, CAPITAL, 6), (0, CURRENCY, 4), (0, BORDERS, 4)]
        )
    )
    # A known capital has a country, too.
    assert second == ("known", "known", 4, 1)
    # Half of the entities with a currency have a capital; that of 2 is known from test.
    assert third == ("likely", "known", 6, 0)
    assert (of_a_currency.head_type, of_a_currency.known_tail) == ("unusual", None)
    assert of_a_currency.known_head == 2
    # Every country has one currency, but a currency has many countries.
    assert (second_currency.known_tail, second_currency.known_head) == (7, None)
    # A country has many neighbours.
    assert neighbour.known_tail is None

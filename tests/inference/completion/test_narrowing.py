"""Which triples may be new."""

from __future__ import annotations

import pytest

from dualkg.data.graph import relations_with_self_loops
from dualkg.inference.completion_search import CandidateFilter
from tests.conftest import graph_of


@pytest.mark.parametrize(("others", "looping"), [(0, True), (99, True), (100, False)])
def test_a_loop_by_mistake_makes_no_others_likely(others, looping):
    """One loop of relation 0 in a hundred triples lets others of its entities in, one in a hundred and one does not."""
    graph = graph_of([(0, 0, 0), *((0, 0, tail) for tail in range(1, others + 1)), (1, 1, 2)], num_entities=102)
    assert relations_with_self_loops(graph) == ({0} if looping else frozenset())
    excluded_pairs = {tuple(pair) for pair in CandidateFilter.of(graph).excluded_pairs(0).tolist()}
    assert ((5, 5) in excluded_pairs) is not (
        looping and others >= 5
    )  # an entity that the relation does not know has none

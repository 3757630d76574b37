"""The parts of a relation: every pair is in one of them, and few queries ask about most."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.inference.calibration import PriorCorrection
from dualkg.inference.completion_search import CandidateFilter, Parts
from tests.conftest import graph_of
from tests.inference.completion.brute_force import random_calibration, random_graph


@given(seed=st.integers(0, 200), types=st.booleans(), some=st.booleans(), by_kind=st.booleans())
def test_every_pair_is_in_one_part(seed, types, some, by_kind):
    graph = random_graph(seed, num_triples=20)
    candidate_filter = CandidateFilter.of(graph, types=types, heads=[1, 4, 7] if some else None)
    parts = Parts(candidate_filter, PriorCorrection.of(random_calibration(seed), graph) if by_kind else None)
    found = []
    for part in parts.in_order():
        given_ids, answers, _ = parts.ends(part)
        assert len(given_ids) == part.num_queries > 0
        assert (np.diff(given_ids) > 0).all()
        pairs = product(given_ids.tolist(), answers.tolist())
        found += [(part.relation, *(pair if part.side == "tail" else pair[::-1])) for pair in pairs]
    relations = candidate_filter.relations.tolist()
    wanted = [
        (r, *pair) for r in relations for pair in product(candidate_filter.heads_of(r), candidate_filter.tails_of(r))
    ]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("rotated", [False, True])
def test_what_train_has_is_asked_about_first(rotated):
    """Two heads and three tails of forty entities: five queries find all but what is new on both sides."""
    train = [(0, 0, 10), (0, 0, 11), (1, 0, 12)]
    valid = [(0, 0, 12), (1, 0, 20), (30, 0, 10)]
    if rotated:
        train, valid = ([triple[::-1] for triple in triples] for triples in (train, valid))
    graph = graph_of(train, valid, num_entities=40, num_relations=1)
    parts = Parts(CandidateFilter.of(graph), PriorCorrection.of(random_calibration(0, 1), graph)).in_order()
    sides = ["head", "tail", "head"] if rotated else ["tail", "head", "tail"]
    assert [(part.num_queries, part.side) for part in parts] == list(zip([2, 3, 38], sides, strict=True))
    assert [part.new_given for part in parts] == [0, 0, 1]

"""Which triples are candidates, the parts of a search, and normalizers."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.graph import relations_with_self_loops
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.completion.search import (
    HEADS,
    KNOWN,
    NEW,
    TAILS,
    logsumexp,
    search_parts,
)
from dualkg.kernels import cpu
from tests.conftest import graph_of
from tests.inference.completion.brute_force import random_calibration, random_graph


@pytest.mark.parametrize(("num_others", "has_self_loops"), [(0, True), (99, True), (100, False)])
def test_one_self_loop_by_mistake_makes_no_others_candidates(num_others, has_self_loops):
    """One self-loop in a hundred triples makes those of the relation's entities candidates, one in
    101 does not.
    """
    others = [(0, 0, tail) for tail in range(1, num_others + 1)]
    graph = graph_of([(0, 0, 0), *others, (1, 1, 2)], num_entities=102)
    assert relations_with_self_loops(graph) == ({0} if has_self_loops else frozenset())

    excluded = {tuple(pair) for pair in CandidateFilter(graph).excluded_pairs(0).tolist()}
    has_entity = num_others >= 5  # Self-loops of entities without a triple are no candidates.
    is_candidate = has_self_loops and has_entity
    assert ((5, 5) in excluded) is not is_candidate


@given(seed=st.integers(0, 200), types=st.booleans(), some=st.booleans(), calibrated=st.booleans())
def test_every_pair_is_in_one_part(seed, types, some, calibrated):
    graph = random_graph(seed, num_triples=20)
    candidates = CandidateFilter(graph, types=types, heads=[1, 4, 7] if some else None)
    correction = random_calibration(seed).on(graph) if calibrated else None

    searched = []
    for part in search_parts(candidates, correction):
        given, answers, _ = part.entities(candidates, correction)
        assert sum(map(len, given.values())) == part.num_queries > 0
        assert all((np.diff(of_class) > 0).all() for of_class in given.values())
        given_entities = np.concatenate([*given.values()]).tolist()
        for entity, answer in product(given_entities, answers.tolist()):
            pair = (entity, answer) if part.given == HEADS else (answer, entity)
            searched.append((part.relation, *pair))

    expected = []
    for relation in candidates.relations.tolist():
        heads, tails = candidates.heads_and_tails(relation)
        expected += [(relation, *pair) for pair in product(heads, tails)]
    assert sorted(searched) == sorted(expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_entities_in_the_domain_and_range_are_searched_first(reverse):
    """Two heads and three tails of forty entities: five queries find all but pairs that are new on
    both sides.
    """
    train = [(0, 0, 10), (0, 0, 11), (1, 0, 12)]
    valid = [(0, 0, 12), (1, 0, 20), (30, 0, 10)]
    few = HEADS
    more = TAILS
    if reverse:
        train = [triple[::-1] for triple in train]
        valid = [triple[::-1] for triple in valid]
        few = TAILS
        more = HEADS
    graph = graph_of(train, valid, num_entities=40, num_relations=1)
    correction = random_calibration(0, 1).on(graph)
    parts = search_parts(CandidateFilter(graph), correction)
    assert [part.given for part in parts] == [few, more, few]
    assert [part.num_queries for part in parts] == [2, 3, 38]
    assert [part.given_classes for part in parts] == [KNOWN, KNOWN, NEW]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 3000), (0, 4)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_the_kernel_is_log_sum_exp(shape, scale):
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    torch.testing.assert_close(
        logsumexp(scores, min_size=0), scores.logsumexp(-1), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_kernel_keeps_nan_and_infinity(bad):
    scores = torch.zeros(2, 5)
    scores[1, 2] = bad
    assert logsumexp(scores, min_size=0).isfinite().tolist() == [True, False]


def test_without_numba_and_for_other_types_pytorch_is_used(monkeypatch):
    monkeypatch.setattr(cpu, "HAS_NUMBA", False)
    scores = torch.randn(4, 9)
    assert torch.equal(logsumexp(scores, min_size=0), scores.logsumexp(-1))
    assert logsumexp(scores.double(), min_size=0).dtype == torch.float64

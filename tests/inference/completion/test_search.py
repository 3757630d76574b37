"""Which triples are candidates, the parts of a search, and normalizers."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.graph import relations_with_self_loops
from dualkg.inference import completion
from dualkg.inference.calibration import PriorCorrection
from dualkg.inference.completion import CandidateFilter, plan_search
from dualkg.kernels import cpu
from tests.conftest import graph_of
from tests.inference.completion.brute_force import random_calibration, random_graph


@pytest.mark.parametrize(("others", "has_self_loops"), [(0, True), (99, True), (100, False)])
def test_one_self_loop_by_mistake_makes_no_others_candidates(others, has_self_loops):
    """One self-loop in a hundred triples makes those of the relation's entities candidates, one in
    101 does not.
    """
    graph = graph_of(
        [(0, 0, 0), *((0, 0, tail) for tail in range(1, others + 1)), (1, 1, 2)], num_entities=102
    )
    assert relations_with_self_loops(graph) == ({0} if has_self_loops else frozenset())
    excluded = {tuple(pair) for pair in CandidateFilter(graph).excluded_pairs(0).tolist()}
    # Entities without a triple of the relation have none.
    assert ((5, 5) in excluded) is not (has_self_loops and others >= 5)


@given(seed=st.integers(0, 200), types=st.booleans(), some=st.booleans(), calibrated=st.booleans())
def test_every_pair_is_in_one_part(seed, types, some, calibrated):
    graph = random_graph(seed, num_triples=20)
    candidates = CandidateFilter(graph, types=types, heads=[1, 4, 7] if some else None)
    prior_correction = PriorCorrection.of(random_calibration(seed), graph) if calibrated else None
    found = []
    for part in plan_search(candidates, prior_correction):
        given_ids, answers, _ = part.entities(candidates)
        assert len(given_ids) == part.num_queries > 0
        assert (np.diff(given_ids) > 0).all()
        pairs = product(given_ids.tolist(), answers.tolist())
        found += [(part.relation, *(pair[::-1] if part.given else pair)) for pair in pairs]
    expected = [
        (r, *pair)
        for r in candidates.relations.tolist()
        for pair in product(*candidates.heads_and_tails(r))
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_entities_in_the_domain_and_range_are_searched_first(reverse):
    """Two heads and three tails of forty entities: five queries find all but pairs that are new on
    both sides.
    """
    train = [(0, 0, 10), (0, 0, 11), (1, 0, 12)]
    valid = [(0, 0, 12), (1, 0, 20), (30, 0, 10)]
    if reverse:
        train, valid = ([triple[::-1] for triple in triples] for triples in (train, valid))
    graph = graph_of(train, valid, num_entities=40, num_relations=1)
    parts = plan_search(CandidateFilter(graph), PriorCorrection.of(random_calibration(0, 1), graph))
    given = [1, 0, 1] if reverse else [0, 1, 0]
    assert [(part.num_queries, part.given) for part in parts] == list(
        zip([2, 3, 38], given, strict=True)
    )
    assert [part.new_given for part in parts] == [(0,), (0,), (1,)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 3000), (0, 4)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_the_kernel_is_log_sum_exp(monkeypatch, shape, scale):
    monkeypatch.setattr(completion, "MIN_SCORES_FOR_NUMBA", 0)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    torch.testing.assert_close(
        completion.logsumexp(scores), scores.logsumexp(-1), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_kernel_keeps_nan_and_infinity(monkeypatch, bad):
    monkeypatch.setattr(completion, "MIN_SCORES_FOR_NUMBA", 0)
    scores = torch.zeros(2, 5)
    scores[1, 2] = bad
    assert completion.logsumexp(scores).isfinite().tolist() == [True, False]


def test_without_numba_and_for_other_types_pytorch_is_used(monkeypatch):
    monkeypatch.setattr(completion, "MIN_SCORES_FOR_NUMBA", 0)
    monkeypatch.setattr(cpu, "HAS_NUMBA", False)
    scores = torch.randn(4, 9)
    assert torch.equal(completion.logsumexp(scores), scores.logsumexp(-1))
    assert completion.logsumexp(scores.double()).dtype == torch.float64

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg
from dualkg.evaluation import ranking
from tests.evaluation.test_ranking import counter, graphs, score_of_every_triple
from tests.families import BILINEAR


def brute_force(model: kg.Model, graph: kg.Graph) -> list[float]:
    known = {
        tuple(triple)
        for name in ("train", "valid", "test")
        for triple in graph.split(name).tolist()
    }
    score = score_of_every_triple(model)
    ranks = []
    for h, r, t in graph.test.tolist():
        others = [o for o in range(graph.shape.num_relations) if o != r and (h, o, t) not in known]
        true = score(h, r, t)
        scores = [score(h, o, t) for o in others]
        ranks.append(1 + sum(s > true for s in scores) + sum(s == true for s in scores) / 2)
    return ranks


@pytest.mark.parametrize("dual", [None, "tail", "head"])
@pytest.mark.parametrize("name", BILINEAR)
@settings(max_examples=15)
@given(graph=graphs(), seed=st.integers(0, 10))
def test_ranks_equal_brute_force(name, dual, graph, seed):
    model = BILINEAR[name](graph.shape, dim=2, seed=seed)
    for parameter in model.parameters():
        parameter.data = torch.randint(
            -1, 2, parameter.shape, generator=torch.Generator().manual_seed(seed)
        ).float()
    if isinstance(model, kg.QuatE):
        model.normalized = False  # division would round and break ties
    scored = kg.Dual(model, dual) if dual else model
    metrics = kg.evaluate_relations(scored, graph)
    ranks = np.array(brute_force(scored, graph))
    assert metrics.mrr == pytest.approx((1 / ranks).mean())
    assert metrics.mr == pytest.approx(ranks.mean())


@pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="numba is not installed")
def test_every_form_of_counting_gives_the_same_ranks(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    plain, _ = ranking.rank_relations(model, small_graph, small_graph.test, count=counter("plain"))
    by_numba, _ = ranking.rank_relations(
        model, small_graph, small_graph.test, count=counter("numba")
    )
    np.testing.assert_array_equal(by_numba, plain)


def test_blocks_do_not_change_ranks(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    whole, num_candidates = ranking.rank_relations(model, small_graph, small_graph.test)
    blocked = ranking.rank_relations(model, small_graph, small_graph.test, block_size=3)
    np.testing.assert_array_equal(blocked[0], whole)
    np.testing.assert_array_equal(blocked[1], num_candidates)


def test_metrics_of_no_triples_are_nan(small_graph):
    empty = dataclasses.replace(small_graph, test=small_graph.test[:0])
    assert kg.evaluate_relations(kg.CP(empty.shape, dim=2), empty).num_queries == 0


def test_nonfinite_scores_are_refused(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    model.relations.data[0] = torch.nan
    with pytest.raises(kg.DivergedError, match=r"for the query \(\d+, \?, \d+\)"):
        kg.evaluate_relations(model, small_graph)

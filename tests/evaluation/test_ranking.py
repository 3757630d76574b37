"""Ranks against brute force on random graphs with ties."""

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg
from dualkg.evaluation import ranking
from dualkg.kernels import cpu_ranks
from tests.conftest import graph_of
from tests.families import BILINEAR, EMBEDDINGS
from tests.pairwise import pairwise


def counter(form: str) -> ranking.Counter:
    """A form of counting; that of numba is the plain one where numba is not installed."""
    if form == "numba":
        return ranking.choose_counter("cpu", 0, min_for_numba=0)
    return ranking.count_with_torch


def score_of_every_triple(model: kg.Model) -> Callable[[int, int, int], float]:
    num_entities = model.shape.num_entities
    num_relations = model.num_relation_ids
    ids = torch.cartesian_prod(
        torch.arange(num_entities), torch.arange(num_relations), torch.arange(num_entities)
    )
    cube = model.score(*ids.T).view(num_entities, num_relations, num_entities).tolist()
    return lambda head, relation, tail: cube[head][relation][tail]


def brute_force(
    model: kg.Model,
    graph: kg.Graph,
    split: str,
    known_from: tuple[str, ...] = ("train", "valid", "test"),
) -> tuple[np.ndarray, np.ndarray]:
    """One candidate at a time, in Python."""
    known = {tuple(triple) for name in known_from for triple in graph.split(name).tolist()}
    num_relations = graph.shape.num_relations

    score = score_of_every_triple(model)
    best = []
    worst = []
    for direction in ("tail", "head"):
        for h, r, t in graph.split(split).tolist():
            greater = equal = 0
            for other in range(graph.shape.num_entities):
                candidate = (h, r, other) if direction == "tail" else (other, r, t)
                if candidate in known and candidate != (h, r, t):
                    continue
                pair = [candidate, (h, r, t)]
                if direction == "head" and model.reciprocal:
                    pair = [(tail, relation + num_relations, head) for head, relation, tail in pair]
                one, true = (score(*triple) for triple in pair)
                greater += one > true
                equal += one == true
            best.append(greater + 1)
            worst.append(greater + equal)
    return np.array(best).reshape(2, -1), np.array(worst).reshape(2, -1)


@st.composite
def graphs(draw):
    num_entities = draw(st.integers(1, 6))
    num_relations = draw(st.integers(1, 3))
    triple = st.tuples(
        st.integers(0, num_entities - 1),
        st.integers(0, num_relations - 1),
        st.integers(0, num_entities - 1),
    )
    splits = [draw(st.lists(triple, min_size=n, max_size=8)) for n in (1, 0, 1)]
    return graph_of(*splits, num_entities=num_entities, num_relations=num_relations)


def whole_numbers(model: kg.Model, seed: int = 0) -> kg.Model:
    """The model with small whole numbers: scores are exact and many are tied."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=random).float()
    if isinstance(model, kg.QuatE):
        model.normalized = False  # division would round and break ties
    return model


# Distance models only where distances of whole numbers are whole numbers.
FORMS = [
    *pairwise(product(BILINEAR, [None, "tail", "head"], [True, False])),
    *product(["TransE", "ModE", "SE"], [None], [True, False]),
]


@pytest.mark.parametrize(("name", "dual", "reciprocal"), FORMS)
@settings(max_examples=12)
@given(graph=graphs(), seed=st.integers(0, 10))
def test_ranks_equal_brute_force(name, dual, reciprocal, graph, seed):
    model = whole_numbers(EMBEDDINGS[name](graph.shape, dim=2, reciprocal=reciprocal), seed)
    if dual:
        model = kg.Dual(model, dual)
    ranks = kg.rank(model, graph, split="test")
    best, worst = brute_force(model, graph, "test")
    np.testing.assert_array_equal(ranks.optimistic, best)
    np.testing.assert_array_equal(ranks.pessimistic, worst)
    np.testing.assert_array_equal(ranks.mean, (best + worst) / 2)


@given(graph=graphs(), seed=st.integers(0, 10))
def test_answers_missing_from_the_filter_are_candidates(graph, seed):
    model = whole_numbers(kg.DistMult(graph.shape, dim=2), seed)
    ranks = kg.rank(model, graph, known=kg.KnownAnswers.of(graph, ["train"]))
    best, worst = brute_force(model, graph, "test", known_from=("train",))
    np.testing.assert_array_equal(ranks.optimistic, best)
    np.testing.assert_array_equal(ranks.pessimistic, worst)


@pytest.mark.parametrize("form", ["plain", "numba"])
def test_every_form_of_counting_gives_the_same_ranks(small_graph, form):
    if form == "numba" and not importlib.util.find_spec("numba"):
        pytest.skip("numba is not installed")
    model = whole_numbers(kg.ComplEx(small_graph.shape, dim=3))
    ranks = kg.rank(model, small_graph, count=counter(form))
    best, worst = brute_force(model, small_graph, "test")
    np.testing.assert_array_equal(ranks.optimistic, best)
    np.testing.assert_array_equal(ranks.pessimistic, worst)


def test_the_fastest_installed_counter_is_chosen(monkeypatch):
    assert ranking.choose_counter("cpu", 99, min_for_numba=100) is ranking.count_with_torch
    assert ranking.choose_counter("mps", 100, min_for_numba=100) is ranking.count_with_torch
    monkeypatch.setattr("dualkg.kernels.cpu.HAS_NUMBA", False)
    monkeypatch.setattr(ranking, "gpu_kernels_unavailable", lambda: "is not installed")
    assert ranking.choose_counter("cpu", 100, min_for_numba=100) is ranking.count_with_torch
    assert ranking.choose_counter("cuda", 100) is ranking.count_with_torch
    monkeypatch.undo()
    if importlib.util.find_spec("numba"):
        compiled = cpu_ranks.count_better_and_tied
        assert ranking.choose_counter("cpu", 100, min_for_numba=100) is compiled
        assert ranking.choose_counter("cpu", 10**12) is compiled


def test_blocks_do_not_change_ranks(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=5, init_scale=1.0)
    whole = kg.rank(model, small_graph)
    pieces = kg.rank(model, small_graph, block_elements=3 * 30)
    np.testing.assert_array_equal(whole.optimistic, pieces.optimistic)
    np.testing.assert_array_equal(whole.pessimistic, pieces.pessimistic)


def test_at_most_one_block_is_scored_at_a_time(small_graph):
    seen = []

    class Watched(kg.DistMult):
        def score_tails(self, heads, relations):
            scores = super().score_tails(heads, relations)
            seen.append(scores.numel())
            return scores

    kg.rank(Watched(small_graph.shape, dim=2), small_graph, block_elements=4 * 30)
    assert max(seen) <= 4 * 30


def test_a_query_with_several_answers_is_scored_once(monkeypatch):
    graph = graph_of([(0, 0, 1)], [], [(0, 0, 2), (0, 0, 3), (0, 0, 4)])
    batch_sizes = []

    class Watched(kg.DistMult):
        def score_tails(self, heads, relations):
            batch_sizes.append(len(heads))
            return super().score_tails(heads, relations)

    kg.rank(Watched(graph.shape, dim=2), graph)
    assert batch_sizes == [1, 3]


def test_equal_scores_have_the_mean_rank():
    graph = graph_of([(0, 0, 1)], [], [(2, 0, 3)], num_entities=5)
    model = kg.DistMult(graph.shape, dim=2, init_scale=0.0)
    ranks = kg.rank(model, graph)
    assert ranks.optimistic.tolist() == [[1], [1]]
    assert ranks.pessimistic.tolist() == [[5], [5]]
    assert ranks.mean.tolist() == [[3.0], [3.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["plain", "numba"])
def test_nonfinite_scores_are_refused(small_graph, bad, form):
    model = kg.ComplEx(small_graph.shape, dim=2)
    model.entities.data[0, 0] = bad
    with pytest.raises(kg.DivergedError):
        kg.rank(model, small_graph, count=counter(form))


@pytest.mark.parametrize(("relation", "query"), [(1, "(2, 1, ?)"), (3, "(?, 1, 3)")])
def test_the_query_with_nonfinite_scores_is_named(relation, query):
    graph = graph_of([(0, 0, 1)], [], [(0, 0, 2), (2, 1, 3)])

    class Odd(kg.DistMult):
        def score_tails(self, heads, relations):
            scores = super().score_tails(heads, relations)
            scores[relations == relation, 1] = torch.nan
            return scores

    with pytest.raises(kg.DivergedError, match=re.escape(query)):
        kg.rank(Odd(graph.shape, dim=2), graph)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "numba"])
def test_scores_may_be_of_any_width(small_graph, dtype, form):
    class Other(kg.DistMult):
        def score_tails(self, heads, relations):
            return super().score_tails(heads, relations).to(dtype)

    same, other = (whole_numbers(kind(small_graph.shape, dim=2)) for kind in (kg.DistMult, Other))
    one = kg.rank(same, small_graph, count=counter(form))
    two = kg.rank(other, small_graph, count=counter(form))
    np.testing.assert_array_equal(one.optimistic, two.optimistic)
    np.testing.assert_array_equal(one.pessimistic, two.pessimistic)


def test_products_are_taken_in_full_precision_and_only_there(small_graph):
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [product.fp32_precision for product in products]
    seen = []

    class Watched(kg.DistMult):
        def score_tails(self, heads, relations):
            seen.extend(product.fp32_precision for product in products)
            return super().score_tails(heads, relations)

    try:
        for product in products:
            product.fp32_precision = "tf32"
        kg.rank(Watched(small_graph.shape, dim=2), small_graph)
        assert [product.fp32_precision for product in products] == ["tf32", "tf32"]
    finally:
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision
    assert set(seen) == {"ieee"}


def test_no_triples_have_no_ranks(small_graph):
    empty = dataclasses.replace(small_graph, test=small_graph.test[:0])
    ranks = kg.rank(kg.DistMult(empty.shape, dim=2), empty)
    assert ranks.optimistic.shape == ranks.pessimistic.shape == (2, 0)


def test_the_only_entity_has_rank_1():
    graph = graph_of([(0, 0, 0)], [], [(0, 1, 0), (0, 1, 0)])
    ranks = kg.rank(kg.DistMult(graph.shape, dim=2), graph)
    assert ranks.pessimistic.tolist() == [[1, 1], [1, 1]]


def test_a_read_only_split_is_ranked(small_graph):
    small_graph.test.flags.writeable = False
    assert kg.rank(kg.DistMult(small_graph.shape, dim=2), small_graph).mean.shape == (2, 20)


def test_triples_of_unseen_entities_are_ranked():
    graph = graph_of([(0, 0, 1)], [], [(2, 0, 3), (0, 0, 0)], num_entities=4)
    report = kg.evaluate(kg.DistMult(graph.shape, dim=2), graph)
    assert report.metrics.num_queries == 4
    assert report.num_unseen_triples == 1
    assert report.without_unseen.num_queries == 2


def test_progress_is_reported_to_the_end(small_graph):
    model = kg.DistMult(small_graph.shape, dim=2)
    reported = []
    kg.rank(
        model,
        small_graph,
        progress=lambda *done: reported.append(done),
        block_elements=4 * 30,
    )
    assert reported == sorted(reported)
    assert len(reported) > 2
    assert reported[-1] == (40, 40)

    reported_by_evaluate = []
    kg.evaluate(model, small_graph, progress=lambda *done: reported_by_evaluate.append(done))
    assert reported_by_evaluate[-1] == (40, 40)


@pytest.mark.parametrize(
    ("num_queries", "num_triples"), [(1, 1), (2, 1), (7, 4), (39, 20), (60, 20)]
)
def test_a_sample_has_a_triple_for_two_queries(small_graph, num_queries, num_triples):
    valid = small_graph.valid
    sample = ranking.sample_triples(valid, num_queries)
    assert len(sample) == num_triples
    positions = [valid.tolist().index(triple) for triple in sample.tolist()]
    assert positions == sorted(set(positions))
    larger = ranking.sample_triples(valid, num_queries + 10).tolist()
    assert all(triple in larger for triple in sample.tolist())


def test_the_ranks_of_a_sample_are_those_of_the_whole(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4)
    whole = kg.evaluate(model, small_graph, split="valid")
    part = kg.evaluate(model, small_graph, split="valid", queries=14)
    assert whole.sample == ""
    assert part.sample == "a sample of 7 of 20 triples"
    assert part.as_dict()["sample"] == {"triples": 7, "of": 20}
    assert part.metrics.num_queries == 14
    rows = [small_graph.valid.tolist().index(triple) for triple in part.ranks.triples.tolist()]
    np.testing.assert_array_equal(part.ranks.optimistic, whole.ranks.optimistic[:, rows])
    np.testing.assert_array_equal(part.ranks.pessimistic, whole.ranks.pessimistic[:, rows])


def test_a_sample_of_nothing_and_of_lists_is_refused(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4)
    with pytest.raises(kg.RequestError, match="queries.* should be at least 1; 0 was given"):
        kg.evaluate(model, small_graph, queries=0)
    lists = {"head": [], "relation": [], "tail": [], "direction": [], "candidate": []}
    with pytest.raises(kg.RequestError, match="Candidates are lists for all triples"):
        kg.evaluate(model, small_graph, queries=4, candidates=lists)

"""Predictions with an index are those without one."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.inference.index import ExactIndex, SearchResult
from dualkg.inference.index_build import OtherModelIndexed, build_index
from tests.conftest import graph_of
from tests.inference.index.conftest import quick_index

MODELS = {
    "ComplEx": lambda shape: kg.ComplEx(shape, dim=4, init_scale=1.0),
    "CP without inverses": lambda shape: kg.CP(shape, dim=4, init_scale=1.0, reciprocal=False),
    "RESCAL without inverses": lambda shape: kg.RESCAL(
        shape, dim=4, init_scale=1.0, reciprocal=False
    ),
    "dual": lambda shape: kg.Dual(kg.DistMult(shape, dim=4, init_scale=1.0)),
    "TransE": lambda shape: kg.TransE(shape, dim=4, init_scale=1.0, norm=2, reciprocal=False),
}


def pair(graph: kg.Graph, name: str = "ComplEx") -> tuple[kg.Predictor, kg.Predictor]:
    model = MODELS[name](graph.shape)
    plain = kg.Predictor(model, graph)
    return plain, kg.Predictor(model, graph, index=quick_index(model, graph, kind="exact"))


def assert_same(ours: list[kg.Prediction], theirs: list[kg.Prediction]) -> None:
    assert [(a.id, a.name, a.split) for a in ours] == [(a.id, a.name, a.split) for a in theirs]
    assert [a.score for a in ours] == pytest.approx([a.score for a in theirs], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("known", ["mark", "omit"])
def test_predictions_are_those_without_an_index(small_graph, name, known):
    plain, indexed = pair(small_graph, name)
    for given_id, relation, k in ((0, 0, 1), (5, 1, 7), (12, 3, 29), (29, 2, 100)):
        assert_same(
            indexed.tails(given_id, relation, k=k, known=known),
            plain.tails(given_id, relation, k=k, known=known),
        )
        assert_same(
            indexed.heads(relation, given_id, k=k, known=known),
            plain.heads(relation, given_id, k=k, known=known),
        )


@given(num_known=st.integers(1, 40), k=st.integers(1, 50), seed=st.integers(0, 1000))
def test_any_number_of_known_answers_can_be_omitted(num_known, k, seed):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
    known = order[:num_known]
    cut = num_known // 2
    train = [(0, 0, tail) for tail in known[:cut]] + [(1, 0, 1)]
    graph = graph_of(train, [], [(0, 0, tail) for tail in known[cut:]], num_entities=40)
    plain, indexed = pair(graph)
    answers = indexed.tails(0, 0, k=k, known="omit")
    assert len(answers) == min(k, 40 - num_known)
    assert not {answer.id for answer in answers} & set(known)
    assert_same(answers, plain.tails(0, 0, k=k, known="omit"))


@pytest.mark.skipif(find_spec("faiss") is None, reason="faiss is not installed")
@pytest.mark.parametrize("num_known", [1, 60, 290])
def test_known_answers_do_not_displace_results_of_an_approximate_index(num_known):
    graph = graph_of(
        [*((0, 0, tail) for tail in range(num_known)), *((n, 0, 1) for n in range(1, 300))]
    )
    model = MODELS["ComplEx"](graph.shape)
    plain = kg.Predictor(model, graph)
    indexed = kg.Predictor(model, graph, index=quick_index(model, graph, kind="ivf", recall=0.9))
    ours, theirs = (one.tails(0, 0, k=10, known="omit") for one in (indexed, plain))
    assert len(ours) == len(theirs) == 10
    assert not any(answer.known for answer in ours)
    assert len({a.id for a in ours} & {a.id for a in theirs}) >= 8


def test_all_entities_are_scored_if_an_index_finds_too_few(small_graph, monkeypatch):
    plain, indexed = pair(small_graph)
    nothing = SearchResult(torch.full((1, 5), -torch.inf), torch.full((1, 5), -1))
    monkeypatch.setattr(ExactIndex, "search", lambda self, queries, k: nothing)
    assert indexed.tails(0, 0, k=5) == plain.tails(0, 0, k=5)
    assert indexed.heads(0, 0, k=5) == plain.heads(0, 0, k=5)


def test_results_of_a_quantized_index_are_rescored(small_graph):
    model = MODELS["ComplEx"](small_graph.shape)
    plain = kg.Predictor(model, small_graph)
    indexed = kg.Predictor(
        model, small_graph, index=quick_index(model, small_graph, kind="exact", storage="int8")
    )
    assert_same(indexed.tails(3, 1, k=30), plain.tails(3, 1, k=30))


def test_invalid_queries_are_refused_as_without_an_index(small_graph):
    _, indexed = pair(small_graph)
    for option in ({"k": 0}, {"known": "hide"}):
        with pytest.raises(InvalidValue) as error:
            indexed.tails(0, 0, **option)
        assert {error.value.setting: error.value.found} == option
    with pytest.raises(kg.RequestError):
        indexed.tails("e99", 0)


def test_an_index_of_another_model_is_refused(small_graph):
    plain, indexed = pair(small_graph)
    other = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0, seed=9)
    for model in (other, kg.Dual(plain.model)):
        with pytest.raises(OtherModelIndexed) as error:
            kg.Predictor(model, small_graph, index=indexed.index)
        assert (error.value.model, error.value.metric) == ("ComplEx", "inner product")
        assert "made of another model, ComplEx by inner product" in str(error.value)
        assert "Build it again: kg." in str(error.value)


def test_an_index_of_other_rows_is_refused(monkeypatch):
    """Also if the rows differ that are not among those of the fingerprint."""
    random = np.random.default_rng(0)
    triples = np.stack([random.integers(0, size, 50) for size in (2500, 2, 2500)], axis=1)
    graph = graph_of(triples, triples[:5], triples[5:10], num_entities=2500, num_relations=2)
    model = kg.ComplEx(graph.shape, dim=4, init_scale=1.0)
    index = build_index(
        model, graph, kind="exact", num_queries=4, seconds=0.01, made_from="identity"
    )
    index.check_model(model)
    with torch.no_grad():
        model.entities[1] += 1
    with pytest.raises(OtherModelIndexed):
        index.check_model(model)
    with pytest.raises(OtherModelIndexed):
        index.check_model(model, identity="of another")
    index.check_model(model, identity="identity")  # which stands for all weights
    replace(index, checksums={}).check_model(model)  # an earlier version


def test_the_entity_of_a_query_is_omitted_as_without_an_index(small_graph):
    is_loop = small_graph.train[:, 0] == small_graph.train[:, 2]
    graph = replace(small_graph, train=small_graph.train[~is_loop])
    plain, indexed = pair(graph)
    for entity in range(5):
        for k in (1, 3, 30):
            assert_same(indexed.tails(entity, 1, k=k), plain.tails(entity, 1, k=k))
        assert entity not in [answer.id for answer in indexed.tails(entity, 1, known="omit")]

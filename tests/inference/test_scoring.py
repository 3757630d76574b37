"""Scores in blocks, and log-probabilities of triples from both directions, with and without a
cache.
"""

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference.scoring import CachedLogProbabilities, score_blocks, triple_log_probabilities
from tests.families import EMBEDDINGS

THREE_QUERIES = 3 * 30  # scores of a block of three queries for thirty entities


@pytest.mark.parametrize("reciprocal", [True, False])
def test_blocks_of_both_directions_are_scored_like_single_queries(small_graph, reciprocal):
    model = kg.ComplEx(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5).eval()
    entities = np.arange(10)
    # From 4 on, a relation id stands for the heads of relation − 4.
    relations = np.array([0, 5, 1, 2, 3, 4, 6, 7, 0, 1])
    blocks = list(score_blocks(model, entities, relations, max_scores=THREE_QUERIES))
    assert [(block.start, block.stop) for block, _ in blocks] == [(0, 3), (3, 6), (6, 9), (9, 10)]

    scores = torch.cat([block_scores for _, block_scores in blocks])
    for entity, relation, query_scores in zip(entities, relations, scores, strict=True):
        given = torch.tensor([entity])
        relation_id = torch.tensor([relation % 4])
        with torch.no_grad():
            if relation < 4:
                expected = model.predict_tails(given, relation_id)
            else:
                expected = model.predict_heads(relation_id, given)
        torch.testing.assert_close(query_scores, expected[0])


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "RotatE", "HAKE"])
def test_log_probability_is_the_mean_of_two_log_softmaxes(small_graph, name, reciprocal):
    model = EMBEDDINGS[name](small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5)
    forward = small_graph.train[:40]
    triples = np.concatenate([forward, forward[:, [2, 1, 0]]]).astype(np.int64)
    heads, relations, tails = torch.from_numpy(triples).T
    with torch.no_grad():
        by_tail = model.predict_tails(heads, relations).log_softmax(-1)
        by_head = model.predict_heads(relations, tails).log_softmax(-1)
    of_tails = by_tail.gather(1, tails[:, None])[:, 0]
    of_heads = by_head.gather(1, heads[:, None])[:, 0]

    log_probabilities = triple_log_probabilities(model, triples, max_scores=THREE_QUERIES)
    torch.testing.assert_close(log_probabilities, (of_tails + of_heads) / 2)


def test_log_probability_is_invariant_to_a_constant_in_all_scores(small_graph):
    """A constant added to a coordinate that all entities share changes all scores of a query
    equally.
    """
    model = kg.DistMult(small_graph.shape, dim=3, init_scale=0.5)
    triples = small_graph.train[:20].astype(np.int64)
    before = triple_log_probabilities(model, triples)
    with torch.no_grad():
        model.entities[:, 0] = 1.0
        model.relations[:, 0] = 0.0
        without = triple_log_probabilities(model, triples)
        model.relations[:, 0] = 5.0
    torch.testing.assert_close(triple_log_probabilities(model, triples), without)
    assert not torch.allclose(before, without)


def test_log_probabilities_of_no_triples(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    no_triples = np.zeros((0, 3), dtype=np.int64)
    assert triple_log_probabilities(model, no_triples).shape == (0,)


def assert_agrees(cached: CachedLogProbabilities, model: kg.Model, triples: np.ndarray) -> None:
    expected = triple_log_probabilities(model, triples)
    torch.testing.assert_close(cached(triples), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("model_class", [kg.ComplEx, kg.CP, kg.TransE])
def test_cached_log_probabilities_agree_with_uncached_ones(small_graph, model_class, reciprocal):
    model = model_class(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=1.0)
    cached = CachedLogProbabilities(model)
    triples = np.concatenate([small_graph.test, small_graph.test[:3]]).astype(np.int64)
    for batch in (triples[:5], triples, triples[::-1]):
        assert_agrees(cached, model, batch)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("model_class", [kg.ComplEx, kg.TransE])
def test_log_probabilities_of_symmetric_relations(small_graph, model_class, reciprocal):
    """By hand: one distribution over the entities that are related to an entity."""
    model = model_class(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=1.0)
    symmetric = np.arange(small_graph.shape.num_relations) == 0
    triples = small_graph.test.astype(np.int64)
    assert symmetric[triples[:, 1]].any()
    assert not symmetric[triples[:, 1]].all()

    expected = triple_log_probabilities(model, triples)
    relation = torch.tensor([0])
    for row, (head, number, tail) in enumerate(triples.tolist()):
        if number:
            continue
        of_ends = []
        for given, answer in ((head, tail), (tail, head)):
            entity = torch.tensor([given])
            of_tails = model.predict_tails(entity, relation)
            of_heads = model.predict_heads(relation, entity)
            of_ends.append(((of_tails + of_heads) / 2).log_softmax(-1)[0, answer])
        expected[row] = sum(of_ends) / 2

    found = triple_log_probabilities(model, triples, symmetric=symmetric)
    torch.testing.assert_close(found, expected)
    swapped = np.where(triples[:, 1:2] == 0, triples[:, ::-1], triples)
    cached = CachedLogProbabilities(model, symmetric=symmetric)
    for batch in (triples, swapped):
        torch.testing.assert_close(cached(batch), expected, rtol=0, atol=1e-5)


def test_the_normalizer_of_a_query_is_computed_once(small_graph, monkeypatch):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    batch_sizes = []
    predict_tails = model.predict_tails

    def counting(heads, relations):
        batch_sizes.append(len(heads))
        return predict_tails(heads, relations)

    monkeypatch.setattr(model, "predict_tails", counting)
    cached = CachedLogProbabilities(model)
    triples = small_graph.test.astype(np.int64)
    tail_queries = {(head, relation) for head, relation, _ in triples.tolist()}

    first = cached(triples)
    assert sum(batch_sizes) == len(tail_queries)
    assert torch.equal(cached(triples), first)
    assert sum(batch_sizes) == len(tail_queries)


def test_the_cache_is_bounded(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    cached = CachedLogProbabilities(model, max_size=10)
    triples = small_graph.test.astype(np.int64)
    for start in range(0, len(triples), 4):
        assert_agrees(cached, model, triples[start : start + 4])
        assert cached.num_cached <= 10

"""Scores in blocks, and log-probabilities of triples from both directions, with and without a
cache.
"""

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference import scoring
from dualkg.inference.scoring import CachedLogProbabilities, score_blocks, triple_log_probabilities
from dualkg.models import MODELS


@pytest.mark.parametrize("reciprocal", [True, False])
def test_blocks_of_both_directions_are_scored_like_single_queries(
    monkeypatch, small_graph, reciprocal
):
    model = MODELS["ComplEx"](
        small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5
    ).eval()
    monkeypatch.setattr(scoring, "BLOCK_SCORES", {"cpu": 90})  # three queries in a block
    entities = np.arange(10)
    relations = np.array([0, 5, 1, 2, 3, 4, 6, 7, 0, 1])  # from 4 on, heads of relation − 4
    blocks = list(score_blocks(model, entities, relations))
    assert [(block.start, block.stop) for block, _ in blocks] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    for entity, relation, scores in zip(
        entities, relations, torch.cat([part for _, part in blocks]), strict=True
    ):
        ids = torch.tensor([entity]), torch.tensor([relation % 4])
        with torch.no_grad():
            expected = (
                model.predict_tails(*ids) if relation < 4 else model.predict_heads(*ids[::-1])
            )
        torch.testing.assert_close(scores, expected[0])


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "RotatE", "HAKE"])
def test_log_probability_is_the_mean_of_two_log_softmaxes(
    monkeypatch, small_graph, name, reciprocal
):
    model = MODELS[name](small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5)
    triples = np.concatenate([small_graph.train[:40], small_graph.train[:40, [2, 1, 0]]]).astype(
        np.int64
    )
    monkeypatch.setattr(
        "dualkg.inference.scoring.BLOCK_SCORES", {"cpu": 90}
    )  # three queries in a block
    found = triple_log_probabilities(model, triples)
    h, r, t = torch.from_numpy(triples).T
    with torch.no_grad():
        tails = model.predict_tails(h, r).log_softmax(-1).gather(1, t[:, None])[:, 0]
        heads = model.predict_heads(r, t).log_softmax(-1).gather(1, h[:, None])[:, 0]
    torch.testing.assert_close(found, (tails + heads) / 2)


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
    assert triple_log_probabilities(
        kg.CP(small_graph.shape, dim=2), np.zeros((0, 3), dtype=np.int64)
    ).shape == (0,)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("model", [kg.ComplEx, kg.CP, kg.TransE])
def test_cached_log_probabilities_agree_with_uncached_ones(small_graph, model, reciprocal):
    made = model(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=1.0)
    found = CachedLogProbabilities(made)
    triples = np.concatenate([small_graph.test, small_graph.test[:3]]).astype(np.int64)
    for part in (triples[:5], triples, triples[::-1]):
        torch.testing.assert_close(
            found(part), triple_log_probabilities(made, part), rtol=0, atol=1e-5
        )


def test_the_normalizer_of_a_query_is_computed_once(small_graph, monkeypatch):
    made = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    scored = []
    predict = made.predict_tails
    monkeypatch.setattr(
        made,
        "predict_tails",
        lambda heads, relations: scored.append(len(heads)) or predict(heads, relations),
    )
    found = CachedLogProbabilities(made)
    triples = small_graph.test.astype(np.int64)
    first = found(triples)
    summed = sum(scored)
    assert summed == len({(h, r) for h, r, _ in triples.tolist()})
    assert torch.equal(found(triples), first)
    assert sum(scored) == summed


def test_the_cache_is_bounded(small_graph, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_CACHED", 10)
    made = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    found = CachedLogProbabilities(made)
    triples = small_graph.test.astype(np.int64)
    for start in range(0, len(triples), 4):
        part = triples[start : start + 4]
        torch.testing.assert_close(
            found(part), triple_log_probabilities(made, part), rtol=0, atol=1e-5
        )
        assert len(found._normalizers) <= 10

"""Evidence with a memory is log_probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference import scoring
from dualkg.inference.scoring import CachedLogProbabilities, triple_log_probabilities


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("model", [kg.ComplEx, kg.CP, kg.TransE])
def test_it_is_what_it_would_be_without(small_graph, model, reciprocal):
    made = model(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=1.0)
    found = CachedLogProbabilities(made)
    triples = np.concatenate([small_graph.test, small_graph.test[:3]]).astype(np.int64)
    for part in (triples[:5], triples, triples[::-1]):
        torch.testing.assert_close(found(part), triple_log_probabilities(made, part), rtol=0, atol=1e-5)


def test_a_question_is_summed_once(small_graph, monkeypatch):
    made = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    asked = []
    ask = made.predict_tails
    monkeypatch.setattr(
        made, "predict_tails", lambda heads, relations: asked.append(len(heads)) or ask(heads, relations)
    )
    found, triples = CachedLogProbabilities(made), small_graph.test.astype(np.int64)
    first = found(triples)
    summed = sum(asked)
    assert summed == len({(h, r) for h, r, _ in triples.tolist()})
    assert torch.equal(found(triples), first)
    assert sum(asked) == summed


def test_what_is_remembered_is_bounded(small_graph, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_CACHED", 10)
    made = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    found, triples = CachedLogProbabilities(made), small_graph.test.astype(np.int64)
    for start in range(0, len(triples), 4):
        part = triples[start : start + 4]
        torch.testing.assert_close(found(part), triple_log_probabilities(made, part), rtol=0, atol=1e-5)
        assert len(found._normalizers) <= 10

"""Evidence: log-probabilities from both ends, whatever the order and the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference.scoring import triple_log_probabilities
from dualkg.models import MODELS


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "RotatE", "HAKE"])
def test_it_is_the_mean_of_two_log_softmaxes(monkeypatch, small_graph, name, reciprocal):
    model = MODELS[name](small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5)
    triples = np.concatenate([small_graph.train[:40], small_graph.train[:40, [2, 1, 0]]]).astype(np.int64)
    monkeypatch.setattr("dualkg.inference.scoring.BLOCK_SCORES", {"cpu": 90})  # three questions at once
    found = triple_log_probabilities(model, triples)
    h, r, t = torch.from_numpy(triples).T
    with torch.no_grad():
        tails = model.predict_tails(h, r).log_softmax(-1).gather(1, t[:, None])[:, 0]
        heads = model.predict_heads(r, t).log_softmax(-1).gather(1, h[:, None])[:, 0]
    torch.testing.assert_close(found, (tails + heads) / 2)


def test_what_all_answers_share_does_not_count(small_graph):
    """A constant added to a coordinate that all entities share moves every score of a question alike."""
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


def test_no_triples_have_no_evidence(small_graph):
    assert triple_log_probabilities(kg.CP(small_graph.shape, dim=2), np.zeros((0, 3), dtype=np.int64)).shape == (0,)

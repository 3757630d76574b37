"""Triples ruled out in less precision; a model on a CPU is made to round its scores as if it were that of a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.answers.completion import complete, completion, precision, search
from tests.answers.completion.by_force import MODELS, random_calibration, random_graph


@pytest.fixture
def rough(monkeypatch):
    """Scores are rounded to bfloat16 while another precision is asked for; how often is counted."""
    counted = {"rough": 0, "on": False}

    @contextmanager
    def products_in(asked):
        counted["on"] = asked == "tf32"
        yield
        counted["on"] = False

    score_tails = kg.ComplEx.score_tails

    def rounded(self, heads, relations):
        scores = score_tails(self, heads, relations)
        counted["rough"] += counted["on"]
        return scores.bfloat16().float() if counted["on"] else scores

    monkeypatch.setattr(kg.ComplEx, "score_tails", rounded)
    monkeypatch.setattr(completion, "check_precision", lambda precision, device: None)
    for module in (precision, search):
        monkeypatch.setattr(module, "products_in", products_in)
    return counted


@pytest.mark.parametrize("seed", range(5))
def test_a_list_that_was_selected_roughly_is_exact(rough, seed):
    graph, calibration = random_graph(seed, num_entities=20), random_calibration(seed)
    model = kg.ComplEx(graph.shape, dim=4, init_scale=1.2, seed=seed)
    exact = complete(model, graph, top=25, calibration=calibration)
    assert not rough["rough"]
    found = complete(model, graph, top=25, calibration=calibration, precision="tf32")
    assert rough["rough"]
    assert found.triples.tolist() == exact.triples.tolist()
    np.testing.assert_allclose(found.evidence, exact.evidence, atol=1e-5)
    np.testing.assert_allclose(found.score, exact.score, atol=1e-5)


def test_precision_is_given_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with precision.products_in("tf32"):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before


def test_refusals():
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    with pytest.raises(kg.RequestError, match="Precision is one of float32, tf32; 'half' came"):
        complete(model, graph, precision="half")
    with pytest.raises(kg.RequestError, match="tf32 is for matrix products on a GPU; the model is on cpu"):
        complete(model, graph, precision="tf32")

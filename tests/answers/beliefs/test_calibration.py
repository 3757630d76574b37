"""Calibration: monotone, fitted by what candidates weigh, relations near what all share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg
from dualkg.answers.beliefs import Calibration, calibrate, evidence_of
from dualkg.answers.beliefs import candidates as room
from dualkg.answers.beliefs.candidates import Candidates, draw_candidates
from dualkg.answers.beliefs.fitting import LEAST_SLOPE, fit_line, fit_lines
from tests.answers.beliefs.test_candidates import all_candidates

FLAT = {"centre": np.array([1.0, 0.0]), "precision": 1e-3 * np.eye(2)}


def drawn_by(slope: float, offset: float, num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Evidence, and marks that are true as often as the line says."""
    random = np.random.default_rng(seed)
    evidence = random.uniform(-6, 0, num)
    return evidence, random.random(num) < 1 / (1 + np.exp(-slope * evidence - offset))


def one(slope: float, offset: float) -> Calibration:
    return Calibration(torch.tensor([slope]), torch.tensor([offset]), torch.tensor([True]))


@given(
    slope=st.floats(0.001, 20),
    offset=st.floats(-20, 20),
    pair=st.tuples(st.floats(-30, 0), st.floats(-30, 0)).map(sorted),
)
def test_more_evidence_is_never_less_probable(slope, offset, pair):
    less, more = one(slope, offset).probability(torch.tensor(pair, dtype=torch.float64), torch.tensor([0, 0]))
    assert 0 <= less <= more <= 1


@given(slope=st.floats(0.1, 5), offset=st.floats(-5, 5), probability=st.floats(0.001, 0.999))
def test_least_evidence_is_where_the_probability_begins(slope, offset, probability):
    calibration = one(slope, offset)
    evidence = torch.tensor([calibration.least_evidence(probability, 0)], dtype=torch.float64)
    assert float(calibration.probability(evidence, torch.tensor([0]))) == pytest.approx(probability, rel=1e-4)


def test_the_line_that_made_the_marks_is_found():
    evidence, true = drawn_by(2.0, 3.0, 40_000)
    assert fit_line(evidence, true, np.ones(len(true)), **FLAT) == pytest.approx([2.0, 3.0], abs=0.1)


def test_a_tenth_of_the_false_ones_stands_for_all():
    evidence, true = drawn_by(2.0, 3.0, 40_000)
    kept = true | (np.arange(len(true)) % 10 == 0)
    weights = np.where(true, 1.0, 10.0)[kept]
    whole = fit_line(evidence, true, np.ones(len(true)), **FLAT)
    assert fit_line(evidence[kept], true[kept], weights, **FLAT) == pytest.approx(whole, abs=0.1)


def test_where_evidence_tells_all_apart_the_line_stays_finite():
    evidence = np.array([-3.0, -2.0, -1.0, -0.5])
    line = fit_line(evidence, np.array([False, False, True, True]), np.ones(4), **FLAT)
    assert np.isfinite(line).all()
    assert line[0] > 1


def test_contrary_evidence_is_not_believed():
    evidence, true = drawn_by(-1.0, -3.0, 5000)
    slope, offset = fit_line(evidence, true, np.ones(len(true)), **FLAT)
    assert slope == LEAST_SLOPE
    assert 1 / (1 + np.exp(-offset)) == pytest.approx(true.mean(), rel=0.05)


def test_relations_with_more_data_go_further_from_the_shared_line():
    """Relation 0 gives the shared line; 1 and 2 are alike, but 2 has twenty times as many; 3 has too few."""
    many, few = drawn_by(2.0, 4.0, 20_000), drawn_by(2.0, 1.0, 300)
    parts = [(0, *many), (1, *few), (2, *(np.tile(values, 20) for values in few)), (3, few[0][:5], few[1][:5])]
    relations = np.concatenate([np.full(len(evidence), relation) for relation, evidence, _ in parts])
    evidence, true = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
    triples = np.stack([relations, relations, relations], axis=1)
    slopes, offsets, own = fit_lines(evidence, Candidates(triples, true, np.ones(len(true))), 5)
    assert own.tolist() == [True, True, True, False, False]
    assert (slopes[3], offsets[3]) == (slopes[4], offsets[4])
    middle = slopes * -1.5 + offsets
    assert middle[4] > middle[1] > middle[2]


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 100))
def test_the_weighted_fit_is_the_fit_to_all_candidates(seed):
    from tests.conftest import graph_of

    random = np.random.default_rng(seed)
    triples = np.unique(np.stack([random.integers(0, n, 700) for n in (40, 2, 40)], axis=1), axis=0)
    random.shuffle(triples)
    graph = graph_of(triples[300:], triples[:200], triples[200:300], num_entities=40, num_relations=2)
    model = kg.DistMult(graph.shape, dim=6, init_scale=0.6, seed=seed)
    wanted = all_candidates(graph, "valid")
    every = Candidates(
        np.array([triple for triple, _, _ in wanted]), np.array([true for _, true, _ in wanted]), np.ones(len(wanted))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "BEST", 5)
        drawn = draw_candidates(model, graph, "valid", seed=seed)
    assert len(drawn.true) < 0.6 * len(wanted)
    lines = [
        np.stack(fit_lines(evidence_of(model, some.triples).double().numpy(), some, 2)[:2]) for some in (every, drawn)
    ]
    evidence = np.quantile(evidence_of(model, every.triples).numpy(), [0.1, 0.5, 0.9])[:, None]
    full, weighted = (1 / (1 + np.exp(-line[0] * evidence - line[1])) for line in lines)
    np.testing.assert_allclose(weighted, full, rtol=0.35)


def test_calibrate(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    calibration = calibrate(model, small_graph)
    assert calibration.slopes.shape == calibration.offsets.shape == calibration.own.shape == (4,)
    assert (calibration.slopes > 0).all()
    assert calibration.about["num_true"] == 40
    assert calibration.about["split"] == "valid"
    again = Calibration.from_dict(calibration.as_dict())
    assert torch.equal(again.slopes, calibration.slopes)
    assert torch.equal(again.own, calibration.own)
    assert again.about == calibration.about


def test_the_model_is_left_as_it_was(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4).train()
    calibrate(model, small_graph)
    assert model.training

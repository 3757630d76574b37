"""Calibration: monotone probabilities, bounded by their examples, weighted fits, shrinkage to
shared parameters.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference import calibration as calibration_module
from dualkg.inference.calibration import (
    MIN_SLOPE,
    PRIOR_MEAN,
    Calibration,
    Candidates,
    DomainRange,
    calibrate,
    fit_line,
    fit_relation_lines,
    line_values,
    max_supported_probability,
    sample_candidates,
)
from dualkg.inference.scoring import triple_log_probabilities
from tests.conftest import graph_of
from tests.inference.test_calibration_sampling import all_candidates

FLAT = {"centre": PRIOR_MEAN, "covariance": 1e3 * np.eye(5)}


def drawn_by(slope: float, offset: float, num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities, and labels that are true with the probability of the line."""
    random = np.random.default_rng(seed)
    log_probability = random.uniform(-6, 0, num)
    return log_probability, random.random(num) < 1 / (1 + np.exp(-slope * log_probability - offset))


def one_pattern(log_probability: np.ndarray) -> np.ndarray:
    return np.zeros(len(log_probability), dtype=np.int64)


def one(slope: float, *offsets: float, max_probability: float = 1.0) -> Calibration:
    return Calibration(
        torch.tensor([slope]), torch.tensor([offsets]), torch.tensor([True]), max_probability
    )


@given(
    slope=st.floats(0.001, 20),
    offset=st.floats(-20, 20),
    pair=st.tuples(st.floats(-30, 0), st.floats(-30, 0)).map(sorted),
    max_probability=st.floats(0.5, 1),
)
def test_probability_never_decreases_with_log_probability(slope, offset, pair, max_probability):
    calibration = one(slope, *[offset] * 4, max_probability=max_probability)
    same = torch.tensor([0, 0])
    less, more = calibration.probability(torch.tensor(pair, dtype=torch.float64), same, same)
    assert 0 <= less <= more <= max_probability


def test_fit_recovers_the_true_parameters():
    log_probability, true = drawn_by(2.0, 3.0, 40_000)
    line = fit_line(log_probability, one_pattern(log_probability), true, np.ones(len(true)), **FLAT)
    assert line[:2] == pytest.approx([2.0, 3.0], abs=0.1)


def test_each_pattern_has_its_own_offset():
    parts = [
        drawn_by(2.0, offset, 20_000, seed) for seed, offset in enumerate((3.0, 1.0, 4.0, -1.0))
    ]
    log_probability, true = (np.concatenate(values) for values in zip(*parts, strict=True))
    line = fit_line(
        log_probability, np.repeat(np.arange(4), 20_000), true, np.ones(len(true)), **FLAT
    )
    assert line == pytest.approx([2.0, 3.0, 1.0, 4.0, -1.0], abs=0.15)


def test_weights_replace_repeated_candidates():
    log_probability, true = drawn_by(2.0, 3.0, 40_000)
    sampled = true | (np.arange(len(true)) % 10 == 0)
    weights = np.where(true, 1.0, 10.0)[sampled]
    patterns = one_pattern(log_probability)
    whole = fit_line(log_probability, patterns, true, np.ones(len(true)), **FLAT)
    assert fit_line(
        log_probability[sampled], patterns[sampled], true[sampled], weights, **FLAT
    ) == pytest.approx(whole, abs=0.1)


def test_separable_data_have_finite_parameters():
    log_probability = np.array([-3.0, -2.0, -1.0, -0.5])
    line = fit_line(
        log_probability,
        one_pattern(log_probability),
        np.array([False, False, True, True]),
        np.ones(4),
        **FLAT,
    )
    assert np.isfinite(line).all()
    assert line[0] > 1


def test_few_examples_bound_the_probability():
    """Three valid triples that rank before all false candidates do not justify a probability near
    1.
    """
    log_probability = np.array([-0.1] * 6 + [-4.0] * 60)
    true = np.arange(66) < 6
    weights = np.ones(66)
    patterns = one_pattern(log_probability)
    drawn = Candidates(np.zeros((66, 3), dtype=np.int64), true, weights)
    lines, _ = fit_relation_lines(log_probability, patterns, drawn, 1)
    max_probability = max_supported_probability(
        line_values(lines[0], log_probability, patterns), true, weights
    )
    assert max_probability == pytest.approx(4 / 5)
    sure = line_values(lines[0], np.zeros(1), np.zeros(1, dtype=np.int64))
    assert 1 / (1 + np.exp(-sure)) < 0.99


@given(num=st.integers(1, 200), misses=st.integers(0, 200))
def test_max_supported_probability(num, misses):
    values = np.concatenate([np.linspace(3, 2, 2 * num), np.linspace(1, 0, 2 * misses)])
    found = max_supported_probability(
        values, np.arange(2 * (num + misses)) < 2 * num, np.ones(2 * (num + misses))
    )
    assert found == pytest.approx((num + 1) / (num + 2))
    reversed_ = max_supported_probability(
        -values, np.arange(2 * (num + misses)) < 2 * num, np.ones(2 * (num + misses))
    )
    assert reversed_ <= found


def test_the_slope_is_positive():
    log_probability, true = drawn_by(-1.0, -3.0, 5000)
    slope, offset, *_ = fit_line(
        log_probability, one_pattern(log_probability), true, np.ones(len(true)), **FLAT
    )
    assert slope == MIN_SLOPE
    assert 1 / (1 + np.exp(-offset)) == pytest.approx(true.mean(), rel=0.05)


def test_relations_with_more_data_deviate_more_from_the_shared_parameters():
    """Relation 0 gives the shared line; 1 and 2 have the same data, 2 twenty times; 3 has too
    few.
    """
    many = drawn_by(2.0, 4.0, 20_000)
    few = drawn_by(2.0, 1.0, 300)
    parts = [
        (0, *many),
        (1, *few),
        (2, *(np.tile(values, 20) for values in few)),
        (3, few[0][:5], few[1][:5]),
    ]
    relations = np.concatenate(
        [np.full(len(log_probability), relation) for relation, log_probability, _ in parts]
    )
    log_probability, true = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
    triples = np.stack([relations, relations, relations], axis=1)
    lines, own = fit_relation_lines(
        log_probability,
        one_pattern(log_probability),
        Candidates(triples, true, np.ones(len(true))),
        5,
    )
    assert own.tolist() == [True, True, True, False, False]
    assert lines[3].tolist() == lines[4].tolist()
    middle = lines[:, 0] * -1.5 + lines[:, 1]
    assert middle[4] > middle[1] > middle[2]


@settings(max_examples=6)
@given(seed=st.integers(0, 100))
def test_fit_to_a_sample_is_close_to_the_fit_to_all_candidates(seed):
    random = np.random.default_rng(seed)
    triples = np.unique(np.stack([random.integers(0, n, 700) for n in (40, 2, 40)], axis=1), axis=0)
    random.shuffle(triples)
    graph = graph_of(
        triples[300:], triples[:200], triples[200:300], num_entities=40, num_relations=2
    )
    model = kg.DistMult(graph.shape, dim=6, init_scale=0.6, seed=seed)
    wanted = all_candidates(graph, "valid")
    every = Candidates(
        np.array([triple for triple, _, _ in wanted]),
        np.array([true for _, true, _ in wanted]),
        np.ones(len(wanted)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_module, "NUM_BEST", 5)
        drawn = sample_candidates(model, graph, "valid", seed=seed)
    assert len(drawn.true) < 0.6 * len(wanted)
    patterns = DomainRange.of(graph)
    lines = [
        fit_relation_lines(
            triple_log_probabilities(model, some.triples).double().numpy(),
            patterns(some.triples),
            some,
            2,
        )[0]
        for some in (every, drawn)
    ]
    log_probability = np.quantile(
        triple_log_probabilities(model, every.triples).numpy(), [0.1, 0.5, 0.9]
    )[:, None]
    full, weighted = (
        1 / (1 + np.exp(-line[:, 0] * log_probability - line[:, 1])) for line in lines
    )
    np.testing.assert_allclose(weighted, full, rtol=0.35)


def test_calibrate(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    calibration = calibrate(model, small_graph)
    assert calibration.slopes.shape == calibration.relation_specific.shape == (4,)
    assert calibration.offsets.shape == (4, 4)
    assert (calibration.slopes > 0).all()
    assert 0 < calibration.max_probability < 1
    assert calibration.metadata["num_true"] == 40
    assert calibration.metadata["split"] == "valid"
    again = Calibration.from_dict(calibration.as_dict())
    assert torch.equal(again.slopes, calibration.slopes)
    assert torch.equal(again.relation_specific, calibration.relation_specific)
    assert again.max_probability == calibration.max_probability
    assert again.metadata == calibration.metadata


def test_calibration_does_not_change_the_mode_of_the_model(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4).train()
    calibrate(model, small_graph)
    assert model.training

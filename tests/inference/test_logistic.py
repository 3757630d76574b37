"""Lines of log odds: bounded by their examples, weighted fits, shrinkage to shared parameters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.logistic import (
    MIN_SLOPE,
    PRIOR_MEAN,
    Examples,
    fit_line,
    fit_relation_lines,
    line_values,
    max_supported_probability,
)
from dualkg.inference.probability import patterns_of, query_classes, triple_log_probabilities
from dualkg.inference.sampling import (
    Candidates,
    SamplingSettings,
    sample_candidates,
)
from tests.conftest import graph_of
from tests.inference.test_sampling import all_candidates

FLAT_PRIOR = {"centre": PRIOR_MEAN, "covariance": 1e3 * np.eye(5)}


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def drawn_by(slope: float, offset: float, num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities, and labels that are true with the probability of the line."""
    random = np.random.default_rng(seed)
    log_probability = random.uniform(-6, 0, num)
    probability = sigmoid(slope * log_probability + offset)
    return log_probability, random.random(num) < probability


def examples_of(
    log_probability: np.ndarray,
    true: np.ndarray,
    *,
    patterns: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    relations: np.ndarray | None = None,
) -> Examples:
    """Examples of one pattern and one relation with weight 1, unless others are given."""
    zeros = np.zeros(len(true), dtype=np.int64)
    return Examples(
        log_probability,
        zeros if patterns is None else patterns,
        true,
        np.ones(len(true)) if weights is None else weights,
        zeros if relations is None else relations,
    )


def test_fit_recovers_the_true_parameters():
    line = fit_line(examples_of(*drawn_by(2.0, 3.0, 40_000)), **FLAT_PRIOR)
    assert line[:2] == pytest.approx([2.0, 3.0], abs=0.1)


def test_each_pattern_has_its_own_offset():
    offsets = [3.0, 1.0, 4.0, -1.0]
    samples = [drawn_by(2.0, offset, 20_000, seed) for seed, offset in enumerate(offsets)]
    examples = examples_of(
        np.concatenate([log_probability for log_probability, _ in samples]),
        np.concatenate([true for _, true in samples]),
        patterns=np.repeat(np.arange(4), 20_000),
    )
    assert fit_line(examples, **FLAT_PRIOR) == pytest.approx([2.0, *offsets], abs=0.15)


def test_weights_replace_repeated_candidates():
    log_probability, true = drawn_by(2.0, 3.0, 40_000)
    whole = fit_line(examples_of(log_probability, true), **FLAT_PRIOR)

    sampled = true | (np.arange(len(true)) % 10 == 0)
    weights = np.where(true, 1.0, 10.0)[sampled]
    sample = examples_of(log_probability[sampled], true[sampled], weights=weights)
    assert fit_line(sample, **FLAT_PRIOR) == pytest.approx(whole, abs=0.1)


def test_separable_data_have_finite_parameters():
    log_probability = np.array([-3.0, -2.0, -1.0, -0.5])
    true = np.array([False, False, True, True])
    line = fit_line(examples_of(log_probability, true), **FLAT_PRIOR)
    assert np.isfinite(line).all()
    assert line[0] > 1


def test_few_examples_bound_the_probability():
    """Three valid triples that rank before all false candidates justify no probability near 1."""
    log_probability = np.array([-0.1] * 6 + [-4.0] * 60)
    true = np.arange(66) < 6
    examples = examples_of(log_probability, true)
    lines, _ = fit_relation_lines(examples, 1)

    log_odds = line_values(lines[0], log_probability, examples.patterns)
    max_probability = max_supported_probability(log_odds, true, examples.weights)
    assert max_probability == pytest.approx(4 / 5)
    log_odds_of_certainty = line_values(lines[0], np.zeros(1), np.zeros(1, dtype=np.int64))
    assert sigmoid(log_odds_of_certainty) < 0.99


@given(num_true=st.integers(1, 200), num_false=st.integers(0, 200))
def test_max_supported_probability(num_true, num_false):
    log_odds = np.concatenate([np.linspace(3, 2, 2 * num_true), np.linspace(1, 0, 2 * num_false)])
    true = np.arange(len(log_odds)) < 2 * num_true
    weights = np.ones(len(log_odds))
    supported = max_supported_probability(log_odds, true, weights)
    assert supported == pytest.approx((num_true + 1) / (num_true + 2))
    assert max_supported_probability(-log_odds, true, weights) <= supported


def test_the_slope_is_positive():
    log_probability, true = drawn_by(-1.0, -3.0, 5000)
    slope, offset, *_ = fit_line(examples_of(log_probability, true), **FLAT_PRIOR)
    assert slope == MIN_SLOPE
    assert sigmoid(offset) == pytest.approx(true.mean(), rel=0.05)


def test_relations_with_more_data_deviate_more_from_the_shared_parameters():
    """Relation 0 gives the shared line; 1 and 2 have the same data, 2 twenty times; 3 has too
    few.
    """
    common = drawn_by(2.0, 4.0, 20_000)
    other_log_probability, other_true = drawn_by(2.0, 1.0, 300)
    samples = [
        common,
        (other_log_probability, other_true),
        (np.tile(other_log_probability, 20), np.tile(other_true, 20)),
        (other_log_probability[:5], other_true[:5]),
    ]
    sizes = [len(true) for _, true in samples]
    examples = examples_of(
        np.concatenate([log_probability for log_probability, _ in samples]),
        np.concatenate([true for _, true in samples]),
        relations=np.repeat(np.arange(4), sizes),
    )
    lines, relation_specific = fit_relation_lines(examples, 5)
    assert relation_specific.tolist() == [True, True, True, False, False]
    assert lines[3].tolist() == lines[4].tolist()
    middles = lines[:, 0] * -1.5 + lines[:, 1]
    assert middles[4] > middles[1] > middles[2]


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
    listed = all_candidates(graph, "valid")
    whole = Candidates(
        np.array([candidate.triple for candidate in listed]),
        np.array([candidate.true for candidate in listed]),
        np.ones(len(listed)),
    )
    sample = sample_candidates(
        model, graph, "valid", seed=seed, settings=SamplingSettings(num_best=5)
    )
    assert len(sample.true) < 0.6 * len(listed)

    def lines_of(candidates: Candidates) -> np.ndarray:
        log_probability = triple_log_probabilities(model, candidates.triples).double().numpy()
        heads, relations, tails = candidates.triples.T
        train = query_classes(graph)
        new_heads = train.num_answers(heads, relations) == 0
        new_tails = train.num_answers(tails, relations + 2) == 0
        examples = Examples(
            log_probability,
            patterns_of(new_heads, new_tails, symmetric=False),
            candidates.true,
            candidates.weights,
            candidates.relations,
        )
        lines, _ = fit_relation_lines(examples, 2)
        return lines

    of_all = triple_log_probabilities(model, whole.triples).numpy()
    log_probability = np.quantile(of_all, [0.1, 0.5, 0.9])[:, None]

    def probabilities_by(lines: np.ndarray) -> np.ndarray:
        return sigmoid(lines[:, 0] * log_probability + lines[:, 1])

    np.testing.assert_allclose(
        probabilities_by(lines_of(sample)), probabilities_by(lines_of(whole)), rtol=0.35
    )

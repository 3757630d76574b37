"""Paired comparison: properties for any ranks, a case worked out by hand, coverage of the
interval.
"""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dualkg.errors import InvalidValue, RequestError
from dualkg.evaluation.comparison import (
    compare_by,
    compare_ranks,
    holm,
    largest_differences,
    short_decimal,
    stack_mean_ranks,
)
from dualkg.evaluation.metrics import METRICS, Metrics
from dualkg.evaluation.ranking import Ranks
from tests.conftest import graph_of
from tests.raising import refused

RANKS = st.integers(2, 40).map(lambda twice: twice / 2)  # a tie may lie between two places


@st.composite
def pairs(draw, fewest=10):
    """Ranks of two runs of any numbers of seeds on the same triples."""
    num_triples = draw(st.integers(fewest, 20))
    return [
        draw(
            arrays(
                np.float64,
                (draw(st.integers(1, 3)), 2, num_triples),
                elements=RANKS,
                fill=st.nothing(),
            )
        )
        for _ in range(2)
    ]


def alike(one, other) -> bool:
    return one == pytest.approx(other, abs=1e-12, nan_ok=True)


@given(pairs())
def test_compared_metrics_equal_those_of_reports(pair):
    found = compare_ranks(*pair, samples=100)
    for name in METRICS.compared():
        one = found.metrics[name]
        assert alike(one.a, getattr(Metrics.of(pair[0]), name))
        assert alike(one.b, getattr(Metrics.of(pair[1]), name))
        assert alike(one.difference, one.a - one.b)
        assert one.low <= one.high
        assert 0 < one.p_value <= 1
        assert one.within_noise == (one.low <= 0 <= one.high)
    assert alike(found.better + found.worse + found.equal, 1)


@given(pairs())
def test_a_run_compared_with_itself_has_no_difference(pair):
    """Also with its seeds in another order, or each of them twice."""
    for other in (pair[0], pair[0][::-1], np.repeat(pair[0], 2, axis=0)):
        found = compare_ranks(pair[0], other, samples=100)
        assert (found.better, found.worse, found.equal) == (0, 0, 1)
        for one in found.differences.values():
            assert (one.low, one.high, one.p_value, one.within_noise) == (0, 0, 1, True)
        assert found.sentence() == "The difference of .0000 is within noise (95 %: .0000 to .0000)."


@given(pairs())
def test_swapping_the_runs_changes_every_sign(pair):
    one = compare_ranks(*pair, samples=200)
    other = compare_ranks(*pair[::-1], samples=200)
    assert (one.better, one.worse, one.equal) == (other.worse, other.better, other.equal)
    for here, there in zip(one.differences.values(), other.differences.values(), strict=True):
        assert alike((here.a, here.difference, here.low), (there.b, -there.difference, -there.high))
        assert here.p_value == there.p_value
        assert here.within_noise == there.within_noise


@settings(max_examples=20)
@given(pairs())
def test_the_order_of_directions_does_not_matter(pair):
    one = compare_ranks(*pair, samples=200)
    rotated = compare_ranks(*(ranks[:, ::-1] for ranks in pair), samples=200)
    for here, there in zip(one.differences.values(), rotated.differences.values(), strict=True):
        assert alike(
            (here.difference, here.low, here.high), (there.difference, there.low, there.high)
        )


def ranks_of(*tails, heads=None):
    """One run, `(1, 2, num_triples)`; its head queries are ranked as its tail queries are, unless
    given.
    """
    return np.array([[tails, heads or tails]], dtype=float)


def test_by_hand():
    """Ten triples; A ranks 1, B ranks 2, 2, 2, 2 on four of them, 1 on five, and A ranks 4 where B
    has 1 on the last.

    Reciprocal ranks differ by ½ four times and by −¾ once: (2 − ¾) / 10 = .125. Hits@1 differ by (4
    − 1) / 10, Hits@3 by −1 / 10, Hits@10 nowhere.
    """
    a = ranks_of(1, 1, 1, 1, 1, 1, 1, 1, 1, 4)
    b = ranks_of(2, 2, 2, 2, 1, 1, 1, 1, 1, 1)
    found = compare_ranks(a, b)
    assert [round(one.difference, 9) for one in found.differences.values()] == [0.125, 0.3, -0.1, 0]
    assert (found.better, found.worse, found.equal, found.num_triples) == (0.4, 0.1, 0.5, 10)
    assert found.hits_at_10.p_value == 1


def binomial_quantile(n: int, p: float, wanted: float) -> int:
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= wanted:
            return k
    return n


def test_the_interval_and_the_p_value_are_those_of_the_bootstrap_distribution():
    """A hits on all 20 triples and B misses k: a sample's difference is Binomial(20, k/20) / 20,
    exactly.
    """
    for num_missed, within in ((2, True), (8, False)):
        b = ranks_of(*[11] * num_missed, *[1] * (20 - num_missed))
        found = compare_ranks(ranks_of(*[1] * 20), b, samples=40_000).hits_at_10
        ends = [binomial_quantile(20, num_missed / 20, tail) / 20 for tail in (0.025, 0.975)]
        assert [found.low, found.high] == pytest.approx(ends)
        assert found.p_value == pytest.approx(2 * (1 - num_missed / 20) ** 20, rel=0.1, abs=1e-4)
        assert found.within_noise is within


def test_both_directions_of_a_triple_are_drawn_together():
    """The second direction repeats the first, so it tells nothing new, and the interval is as wide
    as without it.
    """
    random = np.random.default_rng(0)
    a, b = (random.integers(1, 20, (1, 1, 400)).astype(float) for _ in range(2))
    once = compare_ranks(a, b).mrr
    twice = compare_ranks(np.repeat(a, 2, axis=1), np.repeat(b, 2, axis=1)).mrr
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high), abs=1e-12)
    as_others = compare_ranks(np.concatenate([a, a], axis=2), np.concatenate([b, b], axis=2)).mrr
    assert (as_others.high - as_others.low) == pytest.approx(
        (once.high - once.low) / math.sqrt(2), rel=0.1
    )


def test_metrics_are_averaged_over_seeds():
    one = ranks_of(*[1] * 12)
    other = ranks_of(*[4] * 12)
    b = ranks_of(*[2] * 12)
    found = compare_ranks(np.concatenate([one, other]), b).mrr  # (1 + ¼) / 2 against ½
    assert found.difference == pytest.approx(0.125)
    assert (found.low, found.high) == pytest.approx((0.125, 0.125))


@pytest.mark.slow
def test_the_interval_has_its_nominal_coverage():
    """Drawn from a population with a known difference, 400 times; both directions of a triple go
    together.
    """
    random = np.random.default_rng(1)
    num_triples = 150
    covered = 0
    found_none = 0
    population = (
        np.exp(random.exponential(1.2, (2, 2, 5000)) + random.exponential(0.6, (1, 1, 5000)))
        .round()
        .clip(1)
    )
    population[1] = np.where(random.random((2, 5000)) < 0.5, population[0], population[1])
    population[1, :, ::10] += 3  # B is a little worse
    truth = (1 / population[0]).mean() - (1 / population[1]).mean()
    for seed in range(400):
        drawn = random.integers(0, 5000, num_triples)
        a, b = population[:, None, :, :][..., drawn]
        found = compare_ranks(a, b, samples=400, seed=seed).mrr
        covered += found.low <= truth <= found.high
        other = compare_ranks(
            *np.where(random.random((1, 1, num_triples)) < 0.5, (a, b), (b, a)), samples=400
        ).mrr
        found_none += other.within_noise  # where nothing but chance says which of the two is A
    assert 0.92 <= covered / 400 <= 0.98
    assert 0.92 <= found_none / 400 <= 0.98


def test_the_interval_depends_on_the_seed_and_not_on_threads(monkeypatch):
    random = np.random.default_rng(0)
    a, b = (random.integers(1, 20, (1, 2, 300)).astype(float) for _ in range(2))
    assert compare_ranks(a, b, samples=500) == compare_ranks(a, b, samples=500)
    assert compare_ranks(a, b, samples=500) != compare_ranks(a, b, samples=500, seed=1)
    monkeypatch.setattr("dualkg.evaluation.comparison.torch.get_num_threads", lambda: 5)
    assert compare_ranks(a, b, samples=500) == compare_ranks(a, b, samples=500, seed=0)


def test_sentences():
    random = np.random.default_rng(0)
    b = random.integers(2, 20, (1, 2, 300)).astype(float)
    ahead = compare_ranks(np.ones_like(b), b)
    difference = short_decimal(ahead.mrr.difference)
    low = short_decimal(ahead.mrr.low)
    words = f"is better by {difference} MRR (95 %: {low} to "
    assert ahead.sentence("ComplEx-DURA", "ComplEx").startswith(f"ComplEx-DURA {words}.8")
    assert compare_ranks(b, np.ones_like(b)).sentence("ComplEx", "CP").startswith(f"CP {words}.8")
    few = compare_ranks(ranks_of(1, 1), ranks_of(2, 2))
    assert few.sentence() == "2 triples are too few to tell the difference of .5000 MRR from noise."
    assert few.within_noise
    assert few.as_dict()["mrr"]["low"] is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.01234, ".0123"), (-0.0011, "−.0011"), (-0.00001, ".0000"), (1, "1.0000"), (-1, "−1.0000")],
)
def test_short_decimals(number, text):
    assert short_decimal(number) == text


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (
            np.ones((2, 5)),
            np.ones((1, 2, 5)),
            "are of the shape (num_seeds, 2, num_triples); those of A are (2, 5)",
        ),
        (
            np.ones((1, 2, 5)),
            np.ones((1, 2, 0)),
            "are of the shape (num_seeds, 2, num_triples); those of B are (1, 2, 0)",
        ),
        (
            np.zeros((1, 2, 5)),
            np.ones((1, 2, 5)),
            "are numbers from 1 on; A has others",
        ),
        (
            np.ones((1, 2, 5)),
            np.full((1, 2, 5), np.nan),
            "are numbers from 1 on; B has others",
        ),
    ],
)
def test_invalid_ranks_are_refused(a, b, reason):
    with pytest.raises(RequestError, match=re.escape(reason)):
        compare_ranks(a, b)


def test_ranks_of_different_splits_are_refused():
    sentence = "A has ranks of 2 × 5 queries and B of 2 × 6: only ranks of the same split"
    with pytest.raises(RequestError, match=sentence):
        compare_ranks(np.ones((1, 2, 5)), np.ones((1, 2, 6)))


@pytest.mark.parametrize(
    ("setting", "value", "expected"), [("samples", 99, "at least 100"), ("seed", -1, "at least 0")]
)
def test_invalid_settings_of_a_comparison_are_refused(setting, value, expected):
    ranks = np.ones((1, 2, 5))
    with refused(InvalidValue, setting=setting, expected=expected, found=value):
        compare_ranks(ranks, ranks, **{setting: value})


def test_views():
    """Of relation r0 all tails, of r1 all heads differ."""
    triples = [(i, i % 2, i + 1) for i in range(40)]
    graph = graph_of(triples, [], triples)
    a = np.ones((1, 2, 40))
    b = a.copy()
    b[0, 0, ::2] = 2
    b[0, 1, 1::2] = 4
    by_relation = compare_by(a, b, graph.test, graph, view="relation", samples=500)
    found = {name: part.comparison.mrr.difference for name, part in by_relation.items()}
    assert found == pytest.approx({"r0": 0.25, "r1": 0.375})
    by_direction = compare_by(a, b, graph.test, graph, view="direction", samples=500)
    found = {name: part.comparison.mrr.difference for name, part in by_direction.items()}
    assert found == pytest.approx({"tail": 0.25, "head": 0.375})
    (whole,) = compare_by(a, b, graph.test, graph, view="cardinality", samples=500).items()
    assert whole[0] == "1-1"
    assert whole[1].comparison == compare_ranks(a, b, samples=500)
    assert whole[1].p_corrected == whole[1].comparison.mrr.p_value


def test_holm_by_hand():
    """In order: .01 · 4, .02 · 3, .03 · 2 but no less than the one before, .5 · 1."""
    found = holm([0.02, math.nan, 0.01, 0.5, 0.03])
    assert found == pytest.approx([0.06, math.nan, 0.04, 0.5, 0.06], nan_ok=True)
    assert holm([0.9, 0.9]) == [1.0, 1.0]


def test_the_largest_differences_of_queries():
    triples = np.array([[0, 0, 1], [1, 1, 2], [2, 0, 0]], dtype=np.int32)
    a = ranks_of(1, 2, 4, heads=[1, 10, 1])
    b = ranks_of(1, 1, 4, heads=[1, 10, 100])
    first, second = largest_differences(a, b, triples, most=9)
    assert (first.head, first.relation, first.tail, first.direction) == (2, 0, 0, "head")
    assert (first.rank_a, first.rank_b, first.difference) == pytest.approx((1, 100, 0.99))
    assert (second.tail, second.direction, second.difference) == (2, "tail", pytest.approx(-0.5))
    assert largest_differences(a, b, triples, most=1) == [first]
    seeds = np.concatenate([ranks_of(1, 1, 1), ranks_of(3, 1, 1)])
    (only,) = largest_differences(seeds, ranks_of(1, 1, 1), triples, most=1)
    assert only.rank_a == pytest.approx(1.5)  # 1 / ((1 + ⅓) / 2)


def test_ranks_of_seeds_are_stacked_at_the_mean_of_ties():
    one = Ranks(np.array([[0, 0, 1]], dtype=np.int32), np.array([[1], [2]]), np.array([[2], [2]]))
    other = Ranks(np.array([[1, 0, 0]], dtype=np.int32), one.optimistic, one.pessimistic)
    np.testing.assert_array_equal(stack_mean_ranks([one, one]), [[[1.5], [2]]] * 2)
    with pytest.raises(RequestError, match="do not rank the same triples in the same order"):
        stack_mean_ranks([one, other])

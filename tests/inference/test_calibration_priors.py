"""Prior correction: priors by hand, and the log-probability that log odds require."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.inference.calibration import Calibration, PriorCorrection
from dualkg.inference.completion import complete
from dualkg.inference.recalibration import Recalibration
from dualkg.without_torch.priors import answered_shares, check_missing_share
from dualkg.without_torch.probabilities import log_odds_of
from dualkg.without_torch.query_classes import NUM_CLASSES, QueryClasses
from tests.conftest import graph_of


def calibration_of(
    slope: float,
    offsets: tuple[float, ...],
    *,
    max_probability: float = 1.0,
    recalibration: Recalibration | None = None,
    num_relations: int = 1,
) -> Calibration:
    return Calibration(
        slopes=torch.full((num_relations,), slope),
        offsets=torch.tensor([offsets] * num_relations),
        relation_specific=torch.ones(num_relations).bool(),
        max_probability=max_probability,
        recalibration=recalibration,
    )


def test_priors_by_hand():
    """r0 has the heads 0 and 1 of six entities in train; valid queries 0, and 4, which is new. r1
    has no queries. No entity has two roles, so none is evidence of a type.
    """
    train = [(0, 0, 2), (1, 0, 2), (5, 1, 3)]
    valid = [(0, 0, 3), (4, 0, 2), (0, 0, 5)]
    graph = graph_of(train, valid, num_entities=6)
    calibration = calibration_of(1.0, (0.0,) * 4, num_relations=2)
    correction = PriorCorrection.of(calibration, graph)
    once, twice, new = 0, 1, NUM_CLASSES - 1

    # Of all roles, 2 + 1 + 1 queries have one answer in train, and 1 of these is asked in valid;
    # the tail 2 has two answers, and is asked; 4 + 5 + 5 + 5 have none, and 3 of these are asked.
    assert correction.heads[0, once] == pytest.approx((1 + 1) / (2 + 4))
    assert correction.heads[0, new] == pytest.approx((1 + 1) / (4 + 19 / 3))
    assert correction.heads[1, once] == pytest.approx((0 + 1) / (1 + 4))
    assert correction.heads[1, new] == pytest.approx((0 + 1) / (5 + 19 / 3))
    assert correction.tails[0, twice] == pytest.approx((1 + 1) / (1 + 1))
    assert correction.tails[0, new] == pytest.approx((2 + 1) / (5 + 19 / 3))

    triples = np.array([(0, 0, 2), (4, 0, 2), (0, 0, 3), (4, 0, 3)])
    heads = correction.heads[0, [once, new, once, new]]
    tails = correction.tails[0, [twice, twice, new, new]]
    np.testing.assert_allclose(correction.priors_of(triples), (heads + tails) / 2)
    assert correction.priors(0)[new, twice] == correction.priors_of(triples)[1]

    of_queries = correction.query_priors(0, torch.tensor([0, 1]), "head")
    np.testing.assert_allclose(of_queries, [correction.heads[0, once], correction.heads[1, new]])


def test_a_graph_without_valid_triples_has_priors():
    graph = graph_of([(0, 0, 1)], [], num_entities=2)
    priors = PriorCorrection.of(calibration_of(1.0, (0.0,) * 4), graph).priors(0)
    assert ((priors > 0) & (priors <= 1)).all()


def test_odds_are_the_prior_times_the_odds_of_an_answer():
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3)], num_entities=5)
    calibration = calibration_of(2.0, (1.0, 0.0, -1.0, 3.0), max_probability=0.7)
    correction = PriorCorrection.of(calibration, graph)
    log_probability = torch.tensor([-0.5, -1.0, -2.0, -0.1])
    patterns = torch.arange(4)
    relations = torch.zeros(4, dtype=torch.long)

    # Both ends known, a new head, a new tail, and both new.
    triples = np.array([(0, 0, 3), (1, 0, 3), (0, 0, 4), (4, 0, 2)])
    of_answers = calibration.probability(log_probability, relations, patterns)
    odds = of_answers / (1 - of_answers) * torch.from_numpy(correction.priors_of(triples))
    of_triples = correction.of_triples(triples, log_probability)
    np.testing.assert_allclose(of_triples.answer_probability, of_answers)
    np.testing.assert_allclose(of_triples.probability, odds / (1 + odds), rtol=1e-6)


def test_a_given_share_of_missing_triples_multiplies_all_odds():
    """The graph has 5 triples in its splits, one of them valid. A share of .6 is 7.5 of 12.5."""
    graph = graph_of([(0, 0, 1), (2, 0, 3), (0, 0, 4)], [(0, 0, 3)], [(2, 0, 1)], num_entities=5)
    calibration = calibration_of(2.0, (1.0, 0.0, -1.0, 3.0), max_probability=0.7)
    given = replace(calibration, missing_share=0.6)
    assert given.assumed_missing(graph) == pytest.approx((7.5, 0.6, 7.5))
    assert calibration.assumed_missing(graph) == pytest.approx((1.0, 1 / 6, 1.0))

    log_probability = torch.tensor([-0.5, -1.0, -2.0, -0.1])
    triples = np.array([(0, 0, 3), (1, 0, 3), (0, 0, 4), (4, 0, 2)])
    measured = PriorCorrection.of(calibration, graph).of_triples(triples, log_probability)
    correction = PriorCorrection.of(given, graph)
    of_triples = correction.of_triples(triples, log_probability)
    odds = 7.5 * measured.probability / (1 - measured.probability)
    np.testing.assert_allclose(of_triples.probability, odds / (1 + odds), rtol=1e-6)
    assert (of_triples.answer_probability >= measured.answer_probability).all()
    assert (of_triples.answer_probability + 1e-6 >= of_triples.probability).all()

    # The first triple reaches its own log odds with its own log-probability.
    reached = float(of_triples.log_odds[0])
    classes = [
        correction.query_classes.of_pairs(triples[:1, end], roles).item()
        for end, roles in ((0, np.array([0])), (2, np.array([1])))
    ]
    required = correction.required_log_probability(reached, 0)[tuple(classes)]
    assert float(required) == pytest.approx(-0.5, abs=1e-5)


def test_a_share_as_measured_changes_no_bit(small_graph):
    """Without a share, or with that of valid, probabilities are those of the priors of valid."""
    calibration = calibration_of(1.5, (0.5, 0.0, -1.0, 1.0), num_relations=4)
    correction = PriorCorrection.of(calibration, small_graph)
    heads, tails = answered_shares(
        QueryClasses.of(small_graph), QueryClasses.of(small_graph, split="valid")
    )
    assert correction.heads.tolist() == heads.tolist()
    assert correction.tails.tolist() == tails.tolist()

    share = calibration.assumed_missing(small_graph).share
    same = PriorCorrection.of(replace(calibration, missing_share=share), small_graph)
    np.testing.assert_allclose(same.heads, correction.heads, rtol=1e-12)


def test_with_the_true_share_probabilities_are_right_for_more_missing_triples():
    """A line that is right for 10,000 valid triples, and 40,000 that are missing."""
    random = np.random.default_rng(0)
    true = random.normal(-1.0, 1.0, 40_000)
    false = random.normal(-4.0, 1.0, 200_000)
    # The likelihood ratio of the two normal distributions is exp(3 x + 7.5).
    offset = 7.5 + np.log(10_000 / 200_000)
    calibration = replace(calibration_of(3.0, (offset,) * 4), missing_share=2 / 3)

    # Of 6 triples, 2 are in the splits, and 1 of these in valid.
    graph = graph_of([(0, 0, 1)], [(0, 0, 2)], num_entities=3)
    per_valid = calibration.assumed_missing(graph).per_valid
    assert per_valid == pytest.approx(4)
    priors = torch.full((1, NUM_CLASSES), per_valid, dtype=torch.float64)
    correction = replace(PriorCorrection.of(calibration, graph), heads=priors, tails=priors)

    values = np.concatenate([true, false])
    triples = np.tile([0, 0, 2], (len(values), 1))
    probability = correction.of_triples(triples, torch.from_numpy(values)).probability
    for lower in (0.1, 0.5, 0.8):
        chosen = (probability >= lower) & (probability < lower + 0.2)
        observed = chosen[: len(true)].sum() / chosen.sum()
        assert probability[chosen].mean() == pytest.approx(observed, abs=0.02)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_that_cannot_be_missing_is_refused(share):
    with pytest.raises(InvalidValue) as refusal:
        check_missing_share(share)
    assert refusal.value.setting == "missing_share"


def test_probabilities_add_up_to_the_missing_triples():
    """A calibration fitted on a tenth of all queries, with the prior 0.1, is right for all
    triples.
    """
    random = np.random.default_rng(0)
    log_probability = random.uniform(-9, 0, 400_000)
    true = random.random(len(log_probability)) < 1 / (1 + np.exp(-2 * log_probability + 1.0))
    # All missing triples are queried, and a tenth of the others.
    queried = true | (random.random(len(log_probability)) < 0.1)

    graph = graph_of([(0, 0, 1)], [(0, 0, 2)], num_entities=3)
    offset = -1.0 - np.log(0.1)  # of the line of the queried triples
    calibration = calibration_of(2.0, (offset,) * 4)
    share = torch.full((1, NUM_CLASSES), 0.1, dtype=torch.float64)
    correction = replace(PriorCorrection.of(calibration, graph), heads=share, tails=share)

    triples = np.tile([0, 0, 2], (len(log_probability), 1))
    of_all = correction.of_triples(triples, torch.from_numpy(log_probability)).probability
    zeros = torch.zeros(len(log_probability), dtype=torch.long)
    of_queried = calibration.probability(
        torch.from_numpy(log_probability[queried]), zeros[queried], zeros[queried]
    )
    assert float(of_queried.sum()) == pytest.approx(true.sum(), rel=0.02)
    assert float(of_all.sum()) == pytest.approx(true.sum(), rel=0.02)


@given(
    slope=st.floats(0.1, 5),
    offsets=st.tuples(*[st.floats(-5, 5)] * 4),
    max_probability=st.floats(0.3, 1),
    wanted=st.floats(-12, 3),
    values=st.none() | st.lists(st.floats(-6, 3), min_size=3, max_size=3, unique=True).map(sorted),
)
def test_required_log_probability_inverts_the_log_odds(
    slope, offsets, max_probability, wanted, values
):
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3), (4, 0, 1)], num_entities=6)
    recalibration = None
    if values is not None:
        assume(min(np.diff(values)) > 0.1)
        knots = torch.tensor([-4.0, -1.0, 2.0], dtype=torch.float64)
        recalibration = Recalibration(knots, torch.tensor(values, dtype=torch.float64))
    calibration = calibration_of(
        slope, offsets, max_probability=max_probability, recalibration=recalibration
    )
    correction = PriorCorrection.of(calibration, graph)
    required = correction.required_log_probability(wanted, 0)

    for triple in itertools.product(range(6), [0], range(6)):
        triples = np.array([triple, triple])
        head, tail = correction.query_classes.of_relation(0)[[0, 1], [triple[0], triple[2]]]
        log_probability = required[head, tail]
        if log_probability == torch.inf:
            log_prior = math.log(correction.priors_of(triples)[0])
            assert log_prior + log_odds_of(max_probability) < wanted
            continue
        values_of_triples = torch.stack([log_probability, log_probability - 1e-2])
        reached, missed = correction.of_triples(triples, values_of_triples).log_odds
        assert float(reached) == pytest.approx(wanted, abs=1e-3)
        assert float(missed) < wanted
    assert (correction.required_log_probability(-np.inf, 0) == -np.inf).all()


def test_completion_prefers_relations_with_many_missing_triples():
    """Two relations with the same scores; valid has answers of the first alone."""
    train = [(head, relation, 10 + head % 3) for relation in (0, 1) for head in range(6)]
    graph = graph_of(train, [(0, 0, 11), (1, 0, 12), (2, 0, 10)], num_entities=20)
    model = kg.CP(graph.shape, dim=2, init_scale=0.0)
    calibration = calibration_of(1.0, (2.0,) * 4, num_relations=2)
    completion = complete(model, graph, top=20, calibration=calibration)
    assert set(completion.relations.tolist()) == {0}
    assert (completion.probability < completion.answer_probability).all()

"""Prior correction: priors by hand, and the log-probability that log odds require."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.calibration import Calibration, PriorCorrection, log_odds_of
from dualkg.inference.completion import complete
from dualkg.inference.recalibration import Recalibration
from dualkg.inference.sampling import DomainRange
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
    has no queries.
    """
    train = [(0, 0, 2), (1, 0, 2), (5, 1, 3)]
    valid = [(0, 0, 3), (4, 0, 2), (0, 0, 5)]
    graph = graph_of(train, valid, num_entities=6)
    calibration = calibration_of(1.0, (0.0,) * 4, num_relations=2)
    correction = PriorCorrection.of(calibration, graph)

    # Over both relations train has 2 + 1 heads, of which 1 is queried, and 4 + 5 other entities, of
    # which 1 is: 1/3 and 1/9.
    heads = [
        [(1 + 1) / (2 + 3), (1 + 1) / (4 + 9)],
        [(0 + 1) / (1 + 3), (0 + 1) / (5 + 9)],
    ]
    np.testing.assert_allclose(correction.heads, heads)

    # r0 has the tail 2 in train, and queries of 2, 3 and 5. Of 1 + 1 tails in train 1 is queried,
    # of 5 + 5 new ones 2.
    tails = [
        [(1 + 1) / (1 + 2), (2 + 1) / (5 + 5)],
        [(0 + 1) / (1 + 2), (0 + 1) / (5 + 5)],
    ]
    np.testing.assert_allclose(correction.tails, tails)

    both_known = (heads[0][0] + tails[0][0]) / 2
    new_head = (heads[0][1] + tails[0][0]) / 2
    new_tail = (heads[0][0] + tails[0][1]) / 2
    both_new = (heads[0][1] + tails[0][1]) / 2
    np.testing.assert_allclose(correction.priors[0], [both_known, new_head, new_tail, both_new])

    of_queries = correction.query_priors(0, torch.tensor([0, 1]), "head")
    np.testing.assert_allclose(of_queries, [heads[0][0], heads[1][1]])


def test_a_graph_without_valid_triples_has_priors():
    graph = graph_of([(0, 0, 1)], [], num_entities=2)
    priors = PriorCorrection.of(calibration_of(1.0, (0.0,) * 4), graph).priors
    assert ((priors > 0) & (priors <= 1)).all()


def test_odds_are_the_prior_times_the_odds_of_an_answer():
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3)], num_entities=5)
    calibration = calibration_of(2.0, (1.0, 0.0, -1.0, 3.0), max_probability=0.7)
    correction = PriorCorrection.of(calibration, graph)
    log_probability = torch.tensor([-0.5, -1.0, -2.0, -0.1])
    patterns = torch.arange(4)
    relations = torch.zeros(4, dtype=torch.long)

    of_answers = calibration.probability(log_probability, relations, patterns)
    odds = of_answers / (1 - of_answers) * correction.priors[0]
    of_triples = correction.probability(log_probability, relations, patterns)
    np.testing.assert_allclose(of_triples, odds / (1 + odds), rtol=1e-6)


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
    share = torch.tensor([[0.1, 0.1]], dtype=torch.float64)
    correction = PriorCorrection(calibration, DomainRange.of(graph), share, share)

    zeros = torch.zeros(len(log_probability), dtype=torch.long)
    of_all = correction.probability(torch.from_numpy(log_probability), zeros, zeros)
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

    for pattern in range(4):
        log_probability = required[pattern % 2, pattern // 2]
        if log_probability == torch.inf:
            log_prior = float(correction.priors[0, pattern].log())
            assert log_prior + log_odds_of(max_probability) < wanted
            continue
        reached, missed = correction.log_odds(
            torch.stack([log_probability, log_probability - 1e-2]),
            torch.tensor(0),
            torch.tensor(pattern),
        )
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

"""Prior correction: priors by hand, and the log-probability that log odds require."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.calibration import Calibration, DomainRange, PriorCorrection, log_odds_of
from dualkg.inference.completion import complete
from tests.conftest import graph_of


def calibration_of(
    slope: float,
    offsets: tuple[float, ...],
    *,
    max_probability: float = 1.0,
    num_relations: int = 1,
):
    slopes = torch.full((num_relations,), slope)
    rows = torch.tensor([offsets] * num_relations)
    return Calibration(slopes, rows, torch.ones(num_relations).bool(), max_probability)


def test_priors_by_hand():
    """r0 has the heads 0 and 1 of six entities in train; valid queries 0, and 4, which is new. r1
    has no queries.

    Over both relations train has 2 + 1 heads, of which 1 is queried, and 4 + 5 others, of which 1
    is: 1/3 and 1/9.
    """
    train = [(0, 0, 2), (1, 0, 2), (5, 1, 3)]
    valid = [(0, 0, 3), (4, 0, 2), (0, 0, 5)]
    found = PriorCorrection.of(
        calibration_of(1.0, (0.0,) * 4, num_relations=2), graph_of(train, valid, num_entities=6)
    )
    heads = [[(1 + 1) / (2 + 3), (1 + 1) / (4 + 9)], [(0 + 1) / (1 + 3), (0 + 1) / (5 + 9)]]
    np.testing.assert_allclose(found.heads, heads)
    # Tails: r0 has 2 in train, and queries of 2, 3 and 5; of 1 + 1 known ones 1 is queried, of 5 +
    # 5 new ones 2.
    tails = [[(1 + 1) / (1 + 2), (2 + 1) / (5 + 5)], [(0 + 1) / (1 + 2), (0 + 1) / (5 + 5)]]
    np.testing.assert_allclose(found.tails, tails)
    # DomainRange: both known, a new head, a new tail, both new.
    means = [(heads[0][h] + tails[0][t]) / 2 for h, t in ((0, 0), (1, 0), (0, 1), (1, 1))]
    np.testing.assert_allclose(found.priors[0], means)
    queried = found.query_priors(0, torch.tensor([0, 1]), "head")
    np.testing.assert_allclose(queried, [heads[0][0], heads[1][1]])


def test_a_graph_without_valid_triples_has_priors():
    found = PriorCorrection.of(
        calibration_of(1.0, (0.0,) * 4), graph_of([(0, 0, 1)], [], num_entities=2)
    )
    assert ((found.priors > 0) & (found.priors <= 1)).all()


def test_odds_are_the_prior_times_the_odds_of_an_answer():
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3)], num_entities=5)
    calibration = calibration_of(2.0, (1.0, 0.0, -1.0, 3.0), max_probability=0.7)
    found = PriorCorrection.of(calibration, graph)
    log_probability = torch.tensor([-0.5, -1.0, -2.0, -0.1])
    patterns = torch.arange(4)
    relations = torch.zeros(4, dtype=torch.long)
    answers = calibration.probability(log_probability, relations, patterns)
    odds = answers / (1 - answers) * found.priors[0]
    np.testing.assert_allclose(
        found.probability(log_probability, relations, patterns), odds / (1 + odds), rtol=1e-6
    )


def test_probabilities_add_up_to_the_missing_triples():
    """A calibration fitted on a tenth of all queries, with the prior 0.1, is right for all
    triples.
    """
    random = np.random.default_rng(0)
    log_probability = random.uniform(-9, 0, 400_000)
    true = random.random(len(log_probability)) < 1 / (1 + np.exp(-2 * log_probability + 1.0))
    queried = true | (
        random.random(len(log_probability)) < 0.1
    )  # all missing triples are queried, and a tenth of the others
    graph = graph_of([(0, 0, 1)], [(0, 0, 2)], num_entities=3)
    offset = -1.0 - np.log(0.1)  # the line of the queried triples
    share = torch.tensor([[0.1, 0.1]], dtype=torch.float64)
    found = PriorCorrection(calibration_of(2.0, (offset,) * 4), DomainRange.of(graph), share, share)
    zeros = torch.zeros(len(log_probability), dtype=torch.long)
    sums = found.probability(torch.from_numpy(log_probability), zeros, zeros)
    among_queried = found.calibration.probability(
        torch.from_numpy(log_probability[queried]), zeros[queried], zeros[queried]
    )
    assert float(among_queried.sum()) == pytest.approx(true.sum(), rel=0.02)
    assert float(sums.sum()) == pytest.approx(true.sum(), rel=0.02)


@given(
    slope=st.floats(0.1, 5),
    offsets=st.tuples(*[st.floats(-5, 5)] * 4),
    max_probability=st.floats(0.3, 1),
    wanted=st.floats(-12, 3),
)
def test_required_log_probability_inverts_the_log_odds(slope, offsets, max_probability, wanted):
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3), (4, 0, 1)], num_entities=6)
    found = PriorCorrection.of(
        calibration_of(slope, offsets, max_probability=max_probability), graph
    )
    relation = torch.tensor(0)
    needed = found.required_log_probability(wanted, 0)
    for kind in range(4):
        log_probability = needed[kind % 2, kind // 2]
        at, before = found.log_odds(
            torch.stack([log_probability, log_probability - 1e-2]), relation, torch.tensor(kind)
        )
        if log_probability == torch.inf:
            assert float(found.priors[0, kind].log()) + log_odds_of(max_probability) < wanted
        else:
            assert float(at) == pytest.approx(wanted, abs=1e-3)
            assert float(before) < wanted
    assert (found.required_log_probability(-np.inf, 0) == -np.inf).all()


def test_completion_prefers_relations_with_many_missing_triples():
    """Two relations with the same scores; valid has answers of the first alone."""
    train = [(i, r, 10 + i % 3) for r in (0, 1) for i in range(6)]
    graph = graph_of(train, [(0, 0, 11), (1, 0, 12), (2, 0, 10)], num_entities=20)
    model = kg.CP(graph.shape, dim=2, init_scale=0.0)
    made = complete(
        model, graph, top=20, calibration=calibration_of(1.0, (2.0,) * 4, num_relations=2)
    )
    assert set(made.relations.tolist()) == {0}
    assert (made.probability < made.answer_probability).all()

"""Probabilities of triples: log-probabilities, patterns, priors by hand, and the inverse."""

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
from dualkg.inference.completion import complete
from dualkg.inference.probability import (
    CachedLogProbabilities,
    Calibration,
    log_odds_of,
    patterns_of,
    query_classes,
    triple_log_probabilities,
)
from dualkg.inference.query_classes import NUM_CLASSES, check_missing_share
from tests.conftest import graph_of
from tests.families import EMBEDDINGS
from tests.inference.calibrations import calibration_on, recalibration_of
from tests.inference.completion.brute_force import graph_with_a_symmetric_relation

THREE_QUERIES = 3 * 30  # scores of a block of three queries for thirty entities


# -- log-probabilities -------------------------------------------------------


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "RotatE", "HAKE"])
def test_log_probability_is_the_mean_of_two_log_softmaxes(small_graph, name, reciprocal):
    model = EMBEDDINGS[name](small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5)
    forward = small_graph.train[:40]
    triples = np.concatenate([forward, forward[:, [2, 1, 0]]]).astype(np.int64)
    heads, relations, tails = torch.from_numpy(triples).T
    with torch.no_grad():
        by_tail = model.predict_tails(heads, relations).log_softmax(-1)
        by_head = model.predict_heads(relations, tails).log_softmax(-1)
    of_tails = by_tail.gather(1, tails[:, None])[:, 0]
    of_heads = by_head.gather(1, heads[:, None])[:, 0]

    log_probabilities = triple_log_probabilities(model, triples, max_scores=THREE_QUERIES)
    torch.testing.assert_close(log_probabilities, (of_tails + of_heads) / 2)


def test_log_probability_is_invariant_to_a_constant_in_all_scores(small_graph):
    """A constant added to a coordinate that all entities share changes all scores of a query
    equally.
    """
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


def test_log_probabilities_of_no_triples(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    no_triples = np.zeros((0, 3), dtype=np.int64)
    assert triple_log_probabilities(model, no_triples).shape == (0,)


def assert_agrees(cached: CachedLogProbabilities, model: kg.Model, triples: np.ndarray) -> None:
    expected = triple_log_probabilities(model, triples)
    torch.testing.assert_close(cached(triples), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("model_class", [kg.ComplEx, kg.CP, kg.TransE])
def test_cached_log_probabilities_agree_with_uncached_ones(small_graph, model_class, reciprocal):
    model = model_class(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=1.0)
    cached = CachedLogProbabilities(model, symmetric=np.zeros(4, dtype=bool))
    triples = np.concatenate([small_graph.test, small_graph.test[:3]]).astype(np.int64)
    for batch in (triples[:5], triples, triples[::-1]):
        assert_agrees(cached, model, batch)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("model_class", [kg.ComplEx, kg.TransE])
def test_log_probabilities_of_symmetric_relations(small_graph, model_class, reciprocal):
    """By hand: one distribution over the entities that are related to an entity."""
    model = model_class(small_graph.shape, dim=4, reciprocal=reciprocal, init_scale=1.0)
    symmetric = np.arange(small_graph.shape.num_relations) == 0
    triples = small_graph.test.astype(np.int64)
    assert symmetric[triples[:, 1]].any()
    assert not symmetric[triples[:, 1]].all()

    expected = triple_log_probabilities(model, triples)
    relation = torch.tensor([0])
    for row, (head, number, tail) in enumerate(triples.tolist()):
        if number:
            continue
        of_ends = []
        for asked, answer in ((head, tail), (tail, head)):
            entity = torch.tensor([asked])
            of_tails = model.predict_tails(entity, relation)
            of_heads = model.predict_heads(relation, entity)
            of_ends.append(((of_tails + of_heads) / 2).log_softmax(-1)[0, answer])
        expected[row] = sum(of_ends) / 2

    found = triple_log_probabilities(model, triples, symmetric=symmetric)
    torch.testing.assert_close(found, expected)
    swapped = np.where(triples[:, 1:2] == 0, triples[:, ::-1], triples)
    cached = CachedLogProbabilities(model, symmetric=symmetric)
    for batch in (triples, swapped):
        torch.testing.assert_close(cached(batch), expected, rtol=0, atol=1e-5)


def test_the_normalizer_of_a_query_is_computed_once(small_graph, monkeypatch):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    batch_sizes = []
    predict_tails = model.predict_tails

    def counting(heads, relations):
        batch_sizes.append(len(heads))
        return predict_tails(heads, relations)

    monkeypatch.setattr(model, "predict_tails", counting)
    cached = CachedLogProbabilities(model, symmetric=np.zeros(4, dtype=bool))
    triples = small_graph.test.astype(np.int64)
    tail_queries = {(head, relation) for head, relation, _ in triples.tolist()}

    first = cached(triples)
    assert sum(batch_sizes) == len(tail_queries)
    assert torch.equal(cached(triples), first)
    assert sum(batch_sizes) == len(tail_queries)


def test_the_cache_is_bounded(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    cached = CachedLogProbabilities(model, symmetric=np.zeros(4, dtype=bool), max_size=10)
    triples = small_graph.test.astype(np.int64)
    for start in range(0, len(triples), 4):
        assert_agrees(cached, model, triples[start : start + 4])
        assert cached.num_cached <= 10


# -- domain and range --------------------------------------------------------


def test_patterns_by_hand():
    """A triple of a symmetric relation with one new end has one pattern, whichever end it is."""
    new_heads = np.array([False, True, False, True])
    new_tails = np.array([False, False, True, True])
    assert patterns_of(new_heads, new_tails, symmetric=False).tolist() == [0, 1, 2, 3]
    assert patterns_of(new_heads, new_tails, symmetric=True).tolist() == [0, 1, 1, 3]


def test_the_offset_is_that_of_the_pattern():
    """Train has (0, r, 1) and (2, r, 3): 4 is new to domain and range, 1 is new to the domain."""
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3)], num_entities=5)
    calibration = calibration_on(graph, offsets=(1.0, 2.0, 3.0, 4.0))
    triples = np.array([(0, 0, 3), (1, 0, 3), (0, 0, 4), (4, 0, 2)])
    of_triples = calibration.of_triples(triples, torch.full((4,), -5.0))
    log_odds = [log_odds_of(p) for p in of_triples.answer_probability.tolist()]
    assert log_odds == pytest.approx([-4, -3, -2, -1])


@given(seed=st.integers(0, 50))
def test_both_directions_of_a_symmetric_fact_have_one_probability(seed):
    graph = graph_with_a_symmetric_relation(seed)
    assume(graph.symmetric_relations[0])
    model = kg.ComplEx(graph.shape, dim=3, init_scale=1.0, seed=seed)
    calibration = calibration_on(graph, slopes=0.7, offsets=(0.5, 0.1, -0.4, 1.0))
    pairs = np.array(list(itertools.product(range(9), repeat=2)))
    triples = np.stack([pairs[:, 0], np.zeros(81, dtype=int), pairs[:, 1]], axis=1)
    of_directions = []
    for directed in (triples, triples[:, ::-1]):
        values = triple_log_probabilities(model, directed, symmetric=graph.symmetric_relations)
        of_directions.append(calibration.of_triples(directed, values))
    for one, other in zip(*of_directions, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# -- priors ------------------------------------------------------------------


def test_priors_by_hand():
    """r0 has the heads 0 and 1 of six entities in train; valid queries 0, and 4, which is new. r1
    has no queries. No entity has two roles, so none is evidence of a type.
    """
    train = [(0, 0, 2), (1, 0, 2), (5, 1, 3)]
    valid = [(0, 0, 3), (4, 0, 2), (0, 0, 5)]
    graph = graph_of(train, valid, num_entities=6)
    calibration = calibration_on(graph)
    of_heads = {
        entity: calibration.query_priors(entity, np.arange(2), "head") for entity in (0, 4, 5)
    }
    of_tails = {entity: calibration.query_priors(entity, np.arange(2), "tail") for entity in (2, 5)}

    # Of all roles, 2 + 1 + 1 queries have one answer in train, and 1 of these is asked in valid;
    # the tail 2 has two answers, and is asked; 4 + 5 + 5 + 5 have none, and 3 of these are asked.
    once = (1 + 1) / (2 + 4)
    new_head = (1 + 1) / (4 + 19 / 3)
    twice = (1 + 1) / (1 + 1)
    new_tail = (2 + 1) / (5 + 19 / 3)
    assert of_heads[0] == pytest.approx([once, (0 + 1) / (5 + 19 / 3)])
    assert of_heads[4][0] == pytest.approx(new_head)
    assert of_heads[5][1] == pytest.approx((0 + 1) / (1 + 4))
    assert of_tails[2][0] == pytest.approx(twice)
    assert of_tails[5][0] == pytest.approx(new_tail)
    # Of triples, by the classes of head (0: one answer) and tail (1: two answers).
    assert calibration.priors(0)[0, 1] == pytest.approx((once + twice) / 2)
    assert calibration.priors(0)[-1, -1] == pytest.approx((new_head + new_tail) / 2)


def test_a_graph_without_valid_triples_has_priors():
    graph = graph_of([(0, 0, 1)], [], num_entities=2)
    priors = calibration_on(graph).priors(0)
    assert ((priors > 0) & (priors <= 1)).all()


def test_odds_are_the_prior_times_the_odds_of_an_answer():
    graph = graph_of([(0, 0, 1), (2, 0, 3)], [(0, 0, 3)], num_entities=5)
    offsets = (1.0, 0.0, -1.0, 3.0)
    calibration = calibration_on(graph, slopes=2.0, offsets=offsets, max_probability=0.7)
    log_probability = torch.tensor([-0.5, -1.0, -2.0, -0.1])

    # Both ends known, a new head, a new tail, and both new.
    triples = np.array([(0, 0, 3), (1, 0, 3), (0, 0, 4), (4, 0, 2)])
    of_answers = (2 * log_probability + torch.tensor(offsets)).sigmoid().clamp(max=0.7)
    heads, tails = query_classes(graph).of_relation(0)
    priors = calibration.priors(0)[heads[triples[:, 0]], tails[triples[:, 2]]]
    odds = of_answers / (1 - of_answers) * torch.from_numpy(priors)
    of_triples = calibration.of_triples(triples, log_probability)
    np.testing.assert_allclose(of_triples.answer_probability, of_answers)
    np.testing.assert_allclose(of_triples.probability, odds / (1 + odds), rtol=1e-6)
    assert log_odds_of(of_triples.probability[0]) == pytest.approx(of_triples.log_odds[0])


@given(
    slope=st.floats(0.001, 20),
    offset=st.floats(-20, 20),
    pair=st.tuples(st.floats(-30, 0), st.floats(-30, 0)).map(sorted),
    max_probability=st.floats(0.5, 1),
    is_recalibrated=st.booleans(),
)
def test_probability_never_decreases_with_log_probability(
    slope, offset, pair, max_probability, is_recalibrated
):
    graph = graph_of([(0, 0, 1)], [(0, 0, 2)], num_entities=3)
    recalibration = recalibration_of([-4, -1, 2], [-3, -2, 2]) if is_recalibrated else None
    calibration = calibration_on(
        graph,
        slopes=slope,
        offsets=offset,
        max_probability=max_probability,
        recalibration=recalibration,
    )
    triples = np.array([(0, 0, 2), (0, 0, 2)])
    of_triples = calibration.of_triples(triples, torch.tensor(pair, dtype=torch.float64))
    for lower, higher in (of_triples.probability, of_triples.answer_probability):
        assert 0 <= lower <= higher <= max_probability


def test_a_given_share_of_missing_triples_multiplies_all_odds():
    """The graph has 5 triples in its splits, one of them valid. A share of .6 is 7.5 of 12.5."""
    graph = graph_of([(0, 0, 1), (2, 0, 3), (0, 0, 4)], [(0, 0, 3)], [(2, 0, 1)], num_entities=5)
    calibration = calibration_on(
        graph, slopes=2.0, offsets=(1.0, 0.0, -1.0, 3.0), max_probability=0.7
    )
    given = replace(calibration, missing_share=0.6)
    assert given.assumed_missing == pytest.approx((7.5, 0.6, 7.5))
    assert calibration.assumed_missing == pytest.approx((1.0, 1 / 6, 1.0))
    assert given.as_measured.missing_share is None

    log_probability = torch.tensor([-0.5, -1.0, -2.0, -0.1])
    triples = np.array([(0, 0, 3), (1, 0, 3), (0, 0, 4), (4, 0, 2)])
    measured = calibration.of_triples(triples, log_probability)
    of_triples = given.of_triples(triples, log_probability)
    odds = 7.5 * measured.probability / (1 - measured.probability)
    np.testing.assert_allclose(of_triples.probability, odds / (1 + odds), rtol=1e-6)
    assert (of_triples.answer_probability >= measured.answer_probability).all()
    assert (of_triples.answer_probability + 1e-6 >= of_triples.probability).all()

    # The first triple reaches its own log odds with its own log-probability.
    heads, tails = given.query_classes.of_relation(0)
    required = given.required_log_probability(float(of_triples.log_odds[0]), 0)
    assert float(required[heads[0], tails[3]]) == pytest.approx(-0.5, abs=1e-5)


def test_the_share_of_valid_is_the_default(small_graph):
    calibration = calibration_on(small_graph)
    same = replace(calibration, missing_share=calibration.assumed_missing.share)
    np.testing.assert_allclose(same.priors(1), calibration.priors(1), rtol=1e-12)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_that_cannot_be_missing_is_refused(share):
    with pytest.raises(InvalidValue) as refusal:
        check_missing_share(share)
    assert refusal.value.setting == "missing_share"


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
        recalibration = recalibration_of([-4.0, -1.0, 2.0], values)
    calibration = calibration_on(
        graph,
        slopes=slope,
        offsets=offsets,
        max_probability=max_probability,
        recalibration=recalibration,
    )
    required = calibration.required_log_probability(wanted, 0)
    assert required.shape == (NUM_CLASSES, NUM_CLASSES)

    for triple in itertools.product(range(6), [0], range(6)):
        triples = np.array([triple, triple])
        head, tail = calibration.query_classes.of_relation(0)[[0, 1], [triple[0], triple[2]]]
        log_probability = required[head, tail]
        if log_probability == torch.inf:
            log_prior = math.log(calibration.priors(0)[head, tail])
            assert log_prior + log_odds_of(max_probability) < wanted
            continue
        values_of_triples = torch.stack([log_probability, log_probability - 1e-2])
        reached, missed = calibration.of_triples(triples, values_of_triples).log_odds
        assert float(reached) == pytest.approx(wanted, abs=1e-3)
        assert float(missed) < wanted
    assert (calibration.required_log_probability(-np.inf, 0) == -np.inf).all()


def test_completion_prefers_relations_with_many_missing_triples():
    """Two relations with the same scores; valid has answers of the first alone."""
    train = [(head, relation, 10 + head % 3) for relation in (0, 1) for head in range(6)]
    graph = graph_of(train, [(0, 0, 11), (1, 0, 12), (2, 0, 10)], num_entities=20)
    model = kg.CP(graph.shape, dim=2, init_scale=0.0)
    calibration = calibration_on(graph, offsets=2.0)
    completion = complete(model, graph, top=20, calibration=calibration)
    assert set(completion.relations.tolist()) == {0}
    assert (completion.probability < completion.answer_probability).all()


# -- the fit -----------------------------------------------------------------


def test_the_fit(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5).train()
    calibration = Calibration.fit(model, small_graph)
    assert model.training
    assert calibration.slopes.shape == calibration.relation_specific.shape == (4,)
    assert calibration.offsets.shape == (4, 4)
    assert (calibration.slopes > 0).all()
    assert 0 < calibration.max_probability < 1
    assert calibration.metadata["num_true"] == 40
    assert calibration.metadata["split"] == "valid"
    assert (calibration.recalibration is not None) == calibration.cross_fit.supported


def test_the_fit_on_another_graph_has_its_priors(small_graph):
    """Of a graph with more entities, as one to which entities were added."""
    calibration = calibration_on(small_graph)
    larger = graph_of(small_graph.train, small_graph.valid, num_entities=50, num_relations=4)
    assert calibration.on(small_graph) is calibration
    assert (calibration.on(larger).priors(0) != calibration.priors(0)).any()


@pytest.fixture(scope="module")
def beads() -> kg.Run:
    """A run on 120 triples: beads with a colour, a shape and a maker, each of which determines the
    others.
    """
    relations = ["colour", "shape", "maker"]
    beads = [f"bead {number}" for number in range(40)]
    values = [f"{relation} {number}" for relation in relations for number in range(4)]
    entities = [*beads, *values]

    triples = []
    for bead in range(40):
        for relation in range(3):
            value = len(beads) + 4 * relation + bead % 4
            triples.append((bead, relation, value))
    ids = np.array(triples, dtype=np.int32)
    np.random.default_rng(0).shuffle(ids)

    graph = kg.Graph(
        "beads",
        kg.Vocabulary(entities),
        kg.Vocabulary(relations, kind="relation"),
        ids[24:],
        ids[:12],
        ids[12:24],
    )
    return kg.train(
        kg.ComplEx(graph.shape, dim=16),
        graph,
        regularizer=kg.DURA(0.05),
        optimizer=kg.Optimizer(learning_rate=0.3),
        epochs=30,
    )


def test_triples_outside_domain_and_range_are_improbable(beads):
    """All missing triples are in test; triples such as (maker 2, maker, bead 34) get a low
    probability.
    """
    graph = beads.graph
    calibration = Calibration.fit(beads.model, graph)
    completion = complete(
        beads.model, graph, calibration=calibration, top=50, known=("train", "valid")
    )
    test = {tuple(triple) for triple in graph.test.tolist()}
    hits = [tuple(triple) in test for triple in completion.triples.tolist()]
    assert sum(hits[:12]) >= 8

    # Twelve valid triples support no larger probability.
    assert completion.probability.max() <= calibration.max_probability <= 13 / 14
    assert completion.probability.sum() < 20
    head_is_no_bead = completion.heads >= 40
    assert completion.probability[head_is_no_bead].max() < 0.75

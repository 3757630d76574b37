"""Sampling of candidates: all true ones, some false ones, and weights."""

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.graph import SPLITS
from dualkg.inference.sampling import SamplingSettings, sample_candidates
from dualkg.inference.scoring import MissingTriples
from tests.conftest import graph_of


def random_graph(
    seed: int, *, num_entities: int, num_relations: int = 2, num_triples: int = 60
) -> kg.Graph:
    random = np.random.default_rng(seed)
    sizes = (num_entities, num_relations, num_entities)
    columns = [random.integers(0, size, num_triples) for size in sizes]
    triples = np.unique(np.stack(columns, axis=1), axis=0)
    random.shuffle(triples)
    return graph_of(
        triples[20:],
        triples[:10],
        triples[10:20],
        num_entities=num_entities,
        num_relations=num_relations,
    )


class Candidate(NamedTuple):
    triple: tuple[int, int, int]
    true: bool
    side: str  # which is predicted


def triples_of(graph: kg.Graph, split: str) -> set[tuple[int, ...]]:
    return {tuple(triple) for triple in graph.split(split).tolist()}


def all_candidates(graph: kg.Graph, split: str) -> list[Candidate]:
    """Every candidate of every query."""
    known = set().union(*(triples_of(graph, name) for name in SPLITS))
    in_others = set().union(*(triples_of(graph, name) for name in SPLITS if name != split))
    true = triples_of(graph, split) - in_others
    tail_queries = {("tail", head, relation) for head, relation, _ in true}
    head_queries = {("head", tail, relation) for _, relation, tail in true}

    candidates = []
    entities = range(graph.shape.num_entities)
    for (side, given_entity, relation), entity in product(tail_queries | head_queries, entities):
        if side == "tail":
            triple = (given_entity, relation, entity)
        else:
            triple = (entity, relation, given_entity)
        if triple in true or triple not in known:
            candidates.append(Candidate(triple, triple in true, side))
    return candidates


@given(
    seed=st.integers(0, 1000),
    num_entities=st.integers(12, 90),
    split=st.sampled_from(["valid", "test"]),
)
def test_weights_add_up_to_the_number_of_candidates(seed, num_entities, split):
    graph = random_graph(seed, num_entities=num_entities)
    model = kg.ComplEx(graph.shape, dim=2, init_scale=1.0, seed=seed)
    sample = sample_candidates(model, graph, split, seed=seed)
    expected = all_candidates(graph, split)
    assert sample.weights.sum() == pytest.approx(len(expected))
    assert sample.weights[sample.true].sum() == sum(candidate.true for candidate in expected)

    by_relation = np.bincount(sample.relations, sample.weights, minlength=2)
    relations = [candidate.triple[1] for candidate in expected]
    assert by_relation == pytest.approx(np.bincount(relations, minlength=2))
    sampled = {tuple(triple) for triple in sample.triples.tolist()}
    assert sampled <= {candidate.triple for candidate in expected}


def test_all_candidates_are_drawn_if_the_limits_allow(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    sample = sample_candidates(model, small_graph, "valid", settings=SamplingSettings(num_best=30))
    assert (sample.weights == 1).all()
    triples = [tuple(triple) for triple in sample.triples.tolist()]
    sampled = sorted(zip(triples, sample.true.tolist(), strict=True))
    expected = all_candidates(small_graph, "valid")
    assert sampled == sorted((candidate.triple, candidate.true) for candidate in expected)


def test_few_queries_represent_all(small_graph):
    """With one query of each relation and direction the weights still add up, and all true
    candidates are there.
    """
    model = kg.CP(small_graph.shape, dim=2)
    sample = sample_candidates(
        model, small_graph, "valid", settings=SamplingSettings(num_queries=8)
    )
    expected = all_candidates(small_graph, "valid")
    assert sample.weights.sum() == pytest.approx(len(expected))
    assert sample.true.sum() == sum(candidate.true for candidate in expected)
    assert len(sample.true) < len(expected) / 2


def test_a_graph_with_many_entities_gets_fewer_queries():
    settings = SamplingSettings()
    assert settings.limit_of_queries(15_000) == 4000
    # Ten best, and two of each of eight bands, which begin at the ranks 10, 40, … 163,840.
    assert settings.limit_of_queries(500_000) == 2**32 // (500_000 * (10 + 2 * 8))
    assert settings.limit_of_queries(90_000_000) == 200


def test_the_weighted_mean_log_probability_is_that_of_all_candidates(small_graph):
    """Over many seeds the weighted mean of anything is its mean over all candidates."""
    settings = SamplingSettings(num_best=2, draws_per_band=1)
    model = kg.DistMult(small_graph.shape, dim=4, init_scale=0.7)

    def mean_score(triples, weights):
        with torch.no_grad():
            scores = model.score(*torch.from_numpy(triples).T).numpy()
        return (scores * weights).sum() / weights.sum()

    means = []
    for seed in range(40):
        sample = sample_candidates(model, small_graph, "valid", seed=seed, settings=settings)
        means.append(mean_score(sample.triples, sample.weights))

    candidates = all_candidates(small_graph, "valid")
    triples = np.array([candidate.triple for candidate in candidates])
    standard_error = np.std(means) / 40**0.5
    assert np.mean(means) == pytest.approx(
        mean_score(triples, np.ones(len(triples))), abs=4 * standard_error
    )


def test_the_seed_determines_the_sample(small_graph):
    model = kg.CP(small_graph.shape, dim=2, init_scale=1.0)
    first = sample_candidates(model, small_graph, "valid", seed=0).triples
    same_seed = sample_candidates(model, small_graph, "valid", seed=0).triples
    other_seed = sample_candidates(model, small_graph, "valid", seed=1).triples
    assert np.array_equal(first, same_seed)
    assert not np.array_equal(first, other_seed)


def test_triples_of_other_splits_are_no_candidates():
    graph = graph_of([(0, 0, 1)], [(0, 0, 1), (0, 0, 2)], [(0, 0, 3)], num_entities=6)
    sample = sample_candidates(kg.CP(graph.shape, dim=2), graph, "valid")
    assert {tuple(triple) for triple in sample.triples[sample.true].tolist()} == {(0, 0, 2)}
    tails = {tail for head, _, tail in sample.triples.tolist() if head == 0}
    assert not tails & {1, 3}


@pytest.mark.parametrize("valid", [[], [(0, 0, 1)]])
def test_graphs_without_held_out_triples_are_refused(valid):
    graph = graph_of([(0, 0, 1)], valid, num_entities=3)
    with pytest.raises(MissingTriples) as error:
        sample_candidates(kg.CP(graph.shape, dim=2), graph, "valid")
    assert (error.value.graph, error.value.split) == ("made", "valid")
    assert str(error.value) == (
        "Calibration needs valid triples, and made has none that are not in another split too. "
        "Split the graph so that valid has some."
    )


def test_a_diverged_model_is_refused(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    with torch.no_grad():
        model.entities[3] = torch.nan
    with pytest.raises(kg.DivergedError, match="scores NaN or infinity"):
        sample_candidates(model, small_graph, "valid")


def test_test_triples_are_no_candidates(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.5)
    candidates = sample_candidates(model, small_graph, "valid")
    test = set(map(tuple, small_graph.test.tolist()))
    assert test.isdisjoint(map(tuple, candidates.triples.tolist()))

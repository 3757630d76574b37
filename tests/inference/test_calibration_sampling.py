"""Sampling of candidates: all true ones, some false ones, and weights."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.graph import SPLITS
from dualkg.inference import calibration as calibration_module
from dualkg.inference.calibration import sample_candidates
from tests.conftest import graph_of


def random_graph(
    seed: int, *, num_entities: int, num_relations: int = 2, num_triples: int = 60
) -> kg.Graph:
    random = np.random.default_rng(seed)
    sizes = (num_entities, num_relations, num_entities)
    triples = np.unique(
        np.stack([random.integers(0, n, num_triples) for n in sizes], axis=1), axis=0
    )
    random.shuffle(triples)
    return graph_of(
        triples[20:],
        triples[:10],
        triples[10:20],
        num_entities=num_entities,
        num_relations=num_relations,
    )


def all_candidates(graph: kg.Graph, split: str) -> list[tuple[tuple[int, int, int], bool, str]]:
    """Every candidate of every query: the triple, whether it is true, and the predicted side."""
    splits = {name: {tuple(triple) for triple in graph.split(name).tolist()} for name in SPLITS}
    known = set().union(*splits.values())
    true = splits[split] - set().union(*(found for name, found in splits.items() if name != split))
    found = []
    queries = {("tail", h, r) for h, r, _ in true} | {("head", t, r) for _, r, t in true}
    for (end, given_, r), entity in product(queries, range(graph.shape.num_entities)):
        triple = (given_, r, entity) if end == "tail" else (entity, r, given_)
        if triple in true or triple not in known:
            found.append((triple, triple in true, end))
    return found


@given(
    seed=st.integers(0, 1000),
    num_entities=st.integers(12, 90),
    split=st.sampled_from(["valid", "test"]),
)
def test_weights_add_up_to_the_number_of_candidates(seed, num_entities, split):
    graph = random_graph(seed, num_entities=num_entities)
    model = kg.ComplEx(graph.shape, dim=2, init_scale=1.0, seed=seed)
    drawn = sample_candidates(model, graph, split, seed=seed)
    wanted = all_candidates(graph, split)
    assert drawn.weights.sum() == pytest.approx(len(wanted))
    assert drawn.weights[drawn.true].sum() == sum(true for _, true, _ in wanted)
    by_relation = np.bincount(drawn.relations, drawn.weights, minlength=2)
    assert by_relation == pytest.approx(
        [sum(triple[1] == r for triple, _, _ in wanted) for r in (0, 1)]
    )
    assert {tuple(triple) for triple in drawn.triples.tolist()} <= {
        triple for triple, _, _ in wanted
    }


def test_all_candidates_are_drawn_if_the_limits_allow(monkeypatch, small_graph):
    monkeypatch.setattr(calibration_module, "NUM_BEST", 30)
    drawn = sample_candidates(kg.CP(small_graph.shape, dim=2), small_graph, "valid")
    assert (drawn.weights == 1).all()
    listed = sorted(zip(map(tuple, drawn.triples.tolist()), drawn.true.tolist(), strict=True))
    assert listed == sorted(
        (triple, true) for triple, true, _ in all_candidates(small_graph, "valid")
    )


def test_few_queries_represent_all(monkeypatch, small_graph):
    """With one query of each relation and direction the weights still add up, and the true ones are
    all there.
    """
    monkeypatch.setattr(calibration_module, "NUM_QUERIES", 8)
    drawn = sample_candidates(kg.CP(small_graph.shape, dim=2), small_graph, "valid")
    wanted = all_candidates(small_graph, "valid")
    assert drawn.weights.sum() == pytest.approx(len(wanted))
    assert drawn.true.sum() == sum(true for _, true, _ in wanted)
    assert len(drawn.true) < len(wanted) / 2


def test_the_weighted_mean_log_probability_is_that_of_all_candidates(monkeypatch, small_graph):
    """Over many seeds the weighted mean of anything is its mean over all candidates."""
    monkeypatch.setattr(calibration_module, "NUM_BEST", 2)
    monkeypatch.setattr(calibration_module, "DRAWS_PER_BAND", 1)
    model = kg.DistMult(small_graph.shape, dim=4, init_scale=0.7)

    def mean_of(triples, weights):
        with torch.no_grad():
            scores = model.score(*torch.from_numpy(triples).T).numpy()
        return (scores * weights).sum() / weights.sum()

    wanted = np.array([triple for triple, _, _ in all_candidates(small_graph, "valid")])
    drawn = [sample_candidates(model, small_graph, "valid", seed=seed) for seed in range(40)]
    means = [mean_of(one.triples, one.weights) for one in drawn]
    assert np.mean(means) == pytest.approx(
        mean_of(wanted, np.ones(len(wanted))), abs=4 * np.std(means) / 40**0.5
    )


def test_the_seed_determines_the_sample(small_graph):
    model = kg.CP(small_graph.shape, dim=2, init_scale=1.0)
    one, same, other = (
        sample_candidates(model, small_graph, "valid", seed=seed) for seed in (0, 0, 1)
    )
    assert (one.triples == same.triples).all()
    assert one.triples.shape != other.triples.shape or (one.triples != other.triples).any()


def test_triples_of_other_splits_are_no_candidates():
    graph = graph_of([(0, 0, 1)], [(0, 0, 1), (0, 0, 2)], [(0, 0, 3)], num_entities=6)
    drawn = sample_candidates(kg.CP(graph.shape, dim=2), graph, "valid")
    assert {tuple(triple) for triple in drawn.triples[drawn.true].tolist()} == {(0, 0, 2)}
    tails = {tail for head, _, tail in drawn.triples.tolist() if head == 0}
    assert not tails & {1, 3}


@pytest.mark.parametrize(
    ("valid", "sentence"),
    [
        ((), "made has no valid triples"),
        ([(0, 0, 1)], "no valid triples that are not in another split too"),
    ],
)
def test_graphs_without_held_out_triples_are_refused(valid, sentence):
    graph = graph_of([(0, 0, 1)], valid, num_entities=3)
    with pytest.raises(kg.RequestError, match=sentence):
        sample_candidates(kg.CP(graph.shape, dim=2), graph, "valid")


def test_a_diverged_model_is_refused(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    with torch.no_grad():
        model.entities[3] = torch.nan
    with pytest.raises(kg.DivergedError, match="NaN or infinity"):
        sample_candidates(model, small_graph, "valid")

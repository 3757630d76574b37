"""The study that removes the supporting triples of test triples and trains again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference.explanation import Influence
from paper import studies
from paper.records import Config
from paper.studies import disjoint_triples, measure_explanations, select_triples
from tests.conftest import graph_of


@pytest.fixture(scope="module")
def twins() -> kg.Graph:
    """Twins 2 n and 2 n + 1 like the same one of four things; what some twins like is the test
    split.
    """
    likes = [(one, 0, 40 + one // 2 % 4) for one in range(40)]
    twins = [(2 * n, 1, 2 * n + 1) for n in range(20)] + [(2 * n + 1, 1, 2 * n) for n in range(20)]
    ids = np.array([*likes, *twins], dtype=np.int32)
    held = np.zeros(len(ids), dtype=bool)
    held[[0, 4, 8, 12, 18, 22]] = True
    return replace(graph_of(ids[~held], num_entities=44, num_relations=2), test=ids[held])


def test_scores_drop_without_the_supporting_triples(twins, monkeypatch):
    recipe = kg.Recipe().with_changes(
        {"model.name": "ComplEx", "model.dim": 16, "training.epochs": 40, "training.batch_size": 40}
    )
    monkeypatch.setattr(studies, "rows_with_recipes", lambda rows, graph: rows)
    monkeypatch.setattr(studies, "recipe_of", lambda row, graph: recipe)
    results = list(measure_explanations(Config(seeds=2, device="cpu"), twins, counts=(1,)))
    assert [(one["removed"], one["count"], one["seed"]) for one in results] == [
        (removed, count, seed)
        for seed in (0, 1)
        for removed, count in (("nothing", 0), ("supporting", 1), ("random", 1), ("opposing", 1))
    ]
    nothing, supporting, _, opposing = results[:4]
    assert nothing["num_triples"] == supporting["num_triples"] == 4  # one of each thing
    assert nothing["num_removed"] == 0
    assert 1 <= supporting["num_removed"] <= 4
    assert supporting["score_drop"] > opposing["score_drop"]
    assert supporting["expected_drop"] > 0 >= opposing["expected_drop"]
    assert set(nothing["metrics"]) >= {"mrr", "hits_at_1"}


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 5))
def test_chosen_test_triples_have_no_common_entity(seed, degree, most):
    random = np.random.default_rng(seed)
    triples = np.stack([random.integers(0, n, 60) for n in (20, 2, 20)], axis=1).astype(np.int32)
    graph = replace(graph_of(triples[:40], num_entities=20, num_relations=2), test=triples[40:])
    try:
        chosen = disjoint_triples(graph, random, min_degree=degree, max_triples=most)
    except kg.RequestError:
        reject()
    ends = chosen[:, [0, 2]].ravel()
    assert 2 <= len(chosen) <= most
    assert len(set(ends.tolist())) == len(ends)
    assert all(int((graph.train[:, [0, 2]] == entity).sum()) >= degree for entity in ends.tolist())
    assert {tuple(row) for row in chosen.tolist()} <= {tuple(row) for row in graph.test.tolist()}


def test_triples_are_selected_by_their_influence():
    one = Influence(
        np.array([10, 11, 12, 13]), np.array([0.5, -1.0, 0.0, 2.0]), np.array([0.1, 0.0, 0.0, -3.0])
    )
    found = select_triples([one], 2, np.random.default_rng(0))
    assert {
        kind: [some.tolist() for some in rows] for kind, rows in found.items() if kind != "random"
    } == {
        "supporting": [[10, 12]],
        "opposing": [[11, 13]],
    }
    assert set(found["random"][0].tolist()) <= {10, 11, 12, 13}
    assert len(found["random"][0]) == 2

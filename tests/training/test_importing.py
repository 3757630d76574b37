"""Runs from arrays that were trained elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import dualkg as kg


@pytest.mark.parametrize("name", ["CP", "DistMult", "ComplEx", "RESCAL"])
def test_imported_embeddings_have_the_ranks_and_predictions_of_their_source(small_graph, tmp_path, name):
    from dualkg.models import MODELS

    source = MODELS[name](small_graph.shape, dim=3, init_scale=1.0)
    order = np.random.default_rng(0).permutation(30)
    tables = {key: value.numpy() for key, value in source.state_dict().items()}
    given = {key: tables[key][order] for key in ("entities", "tails") if key in tables}
    run = kg.from_arrays(
        name, **given, relations=tables["relations"], graph=small_graph, entity_names=[f"e{id}" for id in order]
    )
    assert kg.evaluate(run.model, small_graph).mrr == kg.evaluate(source, small_graph).mrr
    run.save(tmp_path / "imported")
    again = kg.load_run(tmp_path / "imported")
    answers = [kg.Predictor(model, small_graph).tails("e3", "r1", k=3) for model in (source, again.model)]
    assert answers[0] == answers[1]


def test_complex_arrays_with_names_and_without_a_graph(tmp_path):
    random = np.random.default_rng(0)
    table = random.normal(size=(3, 2)) + 1j * random.normal(size=(3, 2))
    run = kg.from_arrays(
        "ComplEx", entities=table, relations=table[:1], entity_names=["a", "b", "c"], relation_names=["is"]
    )
    expected = (table[0] * table[0] * table[1].conj()).sum().real
    assert kg.Predictor(run.model, run.graph).score("a", "is", "b") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"relations": np.zeros((3, 4))}, "relation table should have 4 rows, or 8 with reciprocals; it has 3"),
        ({"entities": np.zeros((29, 4))}, "The set of arrays does not fit the model"),
        ({"entity_names": ["e0"] * 30}, "29 of the 30 names of rows are repeated"),
        ({"entity_names": [f"x{i}" for i in range(30)]}, "no row for 30 names of the graph, such as 'e0'"),
        ({"entity_names": [f"e{i}" for i in range(29)]}, "29 names for 30 rows"),
        ({"entities": np.zeros((30, 4)) + 1j}, "entities are complex numbers; DistMult has real ones"),
        ({"relations": np.zeros(4)}, "relations should be a table with a row for each name"),
    ],
)
def test_arrays_of_wrong_shapes_or_names_are_refused(small_graph, more, sentence):
    given = {"entities": np.zeros((30, 4)), "relations": np.zeros((4, 4)), **more}
    with pytest.raises(kg.RequestError, match=sentence):
        kg.from_arrays("DistMult", graph=small_graph, **given)


def test_arrays_need_names():
    with pytest.raises(kg.RequestError, match="needs a graph, or entity_names and relation_names"):
        kg.from_arrays("DistMult", entities=np.zeros((2, 2)), relations=np.zeros((1, 2)))

"""The study that compares inductive entities with training again."""

import json
from dataclasses import replace

import numpy as np

from paper.studies import study_inductive
from tests.inference.test_extension import train_beads


def test_the_study_compares_embedding_with_training_again():
    beads = train_beads()
    graph = replace(
        beads.graph,
        test=beads.graph.train[::7],
        train=np.delete(beads.graph.train, np.s_[::7], axis=0),
    )
    recipe = beads.recipe.with_changes({"training.epochs": 3})
    results = list(
        study_inductive(graph, recipe, share=0.2, counts=(1, None), seeds=(1,), device="cpu")
    )
    assert [(one["method"], one["triples_given"]) for one in results] == [
        ("embedded", 1),
        ("retrained", 1),
        ("embedded", None),
        ("retrained", None),
        ("mean", 0),
        ("random", 0),
    ]
    assert {one["seed"] for one in results} == {1}
    assert len({one["all_queries"]["num_queries"] for one in results}) == 1
    best = results[2]
    mean = results[4]
    assert best["all_queries"]["mrr"] > mean["all_queries"]["mrr"]
    assert results[0]["num_triples"] == results[1]["num_triples"] < best["num_triples"]
    assert json.loads(json.dumps(results)) == results

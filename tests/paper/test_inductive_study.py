"""The study that compares inductive entities with retraining."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from paper.inductive_study import InductiveResult, count_text, study

import dualkg as kg
from dualkg.evaluation.report import Metrics
from tests.inference.test_extension import train_beads


def test_the_number_of_entities_may_differ_between_seeds():
    one = InductiveResult("embedded", 0, 1, 1724, 5, *[Metrics.of(np.ones(3))] * 4, seconds=1.0)
    assert count_text([one, one]) == "1,724 entities"
    assert count_text([one, replace(one, num_entities=722)]) == "722 to 1,724 entities"


def test_the_study_compares_embedding_with_retraining():
    beads = train_beads()
    graph = replace(beads.graph, test=beads.graph.train[::7], train=np.delete(beads.graph.train, np.s_[::7], axis=0))
    recipe = beads.recipe.with_changes({"training.epochs": 3})
    results = study(graph, recipe, share=0.2, counts=(1, None), seeds=(1,), device="cpu")
    assert [(result.method, result.triples_per_entity) for result in results] == [
        ("embedded", 1),
        ("retrained", 1),
        ("embedded", None),
        ("retrained", None),
        ("mean", 0),
        ("random", 0),
    ]
    assert {result.seed for result in results} == {1}
    assert len({result.inductive.num_queries for result in results}) == 1
    best, mean = results[2], results[4]
    assert best.inductive.mrr > mean.inductive.mrr
    assert results[0].num_triples == results[1].num_triples < best.num_triples
    assert json.loads(json.dumps(best.as_dict()))["inductive"]["mrr"] == best.inductive.mrr
    with pytest.raises(kg.RequestError, match="lies between 0 and 1; it is 2"):
        study(graph, recipe, share=2)

"""Domain/range patterns of triples."""

from itertools import product

import numpy as np
import pytest

import dualkg as kg
from dualkg.inference.calibration import calibrate
from dualkg.inference.completion import complete
from dualkg.without_torch.domain_range import DomainRange
from tests.conftest import graph_of
from tests.inference.test_calibration_sampling import random_graph


@pytest.mark.parametrize("seed", range(5))
def test_patterns_say_which_ends_are_new_to_the_relation(seed):
    graph = random_graph(seed, num_entities=12, num_relations=3)
    domains = {(relation, head) for head, relation, _ in graph.train.tolist()}
    ranges = {(relation, tail) for _, relation, tail in graph.train.tolist()}

    triples = list(product(range(12), range(3), range(12)))
    expected = []
    for head, relation, tail in triples:
        new_head = (relation, head) not in domains
        new_tail = (relation, tail) not in ranges
        expected.append(new_head + 2 * new_tail)
    assert DomainRange.of(graph)(np.array(triples)).tolist() == expected


def test_all_ends_are_new_without_training_triples():
    graph = graph_of((), [(0, 0, 1)], num_entities=3)
    assert DomainRange.of(graph)(np.array([(0, 0, 1)])).tolist() == [3]


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
    calibration = calibrate(beads.model, graph)
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

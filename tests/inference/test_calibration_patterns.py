"""Domain/range patterns of triples."""

from itertools import product

import numpy as np
import pytest

import dualkg as kg
from dualkg.inference.calibration import DomainRange, calibrate
from dualkg.inference.completion import complete
from tests.conftest import graph_of
from tests.inference.test_calibration_sampling import random_graph


@pytest.mark.parametrize("seed", range(5))
def test_patterns_say_which_ends_are_new_to_the_relation(seed):
    graph = random_graph(seed, num_entities=12, num_relations=3)
    triples = np.array(list(product(range(12), range(3), range(12))))
    heads, tails = ({(row[1], row[column]) for row in graph.train.tolist()} for column in (0, 2))
    wanted = [((r, h) not in heads) + 2 * ((r, t) not in tails) for h, r, t in triples.tolist()]
    assert DomainRange.of(graph)(triples).tolist() == wanted


def test_all_ends_are_new_without_training_triples():
    assert DomainRange.of(graph_of((), [(0, 0, 1)], num_entities=3))(
        np.array([(0, 0, 1)])
    ).tolist() == [3]


@pytest.fixture(scope="module")
def beads() -> kg.Run:
    """A run on 120 triples: beads with a colour, a shape and a maker, each of which determines the
    others.
    """
    parts = ("colour", "shape", "maker")
    named = [(f"bead {n}", part, f"{part} {n % 4}") for n in range(40) for part in parts]
    entities = list(dict.fromkeys(name for head, _, tail in named for name in (head, tail)))
    ids = np.array(
        [(entities.index(h), parts.index(r), entities.index(t)) for h, r, t in named],
        dtype=np.int32,
    )
    np.random.default_rng(0).shuffle(ids)
    names = kg.Vocabulary(entities), kg.Vocabulary(parts, kind="relation")
    graph = kg.Graph("beads", *names, ids[24:], ids[:12], ids[12:24])
    model = kg.ComplEx(graph.shape, dim=16)
    return kg.train(
        model,
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
    calibration = calibrate(beads.model, beads.graph)
    found = complete(beads.model, graph, calibration=calibration, top=50, known=("train", "valid"))
    test = {tuple(triple) for triple in graph.test.tolist()}
    hits = [tuple(triple) in test for triple in found.triples.tolist()]
    assert sum(hits[:12]) >= 8
    assert (
        found.probability.max() <= calibration.max_probability <= 13 / 14
    )  # twelve valid triples support no more
    assert found.probability.sum() < 20
    likely = found.probability[
        [not graph.entities[head].startswith("bead") for head in found.heads.tolist()]
    ]
    assert likely.max() < 0.75

"""Degrees and commonest roles of entities, worked out by hand."""

import numpy as np

import dualkg as kg
from dualkg.data.roles import EntityRoles


def graph() -> kg.Graph:
    def triples(*rows):
        return np.array(rows, dtype=np.int32).reshape(-1, 3)

    return kg.Graph(
        "small",
        kg.Vocabulary(["a", "b", "c", "alone"]),
        kg.Vocabulary(["r", "s"], kind="relation"),
        train=triples((0, 0, 1), (0, 0, 2), (1, 1, 0)),
        valid=triples((2, 1, 2)),
        test=triples((2, 1, 1)),
    )


def test_a_self_loop_is_one_triple_of_both_roles():
    roles = EntityRoles.of(graph())
    # a: head of r twice, tail of s once; c: tail of r once, head of s twice, tail of s once.
    assert roles.degrees.tolist() == [3, 3, 3, 0]
    assert roles.of_entity(0) == (0, "head")
    assert roles.of_entity(2) == (1, "head")
    assert roles.of_entity(3) is None


def test_of_equally_common_roles_the_first_counts():
    # b is once each: head of s, tail of r, tail of s. Heads of all relations come first.
    assert EntityRoles.of(graph()).of_entity(1) == (1, "head")

"""Relations by which entities are related to themselves."""

from __future__ import annotations

import numpy as np

from dualkg.data.graph import Graph

LOOPS = 0.01  # the least share of a relation's triples that are loops, for another one to be worth asking about


def looping_relations(graph: Graph) -> frozenset[int]:
    """The relations by which train relates entities to themselves, more often than by mistake.

    By any other an entity is no new answer to a question about it, though models like it: of a relation that is its own
    inverse, nothing scores higher.
    """
    counts = [
        np.bincount(triples[:, 1], minlength=graph.shape.num_relations)
        for triples in (graph.train, graph.train[graph.train[:, 0] == graph.train[:, 2]])
    ]
    return frozenset(np.flatnonzero((counts[1] > 0) & (counts[1] >= LOOPS * counts[0])).tolist())

"""Whether a relation gives one or many answers, counted on the training triples."""

from __future__ import annotations

import numpy as np

from dualkg.data.graph import GraphShape, Triples, triple_keys

CARDINALITIES = ("1-1", "1-N", "N-1", "N-N", "unseen")
MANY = 1.5


def cardinalities(train: Triples, shape: GraphShape) -> list[str]:
    """The class of each relation: many tails a head, or heads a tail, means 1.5 or more on average."""
    _, first = np.unique(triple_keys(train, shape), return_index=True)
    distinct = train[first]
    tails_per_head = _answers_per_query(distinct[:, 0], distinct[:, 1], shape)
    heads_per_tail = _answers_per_query(distinct[:, 2], distinct[:, 1], shape)
    return [
        "unseen" if not tails else f"{'N' if heads >= MANY else '1'}-{'N' if tails >= MANY else '1'}"
        for heads, tails in zip(heads_per_tail, tails_per_head, strict=True)
    ]


def _answers_per_query(given: np.ndarray, relation: np.ndarray, shape: GraphShape) -> list[float]:
    answers = np.bincount(relation, minlength=shape.num_relations)
    queries = np.unique(given.astype(np.int64) * shape.num_relations + relation)
    asked = np.bincount(queries % shape.num_relations, minlength=shape.num_relations)
    found: list[float] = (answers / np.maximum(asked, 1)).tolist()
    return found

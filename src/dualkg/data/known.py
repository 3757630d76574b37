"""Known answers: for every query, the entities that some split already gives."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import SPLITS, Graph, GraphShape, Triples, distinct_triples

Ids = npt.NDArray[np.int64]


def with_reciprocals(triples: Triples, num_relations: int) -> Triples:
    """(h, r, t) and then, for each, (t, r + num_relations, h)."""
    turned = triples[:, [2, 1, 0]].copy()
    turned[:, 1] += num_relations
    return np.concatenate([triples, turned])


class KnownAnswers:
    """The tails of every (head, relation), and the heads of every (tail, relation + num_relations).

    Kept as sorted query keys, offsets and answers: 4 bytes an answer and 16 a query.
    """

    def __init__(self, splits: Iterable[Triples], shape: GraphShape) -> None:
        self.shape = shape
        triples = with_reciprocals(np.concatenate(list(splits)), shape.num_relations)
        # A triple that stands twice is one answer.
        triples = distinct_triples(triples, GraphShape(shape.num_entities, 2 * shape.num_relations))
        self.answers = triples[:, 2].copy()
        keys = self.keys(triples[:, 0], triples[:, 1])
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        self.queries, self.offsets = keys[starts], np.append(starts, len(keys))

    @classmethod
    def of(cls, graph: Graph, splits: Iterable[str] = SPLITS) -> KnownAnswers:
        return cls([graph.split(name) for name in splits], graph.shape)

    def keys(self, entities: npt.NDArray[np.integer], relations: npt.NDArray[np.integer]) -> Ids:
        """One number a query."""
        return entities.astype(np.int64) * (2 * self.shape.num_relations) + relations

    def __call__(self, entities: npt.NDArray[np.integer], relations: npt.NDArray[np.integer]) -> tuple[Ids, Ids]:
        """For queries `(batch,)`: which query, and the answer, for every known answer of each."""
        keys = self.keys(np.asarray(entities), np.asarray(relations))
        found = np.minimum(np.searchsorted(self.queries, keys), max(len(self.queries) - 1, 0))
        hit = self.queries[found] == keys if len(self.queries) else np.zeros(len(keys), dtype=bool)
        starts = np.where(hit, self.offsets[found], 0)
        counts = np.where(hit, self.offsets[found + 1] if len(self.queries) else 0, 0) - starts
        rows = np.repeat(np.arange(len(keys)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self.answers[np.repeat(starts, counts) + within].astype(np.int64)

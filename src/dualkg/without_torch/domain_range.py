"""Domain and range of relations: the entities that the triples of a split have at their ends."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from dualkg.data.graph import Graph, Split
from dualkg.data.triples import is_among
from dualkg.without_torch.scores import Flags, Ids


@dataclass(frozen=True, eq=False)
class DomainRange:
    """The entities that the triples of a split have as head and as tail of each relation.

    `heads` and `tails` are sorted keys, relation · num_entities + entity. Called with triples
    `(n, 3)`, it returns their domain/range patterns `(n,)`: 0, plus 1 if the head is new to the
    domain of the relation, plus 2 if the tail is new to its range. The domain of a symmetric
    relation is its range, and a triple of which one end is new to it has the pattern 1: so (h, r,
    t) and (t, r, h) have the same pattern.
    """

    num_entities: int
    heads: Ids
    tails: Ids
    symmetric: Flags | None = None

    @classmethod
    def of(cls, graph: Graph, split: Split = "train", *, symmetric: Flags | None = None) -> Self:
        triples = graph.split(split)
        num_entities = graph.shape.num_entities
        first_keys = triples[:, 1].astype(np.int64) * num_entities
        heads = np.unique(first_keys + triples[:, 0])
        tails = np.unique(first_keys + triples[:, 2])
        if symmetric is not None and symmetric.any():
            both_ends = np.union1d(
                heads[symmetric[heads // num_entities]], tails[symmetric[tails // num_entities]]
            )
            heads = np.union1d(heads, both_ends)
            tails = np.union1d(tails, both_ends)
        return cls(num_entities, heads, tails, symmetric)

    def __call__(self, triples: Ids) -> Ids:
        heads, relations, tails = np.asarray(triples, dtype=np.int64).T
        first_keys = relations * self.num_entities
        new_head = ~is_among(first_keys + heads, self.heads)
        new_tail = ~is_among(first_keys + tails, self.tails)
        patterns: Ids = 1 * new_head + 2 * new_tail
        if self.symmetric is not None:
            patterns[(patterns == 2) & self.symmetric[relations]] = 1
        return patterns

"""Queries of a batch: triples that answer the same query, and the answers of a query in train."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import GraphShape, Triples
from dualkg.data.triples import inverse_relations, slices


class QueryGroups(NamedTuple):
    """Neighbours in a batch with the same head and relation are answers of one query."""

    starts: Tensor  # the answers of query q are the triples `starts[q] : starts[q + 1]`
    rows: Tensor  # the query of each triple

    @staticmethod
    def of(heads: Tensor, relations: Tensor, *, capacity: int | None = None) -> "QueryGroups":
        """The queries of a batch, padded to `capacity` by queries without an answer."""
        rows = (starts_query(heads, relations).cumsum(0) - 1).contiguous()
        num = int(rows[-1]) + 1 if capacity is None else capacity
        return QueryGroups(
            torch.searchsorted(rows, torch.arange(num + 1, device=rows.device)), rows
        )

    @property
    def first(self) -> Tensor:
        """The first triple of each query; any triple for a query without an answer."""
        return self.starts[:-1].clamp(max=len(self.rows) - 1)

    @property
    def rows_of_first(self) -> Tensor:
        """The query that a triple is the first of, or −1."""
        here = torch.arange(len(self.rows), device=self.rows.device)
        return torch.where(self.starts[self.rows] == here, self.rows, -1)


def starts_query(heads: Tensor, relations: Tensor) -> Tensor:
    """Whether a triple has another head or relation than the one before it, `(batch,)`."""
    same = (heads[1:] == heads[:-1]) & (relations[1:] == relations[:-1])
    return torch.cat([torch.ones_like(heads[:1], dtype=torch.bool), ~same])


class Answers(NamedTuple):
    """All answers of a batch of queries, padded to a fixed size, so that no shape depends on their
    number.
    """

    counts: Tensor  # of the answers of each query, `(queries,)`
    queries: Tensor
    entities: Tensor
    valid: Tensor  # whether it is an answer, and no padding


class TrainingAnswers:
    """The answers in train to each query (entity, relation id); heads are answers to (tail, r +
    num_relations).

    Queries are numbered in order, and an answer is the integer query · num_entities + entity: a
    sorted array, in which a binary search finds candidates on any device.
    """

    def __init__(self, train: Triples, shape: GraphShape, *, device: torch.device) -> None:
        known = KnownAnswers([train], shape)

        def numbered() -> Iterator[npt.NDArray[np.int64]]:
            for part in slices(len(known.queries)):
                ends = known.offsets[part.start : part.stop + 1]
                queries = np.repeat(np.arange(part.start, part.stop), np.diff(ends))
                answers = known.answers[ends[0] : ends[-1]].astype(np.int64)
                answers += queries * shape.num_entities
                yield answers

        self.shape = shape
        joined = np.concatenate([known.queries[:0], *numbered()])
        self.queries, self.offsets, self.numbered = (
            torch.from_numpy(array).to(device) for array in (known.queries, known.offsets, joined)
        )

    def contain(self, entities: Tensor, relations: Tensor, candidates: Tensor) -> Tensor:
        """Queries `(batch,)` and candidates `(batch, n)`, or `(n,)` for all → which are answers,
        `(batch, n)`.
        """
        position, found = self._positions(entities, relations)
        wanted = position[:, None] * self.shape.num_entities + candidates
        return _search(self.numbered, wanted)[1] & found[:, None]

    def counts(self, entities: Tensor, relations: Tensor) -> Tensor:
        """How many answers each query has, `(batch,)`; 0 for queries that are not in train."""
        position, found = self._positions(entities, relations)
        return torch.where(found, self.offsets[position + 1] - self.offsets[position], 0)

    def of(self, entities: Tensor, relations: Tensor, *, capacity: int) -> Answers:
        """All answers of queries in train, `(batch,)` each, padded to `capacity` in total."""
        position, _ = self._positions(entities, relations)
        starts = self.offsets[position]
        counts = self.offsets[position + 1] - starts
        ends = counts.cumsum(0)
        number = torch.arange(capacity, device=counts.device)
        queries = torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1)
        valid = number < ends[-1]
        offset = torch.where(valid, number - (ends - counts)[queries], 0)
        answers = self.numbered[starts[queries] + offset] % self.shape.num_entities
        return Answers(counts, queries, answers, valid)

    def max_answers(self, num_queries: int) -> int:
        """The most answers that this many different queries have in total."""
        largest = self.offsets[:0]
        for part in slices(len(self.queries)):
            sizes = torch.cat([largest, self.offsets[part.start : part.stop + 1].diff()])
            largest = sizes.topk(min(num_queries, len(sizes))).values
        return int(largest.sum())

    def subsampling_weights(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """w = 1 / √(count(h, r) + count(t, r⁻¹)), `(batch,)`: frequent queries count less."""
        inverses = inverse_relations(relations, self.shape.num_relations)
        # Both counts start at 4 for a single answer, as in the published code of RotatE.
        counts = self.counts(heads, relations) + self.counts(tails, inverses) + 2 * 3
        return counts.to(torch.get_default_dtype()).rsqrt()

    def head_corruption_probabilities(self) -> Tensor:
        """The probability of corrupting the head for each relation, `(num_relations,)` (Wang et
        al., 2014).

        tph / (tph + hpt) is tails / (tails + heads) of distinct ones; it is 0.5 for a relation
        without triples.
        """
        num_relations = self.shape.num_relations
        distinct = torch.zeros(2 * num_relations, dtype=torch.float64)
        for part in slices(len(self.queries)):
            distinct += torch.bincount(
                self.queries[part].cpu() % (2 * num_relations), minlength=2 * num_relations
            )
        heads, tails = torch.split(distinct, num_relations)
        both = heads + tails
        shares: Tensor = torch.where(both > 0, tails / both.clamp(min=1), 0.5)
        return shares.to(self.queries.device)

    def _positions(self, entities: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each query, and whether it is in train."""
        return _search(self.queries, entities * (2 * self.shape.num_relations) + relations)


def _search(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each value, at most the last one, and whether the value is there."""
    position = torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)
    return position, ordered[position] == wanted

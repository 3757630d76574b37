"""Known answers: the entities that answer a query in some split; filtered ranking omits them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, GraphShape, Triples
from dualkg.data.triples import (
    NO_TRIPLES,
    distinct_triples,
    is_among,
    slices,
    sorted_distinct,
    triple_keys,
)

Ids = npt.NDArray[np.int64]
IdsT = TypeVar("IdsT", Ids, Tensor)
KEY_STRIDE = 2**31  # above all ids


def with_reciprocals(triples: Triples, num_relations: int) -> Triples:
    """(h, r, t) and then, for each, (t, r + num_relations, h)."""
    rotated = triples[:, [2, 1, 0]].copy()
    rotated[:, 1] += num_relations
    return np.concatenate([triples, rotated])


def occur(
    triples: Triples | Ids, splits: Iterable[Triples], shape: GraphShape
) -> npt.NDArray[np.bool_]:
    """Whether each triple is in one of some splits, `(num_triples,)`."""
    keys = triple_keys(np.concatenate([triples, *splits]), shape)
    wanted, known = np.split(keys, [len(triples)])
    return is_among(wanted, np.sort(known))


@dataclass(frozen=True)
class KnownAnswerTensors:
    """Known answers on a device.

    Those of `queries[i]` are `answers[offsets[i]:offsets[i + 1]]`, sorted.
    """

    queries: Tensor
    offsets: Tensor
    answers: Tensor

    def ranges(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The start and end of each query's answers, `(batch,)`; equal for a query without any."""
        first = torch.searchsorted(self.queries, keys, side="left")
        last = torch.searchsorted(self.queries, keys, side="right")
        return self.offsets[first], self.offsets[last]

    def contains(self, first: Tensor, last: Tensor, entities: Tensor) -> Tensor:
        """Whether entities are among the answers `first` to `last` − 1 of their rows, `(batch, n)`.

        `entities` is `(batch, n)`, `first` and `last` are `(batch,)`.
        """
        starts, rows = torch.unique(first, return_inverse=True)
        counts = torch.zeros_like(starts).scatter_reduce(0, rows, last - first, "amax")
        query_of_answer = torch.repeat_interleave(counts)
        if not len(query_of_answer):
            return torch.zeros_like(entities, dtype=torch.bool)

        first_positions = (counts.cumsum(0) - counts)[query_of_answer]
        positions = torch.arange(len(query_of_answer), device=first.device) - first_positions
        answers = self.answers[starts[query_of_answer] + positions]
        known = query_of_answer * KEY_STRIDE + answers
        wanted = rows[:, None] * KEY_STRIDE + entities
        nearest = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        is_known: Tensor = known[nearest] == wanted
        # A query without answers starts where the next one does.
        return is_known & (first < last)[:, None]


class KnownAnswers:
    """The tails of every (head, relation), and the heads of every (tail, relation + num_relations).

    Stored as sorted query keys, offsets and answers: 4 bytes per answer and 16 per query.

    Args:
        splits: Arrays of triples.
        shape: The shape of their graph.
        queries: Keep the answers of the queries of these triples only.

    Examples:
        >>> known = kg.KnownAnswers.of(graph)
        >>> kg.rank(run.model, graph, known=known).mean.shape == (2, len(graph.test))
        True
    """

    def __init__(
        self, splits: Iterable[Triples], shape: GraphShape, *, queries: Triples | None = None
    ) -> None:
        """With `queries`, only the answers to the queries of these triples are kept."""
        self.shape = shape
        splits = list(splits)
        self._by_device: dict[torch.device, KnownAnswerTensors] = {}
        if queries is None:
            triples = with_reciprocals(np.concatenate(splits), shape.num_relations)
        else:
            triples = self._with_queries_of(queries, splits)
        # A repeated triple is one answer.
        triples = distinct_triples(triples, GraphShape(shape.num_entities, 2 * shape.num_relations))
        self.answers = triples[:, 2].copy()
        keys = self._keys(triples)
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        self.queries = keys[starts]
        self.offsets = np.append(starts, len(keys))

    def _with_queries_of(self, queries: Triples, splits: list[Triples]) -> Triples:
        """The triples of both directions with the queries of some, by a pass over the splits."""
        num_relations = self.shape.num_relations
        wanted = sorted_distinct(self._keys(with_reciprocals(queries, num_relations)))
        parts = [NO_TRIPLES]
        for split in splits:
            for rows in slices(len(split)):
                triples = with_reciprocals(split[rows], num_relations)
                parts.append(triples[is_among(self._keys(triples), wanted)])
        return np.concatenate(parts)

    @classmethod
    def of(
        cls, graph: Graph, splits: Iterable[str] = SPLITS, *, queries: Triples | None = None
    ) -> KnownAnswers:
        """Those of a graph; of a large graph only the answers to `queries`, if these are given."""
        triples = [graph.split(name) for name in splits]
        return cls(triples, graph.shape, queries=queries if graph.is_large else None)

    def _keys(self, triples: Triples) -> Ids:
        return self.keys(triples[:, 0].astype(np.int64), triples[:, 1].astype(np.int64))

    def keys(self, entities: IdsT, relations: IdsT) -> IdsT:
        """One number per query."""
        return entities * (2 * self.shape.num_relations) + relations

    def on(self, device: torch.device) -> KnownAnswerTensors:
        """The arrays on a device, copied there once; on a CPU they are shared."""
        if device not in self._by_device:
            arrays = (self.queries, self.offsets, self.answers)
            tensors = [torch.from_numpy(array).to(device) for array in arrays]
            self._by_device[device] = KnownAnswerTensors(*tensors)
        return self._by_device[device]

    def __call__(
        self, entities: npt.NDArray[np.integer], relations: npt.NDArray[np.integer]
    ) -> tuple[Ids, Ids]:
        """For queries `(batch,)`: row and entity of every known answer, `(num_known,)` each."""
        entity_ids = np.asarray(entities, dtype=np.int64)
        relation_ids = np.asarray(relations, dtype=np.int64)
        keys = torch.from_numpy(self.keys(entity_ids, relation_ids))
        first, last = (limits.numpy() for limits in self.on(torch.device("cpu")).ranges(keys))
        counts = last - first
        rows = np.repeat(np.arange(len(keys)), counts)
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self.answers[np.repeat(first, counts) + positions].astype(np.int64)

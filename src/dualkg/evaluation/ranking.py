"""Filtered ranks: the rank of each true answer among all entities but the other known answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split, Triples
from dualkg.errors import DivergedError
from dualkg.kernels.hardware import gpu_kernels_unavailable
from dualkg.kernels.scores import RankTargets, count_with_torch
from dualkg.models.base import Model

Counts = npt.NDArray[np.int64]

BLOCK_ELEMENTS = 16_000_000  # scores in memory at a time: 64 MB in float32
CPU_BLOCK = 512  # queries per block on a CPU: more take more memory and are no faster
MIN_COMPARISONS_FOR_NUMBA = 50_000_000  # importing numba takes longer than fewer comparisons by PyTorch


@dataclass(frozen=True)
class Ranks:
    """The optimistic and the pessimistic rank of the tail and of the head of every triple.

    Arrays are `(2, num_triples)`: row 0 is of (head, relation, ?), row 1 of (?, relation, tail).
    """

    triples: Triples
    optimistic: Counts
    pessimistic: Counts

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """The realistic rank: the mean of the optimistic and the pessimistic one."""
        return (self.optimistic + self.pessimistic) / 2


@torch.no_grad()
def rank(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    known: KnownAnswers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ranks:
    """Rank every triple of a split in both directions, filtered by all three splits.

    A query with several answers is scored once. Memory is bounded by `BLOCK_ELEMENTS` scores. A GPU is synchronized
    at the end, not after each block.
    """
    model.check_shape(graph.shape)
    triples, device = graph.split(split), model.device
    known = known or KnownAnswers.of(graph)
    order, blocks = _queries(triples, known, device)
    count = choose_counter(device.type, 2 * len(triples) * graph.shape.num_entities)
    answers = known.on(device).answers
    counts = torch.empty(len(order), 2, dtype=torch.int32, device=device)
    done = 0
    with full_precision(), eval_mode(model):
        for block in blocks:
            positions = order[done : done + len(block.targets.rows)]
            counts[positions] = count(block.scores(model), answers, block.targets)
            done += len(positions)
            if progress:
                progress(done, len(order))
    found = counts.cpu().numpy().astype(np.int64)
    check_finite(found, lambda position: _format_query(triples, position))
    better, tied = np.moveaxis(found.reshape(2, -1, 2), -1, 0)
    return Ranks(triples, better + 1, better + tied + 1)


# -- queries ------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Distinct queries of one direction, and the answers to rank."""

    given: Tensor
    relations: Tensor
    targets: RankTargets
    backward: bool

    def scores(self, model: Model) -> Tensor:
        if self.backward:
            return model.predict_heads(self.relations, self.given)
        return model.predict_tails(self.given, self.relations)


def _queries(triples: Triples, known: KnownAnswers, device: torch.device) -> tuple[Tensor, Iterator[_Block]]:
    """The queries of both directions in blocks, and the position of each of their answers, in order.

    Positions count the tails of all triples, then the heads of all triples.
    """
    num_entities, num_relations = known.shape
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    given, answers = torch.cat([heads, tails]), torch.cat([tails, heads])
    # Sorted by relation, so that work per relation is done in few blocks.
    keys = torch.cat([relations, relations + num_relations]) * num_entities + given
    order = torch.argsort(keys)
    distinct, rows, repeats = torch.unique_consecutive(keys[order], return_inverse=True, return_counts=True)
    relation, entity = distinct // num_entities, distinct % num_entities
    first, last = (ends[rows] for ends in known.on(device).ranges(known.keys(entity, relation)))
    targets = RankTargets(rows, answers[order], first, last)
    num_forward = int((relation < num_relations).sum())
    size = _block_size(num_entities, device)
    starts = [*range(0, num_forward, size), *range(num_forward, len(distinct), size), len(distinct)]
    offsets = torch.cat([repeats.new_zeros(1), repeats.cumsum(0)])[starts].tolist()

    def blocks() -> Iterator[_Block]:
        for (start, stop), (begin, end) in zip(pairwise(starts), pairwise(offsets), strict=True):
            backward = start >= num_forward
            part = RankTargets(*(values[begin:end] for values in targets))
            yield _Block(
                entity[start:stop],
                relation[start:stop] - (num_relations if backward else 0),
                part._replace(rows=part.rows - start),
                backward,
            )

    return order, blocks()


def _block_size(num_entities: int, device: torch.device) -> int:
    """The number of queries per block, a multiple of 128 if there are more than 128."""
    size = BLOCK_ELEMENTS // num_entities
    if device.type == "cpu":
        size = min(size, CPU_BLOCK)
    return max(1, size - size % 128 if size > 128 else size)


def _format_query(triples: Triples, position: int) -> str:
    backward, row = divmod(position, len(triples))
    head, relation, tail = triples[row].tolist()
    return f"(?, {relation}, {tail})" if backward else f"({head}, {relation}, ?)"


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 matrix products in float32, whatever precision training uses."""
    reduced = [
        (matmul, matmul.fp32_precision)
        for matmul in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        if matmul.fp32_precision in ("tf32", "bf16")
    ]
    for matmul, _ in reduced:
        matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        for matmul, precision in reduced:
            matmul.fp32_precision = precision


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Switch a model to evaluation mode and back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


# -- counts -------------------------------------------------------------------------------------------------

Count = Callable[[Tensor, Tensor, RankTargets], Tensor]


def choose_counter(kind: str, num_comparisons: int) -> Count:
    """The Triton or numba form of `count_with_torch` for a device type, if available and worthwhile."""
    if kind == "cpu" and num_comparisons < MIN_COMPARISONS_FOR_NUMBA:
        return count_with_torch
    return _compiled_count(kind) or count_with_torch


@cache
def _compiled_count(kind: str) -> Count | None:
    if kind == "cuda" and gpu_kernels_unavailable() is None:
        from dualkg.kernels.gpu.scores import count_better_and_tied

        return count_better_and_tied
    if kind == "cpu":
        from dualkg.kernels import cpu  # imports numba

        return cpu.count_better_and_tied if cpu.HAS_NUMBA else None
    return None


def check_finite(counts: Counts, query: Callable[[int], str]) -> None:
    """Raise for rows with counts −1: NaN compares as false with everything and would rank first."""
    bad = np.flatnonzero(counts[:, 0] < 0)
    if len(bad):
        raise DivergedError(
            f"The model scores NaN or infinity for the query {query(int(bad[0]))}, so it cannot be ranked. "
            f"Its training has diverged: lower the learning rate or raise the regularizer's weight."
        )

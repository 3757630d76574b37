"""Ranks: where each true answer stands among all entities, other known answers left out."""

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
from dualkg.models.base import Model

Counts = npt.NDArray[np.int64]

BLOCK_ELEMENTS = 16_000_000  # scores held at once: 64 MB in float32
CPU_BLOCK = 512  # queries scored at once on a CPU: more take more memory and are no faster
PIECE_ELEMENTS = 1_000_000  # scores that PyTorch compares at once
WORTH_NUMBA = 50_000_000  # comparisons; loading numba takes longer than PyTorch does for fewer


@dataclass(frozen=True)
class Ranks:
    """The ranks of the tail and of the head of every triple, at their best and at their worst among ties.

    Arrays are `(2, num_triples)`: row 0 asks (head, relation, ?), row 1 asks (?, relation, tail).
    """

    triples: Triples
    optimistic: Counts
    pessimistic: Counts

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Ties at the mean of the best and the worst place."""
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

    A query is scored once however many of its answers are asked for. Memory is bounded by `BLOCK_ELEMENTS`
    scores, whatever the number of queries. A GPU is waited for at the end, not from block to block.
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
            places = order[done : done + len(block.asked.rows)]
            counts[places] = count(block.scores(model), answers, block.asked)
            done += len(places)
            if progress:
                progress(done, len(order))
    found = counts.cpu().numpy().astype(np.int64)
    check_finite(found, lambda place: _as_asked(triples, place))
    better, tied = np.moveaxis(found.reshape(2, -1, 2), -1, 0)
    return Ranks(triples, better + 1, better + tied + 1)


# -- queries ------------------------------------------------------------------------------------------------


class RankTargets(NamedTuple):
    """Answers asked of rows of scores, `(num_asked,)` each; those of one row stand together.

    Known to the row are `known[first:last]`, of an array that belongs to no row alone.
    """

    rows: Tensor
    answers: Tensor
    first: Tensor
    last: Tensor


class _Block(NamedTuple):
    """Distinct queries of one direction, and the answers asked of them."""

    given: Tensor
    relations: Tensor
    asked: RankTargets
    backward: bool

    def scores(self, model: Model) -> Tensor:
        if self.backward:
            return model.predict_heads(self.relations, self.given)
        return model.predict_tails(self.given, self.relations)


def _queries(triples: Triples, known: KnownAnswers, device: torch.device) -> tuple[Tensor, Iterator[_Block]]:
    """The queries of both directions in blocks; and, for every answer as blocks ask for it, its place among all.

    Places are those of the tails of all triples, then those of the heads of all.
    """
    num_entities, num_relations = known.shape
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    given, answers = torch.cat([heads, tails]), torch.cat([tails, heads])
    # By relation first: what a model does for a relation it then does in few blocks.
    keys = torch.cat([relations, relations + num_relations]) * num_entities + given
    order = torch.argsort(keys)
    distinct, rows, repeats = torch.unique_consecutive(keys[order], return_inverse=True, return_counts=True)
    relation, entity = distinct // num_entities, distinct % num_entities
    first, last = (ends[rows] for ends in known.on(device).ranges(known.keys(entity, relation)))
    asked = RankTargets(rows, answers[order], first, last)
    num_forward = int((relation < num_relations).sum())
    size = _block_size(num_entities, device)
    starts = [*range(0, num_forward, size), *range(num_forward, len(distinct), size), len(distinct)]
    offsets = torch.cat([repeats.new_zeros(1), repeats.cumsum(0)])[starts].tolist()

    def blocks() -> Iterator[_Block]:
        for (start, stop), (begin, end) in zip(pairwise(starts), pairwise(offsets), strict=True):
            backward = start >= num_forward
            part = RankTargets(*(values[begin:end] for values in asked))
            yield _Block(
                entity[start:stop],
                relation[start:stop] - (num_relations if backward else 0),
                part._replace(rows=part.rows - start),
                backward,
            )

    return order, blocks()


def _block_size(num_entities: int, device: torch.device) -> int:
    """How many queries are scored at once: whole tiles of a matrix product where there is room for some."""
    size = BLOCK_ELEMENTS // num_entities
    if device.type == "cpu":
        size = min(size, CPU_BLOCK)
    return max(1, size - size % 128 if size > 128 else size)


def _as_asked(triples: Triples, place: int) -> str:
    backward, row = divmod(place, len(triples))
    head, relation, tail = triples[row].tolist()
    return f"(?, {relation}, {tail})" if backward else f"({head}, {relation}, ?)"


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products of float32 in float32, whatever was chosen for training."""
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
    """The model for a while as it answers, not as it learns: batch normalisation is another thing in the two."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


# -- counts -------------------------------------------------------------------------------------------------

Count = Callable[[Tensor, Tensor, RankTargets], Tensor]


def choose_counter(kind: str, num_comparisons: int) -> Count:
    """The form of `count_with_torch` for a kind of device: Triton's or numba's where that is installed."""
    if kind == "cpu" and num_comparisons < WORTH_NUMBA:
        return count_with_torch
    return _compiled_count(kind) or count_with_torch


@cache
def _compiled_count(kind: str) -> Count | None:
    if kind == "cuda" and gpu_kernels_unavailable() is None:
        from dualkg.kernels.gpu.counting import count_better_and_tied as on_gpu

        return on_gpu
    if kind == "cpu":
        from dualkg.kernels.cpu.compile import HAS_NUMBA
        from dualkg.kernels.cpu.counting import count_better_and_tied as on_cpu

        return on_cpu if HAS_NUMBA else None
    return None


def count_with_torch(scores: Tensor, known: Tensor, asked: RankTargets) -> Tensor:
    """How many candidates stand above each answer, and how many beside it, `(num_asked, 2)`; known ones do not count.

    The answer itself is among neither, whether it is known or not. Where a row has a score that is NaN or infinite,
    its counts are −1.
    """
    finite = torch.isfinite(scores.amax(1)) & torch.isfinite(scores.amin(1))
    step = max(1, PIECE_ELEMENTS // scores.shape[1])
    pieces = (RankTargets(*piece) for piece in zip(*(torch.split(values, step) for values in asked), strict=True))
    counts = torch.cat([_count_piece(scores, known, piece) for piece in pieces])
    return counts.masked_fill_(~finite[asked.rows, None], -1)


def _count_piece(scores: Tensor, known: Tensor, asked: RankTargets) -> Tensor:
    rows, answers, first, last = asked
    values = scores[rows]
    target = values.gather(1, answers[:, None])
    better, tied = ((values > target).sum(1, dtype=torch.int32), (values == target).sum(1, dtype=torch.int32) - 1)
    num_known = last - first
    which = torch.repeat_interleave(num_known)
    within = torch.arange(len(which), device=rows.device) - (num_known.cumsum(0) - num_known)[which]
    others = known[first[which] + within].long()
    theirs, against = values[which, others], target[which, 0]
    apart = others != answers[which]
    better.index_add_(0, which, ((theirs > against) & apart).int(), alpha=-1)
    tied.index_add_(0, which, ((theirs == against) & apart).int(), alpha=-1)
    return torch.stack([better, tied], dim=1)


def check_finite(counts: Counts, query: Callable[[int], str]) -> None:
    """NaN compares as false with everything and would rank first, so it must never be counted."""
    bad = np.flatnonzero(counts[:, 0] < 0)
    if len(bad):
        raise DivergedError(
            f"The model scores NaN or infinity for the query {query(int(bad[0]))}, so it cannot be ranked. "
            f"Its training has diverged: lower the learning rate or raise the regularizer's weight."
        )

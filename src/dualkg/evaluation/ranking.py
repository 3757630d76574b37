"""Filtered ranks: the rank of each true answer among all entities, or given ones, but the other
known answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, Split, Triples, distinct_triples
from dualkg.errors import DivergedError, RequestError
from dualkg.evaluation.candidates import CandidateLists, TypeConstraint
from dualkg.kernels.hardware import gpu_kernels_unavailable
from dualkg.kernels.scores import RankTargets, count_in_columns, count_with_torch
from dualkg.models.base import SIDES, Model
from dualkg.models.sharded import ShardedModel

Counts = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]

BLOCK_ELEMENTS = 16_000_000  # scores in memory at a time: 64 MB in float32
MAX_COLUMNS = 2**20  # entities of a shard that are scored at a time
RELATION_BLOCK = 1024  # queries per block of relation prediction
CPU_BLOCK = 512  # queries per block on a CPU: more take more memory and are no faster
MIN_COMPARISONS_FOR_NUMBA = (
    50_000_000  # importing numba takes longer than fewer comparisons by PyTorch
)


@dataclass(frozen=True)
class Ranks:
    """The optimistic and the pessimistic rank of the tail and of the head of every triple.

    Arrays are `(2, num_triples)`: row 0 is of (head, relation, ?), row 1 of (?, relation, tail).
    `num_candidates` includes the answer; it is None where all entities but the known answers are
    candidates.
    """

    triples: Triples
    optimistic: Counts
    pessimistic: Counts
    num_candidates: Counts | None = None

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
    type_constrained: bool = False,
    candidates: CandidateLists | None = None,
    progress: Progress | None = None,
) -> Ranks:
    """Rank every triple of a split in both directions, filtered by all three splits.

    Candidates are all entities; with `type_constrained` those that train has on the same side of
    the relation; or those of a list for each query. The answer is always one. A GPU is synchronized
    at the end, not after each block.
    """
    model.check_shape(graph.shape)
    triples = graph.split(split)
    device = model.device
    known = known or KnownAnswers.of(graph, queries=triples)
    shard = model.shard if isinstance(model, ShardedModel) else None
    if shard and (candidates is not None or type_constrained):
        raise RequestError(
            "Processes that share a model rank among all entities. Evaluate the finished run."
        )
    if candidates is not None:
        if type_constrained:
            raise RequestError(
                "Candidates are given in lists or by type constraints, not both. Leave out one."
            )
        return _rank_lists(model, triples, known, candidates, progress)
    types = TypeConstraint.of(graph, device) if type_constrained else None
    count = (
        count_with_torch
        if shard
        else choose_counter(device.type, 2 * len(triples) * graph.shape.num_entities)
    )
    num_columns = min(shard.part, MAX_COLUMNS) if shard else graph.shape.num_entities
    answers = known.on(device).answers
    counts = torch.empty(2 * len(triples), 2, dtype=torch.int32, device=device)
    num_candidates = torch.empty(len(counts), dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for block in _blocks(triples, known, device, num_columns=num_columns, progress=progress):
            if isinstance(model, ShardedModel):
                counts[block.positions] = _count_on_shards(model, block, answers)
                continue
            scores = block.scores(model)
            if types:
                allowed = types.allowed(block.relations, backward=block.backward)
                allowed[block.targets.rows, block.targets.answers] = True
                # Candidates that are neither known nor the answer are all tied with it in a table
                # of ones.
                num_candidates[block.positions] = (
                    count(allowed.to(scores.dtype), answers, block.targets)[:, 1] + 1
                )
                scores = torch.where(
                    allowed | ~scores.isfinite(), scores, torch.finfo(scores.dtype).min
                )
            counts[block.positions] = count(scores, answers, block.targets)
    return _ranks(triples, counts, num_candidates if types else None)


def _ranks(triples: Triples, counts: Tensor, num_candidates: Tensor | None) -> Ranks:
    """Ranks from counts `(2 · num_triples, 2)` of the candidates that score higher and equal."""

    def query(position: int) -> str:
        backward, row = divmod(position, len(triples))
        head, relation, tail = triples[row].tolist()
        return f"(?, {relation}, {tail})" if backward else f"({head}, {relation}, ?)"

    found = counts.cpu().numpy().astype(np.int64)
    check_finite(found, query)
    better, tied = np.moveaxis(found.reshape(2, -1, 2), -1, 0)
    numbers = (
        None
        if num_candidates is None
        else num_candidates.cpu().numpy().astype(np.int64).reshape(2, -1)
    )
    return Ranks(triples, better + 1, better + tied + 1, numbers)


@torch.no_grad()
def rank_relations(
    model: Model, graph: Graph, triples: Triples
) -> tuple[npt.NDArray[np.float64], Counts]:
    """Filtered realistic ranks of the relations of triples, and the number of candidates of each,
    `(num_triples,)`.
    """
    model.check_shape(graph.shape)
    num_relations = graph.shape.num_relations
    device = model.device
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    known = distinct_triples(np.concatenate([graph.split(name) for name in SPLITS]), graph.shape)
    pairs, wanted = (
        ids[:, 0].astype(np.int64) * graph.shape.num_entities + ids[:, 2]
        for ids in (known, triples)
    )
    order = np.argsort(pairs, kind="stable")
    first, last = (np.searchsorted(pairs[order], wanted, side=side) for side in ("left", "right"))
    arrays = (known[order, 1], first, last)
    known_relations, starts, ends = (torch.from_numpy(array).to(device) for array in arrays)
    count = choose_counter(device.type, len(triples) * num_relations)
    counts = torch.empty(len(triples), 2, dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for start in range(0, len(triples), RELATION_BLOCK):
            block = slice(start, start + RELATION_BLOCK)
            scores = model.score_relations(heads[block], tails[block])[:, :num_relations]
            targets = RankTargets(
                torch.arange(len(scores), device=device),
                relations[block],
                starts[block],
                ends[block],
            )
            counts[block] = count(scores, known_relations, targets)
    found = counts.cpu().numpy().astype(np.int64)
    check_finite(found, lambda row: f"({triples[row, 0]}, ?, {triples[row, 2]})")
    better, tied = found.T
    return better + 1 + tied / 2, num_relations - (last - first - 1)


def count_candidates(triples: Triples, known: KnownAnswers) -> Counts:
    """The number of candidates of each query, `(2, num_triples)`: all entities but the other known
    answers.
    """
    given, relations, answers = _both_directions(triples, known, torch.device("cpu"))
    tensors = known.on(given.device)
    first, last = tensors.ranges(known.keys(given, relations))
    others = last - first - tensors.contains(first, last, answers[:, None])[:, 0].long()
    found: Counts = (known.shape.num_entities - others).numpy().reshape(2, -1)
    return found


def _count_on_shards(model: ShardedModel, block: _Block, answers: Tensor) -> Tensor:
    """Count on the entities of each process, in blocks of entities, and add the counts of all."""
    shard = model.shard
    rows = block.targets.rows
    wanted = model.shard.positions(block.targets.answers)
    parts = list(model.column_blocks(MAX_COLUMNS))
    values = torch.zeros(len(rows), dtype=next(model.parameters()).dtype, device=rows.device)
    for start, stop in parts:  # of which one has the answer
        with model.columns(start, stop):
            scores = block.scores(model)
        if stop > start:
            here = (wanted >= start) & (wanted < stop)
            columns = (wanted - start).clamp(0, stop - start - 1)
            values = torch.where(here, scores[rows, columns], values)
    shard.all_reduce(values)
    counts = torch.zeros(len(rows), 3, dtype=torch.int64, device=rows.device)
    for start, stop in parts:
        if len(parts) > 1:
            with model.columns(start, stop):
                scores = block.scores(model)

        def columns_of(ids: Tensor, start: int = start, stop: int = stop) -> Tensor:
            at = shard.positions(ids)
            return torch.where((at >= start) & (at < stop), at - start, -1)

        counts += count_in_columns(scores, values, answers, block.targets, columns_of)
    shard.all_reduce(counts)
    finite = (counts[:, 2] == 0) & values.isfinite()
    return counts[:, :2].masked_fill(~finite[:, None], -1).int()


def _rank_lists(
    model: Model,
    triples: Triples,
    known: KnownAnswers,
    lists: CandidateLists,
    progress: Progress | None,
) -> Ranks:
    """Rank each answer among the candidates of its own list that are no other known answers."""
    if lists.num_queries != 2 * len(triples):
        raise RequestError(
            f"Candidates are listed for {lists.num_queries // 2:,} triples; the split has "
            f"{len(triples):,}."
        )
    device = model.device
    tensors = known.on(model.device)
    given, relations, answers = _both_directions(triples, known, device)
    width = max(1, sum(table.numel() for table in model.parameters()) // known.shape.num_entities)
    counts = torch.empty(2 * len(triples), 2, dtype=torch.int32, device=device)
    num_candidates = torch.empty(2 * len(triples), dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for backward, side in enumerate(SIDES):
            offset = backward * len(triples)
            for start, stop, ids in lists.blocks(
                offset, offset + len(triples), BLOCK_ELEMENTS // width
            ):
                entity = given[start:stop]
                relation = relations[start:stop]
                answer = answers[start:stop, None]
                first, last = tensors.ranges(known.keys(entity, relation))
                listed = torch.from_numpy(ids).to(device).long()
                counted = (listed >= 0) & (listed != answer)
                counted &= ~tensors.contains(first, last, listed)
                chosen = torch.cat([answer, listed.clamp(min=0)], 1)
                scores = model.predict_candidates(
                    entity, relation - backward * known.shape.num_relations, chosen, side
                )
                target = scores[:, :1]
                others = scores[:, 1:]
                better = ((others > target) & counted).sum(1)
                tied = ((others == target) & counted).sum(1)
                finite = target[:, 0].isfinite() & (others.isfinite() | ~counted).all(1)
                counts[start:stop] = (
                    torch.stack([better, tied], 1).masked_fill(~finite[:, None], -1).int()
                )
                num_candidates[start:stop] = counted.sum(1) + 1
                if progress:
                    progress(stop, 2 * len(triples))
    return _ranks(triples, counts, num_candidates)


class _Block(NamedTuple):
    """Distinct queries of one direction, the answers to rank, and their positions among all tails,
    then all heads.
    """

    given: Tensor
    relations: Tensor
    targets: RankTargets
    backward: bool
    positions: Tensor

    def scores(self, model: Model) -> Tensor:
        if self.backward:
            return model.predict_heads(self.relations, self.given)
        return model.predict_tails(self.given, self.relations)


def _both_directions(
    triples: Triples, known: KnownAnswers, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The given entity, the relation id and the answer of all tail queries, then of all head
    queries.
    """
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    both = torch.cat([relations, relations + known.shape.num_relations])
    return torch.cat([heads, tails]), both, torch.cat([tails, heads])


def _blocks(
    triples: Triples,
    known: KnownAnswers,
    device: torch.device,
    *,
    num_columns: int,
    progress: Progress | None,
) -> Iterator[_Block]:
    """The queries of both directions in blocks whose rows have `num_columns` scores."""
    num_entities, num_relations = known.shape
    given, relations, answers = _both_directions(triples, known, device)
    # Sorted by relation, so that work per relation is done in few blocks.
    keys = relations * num_entities + given
    order = torch.argsort(keys)
    distinct, rows, repeats = torch.unique_consecutive(
        keys[order], return_inverse=True, return_counts=True
    )
    relation = distinct // num_entities
    entity = distinct % num_entities
    first, last = (ends[rows] for ends in known.on(device).ranges(known.keys(entity, relation)))
    targets = RankTargets(rows, answers[order], first, last)
    num_forward = int((relation < num_relations).sum())
    size = max(1, BLOCK_ELEMENTS // num_columns)
    size = min(size, CPU_BLOCK) if device.type == "cpu" else size
    size -= size % 128 if size > 128 else 0
    starts = [*range(0, num_forward, size), *range(num_forward, len(distinct), size), len(distinct)]
    offsets = torch.cat([repeats.new_zeros(1), repeats.cumsum(0)])[starts].tolist()
    for (start, stop), (begin, end) in zip(pairwise(starts), pairwise(offsets), strict=True):
        backward = start >= num_forward
        part = RankTargets(*(values[begin:end] for values in targets))
        relation_ids = relation[start:stop] - (num_relations if backward else 0)
        part = part._replace(rows=part.rows - start)
        yield _Block(entity[start:stop], relation_ids, part, backward, order[begin:end])
        if progress:
            progress(end, len(order))


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


def choose_counter(
    kind: str, num_comparisons: int
) -> Callable[[Tensor, Tensor, RankTargets], Tensor]:
    """The Triton or numba form of `count_with_torch` for a device type, if available and
    worthwhile.
    """
    if kind == "cuda" and gpu_kernels_unavailable() is None:
        from dualkg.kernels.gpu.scores import count_better_and_tied

        return count_better_and_tied
    if kind == "cpu" and num_comparisons >= MIN_COMPARISONS_FOR_NUMBA:
        from dualkg.kernels import cpu  # imports numba

        return cpu.count_better_and_tied if cpu.HAS_NUMBA else count_with_torch
    return count_with_torch


def check_finite(counts: Counts, query: Callable[[int], str]) -> None:
    """Raise for rows with counts −1: NaN compares as false with everything and would rank first."""
    bad = np.flatnonzero(counts[:, 0] < 0)
    if len(bad):
        raise DivergedError(
            f"The model scores NaN or infinity for the query {query(int(bad[0]))}, so it cannot "
            "be ranked. Its training has diverged: lower the learning rate or raise the "
            "regularizer's weight."
        )

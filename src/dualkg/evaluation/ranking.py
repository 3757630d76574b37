"""Filtered ranks: the rank of each true answer among the candidates of its query.

Candidates are all entities, or given ones, but the other known answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, Split, Triples, distinct_triples
from dualkg.errors import DivergedError, InvalidValue, RequestError
from dualkg.evaluation.candidates import CandidateLists
from dualkg.evaluation.type_constraint import TypeConstraint
from dualkg.kernels.hardware import gpu_kernels_unavailable
from dualkg.kernels.hashing import hash_columns
from dualkg.kernels.scores import RankTargets, count_with_torch
from dualkg.models.base import SIDES, Model
from dualkg.tables.base import TABLE_NAMES, EntityTables, Side

Counts = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
Counter = Callable[[Tensor, Tensor, RankTargets], Tensor]  # such as `count_with_torch`

BLOCK_ELEMENTS = 16_000_000  # scores in memory at a time: 64 MB in float32
RELATION_BLOCK = 1024  # queries per block of relation prediction
CPU_BLOCK = 512  # queries per block on a CPU: more take more memory and are no faster
# Below this number, PyTorch has compared the scores before numba is imported.
MIN_COMPARISONS_FOR_NUMBA = 50_000_000


def realistic_rank(num_better: Any, num_tied: Any) -> Any:
    """The rank of an answer: the mean of its optimistic and its pessimistic rank.

    `num_better` and `num_tied` count the other candidates that score higher, and the same; they are
    arrays of NumPy or PyTorch.
    """
    return 1 + num_better + num_tied / 2


@dataclass(frozen=True)
class Ranks:
    """The optimistic and the pessimistic rank of the tail and of the head of every triple.

    Arrays are `(2, num_triples)`: row 0 is of (head, relation, ?), row 1 of (?, relation, tail).
    `num_candidates` includes the answer; it is None where all entities but the known answers are
    candidates.

    Attributes:
        triples: The ranked triples.
        optimistic: Ranks with all ties below the answer.
        pessimistic: Ranks with all ties above the answer.
        num_candidates: Number of candidates with the answer; None where all entities but the known
            answers are candidates.

    Examples:
        >>> kg.rank(run.model, graph).mean.shape
        (2, 677)
    """

    triples: Triples
    optimistic: Counts
    pessimistic: Counts
    num_candidates: Counts | None = None

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """The realistic rank: the mean of the optimistic and the pessimistic rank."""
        ranks: npt.NDArray[np.float64] = realistic_rank(
            self.optimistic - 1, self.pessimistic - self.optimistic
        )
        return ranks


def sample_triples(triples: Triples, num_queries: int | None, *, seed: int = 0) -> Triples:
    """A sample of triples for `num_queries` queries, two for each triple; None takes all.

    The sample has the lowest hashes of positions, in the order of the triples. Every process and
    every machine takes the same, and a larger sample contains a smaller one.
    """
    num_triples = len(triples) if num_queries is None else -(-num_queries // 2)
    if num_triples >= len(triples):
        return triples
    hashes = hash_columns(seed, torch.arange(len(triples)))
    lowest = hashes.topk(num_triples, largest=False).indices.sort().values
    return np.array(triples[lowest.numpy()])


@torch.no_grad()
def rank(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    triples: Triples | None = None,
    known: KnownAnswers | None = None,
    type_constrained: bool = False,
    candidates: CandidateLists | None = None,
    progress: Progress | None = None,
    block_elements: int = BLOCK_ELEMENTS,
    count: Counter | None = None,
) -> Ranks:
    """Rank every triple of a split in both directions, filtered by all three splits.

    If `triples` are given, such as a sample, they are ranked in place of the split. Candidates are
    all entities; with `type_constrained` only entities that train has on the same side of the
    relation; with `candidates` the entities of a list for each query. The answer is always a
    candidate. A GPU is synchronized at the end, not after each block.

    At most `block_elements` scores are in memory at a time. Candidates are counted by `count`, or
    by the fastest form that is installed.

    Args:
        model: A model.
        graph: The graph.
        split: "train", "valid" or "test".
        triples: Ranked in place of the split.
        known: The filter, if it is there already.
        type_constrained: Whether only entities in domain or range are candidates.
        candidates: Candidates of each query.
        progress: Called with progress.
        block_elements: Number of scores in memory at a time.
        count: How candidates are counted.

    Returns:
        Optimistic and pessimistic ranks of each query.

    Examples:
        >>> ranks = kg.rank(run.model, graph)
        >>> bool((ranks.optimistic <= ranks.pessimistic).all())
        True
    """
    model.check_shape(graph.shape)
    tables = model.tables
    if candidates is not None and type_constrained:
        raise RequestError(
            "Candidates are given in lists or by type constraints, not both. Leave out one."
        )
    if triples is None:
        triples = graph.split(split)
    known = known or KnownAnswers.of(graph, queries=triples)
    if candidates is not None:
        return _rank_lists(
            model, triples, known, candidates, progress, block_elements=block_elements
        )
    device = model.device
    types = TypeConstraint.of(graph, device) if type_constrained else None
    dtype = next(model.parameters()).dtype
    num_entities = graph.shape.num_entities
    count = count or choose_counter(device.type, 2 * len(triples) * num_entities)
    answers = known.on(device).answers
    counts = torch.empty(2 * len(triples), 2, dtype=torch.int32, device=device)
    num_candidates = torch.empty(len(counts), dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for block in _blocks(
            triples,
            known,
            device,
            num_queries=max(1, block_elements // tables.columns_at_once),
            progress=progress,
        ):
            if types is None:
                counts[block.positions] = tables.count_better(
                    partial(block.scores, model), answers, block.targets, count=count
                )
                continue
            allowed = types.allowed(block.relations, backward=block.backward)
            allowed[block.targets.rows, block.targets.answers] = True
            # Candidates that are neither known nor the answer are all tied with it in a table of
            # ones.
            ones = partial(_own_columns, allowed.to(dtype), tables)
            tied = tables.count_better(ones, answers, block.targets, count=count)[:, 1]
            num_candidates[block.positions] = tied + 1
            scores_of = partial(block.scores_within, allowed, model)
            counts[block.positions] = tables.count_better(
                scores_of, answers, block.targets, count=count
            )
    return _ranks(triples, counts, num_candidates if types else None)


def _ranks(triples: Triples, counts: Tensor, num_candidates: Tensor | None) -> Ranks:
    """Ranks from counts `(2 · num_triples, 2)` of the candidates that score higher and equal."""

    def query(position: int) -> str:
        backward, row = divmod(position, len(triples))
        head, relation, tail = triples[row].tolist()
        return f"(?, {relation}, {tail})" if backward else f"({head}, {relation}, ?)"

    numbers = _as_counts(counts)
    check_finite(numbers, query)
    better, tied = np.moveaxis(numbers.reshape(2, -1, 2), -1, 0)
    of_queries = None if num_candidates is None else _as_counts(num_candidates).reshape(2, -1)
    return Ranks(triples, better + 1, better + tied + 1, of_queries)


def _as_counts(values: Tensor) -> Counts:
    return values.cpu().numpy().astype(np.int64)


@torch.no_grad()
def rank_relations(
    model: Model,
    graph: Graph,
    triples: Triples,
    *,
    block_size: int = RELATION_BLOCK,
    count: Counter | None = None,
) -> tuple[npt.NDArray[np.float64], Counts]:
    """Filtered realistic ranks of the relations of triples, `(num_triples,)`.

    The second array has the number of candidates of each. `block_size` queries are scored at a
    time, and `count` counts candidates as in `rank`.
    """
    model.check_shape(graph.shape)
    num_relations = graph.shape.num_relations
    device = model.device
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    known = distinct_triples(np.concatenate([graph.split(name) for name in SPLITS]), graph.shape)
    known_pairs = _pair_keys(known, graph.shape.num_entities)
    wanted = _pair_keys(triples, graph.shape.num_entities)
    order = np.argsort(known_pairs, kind="stable")
    first = np.searchsorted(known_pairs[order], wanted, side="left")
    last = np.searchsorted(known_pairs[order], wanted, side="right")
    known_relations = torch.from_numpy(known[order, 1]).to(device)
    starts = torch.from_numpy(first).to(device)
    ends = torch.from_numpy(last).to(device)
    count = count or choose_counter(device.type, len(triples) * num_relations)
    counts = torch.empty(len(triples), 2, dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for start in range(0, len(triples), block_size):
            block = slice(start, start + block_size)
            scores = model.score_relations(heads[block], tails[block])[:, :num_relations]
            targets = RankTargets(
                torch.arange(len(scores), device=device),
                relations[block],
                starts[block],
                ends[block],
            )
            counts[block] = count(scores, known_relations, targets)
    numbers = _as_counts(counts)
    check_finite(numbers, lambda row: f"({triples[row, 0]}, ?, {triples[row, 2]})")
    better, tied = numbers.T
    return realistic_rank(better, tied), num_relations - (last - first - 1)


def _pair_keys(triples: Triples, num_entities: int) -> npt.NDArray[np.int64]:
    """A number for the pair of head and tail of each triple."""
    return triples[:, 0].astype(np.int64) * num_entities + triples[:, 2]


def count_candidates(triples: Triples, known: KnownAnswers) -> Counts:
    """The number of candidates of each query, `(2, num_triples)`.

    Candidates are all entities except the other known answers.
    """
    given, relations, answers = _both_directions(triples, known, torch.device("cpu"))
    tensors = known.on(given.device)
    first, last = tensors.ranges(known.keys(given, relations))
    others = last - first - tensors.contains(first, last, answers[:, None])[:, 0].long()
    numbers: Counts = (known.shape.num_entities - others).numpy()
    return numbers.reshape(2, -1)


def _rank_lists(
    model: Model,
    triples: Triples,
    known: KnownAnswers,
    lists: CandidateLists,
    progress: Progress | None,
    *,
    block_elements: int,
) -> Ranks:
    """Rank each answer among the candidates of its list, except the other known answers."""
    if lists.num_queries != 2 * len(triples):
        expected = f"lists for the {len(triples):,} triples of the split"
        number = f"lists for {lists.num_queries // 2:,} triples"
        raise InvalidValue("candidates", expected=expected, found=number)
    device = model.device
    tensors = known.on(model.device)
    given, relations, answers = _both_directions(triples, known, device)
    width = _numbers_of_entity(model)
    counts = torch.empty(2 * len(triples), 2, dtype=torch.int32, device=device)
    num_candidates = torch.empty(2 * len(triples), dtype=torch.int32, device=device)
    with full_precision(), eval_mode(model):
        for backward, side in enumerate(SIDES):
            offset = backward * len(triples)
            for start, stop, ids in lists.blocks(
                offset, offset + len(triples), block_elements // width
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


def _numbers_of_entity(model: Model) -> int:
    """The numbers of a model for each entity: the same in all processes that divide the tables."""
    width = 0
    others = 0
    for name, table in model.named_parameters():
        if name.rpartition(".")[2] in TABLE_NAMES:
            width += table.shape[1]
        else:
            others += table.numel()
    return max(1, width + others // model.shape.num_entities)


class _Block(NamedTuple):
    """Distinct queries of one direction and the answers to rank.

    `positions` are where the answers stand among all tails, then all heads.
    """

    given: Tensor
    relations: Tensor
    targets: RankTargets
    backward: bool
    positions: Tensor

    def scores(self, model: Model, rows: slice | None = None) -> Tensor:
        """Scores of the entities that this process has, or of some rows of its tables."""
        side: Side = "head" if self.backward else "tail"
        return model.own_predictions(self.given, self.relations, side, rows)

    def scores_within(self, allowed: Tensor, model: Model, rows: slice | None) -> Tensor:
        """Scores that are least where `(batch, num_entities)` entities are not allowed."""
        scores = self.scores(model, rows)
        is_allowed = _own_columns(allowed, model.tables, rows)
        least = torch.finfo(scores.dtype).min
        return torch.where(is_allowed | ~scores.isfinite(), scores, least)


def _own_columns(values: Tensor, tables: EntityTables, rows: slice | None) -> Tensor:
    """The columns of the entities in some rows of this process; without `rows`, all columns."""
    if rows is None:
        return values
    return values[:, tables.entities_of(rows).to(values.device)]


def _both_directions(
    triples: Triples, known: KnownAnswers, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The given entity, the relation id and the answer of all queries: of tails, then of heads."""
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    both = torch.cat([relations, relations + known.shape.num_relations])
    return torch.cat([heads, tails]), both, torch.cat([tails, heads])


def _blocks(
    triples: Triples,
    known: KnownAnswers,
    device: torch.device,
    *,
    num_queries: int,
    progress: Progress | None,
) -> Iterator[_Block]:
    """The queries of both directions in blocks of at most `num_queries`."""
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
    size = min(num_queries, CPU_BLOCK) if device.type == "cpu" else num_queries
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
    backends: Any = torch.backends
    reduced = []
    for matmul in (backends.cuda.matmul, backends.mkldnn.matmul):
        if matmul.fp32_precision in ("tf32", "bf16"):
            reduced.append((matmul, matmul.fp32_precision))
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
    kind: str, num_comparisons: int, *, min_for_numba: int = MIN_COMPARISONS_FOR_NUMBA
) -> Counter:
    """The Triton or numba form of `count_with_torch`, if available and worthwhile."""
    if kind == "cuda" and gpu_kernels_unavailable() is None:
        from dualkg.kernels.gpu.scores import count_better_and_tied

        return count_better_and_tied
    if kind == "cpu" and num_comparisons >= min_for_numba:
        from dualkg.kernels import cpu, cpu_ranks  # They import numba.

        return cpu_ranks.count_better_and_tied if cpu.HAS_NUMBA else count_with_torch
    return count_with_torch


def check_finite(counts: Counts, query: Callable[[int], str]) -> None:
    """Raise for rows with counts −1: NaN compares as false with everything and would rank first."""
    bad = np.flatnonzero(counts[:, 0] < 0)
    if len(bad):
        raise DivergedError(
            f"The model scores NaN or infinity for the query {query(int(bad[0]))}, so it cannot be "
            "ranked. Its training has diverged: lower the learning rate or raise the regularizer's "
            "weight."
        )

"""Which entities the queries of a path network reach, in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.paths import Edges

WORD = 32  # queries whose reach is one number
MAX_WIDTH = 6 * 128  # numbers of a row in the widest array, at the largest dim
EDGE_BLOCK = 128  # edges of an entity that are searched at a time


class Reached(NamedTuple):
    """The rows, pairs of an entity and a query, that are reached after a number of steps.

    `steps` are the steps after which each row is reached, `(num_entities, batch)`; `rows` are
    sorted by them, and the first `num_rows`, a number on the device, are reached after `num_steps`.
    """

    num_steps: int
    steps: Tensor
    rows: Tensor
    num_rows: Tensor

    @property
    def mask(self) -> Tensor:
        """Whether each row is reached, `(num_entities, batch)`."""
        return self.steps <= self.num_steps


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _reach(
    words_ptr,
    further_ptr,
    steps_ptr,
    starts_ptr,
    others_ptr,
    kept_ptr,
    step,
    batch,
    num_words,
    HAS_KEPT: tl.constexpr,
    EDGES: tl.constexpr,
    WORD: tl.constexpr,
):
    entity = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    before = tl.load(words_ptr + entity * num_words + word)
    found = before
    first = tl.load(starts_ptr + entity)
    last = tl.load(starts_ptr + entity + 1)
    for start in range(first, last, EDGES):
        edges = start + tl.arange(0, EDGES)
        is_edge = edges < last
        if HAS_KEPT:
            is_edge = is_edge & (tl.load(kept_ptr + edges, mask=is_edge, other=0) != 0)
        others = tl.load(others_ptr + edges, mask=is_edge, other=0).to(tl.int64)
        words = tl.load(words_ptr + others * num_words + word, mask=is_edge, other=0)
        found = found | tl.reduce(words, 0, _either)
    tl.store(further_ptr + entity * num_words + word, found)
    bits = tl.arange(0, WORD)
    queries = word * WORD + bits
    is_new = (((found & ~before) >> bits) & 1) != 0
    tl.store(steps_ptr + entity * batch + queries, step, mask=is_new & (queries < batch))


def reach(heads: Tensor, edges: Edges, num_steps: int) -> list[Reached]:
    """Which entities the queries reach, as `dualkg.kernels.paths.reach`."""
    batch = len(heads)
    device = heads.device
    num_words = triton.cdiv(batch, WORD)
    queries = torch.arange(batch, device=device)
    words = torch.zeros(edges.num_entities, num_words, dtype=torch.int32, device=device)
    # Queries with one head have different bits, so that their sum is their union.
    words.index_put_((heads, queries // WORD), 1 << (queries % WORD).int(), accumulate=True)
    shape = (edges.num_entities, batch)
    steps = torch.full(shape, num_steps + 1, dtype=torch.uint8, device=device)
    steps.index_put_((heads, queries), torch.zeros((), dtype=torch.uint8, device=device))
    kept = edges.kept_incoming
    for step in range(1, num_steps + 1):
        further = torch.empty_like(words)
        _reach[(edges.num_entities, num_words)](
            words,
            further,
            steps,
            edges.incoming.starts,
            edges.incoming.others,
            words if kept is None else kept.view(torch.uint8),
            step,
            batch,
            num_words,
            HAS_KEPT=kept is not None,
            EDGES=EDGE_BLOCK,
            WORD=WORD,
            num_warps=1,
        )
        words = further
    in_order, rows = steps.view(-1).sort(stable=True)
    numbers = torch.arange(num_steps + 1, dtype=torch.uint8, device=device)
    counts = torch.searchsorted(in_order, numbers, right=True)
    # Small offsets take fewer registers.
    if rows.numel() * MAX_WIDTH < 2**31:
        rows = rows.int()
    return [Reached(step, steps, rows, counts[step]) for step in range(num_steps + 1)]

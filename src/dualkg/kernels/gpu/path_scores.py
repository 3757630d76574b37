"""Scores of the vectors of a path network, in Triton: hidden layers are never written.

A program has some queries and goes over entities, so that it sums the gradients of its queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualkg.kernels.gpu.path_mixing import num_multiprocessors

MIN_QUERIES = 32  # queries of a program: at least, and at most
MAX_QUERIES = 64
PROGRAMS = 4  # for each multiprocessor
NUM_WARPS = 4


@triton.jit
def _hidden(vectors, weight_ptr, from_queries, DIM: tl.constexpr):
    """The hidden layer of the queries of one entity, before it is rectified."""
    columns = tl.arange(0, DIM)
    units = tl.arange(0, 2 * DIM)
    weight = tl.load(weight_ptr + units[None, :] * DIM + columns[:, None])
    return tl.dot(vectors, weight, input_precision="ieee") + from_queries


@triton.jit
def _score(
    vectors_ptr,
    from_queries_ptr,
    weight_ptr,
    score_weight_ptr,
    scores_ptr,
    num_entities,
    batch,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
):
    columns = tl.arange(0, DIM)
    units = tl.arange(0, 2 * DIM)
    queries = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    is_query = queries < batch
    mask = is_query[:, None]
    from_queries_ptrs = from_queries_ptr + queries[:, None] * (2 * DIM) + units[None, :]
    from_queries = tl.load(from_queries_ptrs, mask=mask, other=0.0)
    score_weight = tl.load(score_weight_ptr + units)[None, :]
    for number in range(tl.program_id(0), num_entities, tl.num_programs(0)):
        entity = tl.full((), 0, tl.int64) + number
        offsets = entity * (batch * DIM) + queries[:, None] * DIM + columns[None, :]
        vectors = tl.load(vectors_ptr + offsets, mask=mask, other=0.0)
        hidden = _hidden(vectors, weight_ptr, from_queries, DIM)
        scores = tl.sum(tl.maximum(hidden, 0.0) * score_weight, axis=1)
        tl.store(scores_ptr + entity * batch + queries, scores, mask=is_query)


@triton.jit
def _score_backward(
    vectors_ptr,
    from_queries_ptr,
    weight_ptr,
    score_weight_ptr,
    grad_ptr,
    grad_vectors_ptr,
    grad_queries_ptr,
    grad_weights_ptr,
    grad_score_weights_ptr,
    num_entities,
    batch,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Store the gradients of vectors, and sums of the others for each program."""
    columns = tl.arange(0, DIM)
    units = tl.arange(0, 2 * DIM)
    queries = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    is_query = queries < batch
    mask = is_query[:, None]
    query_offsets = queries[:, None] * (2 * DIM) + units[None, :]
    from_queries = tl.load(from_queries_ptr + query_offsets, mask=mask, other=0.0)
    score_weight = tl.load(score_weight_ptr + units)[None, :]
    weight = tl.load(weight_ptr + units[:, None] * DIM + columns[None, :])
    of_queries = tl.zeros((QUERIES, 2 * DIM), tl.float32)
    of_weight = tl.zeros((2 * DIM, DIM), tl.float32)
    of_score_weight = tl.zeros((2 * DIM,), tl.float32)
    for number in range(tl.program_id(0), num_entities, tl.num_programs(0)):
        entity = tl.full((), 0, tl.int64) + number
        offsets = entity * (batch * DIM) + queries[:, None] * DIM + columns[None, :]
        vectors = tl.load(vectors_ptr + offsets, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + entity * batch + queries, mask=is_query, other=0.0)[:, None]
        hidden = _hidden(vectors, weight_ptr, from_queries, DIM)
        of_score_weight += tl.sum(tl.maximum(hidden, 0.0) * grad, axis=0)
        of_hidden = tl.where(hidden > 0, grad * score_weight, 0.0)
        of_queries += of_hidden
        rounded = of_hidden.to(vectors.dtype)
        of_weight = tl.dot(tl.trans(rounded), vectors, acc=of_weight, input_precision="ieee")
        of_vectors = tl.dot(rounded, weight, input_precision="ieee")
        tl.store(grad_vectors_ptr + offsets, of_vectors, mask=mask)
    program = tl.program_id(0)
    query_ptrs = grad_queries_ptr + program * (batch * 2 * DIM) + query_offsets
    tl.store(query_ptrs, of_queries, mask=mask)
    program = program * tl.num_programs(1) + tl.program_id(1)
    weight_ptrs = grad_weights_ptr + program * (2 * DIM * DIM)
    tl.store(weight_ptrs + units[:, None] * DIM + columns[None, :], of_weight)
    tl.store(grad_score_weights_ptr + program * (2 * DIM) + units, of_score_weight)


def _grid(vectors: Tensor) -> tuple[int, int, int]:
    """The numbers of programs, of blocks of queries, and of queries in a block."""
    num_entities, batch, _ = vectors.shape
    num_programs = min(num_entities, PROGRAMS * num_multiprocessors(vectors.device))
    queries = min(max(triton.next_power_of_2(batch), MIN_QUERIES), MAX_QUERIES)
    return num_programs, triton.cdiv(batch, queries), queries


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, from_queries: Tensor, weight: Tensor, score_weight: Tensor
    ) -> Tensor:
        num_entities, batch, dim = vectors.shape
        from_queries = from_queries.contiguous()
        rounded = weight.to(vectors.dtype).contiguous()
        score_weight = score_weight.contiguous()
        scores = torch.empty(num_entities, batch, device=vectors.device)
        num_programs, num_blocks, queries = _grid(vectors)
        _score[(num_programs, num_blocks)](
            vectors,
            from_queries,
            rounded,
            score_weight,
            scores,
            num_entities,
            batch,
            DIM=dim,
            QUERIES=queries,
            num_warps=NUM_WARPS,
            num_stages=1,
        )
        ctx.save_for_backward(vectors, from_queries, rounded, score_weight)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        vectors, from_queries, weight, score_weight = ctx.saved_tensors
        num_entities, batch, dim = vectors.shape
        device = vectors.device
        num_programs, num_blocks, queries = _grid(vectors)
        grad_vectors = torch.empty_like(vectors)
        of_queries = torch.empty(num_programs, batch, 2 * dim, device=device)
        of_weight = torch.empty(num_programs * num_blocks, 2 * dim, dim, device=device)
        of_score_weight = torch.empty(num_programs * num_blocks, 2 * dim, device=device)
        _score_backward[(num_programs, num_blocks)](
            vectors,
            from_queries,
            weight,
            score_weight,
            grad.contiguous(),
            grad_vectors,
            of_queries,
            of_weight,
            of_score_weight,
            num_entities,
            batch,
            DIM=dim,
            QUERIES=queries,
            num_warps=NUM_WARPS,
            num_stages=1,
        )
        return grad_vectors, of_queries.sum(0), of_weight.sum(0), of_score_weight.sum(0)


def score(vectors: Tensor, from_queries: Tensor, weight: Tensor, score_weight: Tensor) -> Tensor:
    """Scores in float32, as `dualkg.kernels.paths.score`."""
    scores: Tensor = _Scores.apply(  # type: ignore[no-untyped-call]
        vectors, from_queries, weight, score_weight
    )
    return scores

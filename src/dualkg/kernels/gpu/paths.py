"""Message passing of a path network, compiled.

A step is three kernels forward and two backward. `path_messages` goes over the edges that enter an
entity and takes the statistics of their messages. `path_mixing` mixes the statistics of the rows
that are reached: pairs of an entity and a query. Backward, the second is first: it computes the
gradients of the statistics, and the other goes over the edges that leave an entity. `path_scores`
has the scores of the vectors after the last step.

No size depends on the content of a batch, so that a step can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualkg.kernels.gpu.path_messages import message_gradients, query_gradients, take_statistics
from dualkg.kernels.gpu.path_mixing import SUMMED_DIMS, mix, mix_backward
from dualkg.kernels.gpu.path_reach import Reached, reach
from dualkg.kernels.gpu.path_scores import score
from dualkg.kernels.paths import NUM_STATISTICS, Edges, Mixing

__all__ = ["reach", "score", "take_step"]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        factors: Tensor,
        query_vectors: Tensor,
        statistics_weight: Tensor,
        own_weight: Tensor,
        bias: Tensor,
        gain: Tensor,
        shift: Tensor,
        heads: Tensor,
        edges: Edges,
        before: Reached,
        after: Reached,
    ) -> Tensor:
        dtype = vectors.dtype
        num_entities, batch, dim = vectors.shape
        factors = factors.contiguous()
        mixing = Mixing(
            statistics_weight.to(dtype).contiguous(),
            own_weight.to(dtype).contiguous(),
            bias.contiguous(),
            gain.contiguous(),
            shift.contiguous(),
        )
        # Where weights get their gradients by a product over all rows, those that are not reached
        # must be numbers.
        make = torch.empty if dim in SUMMED_DIMS else torch.zeros
        shape = (num_entities, batch, NUM_STATISTICS, dim)
        statistics = make(shape, dtype=dtype, device=vectors.device)
        take_statistics(
            vectors, factors, query_vectors, statistics, heads=heads, edges=edges, after=after
        )
        result = torch.zeros_like(vectors)
        mix(vectors, statistics, mixing, result, edges=edges, after=after)
        ctx.save_for_backward(vectors, factors, query_vectors, *mixing, heads, statistics)
        ctx.edges = edges
        ctx.before = before
        ctx.after = after
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, factors, query_vectors, *weights, heads, statistics = ctx.saved_tensors
        edges: Edges = ctx.edges
        gradients = mix_backward(
            vectors,
            statistics,
            Mixing(*weights),
            grad,
            edges=edges,
            after=ctx.after,
        )
        grad_vectors, grad_factors = message_gradients(
            vectors,
            factors,
            gradients.messages,
            gradients.vectors,
            edges=edges,
            before=ctx.before,
        )
        return (
            grad_vectors,
            grad_factors.to(factors.dtype),
            query_gradients(query_vectors, gradients.messages, heads=heads),
            *gradients.mixing,
            None,
            None,
            None,
            None,
        )


def take_step(
    vectors: Tensor,
    factors: Tensor,
    query_vectors: Tensor,
    mixing: Mixing,
    *,
    heads: Tensor,
    edges: Edges,
    before: Reached,
    after: Reached,
) -> Tensor:
    """The vectors after one more step, as `dualkg.kernels.paths.take_step`.

    The gradient of vectors that are not reached `before` is undefined: they are constants.
    """
    # Kernels read arrays without gaps. The heads of a batch of triples are one of its columns.
    vectors = vectors.contiguous()
    query_vectors = query_vectors.contiguous()
    heads = heads.contiguous()
    result: Tensor = _Step.apply(  # type: ignore[no-untyped-call]
        vectors, factors, query_vectors, *mixing, heads, edges, before, after
    )
    return result

"""numba kernels of path networks on a CPU; the plain form is `dualkg.kernels.paths`.

Only rows are computed: pairs of an entity and a query that reaches it. Entities are divided into a
fixed number of ranges, so that sums do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu import compiled, in_parallel
from dualkg.kernels.paths import (
    MIN_VARIANCE,
    NORM_EPSILON,
    NUM_SCALERS,
    NUM_STATISTICS,
    Adjacency,
    Edges,
    Mixing,
    score,
)

__all__ = ["reach", "score", "take_step"]

NUM_RANGES = 8
NUM_GRADIENTS = 6  # what an edge reads backward: see `_gradients_of_messages`


# -- reach ---------------------------------------------------------------------


@compiled()
def _reach(start, stop, reached, further, starts, others, kept):
    for entity in range(start, stop):
        for query in range(reached.shape[1]):
            further[entity, query] = reached[entity, query]
        for edge in range(starts[entity], starts[entity + 1]):
            if kept[edge]:
                other = others[edge]
                for query in range(reached.shape[1]):
                    further[entity, query] |= reached[other, query]


def reach(heads: Tensor, edges: Edges, num_steps: int) -> list[Tensor]:
    """Which entities the queries reach, as `dualkg.kernels.paths.reach`."""
    batch = len(heads)
    first = torch.zeros(edges.num_entities, batch, dtype=torch.bool)
    first[heads, torch.arange(batch)] = True
    reached = [first]
    starts, others, _ = _lists_of(edges.incoming)
    kept = _array_of(edges.kept_incoming, edges)
    for _ in range(num_steps):
        further = torch.empty_like(first)
        arrays = (reached[-1].numpy(), further.numpy(), starts, others, kept)
        in_parallel(_reach, edges.num_entities, *arrays)
        reached.append(further)
    return reached


def _lists_of(adjacency: Adjacency) -> tuple[Any, Any, Any]:
    return adjacency.starts.numpy(), adjacency.others.numpy(), adjacency.relations.numpy()


def _array_of(kept: Tensor | None, edges: Edges) -> Any:
    if kept is None:
        kept = torch.ones(len(edges.heads), dtype=torch.bool)
    return kept.numpy()


# -- statistics of messages ----------------------------------------------------


@compiled()
def _aggregate(
    start,
    stop,
    bounds,
    vectors,
    factors,
    queries,
    heads,
    before,
    rows,
    degrees,
    starts,
    others,
    relations,
    kept,
    statistics,
    min_variance,
):
    """Store mean, maximum, minimum and standard deviation of the messages to each row."""
    batch = vectors.shape[1]
    dim = vectors.shape[2]
    sums = np.empty(dim, vectors.dtype)
    squares = np.empty(dim, vectors.dtype)
    highest = np.empty(dim, vectors.dtype)
    lowest = np.empty(dim, vectors.dtype)
    for entity in range(bounds[start], bounds[stop]):
        for query in range(batch):
            row = rows[entity, query]
            if row < 0:
                continue
            for column in range(dim):
                message = vectors[0, 0, 0] * 0
                if heads[query] == entity:
                    message = queries[query, column]
                sums[column] = message
                squares[column] = message * message
                highest[column] = max(message, 0)
                lowest[column] = min(message, 0)
            for edge in range(starts[entity], starts[entity + 1]):
                other = others[edge]
                if kept[edge] and before[other, query]:
                    relation = relations[edge]
                    for column in range(dim):
                        message = vectors[other, query, column] * factors[relation, query, column]
                        sums[column] += message
                        squares[column] += message * message
                        highest[column] = max(highest[column], message)
                        lowest[column] = min(lowest[column], message)
            for column in range(dim):
                mean = sums[column] / degrees[entity]
                variance = squares[column] / degrees[entity] - mean * mean
                statistics[row, column] = mean
                statistics[row, dim + column] = highest[column]
                statistics[row, 2 * dim + column] = lowest[column]
                statistics[row, 3 * dim + column] = np.sqrt(max(variance, min_variance))


@compiled()
def _aggregate_backward(
    start,
    stop,
    bounds,
    vectors,
    factors,
    before,
    rows,
    starts,
    others,
    relations,
    kept,
    gradients,
    grad_vectors,
    grad_factors,
):
    """Store the gradients of vectors, and add those of factors to an array for each range."""
    batch = vectors.shape[1]
    dim = vectors.shape[2]
    for number in range(start, stop):
        of_factors = grad_factors[number]
        for entity in range(bounds[number], bounds[number + 1]):
            for edge in range(starts[entity], starts[entity + 1]):
                if not kept[edge]:
                    continue
                other = others[edge]
                relation = relations[edge]
                for query in range(batch):
                    if not before[entity, query]:
                        continue
                    row = rows[other, query]
                    for column in range(dim):
                        vector = vectors[entity, query, column]
                        factor = factors[relation, query, column]
                        message = vector * factor
                        gradient = gradients[row, 0, column]
                        gradient += message * gradients[row, 1, column]
                        if message > 0 and message == gradients[row, 2, column]:
                            gradient += gradients[row, 3, column]
                        if message < 0 and message == gradients[row, 4, column]:
                            gradient += gradients[row, 5, column]
                        grad_vectors[entity, query, column] += gradient * factor
                        of_factors[relation, query, column] += gradient * vector


def _gradients_of_messages(statistics: Tensor, grad: Tensor, degrees: Tensor) -> Tensor:
    """What the gradient of a message depends on, `(num_rows, 6, dim)`.

    It is the first part, plus the second times the message, plus the fourth if it is the maximum,
    which is the third, plus the sixth if it is the minimum, which is the fifth.
    """
    means, highest, lowest, deviations = statistics.chunk(NUM_STATISTICS, dim=1)
    of_means, of_highest, of_lowest, of_deviations = grad.chunk(NUM_STATISTICS, dim=1)
    is_variable = deviations > MIN_VARIANCE**0.5 * (1 + 1e-4)
    of_squares = torch.where(is_variable, of_deviations / deviations, 0) / degrees[:, None]
    of_sums = of_means / degrees[:, None] - means * of_squares
    parts = (of_sums, of_squares, highest, of_highest, lowest, of_lowest)
    return torch.stack(parts, dim=1)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        factors: Tensor,
        queries: Tensor,
        heads: Tensor,
        edges: Edges,
        before: Tensor,
        rows: Tensor,
        entities: Tensor,
    ) -> Tensor:
        dim = vectors.shape[2]
        degrees = edges.degrees.to(vectors.dtype)
        statistics = vectors.new_empty(len(entities), NUM_STATISTICS * dim)
        in_parallel(
            _aggregate,
            NUM_RANGES,
            _bounds(edges.num_entities),
            vectors.numpy(),
            factors.numpy(),
            queries.numpy(),
            heads.numpy(),
            before.numpy(),
            rows.numpy(),
            degrees.numpy(),
            *_lists_of(edges.incoming),
            _array_of(edges.kept_incoming, edges),
            statistics.numpy(),
            MIN_VARIANCE,
        )
        ctx.save_for_backward(vectors, factors, queries, heads, before, rows, entities, statistics)
        ctx.edges = edges
        return statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, factors, queries, heads, before, rows, entities, statistics = ctx.saved_tensors
        edges: Edges = ctx.edges
        degrees = edges.degrees.to(vectors.dtype)[entities]
        gradients = _gradients_of_messages(statistics, grad, degrees)
        grad_vectors = torch.zeros_like(vectors)
        grad_factors = factors.new_zeros(NUM_RANGES, *factors.shape)
        in_parallel(
            _aggregate_backward,
            NUM_RANGES,
            _bounds(edges.num_entities),
            vectors.numpy(),
            factors.numpy(),
            before.numpy(),
            rows.numpy(),
            *_lists_of(edges.outgoing),
            _array_of(edges.kept_outgoing, edges),
            gradients.numpy(),
            grad_vectors.numpy(),
            grad_factors.numpy(),
        )
        # The message of each query to its head.
        at_heads = gradients[rows[heads, torch.arange(len(heads))].long()]
        of_sums, of_squares, highest, of_highest, lowest, of_lowest = at_heads.unbind(1)
        of_queries = of_sums + queries * of_squares
        of_queries += torch.where((queries > 0) & (queries == highest), of_highest, 0)
        of_queries += torch.where((queries < 0) & (queries == lowest), of_lowest, 0)
        return grad_vectors, grad_factors.sum(0), of_queries, None, None, None, None, None


def _bounds(num_entities: int) -> Any:
    return np.linspace(0, num_entities, NUM_RANGES + 1).astype(np.int64)


def take_step(
    vectors: Tensor,
    factors: Tensor,
    query_vectors: Tensor,
    mixing: Mixing,
    *,
    heads: Tensor,
    edges: Edges,
    before: Tensor,
    after: Tensor,
) -> Tensor:
    """The vectors after one more step, as `dualkg.kernels.paths.take_step`."""
    dim = vectors.shape[2]
    pairs = after.view(-1).nonzero().squeeze(1)
    entities = pairs // after.shape[1]
    rows = torch.full((after.numel(),), -1, dtype=torch.int32)
    rows[pairs] = torch.arange(len(pairs), dtype=torch.int32)
    statistics: Tensor = _Aggregate.apply(  # type: ignore[no-untyped-call]
        vectors,
        factors.contiguous(),
        query_vectors,
        heads,
        edges,
        before,
        rows.view_as(after),
        entities,
    )
    own = vectors.view(-1, dim).index_select(0, pairs)
    mixed = (statistics @ mixing.statistics.T).view(-1, NUM_SCALERS, dim)
    scalers = edges.scalers[entities].to(vectors.dtype)
    mixed = (mixed * scalers[:, :, None]).sum(1) + own @ mixing.own.T + mixing.bias
    normalized = torch.nn.functional.layer_norm(
        mixed, (dim,), mixing.gain, mixing.shift, NORM_EPSILON
    )
    result = torch.zeros_like(vectors).view(-1, dim)
    return result.index_copy(0, pairs, own + normalized.relu()).view_as(vectors)

"""numba kernels of path networks on a CPU; the plain form is `dualkg.kernels.paths`.

Every query is computed by itself, so that its vectors and factors stay in the cache of a core and
nothing depends on the number of threads. Only rows are computed: entities that a query reaches, in
the order in which it reaches them. Those of an earlier step are the first ones of a later step.

Kernels read the dim as the length of a tuple: it is then a constant, and LLVM vectorizes the loops
over columns without checks whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
)

__all__ = ["Reach", "reach", "score_entities"]

NUM_GRADIENTS = 6  # what an edge reads backward: see `_gradients_of_messages`
MAX_ROWS = 16384  # of queries that are computed together
MIN_QUERIES = 8
VARIABLE_DEVIATION = MIN_VARIANCE**0.5 * (1 + 1e-4)


# -- reach ---------------------------------------------------------------------


class Reach(NamedTuple):
    """Which entities queries reach.

    `entities[q]` are those of query q in the order in which they are reached, and `places[q, e]` is
    the place of entity e among them, or −1. `counts[s, q]` are reached after s steps.
    """

    entities: Tensor
    places: Tensor
    counts: Tensor

    def of_queries(self, queries: slice) -> Reach:
        return Reach(self.entities[queries], self.places[queries], self.counts[:, queries])

    @property
    def offsets(self) -> Any:
        """Where the rows of each query begin after each step, `(num_steps + 1, batch + 1)`."""
        return np.pad(self.counts.numpy().cumsum(1), ((0, 0), (1, 0)))

    @property
    def numbers_of_rows(self) -> Tensor:
        """The number of each row after the last step among all pairs of a query and an entity."""
        batch, num_entities = self.entities.shape
        is_row = torch.arange(num_entities) < self.counts[-1][:, None]
        numbers = self.entities + torch.arange(batch)[:, None] * num_entities
        return numbers[is_row]


@compiled()
def _reach(start, stop, heads, starts, others, kept, entities, places, counts):
    for query in range(start, stop):
        places[query, :] = -1
        entities[query, 0] = heads[query]
        places[query, heads[query]] = 0
        counts[0, query] = 1
        num_seen = 0
        num_reached = 1
        for step in range(1, len(counts)):
            num_before = num_reached
            for place in range(num_seen, num_before):
                entity = entities[query, place]
                for edge in range(starts[entity], starts[entity + 1]):
                    other = others[edge]
                    if kept[edge] and places[query, other] < 0:
                        entities[query, num_reached] = other
                        places[query, other] = num_reached
                        num_reached += 1
            num_seen = num_before
            counts[step, query] = num_reached


def reach(heads: Tensor, edges: Edges, num_steps: int) -> Reach:
    """Which entities the queries reach in some steps."""
    batch = len(heads)
    entities = torch.empty(batch, edges.num_entities, dtype=torch.int32)
    places = torch.empty(batch, edges.num_entities, dtype=torch.int32)
    counts = torch.empty(num_steps + 1, batch, dtype=torch.int64)
    starts, others, _, kept = _lists_of(edges.outgoing, edges.kept_outgoing)
    arrays = (heads.numpy(), starts, others, kept)
    in_parallel(_reach, batch, *arrays, entities.numpy(), places.numpy(), counts.numpy())
    return Reach(entities, places, counts)


def _lists_of(adjacency: Adjacency, kept: Tensor | None) -> tuple[Any, Any, Any, Any]:
    if kept is None:
        kept = torch.ones(len(adjacency.others), dtype=torch.bool)
    starts, others, relations = adjacency[:3]
    return starts.numpy(), others.numpy(), relations.numpy(), kept.numpy()


# -- statistics of messages ----------------------------------------------------


@compiled("contract")
def _aggregate(
    start,
    stop,
    columns,
    vectors,
    factors,
    queries,
    entities,
    places,
    before,
    after,
    degrees,
    starts,
    others,
    relations,
    kept,
    statistics,
    min_variance,
):
    """Store mean, maximum, minimum and standard deviation of the messages to each row."""
    dim = len(columns)
    number_type = vectors.dtype.type
    # Sums, maxima, minima and sums of squares.
    totals = np.empty(4 * dim, vectors.dtype)
    max_edges = np.max(starts[1:] - starts[:-1])
    sources = np.empty(max_edges, np.int64)
    types = np.empty(max_edges, np.int64)
    for query in range(start, stop):
        first = before[query]
        num_before = before[query + 1] - first
        for place in range(after[query + 1] - after[query]):
            entity = entities[query, place]
            num_messages = 0
            for edge in range(starts[entity], starts[entity + 1]):
                source = places[query, others[edge]]
                if kept[edge] and 0 <= source < num_before:
                    sources[num_messages] = first + source
                    types[num_messages] = relations[edge]
                    num_messages += 1

            for column in range(4 * dim):
                totals[column] = 0
            if place == 0:
                # The row of the head takes the query.
                for column in range(dim):
                    message = queries[query, column]
                    totals[column] = message
                    totals[dim + column] = max(message, number_type(0))
                    totals[2 * dim + column] = min(message, number_type(0))
                    totals[3 * dim + column] = message * message
            # Four messages at a time, so that totals are read and written less often.
            for number in range(0, num_messages - 3, 4):
                source_0 = sources[number]
                source_1 = sources[number + 1]
                source_2 = sources[number + 2]
                source_3 = sources[number + 3]
                type_0 = types[number]
                type_1 = types[number + 1]
                type_2 = types[number + 2]
                type_3 = types[number + 3]
                for column in range(dim):
                    m0 = vectors[source_0, column] * factors[query, type_0, column]
                    m1 = vectors[source_1, column] * factors[query, type_1, column]
                    m2 = vectors[source_2, column] * factors[query, type_2, column]
                    m3 = vectors[source_3, column] * factors[query, type_3, column]
                    totals[column] += (m0 + m1) + (m2 + m3)
                    totals[3 * dim + column] += (m0 * m0 + m1 * m1) + (m2 * m2 + m3 * m3)
                    upper_0 = m0 if m0 > m1 else m1
                    upper_1 = m2 if m2 > m3 else m3
                    upper = upper_0 if upper_0 > upper_1 else upper_1
                    highest = totals[dim + column]
                    totals[dim + column] = upper if upper > highest else highest
                    lower_0 = m0 if m0 < m1 else m1
                    lower_1 = m2 if m2 < m3 else m3
                    lower = lower_0 if lower_0 < lower_1 else lower_1
                    lowest = totals[2 * dim + column]
                    totals[2 * dim + column] = lower if lower < lowest else lowest
            for number in range(num_messages // 4 * 4, num_messages):
                source = sources[number]
                relation = types[number]
                for column in range(dim):
                    message = vectors[source, column] * factors[query, relation, column]
                    totals[column] += message
                    totals[3 * dim + column] += message * message
                    highest = totals[dim + column]
                    totals[dim + column] = message if message > highest else highest
                    lowest = totals[2 * dim + column]
                    totals[2 * dim + column] = message if message < lowest else lowest

            row = after[query] + place
            share = number_type(1) / degrees[entity]
            for column in range(dim):
                mean = totals[column] * share
                variance = totals[3 * dim + column] * share - mean * mean
                # A variance that is not a number is kept.
                variance = min_variance if variance < min_variance else variance
                statistics[row, column] = mean
                statistics[row, dim + column] = totals[dim + column]
                statistics[row, 2 * dim + column] = totals[2 * dim + column]
                statistics[row, 3 * dim + column] = np.sqrt(variance)


@compiled("contract")
def _gradients_of_messages(
    start, stop, columns, statistics, grads, entities, after, degrees, gradients, min_deviation
):
    """Store what the gradient of a message depends on, `(num_rows, 6 · dim)`.

    It is the first part, plus the second times the message, plus the fourth if it is the third,
    which is the maximum, plus the sixth if it is the fifth, which is the minimum. An extreme of
    zero is stored as NaN, which is equal to no message.
    """
    dim = len(columns)
    number_type = statistics.dtype.type
    zero = number_type(0)
    nan = number_type(np.nan)
    for query in range(start, stop):
        for place in range(after[query + 1] - after[query]):
            row = after[query] + place
            share = number_type(1) / degrees[entities[query, place]]
            for column in range(dim):
                mean = statistics[row, column]
                highest = statistics[row, dim + column]
                lowest = statistics[row, 2 * dim + column]
                deviation = statistics[row, 3 * dim + column]
                of_square = grads[row, 3 * dim + column] / deviation * share
                of_square = of_square if deviation > min_deviation else zero
                gradients[row, column] = grads[row, column] * share - mean * of_square
                gradients[row, dim + column] = of_square
                gradients[row, 2 * dim + column] = highest if highest != 0 else nan
                gradients[row, 3 * dim + column] = grads[row, dim + column]
                gradients[row, 4 * dim + column] = lowest if lowest != 0 else nan
                gradients[row, 5 * dim + column] = grads[row, 2 * dim + column]


@compiled("contract")
def _aggregate_backward(
    start,
    stop,
    columns,
    vectors,
    factors,
    queries,
    gradients,
    entities,
    places,
    before,
    after,
    starts,
    others,
    relations,
    kept,
    grad_vectors,
    grad_factors,
    grad_queries,
):
    """Add the gradients of vectors, factors and queries."""
    dim = len(columns)
    # Short loops of a constant length would be unrolled before they are vectorized.
    width = vectors.shape[1]
    zero = vectors.dtype.type(0)
    totals = np.empty(dim, vectors.dtype)
    messages = np.empty(dim, vectors.dtype)
    targets = np.empty(np.max(starts[1:] - starts[:-1]), np.int64)
    for query in range(start, stop):
        row = after[query]
        for column in range(dim):
            message = queries[query, column]
            gradient = gradients[row, column] + message * gradients[row, dim + column]
            if message == gradients[row, 2 * dim + column]:
                gradient += gradients[row, 3 * dim + column]
            if message == gradients[row, 4 * dim + column]:
                gradient += gradients[row, 5 * dim + column]
            grad_queries[query, column] += gradient
        for source in range(before[query], before[query + 1]):
            entity = entities[query, source - before[query]]
            edge = starts[entity]
            end = starts[entity + 1]
            while edge < end:
                # Edges of one relation carry the same message.
                relation = relations[edge]
                num_targets = 0
                while edge < end and relations[edge] == relation:
                    if kept[edge]:
                        targets[num_targets] = after[query] + places[query, others[edge]]
                        num_targets += 1
                    edge += 1
                if num_targets == 0:
                    continue
                for column in range(width):
                    messages[column] = vectors[source, column] * factors[query, relation, column]
                    totals[column] = 0
                for number in range(num_targets):
                    row = targets[number]
                    for column in range(dim):
                        message = messages[column]
                        gradient = gradients[row, column] + message * gradients[row, dim + column]
                        is_highest = message == gradients[row, 2 * dim + column]
                        is_lowest = message == gradients[row, 4 * dim + column]
                        gradient += gradients[row, 3 * dim + column] if is_highest else zero
                        gradient += gradients[row, 5 * dim + column] if is_lowest else zero
                        totals[column] += gradient
                for column in range(width):
                    total = totals[column]
                    grad_vectors[source, column] += total * factors[query, relation, column]
                    grad_factors[query, relation, column] += total * vectors[source, column]


# -- new vectors -----------------------------------------------------------------


@compiled("contract", "reassoc")
def _renew(
    start,
    stop,
    vectors,
    mixed,
    mixed_own,
    bias,
    gain,
    shift,
    scalers,
    entities,
    before,
    after,
    normalized,
    inverse_deviations,
    renewed,
    epsilon,
):
    """Store the vectors after a step: the mixed statistics normalized, rectified and added."""
    dim = vectors.shape[1]
    number_type = vectors.dtype.type
    zero = number_type(0)
    share = number_type(1 / dim)
    for query in range(start, stop):
        num_before = before[query + 1] - before[query]
        for place in range(after[query + 1] - after[query]):
            row = after[query] + place
            own = before[query] + place
            entity = entities[query, place]
            amplification = scalers[entity, 1]
            attenuation = scalers[entity, 2]
            for column in range(dim):
                number = mixed[row, column] + amplification * mixed[row, dim + column]
                number += attenuation * mixed[row, 2 * dim + column]
                normalized[row, column] = number + bias[column]
            if place < num_before:
                for column in range(dim):
                    normalized[row, column] += mixed_own[own, column]
            total = zero
            for column in range(dim):
                total += normalized[row, column]
            mean = total * share
            total = zero
            for column in range(dim):
                difference = normalized[row, column] - mean
                total += difference * difference
            inverse_deviation = number_type(1) / np.sqrt(total * share + epsilon)
            inverse_deviations[row] = inverse_deviation
            for column in range(dim):
                number = (normalized[row, column] - mean) * inverse_deviation
                normalized[row, column] = number
                number = number * gain[column] + shift[column]
                renewed[row, column] = zero if number < 0 else number
            if place < num_before:
                for column in range(dim):
                    renewed[row, column] += vectors[own, column]


@compiled("contract", "reassoc")
def _renew_backward(
    start,
    stop,
    columns,
    normalized,
    inverse_deviations,
    gain,
    shift,
    scalers,
    entities,
    before,
    after,
    grads,
    grad_mixed,
    grad_mixed_own,
    grad_parameters,
):
    """Store the gradients of what is mixed, and add those of gain, shift and bias."""
    dim = len(columns)
    number_type = gain.dtype.type
    zero = number_type(0)
    share = number_type(1 / dim)
    passed = np.empty(dim, gain.dtype)
    for query in range(start, stop):
        num_before = before[query + 1] - before[query]
        for place in range(after[query + 1] - after[query]):
            row = after[query] + place
            entity = entities[query, place]
            amplification = scalers[entity, 1]
            attenuation = scalers[entity, 2]
            total = zero
            projection = zero
            for column in range(dim):
                number = normalized[row, column]
                is_passed = number * gain[column] + shift[column] > 0
                gradient = grads[row, column] if is_passed else zero
                passed[column] = gradient
                gradient *= gain[column]
                total += gradient
                projection += gradient * number
            total *= share
            projection *= share
            inverse_deviation = inverse_deviations[row]
            for column in range(dim):
                number = normalized[row, column]
                gradient = passed[column] * gain[column] - total - number * projection
                gradient *= inverse_deviation
                grad_parameters[query, 0, column] += passed[column] * number
                grad_parameters[query, 1, column] += passed[column]
                grad_parameters[query, 2, column] += gradient
                grad_mixed[row, column] = gradient
                grad_mixed[row, dim + column] = gradient * amplification
                grad_mixed[row, 2 * dim + column] = gradient * attenuation
            if place < num_before:
                own = before[query] + place
                for column in range(dim):
                    grad_mixed_own[own, column] = grad_mixed[row, column]


@compiled()
def _take_first(start, stop, grads, before, after, grad_vectors):
    """Add the gradients of the rows that were reached before."""
    for query in range(start, stop):
        for place in range(before[query + 1] - before[query]):
            for column in range(grads.shape[1]):
                gradient = grads[after[query] + place, column]
                grad_vectors[before[query] + place, column] += gradient


# -- all steps ---------------------------------------------------------------------


class _Kept(NamedTuple):
    """What a step leaves for its gradients."""

    vectors: Tensor
    statistics: Tensor
    normalized: Tensor
    inverse_deviations: Tensor


class _Spread(torch.autograd.Function):
    """The vectors of all rows after the last step, `(num_rows, dim)`.

    `factors` are those of all steps, `(num_steps, batch, num_relations, dim)`, and so are the
    parameters of the mixing.
    """

    @staticmethod
    def forward(
        ctx: Any, reached: Reach, edges: Edges, queries: Tensor, factors: Tensor, *mixing: Tensor
    ) -> Tensor:
        batch, dim = queries.shape
        columns = (0,) * dim
        dtype = queries.dtype
        places = reached.places.numpy()
        entities = reached.entities.numpy()
        degrees = edges.degrees.to(dtype).numpy()
        scalers = edges.scalers.to(dtype).numpy()
        incoming = _lists_of(edges.incoming, edges.kept_incoming)
        offsets = reached.offsets
        has_gradients = any(ctx.needs_input_grad)
        kept = []
        vectors = queries
        for step, of_step in enumerate(zip(*mixing, strict=True)):
            parameters = Mixing(*of_step)
            before = offsets[step]
            after = offsets[step + 1]
            num_rows = int(after[-1])
            statistics = queries.new_empty(num_rows, NUM_STATISTICS * dim)
            in_parallel(
                _aggregate,
                batch,
                columns,
                vectors.numpy(),
                factors[step].numpy(),
                queries.numpy(),
                entities,
                places,
                before,
                after,
                degrees,
                *incoming,
                statistics.numpy(),
                degrees.dtype.type(MIN_VARIANCE),
            )
            mixed = statistics @ parameters.statistics.T
            mixed_own = vectors @ parameters.own.T
            normalized = queries.new_empty(num_rows, dim)
            inverse_deviations = queries.new_empty(num_rows)
            renewed = queries.new_empty(num_rows, dim)
            in_parallel(
                _renew,
                batch,
                vectors.numpy(),
                mixed.numpy(),
                mixed_own.numpy(),
                parameters.bias.numpy(),
                parameters.gain.numpy(),
                parameters.shift.numpy(),
                scalers,
                entities,
                before,
                after,
                normalized.numpy(),
                inverse_deviations.numpy(),
                renewed.numpy(),
                degrees.dtype.type(NORM_EPSILON),
            )
            if has_gradients:
                kept.append(_Kept(vectors, statistics, normalized, inverse_deviations))
            vectors = renewed
        if has_gradients:
            ctx.kept = kept
            ctx.given = (reached, edges, queries, factors, mixing)
        return vectors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        reached, edges, queries, factors, mixing = ctx.given
        batch, dim = queries.shape
        columns = (0,) * dim
        dtype = queries.dtype
        places = reached.places.numpy()
        entities = reached.entities.numpy()
        degrees = edges.degrees.to(dtype).numpy()
        scalers = edges.scalers.to(dtype).numpy()
        outgoing = _lists_of(edges.outgoing, edges.kept_outgoing)
        offsets = reached.offsets
        grad_queries = torch.zeros_like(queries)
        grad_factors = factors.new_zeros(factors.shape)
        grad_mixing = Mixing(*(torch.empty_like(parameters) for parameters in mixing))
        grad = grad.contiguous()
        for step in reversed(range(len(factors))):
            vectors, statistics, normalized, inverse_deviations = ctx.kept[step]
            parameters = Mixing(*(of_steps[step] for of_steps in mixing))
            before = offsets[step]
            after = offsets[step + 1]
            grad_mixed = queries.new_empty(len(grad), NUM_SCALERS * dim)
            grad_mixed_own = torch.empty_like(vectors)
            grad_parameters = queries.new_zeros(batch, 3, dim)
            in_parallel(
                _renew_backward,
                batch,
                columns,
                normalized.numpy(),
                inverse_deviations.numpy(),
                parameters.gain.numpy(),
                parameters.shift.numpy(),
                scalers,
                entities,
                before,
                after,
                grad.numpy(),
                grad_mixed.numpy(),
                grad_mixed_own.numpy(),
                grad_parameters.numpy(),
            )
            of_gain, of_shift, of_bias = grad_parameters.sum(0)
            grad_mixing.gain[step] = of_gain
            grad_mixing.shift[step] = of_shift
            grad_mixing.bias[step] = of_bias
            grad_mixing.own[step] = grad_mixed_own.T @ vectors
            grad_mixing.statistics[step] = grad_mixed.T @ statistics
            grad_vectors = grad_mixed_own @ parameters.own
            grad_statistics = grad_mixed @ parameters.statistics
            in_parallel(_take_first, batch, grad.numpy(), before, after, grad_vectors.numpy())
            gradients = queries.new_empty(len(grad), NUM_GRADIENTS * dim)
            in_parallel(
                _gradients_of_messages,
                batch,
                columns,
                statistics.numpy(),
                grad_statistics.numpy(),
                entities,
                after,
                degrees,
                gradients.numpy(),
                degrees.dtype.type(VARIABLE_DEVIATION),
            )
            in_parallel(
                _aggregate_backward,
                batch,
                columns,
                vectors.numpy(),
                factors[step].numpy(),
                queries.numpy(),
                gradients.numpy(),
                entities,
                places,
                before,
                after,
                *outgoing,
                grad_vectors.numpy(),
                grad_factors[step].numpy(),
                grad_queries.numpy(),
            )
            grad = grad_vectors
        return None, None, grad_queries + grad, grad_factors, *grad_mixing


def score_entities(
    queries: Tensor,
    factors: Tensor,
    mixing: Mixing,
    *,
    heads: Tensor,
    edges: Edges,
    from_queries: Tensor,
    weight: Tensor,
    score_weight: Tensor,
    max_rows: int = MAX_ROWS,
) -> Tensor:
    """Scores of all entities, `(batch, num_entities)`.

    They are those of `dualkg.kernels.paths.score` after all steps of `take_step`. `factors` are
    those of all steps, `(num_steps, batch, num_relations, dim)`, and so are the parameters of
    `mixing`. Queries are computed together that have at most `max_rows` rows, unless they are few.
    """
    reached = reach(heads, edges, len(factors))
    factors = factors.contiguous()
    scores = []
    for group in _groups(reached.counts[-1].tolist(), max_rows):
        of_group = reached.of_queries(group)
        vectors: Tensor = _Spread.apply(  # type: ignore[no-untyped-call]
            of_group, edges, queries[group], factors[:, group], *mixing
        )
        counts = of_group.counts[-1]
        of_queries = from_queries[group]
        hidden = torch.addmm(of_queries.repeat_interleave(counts, dim=0), vectors, weight.T)
        # Entities that a query does not reach have the vector zero.
        others = of_queries.relu() @ score_weight
        scores_of_group = others[:, None].expand(-1, edges.num_entities).flatten()
        of_rows = hidden.relu() @ score_weight
        scores_of_group = scores_of_group.index_copy(0, of_group.numbers_of_rows, of_rows)
        scores.append(scores_of_group.view(len(counts), -1))
    return torch.cat(scores)


def _groups(counts: list[int], max_rows: int) -> Iterator[slice]:
    """Queries that are computed together, so that their rows stay in a cache."""
    start = 0
    num_rows = 0
    for query, count in enumerate(counts):
        if query - start >= MIN_QUERIES and num_rows + count > max_rows:
            yield slice(start, query)
            start = query
            num_rows = 0
        num_rows += count
    yield slice(start, len(counts))

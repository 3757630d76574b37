"""Message passing from the heads of a batch of queries, in plain PyTorch.

In every step, each entity takes the messages of the edges that enter it: products of the vector at
the edge's other end with a vector of the edge's relation, which depends on the query. Mean,
maximum, minimum and standard deviation of the messages are mixed by a linear map. `gpu/paths.py`
has the compiled form.

Every entity also takes a message of zeros, and a head the vector of its query. Entities that no
message has reached keep the vector zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

MIN_VARIANCE = 1e-6
MIN_AMPLIFICATION = 0.2
NORM_EPSILON = 1e-5
SEGMENT = 64  # edges of an entity that are handled one after the other
NUM_STATISTICS = 4  # mean, maximum, minimum and standard deviation
NUM_SCALERS = 3  # as they are, amplified with the degree, and attenuated


class Segments(NamedTuple):
    """The edges at all entities in segments of limited length, so that large ones share the work.

    A segment has the edges `starts` to `ends` − 1 of one of the `entities`. An entity with several
    segments is one of the `divided`; their segments are numbered by `slots`, and those of the i-th
    have the slots `slot_starts[i]` to `slot_starts[i + 1]` − 1. The slot of all other segments is
    −1, and there are `num_slots`.
    """

    entities: Tensor
    starts: Tensor
    ends: Tensor
    slots: Tensor
    divided: Tensor
    slot_starts: Tensor
    num_slots: int

    @staticmethod
    def of(starts: Tensor) -> Segments:
        """The segments of entities whose edges are from `starts[e]` to `starts[e + 1]` − 1."""
        device = starts.device
        lengths = starts.diff()
        # An entity without an edge has a segment, too: it takes the message of zeros.
        counts = (-(-lengths // SEGMENT)).clamp(min=1)
        numbers = torch.arange(len(counts), dtype=torch.int32, device=device)
        entities = torch.repeat_interleave(numbers, counts)
        first_segments = counts.cumsum(0) - counts
        within = torch.arange(len(entities), device=device) - first_segments[entities]
        segment_starts = starts[entities] + SEGMENT * within
        ends = torch.minimum(segment_starts + SEGMENT, starts[entities + 1])
        is_divided = counts[entities] > 1
        slots = torch.where(is_divided, is_divided.cumsum(0) - 1, -1)
        divided = numbers[counts > 1]
        slot_starts = torch.zeros(len(divided) + 1, dtype=torch.int32, device=device)
        slot_starts[1:] = counts[divided].cumsum(0)
        return Segments(
            entities,
            segment_starts.int(),
            ends.int(),
            slots.int(),
            divided,
            slot_starts,
            int(slot_starts[-1]),
        )


class Adjacency(NamedTuple):
    """The edges at each entity, sorted by relation.

    Those of entity e have the numbers `starts[e]` to `starts[e + 1]` − 1. `others` are the entities
    at their other ends. `positions` are the edges in the order in which they were given.
    """

    starts: Tensor
    others: Tensor
    relations: Tensor
    positions: Tensor
    segments: Segments

    @staticmethod
    def of(entities: Tensor, relations: Tensor, others: Tensor, num_entities: int) -> Adjacency:
        num_relations = int(relations.max()) + 1 if len(relations) else 1
        positions = torch.argsort(entities.long() * num_relations + relations, stable=True)
        counts = torch.bincount(entities, minlength=num_entities)
        starts = torch.zeros(num_entities + 1, dtype=torch.int32, device=entities.device)
        starts[1:] = counts.cumsum(0)
        return Adjacency(
            starts,
            others[positions].int(),
            relations[positions].int(),
            positions,
            Segments.of(starts),
        )


@dataclass(frozen=True)
class Edges:
    """A graph as edges in both directions.

    `kept` says for each edge whether messages pass along it; without it, all do. `kept_incoming`
    and `kept_outgoing` say so in the order of these. `degrees` count the kept edges that enter an
    entity, and the message of zeros. `scalers` are by what the statistics of an entity are
    multiplied, `(num_entities, 3)`.
    """

    heads: Tensor
    relations: Tensor
    tails: Tensor
    incoming: Adjacency
    outgoing: Adjacency
    mean_log_degree: float
    degrees: Tensor
    scalers: Tensor
    kept: Tensor | None = None
    kept_incoming: Tensor | None = None
    kept_outgoing: Tensor | None = None

    @staticmethod
    def of(triples: Tensor, *, num_entities: int, num_relations: int) -> Edges:
        """The edges of triples `(n, 3)` and, after them, those of their inverses."""
        heads = torch.cat([triples[:, 0], triples[:, 2]])
        relations = torch.cat([triples[:, 1], triples[:, 1] + num_relations])
        tails = torch.cat([triples[:, 2], triples[:, 0]])
        degrees = 1.0 + torch.bincount(tails, minlength=num_entities).float()
        # A graph without edges has no logarithm to divide by.
        mean_log_degree = max(float(degrees.log().mean()), 1e-6)
        return Edges(
            heads,
            relations,
            tails,
            Adjacency.of(tails, relations, heads, num_entities),
            Adjacency.of(heads, relations, tails, num_entities),
            mean_log_degree,
            degrees,
            _scalers(degrees, mean_log_degree),
        )

    def keep(self, kept: Tensor) -> Edges:
        """The same edges, of which some are kept, `(num_edges,)`."""
        degrees = torch.ones_like(self.degrees)
        degrees.index_add_(0, self.tails, kept.to(degrees.dtype))
        return replace(
            self,
            degrees=degrees,
            scalers=_scalers(degrees, self.mean_log_degree),
            kept=kept,
            kept_incoming=kept[self.incoming.positions],
            kept_outgoing=kept[self.outgoing.positions],
        )

    @property
    def num_entities(self) -> int:
        return len(self.degrees)


def _scalers(degrees: Tensor, mean_log_degree: float) -> Tensor:
    logs = degrees.log() / mean_log_degree
    attenuation = 1 / logs.clamp(min=MIN_AMPLIFICATION)
    return torch.stack([torch.ones_like(logs), logs, attenuation], dim=1)


class WeightedEdges(NamedTuple):
    """Edges of one step, and what the message along each of the kept ones is multiplied by."""

    edges: Edges
    weights: Tensor


class Mixing(NamedTuple):
    """The parameters by which a step makes new vectors of the statistics.

    `statistics` is `(3 · dim, 4 · dim)`: a linear map for each scaler. `own` is `(dim, dim)`, the
    map of the entity's own vector, and `bias` is added to it. The result is normalized, and scaled
    and shifted by `gain` and `shift`.
    """

    statistics: Tensor
    own: Tensor
    bias: Tensor
    gain: Tensor
    shift: Tensor


def reach(heads: Tensor, edges: Edges, num_steps: int) -> list[Tensor]:
    """Which entities the queries reach after 0 to `num_steps` steps, `(num_entities, batch)` each.

    Without a step, they reach their heads.
    """
    sources = edges.heads
    targets = edges.tails
    if edges.kept is not None:
        sources = sources[edges.kept]
        targets = targets[edges.kept]
    counts = torch.zeros(edges.num_entities, len(heads), dtype=torch.int32, device=heads.device)
    counts[heads, torch.arange(len(heads), device=heads.device)] = 1
    reached = [counts > 0]
    for _ in range(num_steps):
        counts = reached[-1].to(torch.int32)
        reached.append(counts.index_add(0, targets, counts[sources]) > 0)
    return reached


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
    weights: Tensor | None = None,
) -> Tensor:
    """The vectors after one more step, `(num_entities, batch, dim)`.

    `vectors` are those before it, `factors` those of relations `(num_relations, batch, dim)`, and
    `query_vectors` `(batch, dim)`. `before` and `after` say which entities are reached. `weights`
    multiply the messages along kept edges, `(num_kept,)`; degrees do not depend on them. This is
    the reference of the compiled forms, which have no weights.
    """
    num_entities, batch, dim = vectors.shape
    sources = edges.heads
    relations = edges.relations
    targets = edges.tails
    if edges.kept is not None:
        sources = sources[edges.kept]
        relations = relations[edges.kept]
        targets = targets[edges.kept]
    messages = vectors[sources] * factors[relations]
    if weights is not None:
        messages = messages * weights[:, None, None]
    at_heads = torch.zeros_like(vectors)
    at_heads[heads, torch.arange(batch, device=heads.device)] = query_vectors
    messages = torch.cat([messages, at_heads])
    targets = torch.cat([targets, torch.arange(num_entities, device=targets.device)])

    zeros = torch.zeros_like(vectors)
    degrees = edges.degrees.to(vectors.dtype)[:, None, None]
    means = zeros.index_add(0, targets, messages) / degrees
    squares = zeros.index_add(0, targets, messages.square()) / degrees
    deviations = (squares - means.square()).clamp(min=MIN_VARIANCE).sqrt()
    highest = _extremes(messages, targets, "amax", num_entities)
    lowest = _extremes(messages, targets, "amin", num_entities)

    statistics = torch.cat([means, highest, lowest, deviations], dim=-1)
    mixed = (statistics @ mixing.statistics.T).view(num_entities, batch, NUM_SCALERS, dim)
    scalers = edges.scalers.to(vectors.dtype)[:, None, :, None]
    mixed = (mixed * scalers).sum(2) + vectors @ mixing.own.T + mixing.bias
    normalized = torch.nn.functional.layer_norm(
        mixed, (dim,), mixing.gain, mixing.shift, NORM_EPSILON
    )
    return vectors + normalized.relu() * after[:, :, None]


def score(vectors: Tensor, from_queries: Tensor, weight: Tensor, score_weight: Tensor) -> Tensor:
    """Scores of vectors by a hidden layer of 2 · dim units, `(num_entities, batch)`.

    `weight` is `(2 · dim, dim)`. To its product with a vector `from_queries` `(batch, 2 · dim)` are
    added. The rectified units are summed with `score_weight` `(2 · dim,)`.
    """
    hidden = vectors @ weight.T + from_queries
    return hidden.relu() @ score_weight


def _extremes(messages: Tensor, targets: Tensor, kind: str, num_entities: int) -> Tensor:
    """The maximum or minimum of zero and the messages to each entity.

    Its gradient goes to every message that is equal to it and not zero.
    """
    zeros = messages.new_zeros(num_entities, *messages.shape[1:])
    positions = targets[:, None, None].expand_as(messages)
    values = zeros.scatter_reduce(0, positions, messages.detach(), kind, include_self=True)
    is_extreme = (messages == values[targets]) & (messages != 0)
    differences = (messages - messages.detach()) * is_extreme
    return values.index_add(0, targets, differences)

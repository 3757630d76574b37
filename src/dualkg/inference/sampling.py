"""Candidates that a calibration is fitted to and evaluated on: all true ones, and a sample of the
false ones.

A candidate is an answer to a query of a split that no other split contains. Most false candidates
are improbable, so they are drawn by rank: the best are all taken, and lower ranks are divided into
bands from which a few are drawn. Each drawn candidate has a weight, the number of candidates that
it represents.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from dualkg.data.filters import KnownAnswers, occur, with_reciprocals
from dualkg.data.graph import SPLITS, Graph, Split, distinct_triples
from dualkg.inference.scoring import Flags, Floats, Ids, MissingTriples, check_finite, score_blocks
from dualkg.models.base import Model


@dataclass(frozen=True)
class SamplingSettings:
    """How many false candidates are drawn, and from which queries."""

    num_queries: int = 4000
    min_queries: int = 200
    max_scores: int = 2**32  # computed for all queries; a graph with many entities gets fewer
    num_best: int = 10  # false candidates of a query that are all taken
    draws_per_band: int = 2
    band_factor: int = 4  # between the ranks at which two successive bands begin

    def bands(self, num_entities: int) -> list[int]:
        """The first ranks of the bands, and the end of the last band."""
        bands = [self.num_best]
        while bands[-1] * self.band_factor < num_entities:
            bands.append(bands[-1] * self.band_factor)
        bands.append(num_entities)
        return bands

    def limit_of_queries(self, num_entities: int) -> int:
        """The number of queries from which false candidates are drawn, at most."""
        num_bands = len(self.bands(num_entities)) - 1
        drawn_per_query = self.num_best + self.draws_per_band * num_bands
        affordable = self.max_scores // (num_entities * drawn_per_query)
        return min(self.num_queries, max(self.min_queries, affordable))


SAMPLING = SamplingSettings()


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sampled candidates `(n, 3)`, whether each is in the split, and their weights.

    The weight of a candidate is the number of candidates that it represents.
    """

    triples: Ids
    true: Flags
    weights: Floats

    @property
    def relations(self) -> Ids:
        return self.triples[:, 1]


@torch.no_grad()
def sample_candidates(
    model: Model,
    graph: Graph,
    split: Split,
    *,
    seed: int = 0,
    settings: SamplingSettings = SAMPLING,
) -> Candidates:
    """Draw candidates for the queries of a split in both directions."""
    model.check_shape(graph.shape)
    num_relations = graph.shape.num_relations

    distinct = distinct_triples(graph.split(split), graph.shape)
    other_splits = (graph.split(name) for name in SPLITS if name != split)
    only_there = distinct[~occur(distinct, other_splits, graph.shape)]
    if not len(only_there):
        raise MissingTriples(graph.name, split, purpose="Calibration", only_there=True)

    true = with_reciprocals(only_there, num_relations).astype(np.int64)
    false, false_weights = _sample_false(
        model, true, KnownAnswers.of(graph), random=np.random.default_rng(seed), settings=settings
    )

    triples = np.concatenate([true, false])
    is_true = np.arange(len(triples)) < len(true)
    weights = np.concatenate([np.ones(len(true)), false_weights])
    return Candidates(_as_triples(triples, num_relations), is_true, weights)


def _as_triples(rows: Ids, num_relations: int) -> Ids:
    """Rows of (entity, relation id, answer) as triples: inverse relations are turned round."""
    triples = rows.copy()
    backward = rows[:, 1] >= num_relations
    triples[backward] = rows[backward][:, [2, 1, 0]] - [0, num_relations, 0]
    return triples


def _sample_false(
    model: Model,
    true: Ids,
    known: KnownAnswers,
    *,
    random: np.random.Generator,
    settings: SamplingSettings,
) -> tuple[Ids, Floats]:
    """False candidates as rows of (entity, relation id, answer), and their weights.

    `true` are such rows, whose queries are asked.
    """
    num_entities = known.shape.num_entities
    keys = np.unique(known.keys(true[:, 0], true[:, 1]))
    entities, relations = np.divmod(keys, 2 * known.shape.num_relations)
    first, last = known.on(torch.device("cpu")).ranges(torch.from_numpy(keys))
    num_false = num_entities - (last - first).numpy()

    bands = settings.bands(num_entities)
    chosen = _balanced(relations, settings.limit_of_queries(num_entities), random)

    false_blocks = []
    weight_blocks = []
    for block, scores in score_blocks(model, entities[chosen], relations[chosen]):
        check_finite(scores)
        queries = chosen[block]
        given = entities[queries]
        relation_ids = relations[queries]

        known_rows, known_answers = known(given, relation_ids)
        places = (
            torch.from_numpy(known_rows).to(model.device),
            torch.from_numpy(known_answers).to(model.device),
        )
        unknown_scores = scores.index_put(places, scores.new_tensor(-torch.inf))
        ranked = unknown_scores.argsort(dim=1, descending=True)

        ranks, rank_weights = _draw_ranks(num_false[queries], bands, random, settings=settings)
        answers = ranked.gather(1, torch.from_numpy(ranks).to(model.device)).cpu().numpy()

        rows, columns = np.nonzero(rank_weights)
        false_blocks.append(
            np.stack([given[rows], relation_ids[rows], answers[rows, columns]], axis=1)
        )
        weight_blocks.append(rank_weights[rows, columns])

    false = np.concatenate(false_blocks)
    weights = np.concatenate(weight_blocks)

    # The drawn candidates of a relation and direction represent those of all its queries.
    num_relation_ids = int(relations.max()) + 1
    total = np.bincount(relations, num_false, minlength=num_relation_ids)
    sampled = np.bincount(false[:, 1], weights, minlength=num_relation_ids)
    factors = total / np.maximum(sampled, 1e-300)
    return false, weights * factors[false[:, 1]]


def _balanced(relations: Ids, limit: int, random: np.random.Generator) -> Ids:
    """Rows of at most about `limit` queries, given their relations `(num_queries,)`.

    All queries of a relation are taken, or an equal number of each relation if those are too many.
    """
    shuffled = random.permutation(len(relations))
    by_relation = shuffled[np.argsort(relations[shuffled], kind="stable")]

    counts = np.bincount(relations)
    starts = np.cumsum(counts) - counts
    place_in_relation = np.arange(len(relations)) - starts[relations[by_relation]]

    # The number of queries if at most 1, 2, … of each relation are taken.
    num_taken = np.cumsum(np.bincount(place_in_relation))
    per_relation = max(1, np.searchsorted(num_taken, limit, side="right"))
    return np.sort(by_relation[place_in_relation < per_relation])


def _draw_ranks(
    num_false: Ids, bands: list[int], random: np.random.Generator, *, settings: SamplingSettings
) -> tuple[Ids, Floats]:
    """Ranks `(batch, n)` of false candidates, and the number of candidates that each represents.

    Ranks are equally spaced within a band. A rank that represents 0 candidates is not drawn.
    """
    num_queries = len(num_false)
    best = np.broadcast_to(np.arange(settings.num_best), (num_queries, settings.num_best))
    ranks = [best]
    weights = [best < num_false[:, None]]

    for start, stop in pairwise(bands):
        band_sizes = (np.minimum(stop, num_false) - start).clip(0)[:, None]
        steps = np.arange(settings.draws_per_band) + random.random((num_queries, 1))
        drawn = start + (steps * band_sizes / settings.draws_per_band).astype(np.int64)
        ranks.append(drawn)
        weights.append(np.broadcast_to(band_sizes / settings.draws_per_band, drawn.shape))

    last_rank = bands[-1] - 1
    return (
        np.concatenate(ranks, axis=1).clip(max=last_rank),
        np.concatenate(weights, axis=1).astype(np.float64),
    )

"""Paths between two entities: chains of triples in either direction, known or predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import RequestError
from dualkg.inference.predictor import Predictor, Query
from dualkg.serve.entity_facts import Fact, predicted_facts

Ids = npt.NDArray[np.int64]
# Edges that one step of a search looks at; edges of entities with few triples come first.
MAX_EDGES = 200_000
MIN_PROBABILITY = 0.001  # of a path with predicted triples
NUM_PREDICTED = 40  # predicted facts of each of the two entities that paths may have


@dataclass(frozen=True)
class EntityPath:
    """Entities, and between each two of them in a row the triples that join them.

    `probability` is the product of the probabilities of the best predicted triple of each step. It
    is None if all steps are known, or without a calibration.
    """

    entities: tuple[int, ...]
    steps: tuple[tuple[Fact, ...], ...]
    probability: float | None = None


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The neighbours of all entities in the triples of all splits, in either direction.

    Those of entity e are `others[offsets[e]:offsets[e + 1]]`, and `rows` are their triples.
    """

    triples: Ids
    split_starts: Ids
    offsets: Ids
    others: Ids
    rows: Ids
    is_symmetric: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        if graph.is_large:
            raise RequestError(f"{graph.name} is larger than memory, and has no search for paths.")
        splits = [graph.split(split) for split in SPLITS]
        triples = np.concatenate(splits).astype(np.int64)
        sources = np.concatenate([triples[:, 0], triples[:, 2]])
        others = np.concatenate([triples[:, 2], triples[:, 0]])
        rows = np.tile(np.arange(len(triples)), 2)
        order = np.argsort(sources, kind="stable")
        counts = np.bincount(sources, minlength=graph.shape.num_entities)
        return cls(
            triples=triples,
            split_starts=np.cumsum([0, *map(len, splits)]),
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            others=others[order],
            rows=rows[order],
            is_symmetric=graph.symmetric_relations,
        )

    @cached_property
    def degrees(self) -> Ids:
        return np.diff(self.offsets)

    def of_entity(self, entity: int) -> Ids:
        return np.unique(self.others[self.offsets[entity] : self.offsets[entity + 1]])

    def around(self, entities: Ids) -> tuple[Ids, Ids]:
        """Pairs of an entity and a neighbour; hubs are left out if there are very many pairs."""
        ordered = entities[np.argsort(self.degrees[entities], kind="stable")]
        counts = self.degrees[ordered]
        ordered = ordered[np.cumsum(counts) <= MAX_EDGES]
        counts = self.degrees[ordered]
        sources = np.repeat(ordered, counts)
        within = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        return sources, self.others[self.offsets[sources] + within]

    def facts_between(self, one: int, other: int) -> tuple[Fact, ...]:
        """The known triples that join two entities; a symmetric one is not repeated."""
        place = slice(self.offsets[one], self.offsets[one + 1])
        rows = np.unique(self.rows[place][self.others[place] == other])
        facts: dict[tuple[int, int, int], Fact] = {}
        for row in rows.tolist():
            head, relation, tail = self.triples[row].tolist()
            is_reverse = self.is_symmetric[relation] and (tail, relation, head) in facts
            if (head, relation, tail) not in facts and not is_reverse:
                split = SPLITS[int(np.searchsorted(self.split_starts, row, side="right")) - 1]
                facts[head, relation, tail] = Fact(head, relation, tail, split)
        return tuple(facts.values())


def known_paths(neighbours: Neighbours, start: int, end: int, *, k: int) -> list[EntityPath]:
    """Up to `k` paths of at most four known triples, the shortest first, each with other entities.

    Among paths of equal length, paths through entities with few triples come first: they say more.
    """
    of_start = np.setdiff1d(neighbours.of_entity(start), [start, end])
    of_end = np.setdiff1d(neighbours.of_entity(end), [start, end])
    by_length: list[Callable[[], list[tuple[int, ...]]]] = [
        lambda: [()] if end in neighbours.of_entity(start) else [],
        lambda: [(entity,) for entity in np.intersect1d(of_start, of_end).tolist()],
        lambda: _pairs_between(neighbours, of_start, of_end),
        lambda: _triples_between(neighbours, (start, end), of_start, of_end),
    ]
    paths: list[EntityPath] = []
    for between in by_length:
        if len(paths) >= k:
            break
        inner = sorted(between(), key=lambda ids: (_log_degree(neighbours, ids), ids))
        for ids in inner[: k - len(paths)]:
            entities = (start, *ids, end)
            steps = tuple(neighbours.facts_between(one, other) for one, other in pairwise(entities))
            paths.append(EntityPath(entities, steps))
    return paths


def _pairs_between(neighbours: Neighbours, of_start: Ids, of_end: Ids) -> list[tuple[int, ...]]:
    """The two inner entities of paths of three triples without a shortcut."""
    first, second = neighbours.around(np.setdiff1d(of_start, of_end))
    is_joined = np.isin(second, np.setdiff1d(of_end, of_start))
    pairs = np.stack([first[is_joined], second[is_joined]], axis=1)
    return [(one, other) for one, other in np.unique(pairs, axis=0).tolist()]


def _triples_between(
    neighbours: Neighbours, ends: Sequence[int], of_start: Ids, of_end: Ids
) -> list[tuple[int, ...]]:
    """The three inner entities of paths of four triples without a shortcut; one for each middle."""
    first = _cheapest(neighbours, np.setdiff1d(of_start, of_end))
    last = _cheapest(neighbours, np.setdiff1d(of_end, of_start))
    excluded = {*ends, *of_start.tolist(), *of_end.tolist()}
    middles = (first.keys() & last.keys()) - excluded
    return [(first[middle], middle, last[middle]) for middle in middles]


def _cheapest(neighbours: Neighbours, entities: Ids) -> dict[int, int]:
    """For each neighbour of some entities, the adjacent entity with the lowest degree."""
    sources, others = neighbours.around(entities)
    # The last of several values of a key counts.
    order = np.argsort(-neighbours.degrees[sources], kind="stable")
    return dict(zip(others[order].tolist(), sources[order].tolist(), strict=True))


def _log_degree(neighbours: Neighbours, entities: Sequence[int]) -> float:
    return float(np.log(neighbours.degrees[list(entities)]).sum())


def predicted_paths(
    predictor: Predictor,
    neighbours: Neighbours,
    start: int,
    end: int,
    *,
    k: int,
    is_rejected: Callable[[Fact], bool] = lambda fact: False,
) -> list[EntityPath]:
    """Up to `k` paths of one or two triples with at least one that is predicted.

    The most probable come first. Predicted are the triples between the two entities, and the best
    of each of them with others.
    """
    direct = _predicted_between(predictor, start, end)
    of_start = _by_other(predictor, start, is_rejected=is_rejected)
    of_end = _by_other(predictor, end, is_rejected=is_rejected)
    paths = [
        EntityPath((start, end), ((fact,),), fact.probability)
        for fact in direct
        if not is_rejected(fact)
    ]
    known_of_start = set(neighbours.of_entity(start).tolist())
    known_of_end = set(neighbours.of_entity(end).tolist())
    inner = (of_start.keys() & (known_of_end | of_end.keys())) | (of_end.keys() & known_of_start)
    for entity in inner - {start, end}:
        steps = []
        probability: float | None = 1.0
        for one, predicted, is_known in (
            (start, of_start, entity in known_of_start),
            (end, of_end, entity in known_of_end),
        ):
            if is_known:
                steps.append(neighbours.facts_between(one, entity))
                continue
            fact = predicted[entity]
            steps.append((fact,))
            factor = fact.probability
            probability = None if factor is None or probability is None else probability * factor
        is_predicted = any(fact.split is None for step in steps for fact in step)
        if is_predicted:
            paths.append(EntityPath((start, entity, end), tuple(steps), probability))
    likely = [
        path for path in paths if path.probability is None or path.probability >= MIN_PROBABILITY
    ]

    def order(path: EntityPath) -> tuple[float, int, float]:
        probability = path.probability or 0.0
        return (-probability, len(path.steps), _log_degree(neighbours, path.entities[1:-1]))

    return sorted(likely, key=order)[:k]


def _by_other(
    predictor: Predictor, entity: int, *, is_rejected: Callable[[Fact], bool]
) -> dict[int, Fact]:
    """The best predicted fact of an entity with each of some others."""
    facts: dict[int, Fact] = {}
    for fact in predicted_facts(predictor, entity, k=NUM_PREDICTED):
        if not is_rejected(fact):
            facts.setdefault(fact.tail if fact.head == entity else fact.head, fact)
    return facts


def _predicted_between(predictor: Predictor, start: int, end: int) -> list[Fact]:
    """The likely new triples between two entities, in either direction."""
    graph = predictor.graph
    pairs = [(start, end), (end, start)]
    number = graph.shape.num_relations
    answers = predictor.predict("relations", [Query(pair, number, "omit") for pair in pairs])
    facts: dict[tuple[int, int, int], Fact] = {}
    for (head, tail), predictions in zip(pairs, answers, strict=True):
        for prediction in predictions:
            relation = prediction.id
            is_reverse = graph.symmetric_relations[relation] and (tail, relation, head) in facts
            is_likely = (prediction.probability or 0.0) >= MIN_PROBABILITY
            if is_likely and not prediction.known and not is_reverse:
                facts[head, relation, tail] = Fact(
                    head,
                    relation,
                    tail,
                    probability=prediction.probability,
                    answer_probability=prediction.answer_probability,
                )
    return list(facts.values())

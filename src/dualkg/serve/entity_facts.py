"""Facts about one entity: its known triples, the new ones that are predicted best, and remarks.

A remark is what train says against a new triple: an end of an unusual type, or a known answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.inspection import answers_per_query
from dualkg.inference.predictor import Predictor
from dualkg.inference.probability import (
    query_classes,
    score_facts,
    triple_log_probabilities,
)
from dualkg.inference.query_classes import NUM_KNOWN, QueryClasses, is_unusual
from dualkg.inference.scoring import Ids, score_blocks
from dualkg.tables.base import Side

TypeFit = Literal["known", "likely", "unusual"]
# The mean number of answers per query up to which a second answer is remarkable: most queries of
# such a relation have one answer, and a tenth of them may have two.
FUNCTIONAL = 1.1
CANDIDATES_PER_FACT = 5  # triples that are scored from both ends for each fact that is returned


@dataclass(frozen=True)
class Fact:
    """A triple by ids, with the split that contains it or the probability that a model gives it."""

    head: int
    relation: int
    tail: int
    split: str | None = None
    probability: float | None = None
    log_probability: float | None = None
    answer_probability: float | None = None


def known_facts(predictor: Predictor, entity: int, *, limit: int) -> tuple[list[Fact], int]:
    """The first `limit` known triples of an entity, and the number of all.

    They are sorted by split; in each split, triples with the entity as head come first.
    """
    facts: list[Fact] = []
    for split in SPLITS:
        triples = predictor.graph.split(split)
        is_head = triples[:, 0] == entity
        is_only_tail = ~is_head & (triples[:, 2] == entity)
        for head, relation, tail in triples[is_head].tolist():
            facts.append(Fact(head, relation, tail, split))
        for head, relation, tail in triples[is_only_tail].tolist():
            facts.append(Fact(head, relation, tail, split))
    return facts[:limit], len(facts)


@torch.no_grad()
def predicted_facts(predictor: Predictor, entity: int, *, k: int) -> list[Fact]:
    """The `k` best new triples with an entity as head or tail.

    They are sorted by probability, or without a calibration by log-probability. All relations are
    queried in both directions. The `CANDIDATES_PER_FACT` · k most likely answers are then scored
    from both ends. Triples of the entity with itself are excluded.
    """
    triples = _likely_new_triples(predictor, entity, number=CANDIDATES_PER_FACT * k)
    if not len(triples):
        return []

    log_probabilities = triple_log_probabilities(
        predictor.model, triples, symmetric=predictor.graph.symmetric_relations
    ).cpu()
    sort_keys = log_probabilities.numpy()
    probabilities: list[float | None] = [None] * len(triples)
    answer_probabilities = probabilities
    calibration = predictor.calibration
    if calibration is not None:
        of_triples = calibration.of_triples(triples, log_probabilities)
        sort_keys = of_triples.log_odds
        probabilities = of_triples.probability.tolist()
        answer_probabilities = of_triples.answer_probability.tolist()

    facts = []
    best = np.lexsort((-log_probabilities.numpy(), -sort_keys))[:k]
    for row in best.tolist():
        head, relation, tail = triples[row].tolist()
        log_probability = float(log_probabilities[row])
        facts.append(
            Fact(
                head,
                relation,
                tail,
                probability=probabilities[row],
                log_probability=log_probability,
                answer_probability=answer_probabilities[row],
            )
        )
    return facts


def _likely_new_triples(predictor: Predictor, entity: int, *, number: int) -> Ids:
    """The most likely new triples of an entity, `(num_triples, 3)`, by the queries that give it."""
    num_relations = predictor.graph.shape.num_relations
    candidates: list[tuple[float, int, int, int]] = []
    for given_side in ("head", "tail"):
        relations = np.arange(num_relations)
        if given_side == "tail":
            relations = relations + num_relations
        entities = np.full(num_relations, entity)
        blocks = score_blocks(
            predictor.model,
            entities,
            relations,
            score=partial(score_facts, symmetric=predictor.graph.symmetric_relations),
        )
        for block, scores in blocks:
            likely = _new_log_likelihoods(predictor, entity, relations[block], scores)
            best = likely.flatten().topk(min(number, likely.numel()))
            for value, cell in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                row, answer = divmod(cell, likely.shape[1])
                relation = int(relations[block][row]) % num_relations
                if given_side == "head":
                    candidates.append((value, entity, relation, answer))
                else:
                    candidates.append((value, answer, relation, entity))

    candidates.sort(key=lambda candidate: -candidate[0])
    triples = [triple for value, *triple in candidates[:number] if value > -np.inf]
    return np.array(triples, dtype=np.int64).reshape(-1, 3)


def _new_log_likelihoods(
    predictor: Predictor, entity: int, relations: Ids, scores: Tensor
) -> Tensor:
    """The log-likelihoods of the answers to queries of one entity, `(num_queries, num_entities)`.

    Known answers and the entity itself have −∞.
    """
    num_relations = predictor.graph.shape.num_relations
    likely = scores.log_softmax(-1)
    if predictor.calibration is not None:
        side: Side = "head" if relations[0] < num_relations else "tail"
        priors = predictor.calibration.query_priors(entity, relations % num_relations, side)
        likely += torch.from_numpy(priors).log().to(likely)[:, None]

    rows, known = predictor.all_known(np.full(len(relations), entity), relations)
    row_ids = torch.from_numpy(rows).to(likely.device)
    known_ids = torch.from_numpy(known).to(likely.device)
    likely[row_ids, known_ids] = -torch.inf
    likely[:, entity] = -torch.inf
    return likely


class Remarks(NamedTuple):
    """Remarks on one triple.

    The type of an end is `known` if train has the entity at that end of the relation, `likely` if
    the other roles of the entity are evidence of the type, and `unusual` otherwise. `known_tail` is
    a known tail of the head if most heads of the relation have one tail; `known_head` likewise.
    """

    head_type: TypeFit
    tail_type: TypeFit
    known_tail: int | None
    known_head: int | None


@dataclass(frozen=True, eq=False)
class Remarker:
    """Finds the remarks on new triples of a graph."""

    graph: Graph
    known: KnownAnswers
    classes: QueryClasses

    @classmethod
    def of(cls, graph: Graph, known: KnownAnswers, classes: QueryClasses | None = None) -> Self:
        return cls(graph, known, classes or query_classes(graph))

    @cached_property
    def functional(self) -> tuple[Ids, Ids]:
        """The relations that have one tail for each head as a rule, and those with one head."""
        means = answers_per_query(self.graph.train, self.graph.shape)
        tails, heads = (np.flatnonzero((mean > 0) & (mean <= FUNCTIONAL)) for mean in means)
        return tails, heads

    def of_triples(self, triples: Ids) -> list[Remarks]:
        """The remarks on triples `(num_triples, 3)`."""
        heads, relations, tails = np.asarray(triples, dtype=np.int64).reshape(-1, 3).T
        tail_roles = self.classes.tail_roles[relations]
        head_types = _type_fits(self.classes.of_pairs(heads, relations))
        tail_types = _type_fits(self.classes.of_pairs(tails, tail_roles))
        known_tails = self._known_answers(heads, relations, self.functional[0])
        inverse = relations + self.graph.shape.num_relations
        known_heads = self._known_answers(
            tails, inverse, self.functional[1] + self.graph.shape.num_relations
        )
        return [
            Remarks(*remarks)
            for remarks in zip(head_types, tail_types, known_tails, known_heads, strict=True)
        ]

    def _known_answers(self, entities: Ids, relations: Ids, functional: Ids) -> list[int | None]:
        """The first known answer of each query of a functional relation, else None."""
        answers: list[int | None] = [None] * len(entities)
        queries = np.flatnonzero(np.isin(relations, functional))
        if not len(queries):
            return answers
        rows, known = self.known(entities[queries], relations[queries])
        for row, answer in zip(rows[::-1].tolist(), known[::-1].tolist(), strict=True):
            answers[queries[row]] = answer
        return answers


def _type_fits(query_classes: Ids) -> list[TypeFit]:
    fits = np.where(query_classes < NUM_KNOWN, "known", "likely")
    of_classes: list[TypeFit] = np.where(is_unusual(query_classes), "unusual", fits).tolist()
    return of_classes

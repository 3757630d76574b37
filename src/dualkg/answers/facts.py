"""What is known of one entity, and what a model would add to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualkg.answers.beliefs.evidence import evidence_of, queries_at_once
from dualkg.answers.predictor import Predictor
from dualkg.data.graph import SPLITS
from dualkg.data.known import Ids

LOOKED_AT = 5  # times as many triples as are wanted are measured from both their ends


@dataclass(frozen=True)
class Fact:
    """A triple by ids; the split that has it, or how likely a model holds it to be."""

    head: int
    relation: int
    tail: int
    split: str | None = None
    probability: float | None = None
    evidence: float | None = None


@dataclass(frozen=True)
class KnownFacts:
    """The triples that have an entity, the first so many of them, and how many there are."""

    facts: list[Fact]
    number: int


def known_facts(predictor: Predictor, entity: int, *, most: int) -> KnownFacts:
    """By split; those with the entity as head before those with it as tail."""
    facts: list[Fact] = []
    for split in SPLITS:
        triples = predictor.graph.split(split)
        is_head = triples[:, 0] == entity
        for which in (is_head, ~is_head & (triples[:, 2] == entity)):
            facts += [Fact(head, relation, tail, split=split) for head, relation, tail in triples[which].tolist()]
    return KnownFacts(facts[:most], len(facts))


@torch.no_grad()
def predicted_facts(predictor: Predictor, entity: int, *, k: int) -> list[Fact]:
    """New triples with the entity as head or as tail, best first: by probability, or without one by evidence.

    Every relation is asked from both its ends. Of all answers, `LOOKED_AT` · k that are likeliest to their own
    question, and where there are prospects to be missing, are then measured from both ends. A triple of the entity
    with itself is none.
    """
    prospects = predictor.prospects
    triples = _likeliest(predictor, entity, number=LOOKED_AT * k)
    if not len(triples):
        return []
    evidence = evidence_of(predictor.model, triples).cpu()
    worth, probability = evidence, None
    if prospects is not None:
        relations, kinds = (torch.from_numpy(one) for one in (triples[:, 1], prospects.kinds(triples)))
        worth = prospects.log_odds(evidence, relations, kinds)
        probability = worth.sigmoid()
    best = torch.from_numpy(np.lexsort((-evidence.numpy(), -worth.numpy())))[:k]
    believed = [None] * len(best) if probability is None else probability[best].tolist()
    return [
        Fact(head, relation, tail, probability=likely, evidence=measured)
        for (head, relation, tail), likely, measured in zip(
            triples[best.numpy()].tolist(), believed, evidence[best].tolist(), strict=True
        )
    ]


def _likeliest(predictor: Predictor, entity: int, *, number: int) -> Ids:
    """Triples `(n, 3)` that no split has, the likeliest answers of all questions that the entity can be given in."""
    model, shape = predictor.model, predictor.graph.shape
    found: list[tuple[float, int, int, int]] = []
    every = torch.arange(shape.num_relations, device=model.device)
    for relations in torch.split(every, queries_at_once(model)):
        given = torch.full_like(relations, entity)
        for backward in (False, True):
            scores = model.ask_heads(relations, given) if backward else model.ask_tails(given, relations)
            likely = scores.log_softmax(-1)
            if predictor.prospects is not None:
                open_ = predictor.prospects.of_questions(entity, relations.cpu(), "tail" if backward else "head")
                likely += open_.log().to(likely)[:, None]
            inverse = relations.cpu().numpy() + (shape.num_relations if backward else 0)
            rows, known = predictor.all_known(np.full(len(inverse), entity), inverse)
            likely[torch.from_numpy(rows).to(likely.device), torch.from_numpy(known).to(likely.device)] = -torch.inf
            likely[:, entity] = -torch.inf
            best = likely.flatten().topk(min(number, likely.numel()))
            for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                row, other = divmod(place, shape.num_entities)
                ends = (other, entity) if backward else (entity, other)
                found.append((value, ends[0], int(relations[row]), ends[1]))
    found.sort(key=lambda one: -one[0])
    return np.array([triple for value, *triple in found[:number] if value > -np.inf], dtype=np.int64).reshape(-1, 3)

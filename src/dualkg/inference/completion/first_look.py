"""A first look at a large graph: good new triples after a second, long before the search ends.

A sample of the queries of promising relations is answered, and the best answers are scored from
both ends. So these are new triples with their exact figures, of which the search need not find any
again: it starts from the bound that they set.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.completion.plan import HEADS, SearchPart, parts_of_relation
from dualkg.inference.completion.queries import RelationQueries
from dualkg.inference.completion.search import (
    SearchState,
    best_first,
    excluded_of_part,
    search_block,
)
from dualkg.inference.scoring import Ids
from dualkg.models.base import Model

MAX_RELATIONS = 16  # that are looked at: of the highest priors, or the most frequent ones
# The sampled queries are scored twice, and so are the second queries of twice as many answers.
SCORED_PER_SAMPLED = 4
ANSWERS_OF_QUERY = 8  # the best ones
SEARCH_PER_LOOK = 40  # candidates of a search for each score of a look that is worth it


def is_worth_it(candidates: CandidateFilter, max_scores: int) -> bool:
    """Whether a search takes so much longer than a look."""
    num_entities = candidates.graph.shape.num_entities
    num_heads = num_entities if candidates.heads is None else len(candidates.heads)
    num_candidates = len(candidates.relations) * num_heads * num_entities
    return 0 < SEARCH_PER_LOOK * max_scores < num_candidates


def first_look(
    model: Model, candidates: CandidateFilter, *, start: SearchState, max_scores: int
) -> Iterator[SearchState]:
    """States with more and more triples, for about so many scores; `start` has none."""
    correction = start.prior_correction
    relations = candidates.relations.tolist()
    if correction is None:
        promise = [float(len(candidates.train[relation])) for relation in relations]
    else:
        promise = [float(correction.priors(relation).max()) for relation in relations]
    order = np.argsort(-np.array(promise), kind="stable")[:MAX_RELATIONS]
    parts: list[SearchPart] = []
    for relation in candidates.relations[order].tolist():
        parts += parts_of_relation(relation, candidates, start.prior_correction)[:1]
    parts.sort(key=lambda part: -part.prior)
    num_scored = max_scores // candidates.graph.shape.num_entities
    num_sampled = max(1, num_scored // (SCORED_PER_SAMPLED * max(1, len(parts))))

    state = start
    for part in parts:
        state = _look_at(model, candidates, part, state=state, num_sampled=num_sampled)
        yield state


def _look_at(
    model: Model,
    candidates: CandidateFilter,
    part: SearchPart,
    *,
    state: SearchState,
    num_sampled: int,
) -> SearchState:
    """The state with triples of a part."""
    entities = part.entities(candidates, state.prior_correction)
    excluded = excluded_of_part(candidates, part).to(model.device)
    answers = torch.from_numpy(entities.answers).to(model.device)
    classes = torch.from_numpy(entities.answer_classes).to(model.device)
    symmetric = bool(candidates.symmetric[part.relation])
    finds_tails = part.given == HEADS
    first = RelationQueries(
        model, part.relation, "tail" if finds_tails else "head", symmetric=symmetric
    )
    second = RelationQueries(
        model, part.relation, "head" if finds_tails else "tail", symmetric=symmetric
    )
    required = replace(state, triples=state.triples[:0]).required(part)

    num_given = sum(len(given) for given in entities.given)
    for given_class, of_class in zip(entities.given_classes, entities.given, strict=True):
        number = max(1, num_sampled * len(of_class) // num_given)
        for sample in np.array_split(_spread(of_class, number), -(-number // first.block_size)):
            given = torch.from_numpy(sample).to(model.device)
            best = first.scores(given)[:, answers].topk(min(ANSWERS_OF_QUERY, len(answers)))
            promising = _commonest(best.indices.cpu().numpy().ravel(), 2 * len(sample))
            new = search_block(
                first,
                second,
                given,
                answers=answers[torch.from_numpy(promising).to(answers.device)],
                excluded=excluded,
                classes=classes,
                required=required[given_class].float(),
                top=state.top,
            )
            state = state.merge(new)
    return state


def _spread(entities: Ids, number: int) -> Ids:
    """So many of some entities, ascending and evenly spread."""
    places = np.linspace(0, len(entities) - 1, min(number, len(entities))).astype(np.int64)
    return entities[np.unique(places)]


def _commonest(places: Ids, number: int) -> Ids:
    """The places that are named most often, and among those the ones that are named first."""
    values, firsts, counts = np.unique(places, return_index=True, return_counts=True)
    order = np.lexsort((firsts, -counts))
    return np.sort(values[order[:number]])


def best_of(look: SearchState, state: SearchState) -> SearchState:
    """The best triples of a look and of a search, each of them once."""
    triples = best_first(np.concatenate([state.triples, look.triples]))
    ids: Any = np.stack([triples["head"], triples["relation"], triples["tail"]], axis=1)
    _, firsts = np.unique(ids, axis=0, return_index=True)
    return replace(state, triples=triples[np.sort(firsts)][: state.top])

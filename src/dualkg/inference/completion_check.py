"""Whether a list of new triples is rank_score something: how many withheld triples stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dualkg.data.graph import Graph, distinct_triples, triple_keys
from dualkg.errors import RequestError
from dualkg.inference.completion import Completion, complete
from dualkg.inference.completion_search import CandidateFilter, Column, Ids
from dualkg.models.base import Model

SIZES = (100, 1_000, 10_000, 100_000)
KNOWN = ("train", "valid")


@dataclass(frozen=True)
class Check:
    """How many test triples stand among the best of a list that was made without them, beside two guesses.

    `expected` is how many its probabilities promise. They are of as many missing triples as valid holds, so that their
    sum counts for as much more as test is larger; None where the list has none.

    A guess by degree takes the pairs whose head is a frequent head of the relation, and whose tail a frequent tail:
    by the product of the two numbers of train triples. What ties is taken at random, so both guesses are expected
    numbers.
    """

    sizes: list[int]
    found: list[int]
    expected: list[float] | None
    by_degree: list[float]
    at_random: list[float]
    num_test: int  # those that the list could hold
    num_triples: int  # all that the list could hold

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes_up_to(top: int) -> list[int]:
    """The usual sizes below the largest, and the largest."""
    return [*(size for size in SIZES if size < top), top]


def study(model: Model, graph: Graph, *, sizes: Sequence[int] = SIZES, **choices: Any) -> Check:
    """Complete a graph that is known but for its test triples; `choices` are those of `complete`."""
    narrowed = {name: choices[name] for name in ("relations", "heads", "types", "loops") if name in choices}
    candidate_filter = CandidateFilter.of(graph, **narrowed, known=KNOWN)
    distinct = distinct_triples(graph.test, graph.shape)
    test = distinct[candidate_filter.holds(distinct)].astype(np.int64)
    if not len(test):
        raise RequestError(f"None of the {len(distinct):,} test triples of {graph.name} could be found, so narrowed.")
    made = complete(model, graph, top=max(sizes), known=KNOWN, **choices)
    listed, sought = (triple_keys(triples.astype(np.int32), graph.shape) for triples in (made.triples, test))
    hits = np.append(0, np.cumsum(np.isin(listed, sought)))
    products, counts = _by_product(candidate_filter)
    num_triples = counts.sum(keepdims=True)
    return Check(
        list(sizes),
        [int(hits[min(size, len(made))]) for size in sizes],
        _promised(made, graph, sizes),
        _expected(products, counts, _products_of(candidate_filter, test), sizes),
        _expected(np.zeros(1), num_triples, np.zeros(len(test)), sizes),
        len(test),
        int(num_triples[0]),
    )


def _promised(made: Completion, graph: Graph, sizes: Sequence[int]) -> list[float] | None:
    if made.probability is None:
        return None
    so_far = np.append(0, np.cumsum(made.probability, dtype=np.float64)) * len(graph.test) / max(1, len(graph.valid))
    return [float(so_far[min(size, len(made))]) for size in sizes]


def _degrees(candidate_filter: CandidateFilter, relation: int) -> tuple[Ids, Ids]:
    """How many train triples of a relation each entity is the head of, and the tail of."""
    triples, num_entities = candidate_filter.train_triples(relation), candidate_filter.graph.shape.num_entities
    heads, tails = (np.bincount(triples[:, column], minlength=num_entities) for column in (0, 2))
    return heads, tails


def _products_of(candidate_filter: CandidateFilter, triples: Ids) -> Ids:
    products = np.empty(len(triples), np.int64)
    for relation in np.unique(triples[:, 1]).tolist():
        here = triples[:, 1] == relation
        heads, tails = _degrees(candidate_filter, relation)
        products[here] = heads[triples[here, 0]] * tails[triples[here, 2]]
    return products


def _by_product(candidate_filter: CandidateFilter) -> tuple[Ids, Ids]:
    """Each product of degrees, and how many triples that may be new have it; none of them is looked at one by one."""
    products, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for relation in candidate_filter.relations.tolist():
        asked = candidate_filter.heads_of(relation), candidate_filter.tails_of(relation)
        sides = [side[ids] for side, ids in zip(_degrees(candidate_filter, relation), asked, strict=True)]
        (heads, num_heads), (tails, num_tails) = (np.unique(side, return_counts=True) for side in sides)
        pairs = candidate_filter.excluded_pairs(relation)
        taken = np.insert(pairs[candidate_filter.in_candidates(pairs, relation)], 1, relation, axis=1)
        products += [np.outer(heads, tails).ravel(), _products_of(candidate_filter, taken)]
        counts += [np.outer(num_heads, num_tails).ravel(), np.full(len(taken), -1)]
    distinct, places = np.unique(np.concatenate(products), return_inverse=True)
    number = np.zeros(len(distinct), np.int64)
    np.add.at(number, places, np.concatenate(counts))
    return distinct, number


def _expected(values: Column, counts: Column, wanted: Column, sizes: Sequence[int]) -> list[float]:
    """How many of the wanted stand in the best of each size, by a value that `counts` triples share each."""
    hits = np.bincount(np.searchsorted(values, wanted), minlength=len(values))[::-1]
    so_far, hits_so_far = (np.append(0, np.cumsum(number)) for number in (counts[::-1], hits))
    return [float(value) for value in np.interp(sizes, so_far, hits_so_far)]

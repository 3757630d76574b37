"""Checking completion: how many test triples are among the new triples of a model that does not know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import Graph, Triples, distinct_triples, triple_keys
from dualkg.errors import RequestError
from dualkg.inference.completion import Completion, complete
from dualkg.inference.completion_search import CandidateFilter, Column, Ids
from dualkg.models.base import Model

SIZES = (100, 1_000, 10_000, 100_000)
KNOWN = ("train", "valid")


@dataclass(frozen=True)
class CompletionCheck:
    """The number of test triples among the best of each size, beside two baselines.

    `expected` is the number by the probabilities of the triples, None without a calibration: they are calibrated to as
    many missing triples as valid has, so their sum is scaled to the size of test. The baseline by degree orders pairs
    by the number of training triples of the relation with that head, times the number with that tail. Ties are in
    random order, so both baselines are expected numbers.
    """

    sizes: list[int]
    found: list[int]
    expected: list[float] | None
    by_degree: list[float]
    at_random: list[float]
    num_test: int  # test triples that are candidates
    num_triples: int  # candidates

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes_up_to(top: int) -> list[int]:
    """The usual sizes below `top`, and `top`."""
    return [*(size for size in SIZES if size < top), top]


def check_completion(model: Model, graph: Graph, *, sizes: Sequence[int] = SIZES, **options: Any) -> CompletionCheck:
    """Complete a graph as if its test triples were unknown, and look for them; `options` are those of `complete`."""
    filters = {name: options[name] for name in ("relations", "heads", "types", "loops") if name in options}
    candidates = CandidateFilter.of(graph, **filters, known=KNOWN)
    distinct = distinct_triples(graph.test, graph.shape)
    test = distinct[_are_candidates(distinct, candidates)].astype(np.int64)
    if not len(test):
        raise RequestError(f"None of the {len(distinct):,} test triples of {graph.name} is a candidate of this search.")
    made = complete(model, graph, top=max(sizes), known=KNOWN, **options)
    keys, test_keys = (triple_keys(triples.astype(np.int32), graph.shape) for triples in (made.triples, test))
    hits = np.append(0, np.cumsum(np.isin(keys, test_keys)))
    products, counts = _products_of_degrees(candidates)
    num_triples = counts.sum(keepdims=True)
    return CompletionCheck(
        list(sizes),
        [int(hits[min(size, len(made))]) for size in sizes],
        _expected_by_probability(made, graph, sizes),
        _expected(products, counts, _products_of(candidates, test), sizes),
        _expected(np.zeros(1), num_triples, np.zeros(len(test)), sizes),
        len(test),
        int(num_triples[0]),
    )


def _are_candidates(triples: Triples, candidates: CandidateFilter) -> npt.NDArray[np.bool_]:
    result, factors = np.zeros(len(triples), dtype=bool), np.array([candidates.graph.shape.num_entities, 1])
    for relation in candidates.relations.tolist():
        rows = np.flatnonzero(triples[:, 1] == relation)
        pairs = triples[rows][:, [0, 2]].astype(np.int64)
        excluded = np.isin(pairs @ factors, candidates.excluded_pairs(relation) @ factors)
        result[rows] = _have_candidate_ends(pairs, relation, candidates) & ~excluded
    return result


def _have_candidate_ends(pairs: Ids, relation: int, candidates: CandidateFilter) -> npt.NDArray[np.bool_]:
    heads, tails = candidates.heads_and_tails(relation)
    return np.isin(pairs[:, 0], heads) & np.isin(pairs[:, 1], tails)


def _expected_by_probability(made: Completion, graph: Graph, sizes: Sequence[int]) -> list[float] | None:
    if made.probability is None:
        return None
    sums = np.append(0, np.cumsum(made.probability, dtype=np.float64)) * len(graph.test) / max(1, len(graph.valid))
    return [float(sums[min(size, len(made))]) for size in sizes]


def _degrees(candidates: CandidateFilter, relation: int) -> tuple[Ids, Ids]:
    """The number of training triples of a relation with each entity as head, and as tail."""
    triples, num_entities = candidates.train[relation], candidates.graph.shape.num_entities
    heads, tails = (np.bincount(triples[:, column], minlength=num_entities) for column in (0, 2))
    return heads, tails


def _products_of(candidates: CandidateFilter, triples: Ids) -> Ids:
    """The product of degrees of each triple."""
    products = np.empty(len(triples), np.int64)
    for relation in np.unique(triples[:, 1]).tolist():
        rows = triples[:, 1] == relation
        heads, tails = _degrees(candidates, relation)
        products[rows] = heads[triples[rows, 0]] * tails[triples[rows, 2]]
    return products


def _products_of_degrees(candidates: CandidateFilter) -> tuple[Ids, Ids]:
    """Each product of degrees and the number of candidates that have it, without listing the candidates."""
    products, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for relation in candidates.relations.tolist():
        ends = candidates.heads_and_tails(relation)
        sides = [side[ids] for side, ids in zip(_degrees(candidates, relation), ends, strict=True)]
        (heads, num_heads), (tails, num_tails) = (np.unique(side, return_counts=True) for side in sides)
        pairs = candidates.excluded_pairs(relation)
        excluded = np.insert(pairs[_have_candidate_ends(pairs, relation, candidates)], 1, relation, axis=1)
        products += [np.outer(heads, tails).ravel(), _products_of(candidates, excluded)]
        counts += [np.outer(num_heads, num_tails).ravel(), np.full(len(excluded), -1)]
    distinct, positions = np.unique(np.concatenate(products), return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, positions, np.concatenate(counts))
    return distinct, totals


def _expected(values: Column, counts: Column, sought: Column, sizes: Sequence[int]) -> list[float]:
    """The expected number of sought triples among the best of each size, by a value that `counts` triples share."""
    hits = np.bincount(np.searchsorted(values, sought), minlength=len(values))[::-1]
    so_far, hits_so_far = (np.append(0, np.cumsum(number)) for number in (counts[::-1], hits))
    return [float(value) for value in np.interp(sizes, so_far, hits_so_far)]

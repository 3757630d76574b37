"""How many test triples a completion finds, compared with two baselines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dualkg.data.graph import Graph, distinct_triples, triple_keys
from dualkg.errors import DataError
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.completion.result import Column, Completion
from dualkg.inference.completion.search import complete
from dualkg.inference.probability import Calibration
from dualkg.inference.reliability import LIKELY, ReliabilityBin, reliability_table
from dualkg.inference.scoring import Flags, Ids
from dualkg.models.base import Model

CHECK_SIZES = (100, 1_000, 10_000, 100_000)
CHECK_KNOWN = ("train", "valid")
# Scores of a search whose reliability is measured without being asked for, and triples of it.
MAX_SCORES = 2 * 10**9
MAX_TRIPLES = 100_000
FILTERS = ("relations", "heads", "types", "loops")  # options that choose the candidates


@dataclass(frozen=True)
class CompletionCheck:
    """The number of test triples among the best of each size, with two baselines.

    Numbers are means over the order of ties. `expected` follows from the probabilities of the
    triples, None without a calibration: they are calibrated to as many missing triples as valid
    has, so their sum is scaled to the size of test. The baseline `by_degree` orders pairs by the
    number of training triples of the relation with that head, times the number with that tail.
    `num_test` counts the test triples that are candidates, and `num_triples` all candidates.
    """

    sizes: list[int]
    found: list[int]
    expected: list[float] | None
    by_degree: list[float]
    at_random: list[float]
    num_test: int
    num_triples: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes_up_to(top: int) -> list[int]:
    """The usual sizes below `top`, and `top`."""
    smaller = [size for size in CHECK_SIZES if size < top]
    return [*smaller, top]


def check_completion(
    model: Model, graph: Graph, *, sizes: Sequence[int] = CHECK_SIZES, **options: Any
) -> CompletionCheck:
    """Complete a graph as if its test triples were unknown, and look for them.

    `options` are the options of `complete`. A given share of missing triples is not used, since
    test has only a part of these.
    """
    calibration: Calibration | None = options.get("calibration")
    query_classes = None
    if calibration is not None:
        options["calibration"] = calibration.as_measured
        query_classes = calibration.on(graph).query_classes
    filters = {name: options[name] for name in FILTERS if name in options}
    candidates = CandidateFilter(graph, **filters, known=CHECK_KNOWN, query_classes=query_classes)
    distinct = distinct_triples(graph.test, graph.shape)
    degrees = _degree_products(candidates, distinct.astype(np.int64))
    num_test = len(degrees.test)
    if not num_test:
        raise DataError(
            f"None of the {len(distinct):,} test triples of {graph.name} is a candidate of this "
            "search."
        )

    completion = complete(model, graph, top=max(sizes), known=CHECK_KNOWN, **options)
    is_hit = _are_in_test(completion, degrees.test)
    num_hits = np.append(0, np.cumsum(is_hit))
    ends = np.minimum(sizes, len(completion))

    expected = None
    if completion.probability is not None:
        sums = np.append(0, np.cumsum(completion.probability, dtype=np.float64))
        scaled = sums * len(graph.test) / max(1, len(graph.valid))
        expected = scaled[ends].tolist()

    num_triples = degrees.counts.sum(keepdims=True)
    return CompletionCheck(
        sizes=list(sizes),
        found=num_hits[ends].tolist(),
        expected=expected,
        by_degree=_expected_hits(degrees.products, degrees.counts, degrees.of_test, sizes=sizes),
        at_random=_expected_hits(np.zeros(1), num_triples, np.zeros(num_test), sizes=sizes),
        num_test=num_test,
        num_triples=int(num_triples[0]),
    )


def completion_reliability(
    model: Model, graph: Graph, calibration: Calibration
) -> tuple[ReliabilityBin, ...] | None:
    """How often new triples of some probability are in test, which is taken as unknown.

    The probabilities are calibrated to as many missing triples as valid has, so `predicted` is
    scaled to the size of test. Intervals are as wide as if all triples came in pairs, as the
    triples of symmetric relations do. None without test, without any likely triple, if the search
    would take long, or with a given share of missing triples: test does not have all of these.
    """
    shape = graph.shape
    takes_long = shape.num_relations * shape.num_entities**2 > MAX_SCORES
    is_given = calibration.missing_share is not None
    if takes_long or is_given or not len(graph.test) or not len(graph.valid):
        return None
    completion = complete(
        model,
        graph,
        top=MAX_TRIPLES,
        calibration=calibration,
        min_probability=LIKELY,
        known=CHECK_KNOWN,
    )
    if completion.probability is None or not len(completion):
        return None
    is_hit = _are_in_test(completion, distinct_triples(graph.test, shape).astype(np.int64))
    probabilities = completion.probability.astype(np.float64)
    table = reliability_table(probabilities, is_hit, np.ones(len(completion)))
    ratio = len(graph.test) / len(graph.valid)
    return tuple(replace(bin, predicted=min(1.0, bin.predicted * ratio)) for bin in table)


def _are_in_test(completion: Completion, test: Ids) -> Flags:
    """Which new triples are in test, `(num_triples,)`."""
    # Past 63 bits, keys are comparable only among triples that are encoded together.
    joined = np.concatenate([completion.triples, test]).astype(np.int32)
    keys = triple_keys(joined, completion.graph.shape)
    new_keys, test_keys = np.split(keys, [len(completion)])
    return np.isin(new_keys, test_keys)


class _DegreeProducts(NamedTuple):
    """The product of the degrees of head and tail in the relation, of all candidates.

    `products` are the distinct values, ascending, and `counts` the numbers of candidates that have
    them. `test` are the test triples that are candidates, and `of_test` their products.
    """

    test: Ids
    of_test: Ids
    products: Ids
    counts: Ids


def _degree_products(candidates: CandidateFilter, test: Ids) -> _DegreeProducts:
    """All pairs are counted by the degrees of their ends, and excluded pairs as −1."""
    num_entities = candidates.graph.shape.num_entities
    keys = np.array([num_entities, 1])
    test_parts = []
    of_test_parts = []
    product_parts = []
    count_parts = []
    for relation in candidates.relations.tolist():
        heads, tails = candidates.heads_and_tails(relation)
        train = candidates.train[relation]
        head_degrees = np.bincount(train[:, 0], minlength=num_entities)
        tail_degrees = np.bincount(train[:, 2], minlength=num_entities)

        excluded = _among_ends(candidates.excluded_pairs(relation), heads, tails)
        test_pairs = _among_ends(test[test[:, 1] == relation][:, [0, 2]], heads, tails)
        test_pairs = test_pairs[~np.isin(test_pairs @ keys, excluded @ keys)]
        test_parts.append(np.insert(test_pairs, 1, relation, axis=1))
        of_test_parts.append(head_degrees[test_pairs[:, 0]] * tail_degrees[test_pairs[:, 1]])

        degrees_of_heads, num_heads = np.unique(head_degrees[heads], return_counts=True)
        degrees_of_tails, num_tails = np.unique(tail_degrees[tails], return_counts=True)
        product_parts.append(np.outer(degrees_of_heads, degrees_of_tails).ravel())
        product_parts.append(head_degrees[excluded[:, 0]] * tail_degrees[excluded[:, 1]])
        count_parts.append(np.outer(num_heads, num_tails).ravel())
        count_parts.append(np.full(len(excluded), -1))

    products, places = np.unique(np.concatenate(product_parts), return_inverse=True)
    counts = np.zeros(len(products), np.int64)
    np.add.at(counts, places, np.concatenate(count_parts))
    return _DegreeProducts(
        np.concatenate(test_parts), np.concatenate(of_test_parts), products, counts
    )


def _among_ends(pairs: Ids, heads: Ids, tails: Ids) -> Ids:
    """The pairs of a candidate head and a candidate tail."""
    return pairs[np.isin(pairs[:, 0], heads) & np.isin(pairs[:, 1], tails)]


def _expected_hits(
    values: Column, counts: Column, sought: Column, *, sizes: Sequence[int]
) -> list[float]:
    """The expected number of sought triples among the best of each size.

    Triples are ordered by decreasing value; `counts` triples share each of the ascending `values`,
    and `sought` are the values of the sought triples.
    """
    hits = np.bincount(np.searchsorted(values, sought), minlength=len(values))
    num_triples = np.append(0, np.cumsum(counts[::-1]))
    num_hits = np.append(0, np.cumsum(hits[::-1]))
    expected: list[float] = np.interp(sizes, num_triples, num_hits).tolist()
    return expected

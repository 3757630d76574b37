"""Known answers, against a dictionary of sets."""

from collections import defaultdict

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.filters import KnownAnswers, occur, with_reciprocals
from dualkg.data.graph import GraphShape
from tests.conftest import graph_of

NUM_ENTITIES = 6
NUM_RELATIONS = 3
QUERIES = [
    (entity, relation) for entity in range(NUM_ENTITIES) for relation in range(2 * NUM_RELATIONS)
]
Row = tuple[int, int, int]

entity = st.integers(0, NUM_ENTITIES - 1)
splits = st.lists(st.tuples(entity, st.integers(0, NUM_RELATIONS - 1), entity), max_size=30)


def answers_of(known: KnownAnswers, queries: list[tuple[int, int]]) -> list[list[int]]:
    """The answers to each query, as they come."""
    entities, relations = np.array(queries, dtype=np.int32).reshape(-1, 2).T
    rows, answers = known(entities, relations)
    assert (np.diff(rows) >= 0).all()
    return [answers[rows == row].tolist() for row in range(len(queries))]


def expected(triples: list[Row]) -> dict[tuple[int, int], set[int]]:
    answers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for head, relation, tail in triples:
        answers[head, relation].add(tail)
        answers[tail, relation + NUM_RELATIONS].add(head)
    return answers


@given(splits, splits, splits, st.permutations(QUERIES))
def test_every_query_gets_its_answers_once(
    train: list[Row], valid: list[Row], test: list[Row], queries: list[tuple[int, int]]
) -> None:
    known = KnownAnswers.of(
        graph_of(train, valid, test, num_entities=NUM_ENTITIES, num_relations=NUM_RELATIONS)
    )
    answers = expected(train + valid + test)
    assert answers_of(known, queries) == [sorted(answers[query]) for query in queries]
    assert len(known.answers) == sum(len(found) for found in answers.values())


@given(splits, splits)
def test_only_the_splits_named_are_known(train: list[Row], test: list[Row]) -> None:
    graph = graph_of(train, [], test, num_entities=NUM_ENTITIES, num_relations=NUM_RELATIONS)
    answers = expected(test)
    assert answers_of(KnownAnswers.of(graph, ["test"]), QUERIES) == [
        sorted(answers[query]) for query in QUERIES
    ]


def test_a_query_may_be_repeated() -> None:
    known = KnownAnswers.of(graph_of([(0, 0, 1), (0, 0, 2)]))
    assert answers_of(known, [(0, 0), (1, 0), (0, 0)]) == [[1, 2], [], [1, 2]]


def test_no_queries_have_no_answers() -> None:
    rows, answers = KnownAnswers.of(graph_of([(0, 0, 1)]))(
        np.array([], np.int64), np.array([], np.int64)
    )
    assert (len(rows), len(answers)) == (0, 0)


def test_an_empty_graph_has_no_known_answers() -> None:
    known = KnownAnswers.of(graph_of([], num_entities=NUM_ENTITIES, num_relations=NUM_RELATIONS))
    assert answers_of(known, QUERIES) == [[]] * len(QUERIES)


def test_keys_of_very_many_entities_fit_in_64_bits() -> None:
    last = 2**31 - 2
    triples = np.array(
        [(last, 999, 0), (last, 999, last), (last, 999, 0), (0, 0, last)], dtype=np.int32
    )
    known = KnownAnswers([triples], GraphShape(last + 1, 1000))
    assert answers_of(known, [(last, 999), (0, 0), (last, 1000), (0, 1999)]) == [
        [0, last],
        [last],
        [0],
        [last],
    ]


def test_dtypes_of_answers_and_queries() -> None:
    known = KnownAnswers.of(graph_of([(0, 0, 1)]))
    assert known.answers.dtype == np.int32
    assert known(np.array([0]), np.array([0]))[1].dtype == np.int64


def test_known_answers_are_copied_to_a_device_once_and_not_on_a_cpu() -> None:
    known = KnownAnswers.of(graph_of([(0, 0, 1)]))
    here = torch.device("cpu")
    assert known.on(here) is known.on(here)
    assert known.on(here).answers.data_ptr() == known.answers.ctypes.data


def test_a_query_that_is_not_known_has_an_empty_range() -> None:
    known = KnownAnswers.of(graph_of([(1, 0, 2), (1, 0, 3)], num_entities=5))
    first, last = known.on(torch.device("cpu")).ranges(torch.arange(-1, 11))
    assert (last - first).tolist() == [0, 0, 0, 2, 0, 0, 1, 0, 1, 0, 0, 0]


def test_reciprocals_follow_their_triples() -> None:
    triples = np.array([(0, 1, 2), (3, 0, 4)], dtype=np.int32)
    assert with_reciprocals(triples, 5).tolist() == [[0, 1, 2], [3, 0, 4], [2, 6, 0], [4, 5, 3]]
    assert triples.tolist() == [[0, 1, 2], [3, 0, 4]]


@given(splits, splits, splits)
def test_only_the_answers_to_given_queries(
    train: list[Row], valid: list[Row], test: list[Row]
) -> None:
    arrays = [np.array(rows, dtype=np.int32).reshape(-1, 3) for rows in (train, valid, test)]
    shape = GraphShape(NUM_ENTITIES, NUM_RELATIONS)
    known = KnownAnswers(arrays, shape)
    some = KnownAnswers(arrays, shape, queries=arrays[1])
    wanted = [
        (head, relation)
        for head, relation, _ in with_reciprocals(arrays[1], NUM_RELATIONS).tolist()
    ]
    assert answers_of(some, wanted) == answers_of(known, wanted)
    assert len(some.queries) == len(set(wanted))


@given(
    splits,
    splits,
    st.sampled_from([GraphShape(NUM_ENTITIES, NUM_RELATIONS), GraphShape(2**31 - 1, 2**20)]),
)
def test_triples_are_found_in_splits(
    wanted: list[Row], known: list[Row], shape: GraphShape
) -> None:
    arrays = [
        np.array(rows, dtype=np.int32).reshape(-1, 3) for rows in (wanted, known[::2], known[1::2])
    ]
    assert occur(arrays[0], arrays[1:], shape).tolist() == [row in known for row in wanted]

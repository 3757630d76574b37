"""Restricted candidates, numbers of candidates and adjusted mean ranks, against brute force and by
hand.
"""

import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.filters import KnownAnswers
from dualkg.errors import DataError, DivergedError, InvalidValue, RequestError
from dualkg.evaluation import ranking, read_candidates
from dualkg.evaluation.report import build_report, load_ranks, save_ranks
from dualkg.models.ensemble import EnsembleModel
from tests.conftest import graph_of
from tests.evaluation.test_ranking import graphs, score_of_every_triple, whole_numbers

MODELS = [(kg.ComplEx, True), (kg.DistMult, False), (kg.CP, False), (kg.RESCAL, True)]


def brute_force(
    model: kg.Model, graph: kg.Graph, candidates: Callable[[str, int], list[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Optimistic and pessimistic ranks and numbers of candidates of the test triples, one candidate
    at a time.
    """
    known = {
        tuple(triple)
        for name in ("train", "valid", "test")
        for triple in graph.split(name).tolist()
    }
    score = score_of_every_triple(model)
    rows = []
    for direction in ("tail", "head"):
        for number, (h, r, t) in enumerate(graph.test.tolist()):
            answer = t if direction == "tail" else h
            scores = []
            for other in candidates(direction, number):
                triple = (h, r, other) if direction == "tail" else (other, r, t)
                if triple not in known:
                    scores.append(triple)

            def value(triple: tuple[int, int, int], backward: bool = direction == "head") -> float:
                if backward and model.reciprocal:
                    return score(triple[2], triple[1] + graph.shape.num_relations, triple[0])
                return score(*triple)

            true = value((h, r, t))
            better = sum(value(one) > true for one in scores)
            tied = sum(value(one) == true for one in scores)
            assert answer not in [one[2 if direction == "tail" else 0] for one in scores]
            rows.append((better + 1, better + tied + 1, len(scores) + 1))
    best, worst, numbers = np.array(rows).T.reshape(3, 2, -1)
    return best, worst, numbers


def assert_ranks(ranks: kg.Ranks, wanted: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    assert ranks.num_candidates is not None
    for found, one in zip(
        (ranks.optimistic, ranks.pessimistic, ranks.num_candidates), wanted, strict=True
    ):
        np.testing.assert_array_equal(found, one)


@given(graphs(), st.sampled_from(MODELS), st.integers(0, 5))
def test_type_constrained_ranks_are_those_of_brute_force(graph, form, seed):
    kind, reciprocal = form
    model = whole_numbers(kind(graph.shape, dim=2, reciprocal=reciprocal), seed)
    column = {"tail": 2, "head": 0}

    def seen_in_train(direction: str, number: int) -> list[int]:
        relation = graph.test[number, 1]
        seen = np.unique(graph.train[graph.train[:, 1] == relation, column[direction]]).tolist()
        return seen or list(range(graph.shape.num_entities))

    assert_ranks(
        kg.rank(model, graph, type_constrained=True), brute_force(model, graph, seen_in_train)
    )


@given(graphs(), st.sampled_from(MODELS), st.integers(0, 5), st.data())
def test_ranks_among_given_lists_are_those_of_brute_force(graph, form, seed, data):
    """Lists of any length, with repeated entities, known answers and the answer itself."""
    kind, reciprocal = form
    model = whole_numbers(kind(graph.shape, dim=2, reciprocal=reciprocal), seed)
    distinct = list(dict.fromkeys(map(tuple, graph.test.tolist())))
    some = st.lists(st.integers(0, graph.shape.num_entities - 1), max_size=6)
    lists = {triple: {side: data.draw(some) for side in ("tail", "head")} for triple in distinct}
    shuffled = data.draw(st.permutations(distinct))
    columns = {
        name: [f"{'r' if i == 1 else 'e'}{one[i]}" for one in shuffled]
        for i, name in enumerate(PARTS)
    }
    for side in ("tail", "head"):
        columns[f"{side}_candidates"] = [
            [f"e{id}" for id in lists[triple][side]] for triple in shuffled
        ]
    report = kg.evaluate(model, graph, candidates=columns)
    wanted = brute_force(
        model, graph, lambda side, number: lists[tuple(graph.test[number].tolist())][side]
    )
    assert_ranks(report.ranks, wanted)
    assert report.candidates == "given lists"


PARTS = ("head", "relation", "tail")


@given(graphs(), st.integers(0, 5))
def test_lists_of_all_entities_give_the_ordinary_ranks(graph, seed):
    model = whole_numbers(kg.ComplEx(graph.shape, dim=2), seed)
    ordinary = kg.rank(model, graph)
    numbers = ranking.count_candidates(graph.test, KnownAnswers.of(graph))
    every = np.tile(np.arange(graph.shape.num_entities), (2 * len(graph.test), 1)).astype(np.int32)
    lists = kg.evaluation.CandidateLists(
        every.reshape(-1), np.arange(len(every) + 1) * every.shape[1]
    )
    assert ordinary.num_candidates is None
    assert_ranks(
        kg.rank(model, graph, candidates=lists),
        (ordinary.optimistic, ordinary.pessimistic, numbers),
    )


@given(graphs(), st.sampled_from([("train",), ("train", "valid"), ("train", "valid", "test")]))
def test_numbers_of_candidates_are_those_of_brute_force(graph, splits):
    found = ranking.count_candidates(graph.test, KnownAnswers.of(graph, splits))
    known = {tuple(triple) for name in splits for triple in graph.split(name).tolist()}
    entities = range(graph.shape.num_entities)
    for number, (h, r, t) in enumerate(graph.test.tolist()):
        assert found[0, number] == sum(e == t or (h, r, e) not in known for e in entities)
        assert found[1, number] == sum(e == h or (e, r, t) not in known for e in entities)


def test_blocks_of_lists_cover_all_queries_in_bounded_memory(small_graph):
    model = kg.DistMult(small_graph.shape, dim=4, init_scale=1.0)
    random = np.random.default_rng(0)
    lengths = random.integers(0, 12, 2 * len(small_graph.test))
    lists = kg.evaluation.CandidateLists(
        random.integers(0, 30, lengths.sum()).astype(np.int32), np.append(0, np.cumsum(lengths))
    )
    whole = kg.rank(model, small_graph, candidates=lists)
    for first, last, ids in lists.blocks(0, 40, 30):
        assert last == first + 1 or ids.size + len(ids) <= 30
    done: list[int] = []
    blocked = kg.rank(
        model,
        small_graph,
        candidates=lists,
        progress=lambda now, total: done.append(now),
        block_elements=100,
    )
    np.testing.assert_array_equal(blocked.mean, whole.mean)
    assert len(done) > 4
    assert done[-1] == 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_ranks_on_a_gpu_are_those_on_a_cpu(small_graph):
    model = whole_numbers(kg.ComplEx(small_graph.shape, dim=4))
    random = np.random.default_rng(0)
    lists = kg.evaluation.CandidateLists(
        random.integers(0, 30, 400).astype(np.int32), np.arange(0, 401, 10)
    )
    for options in ({"type_constrained": True}, {"candidates": lists}):
        wanted = kg.rank(model.cpu(), small_graph, **options)
        found = kg.rank(model.cuda(), small_graph, **options)
        assert_ranks(found, (wanted.optimistic, wanted.pessimistic, wanted.num_candidates))


def test_an_ensemble_is_ranked_among_lists(small_graph):
    members = [
        whole_numbers(kg.ComplEx(small_graph.shape, dim=2), 1),
        whole_numbers(kg.CP(small_graph.shape, dim=2), 2),
    ]
    model = EnsembleModel(members, weights=[1.0, 2.0])
    every = np.tile(np.arange(30), 40).astype(np.int32)
    ranks = kg.rank(
        model, small_graph, candidates=kg.evaluation.CandidateLists(every, np.arange(41) * 30)
    )
    np.testing.assert_array_equal(ranks.mean, kg.rank(model, small_graph).mean)


def test_nan_in_a_list_raises(small_graph):
    model = kg.DistMult(small_graph.shape, dim=2)
    model.entities.data[7] = torch.nan
    lists = kg.evaluation.CandidateLists(np.full(40, 7, np.int32), np.arange(41))
    nan_or_infinity = r"NaN or infinity for the query \(\d+, \d, \?\), so it cannot be ranked"
    with pytest.raises(DivergedError, match=nan_or_infinity):
        kg.rank(model, small_graph, candidates=lists)
    with pytest.raises(DivergedError, match=nan_or_infinity):
        kg.rank(model, small_graph, type_constrained=True)


def test_a_constant_model_has_an_adjusted_mean_rank_index_of_zero(small_graph):
    model = kg.DistMult(small_graph.shape, dim=2)
    for parameter in model.parameters():
        parameter.data.zero_()
    for options in ({}, {"type_constrained": True}):
        report = kg.evaluate(model, small_graph, **options)
        assert report.metrics.amri == pytest.approx(0, abs=1e-12)
        assert report.metrics.amr == pytest.approx(1)
    assert kg.evaluate_relations(model, small_graph).amri == pytest.approx(0, abs=1e-12)


def test_hits_at_any_k(small_graph):
    model = kg.DistMult(small_graph.shape, dim=4, init_scale=1.0)
    report = kg.evaluate(model, small_graph, hits=(1, 7, 20))
    ranks = report.ranks.mean
    for k in (1, 2, 7, 20, 1000):
        assert report.hits(k) == np.mean(ranks <= k)
    assert report.metrics.hits(7) == report.as_dict()["metrics"]["hits_at_7"] == report.hits(7)
    assert report.by_direction["head"].hits(20) == np.mean(ranks[1] <= 20)
    assert list(report.metrics.more_hits) == [7, 20]
    with pytest.raises(RequestError, match="Hits@5 was not computed, only k = 1, 3, 10, 7, 20"):
        report.metrics.hits(5)


def test_numbers_of_candidates_are_saved_with_restricted_ranks(small_graph, tmp_path):
    model = kg.DistMult(small_graph.shape, dim=4, init_scale=1.0)
    report = kg.evaluate(model, small_graph, type_constrained=True)
    save_ranks(report.ranks, tmp_path / "ranks.parquet")
    again = build_report(load_ranks(tmp_path / "ranks.parquet"), small_graph, split="test")
    assert again.metrics == report.metrics
    ordinary = kg.evaluate(model, small_graph)
    save_ranks(ordinary.ranks, tmp_path / "ordinary.parquet")
    assert "num_candidates" not in pq.read_schema(tmp_path / "ordinary.parquet").names
    assert (
        build_report(load_ranks(tmp_path / "ordinary.parquet"), small_graph, split="test")
        == ordinary
    )


# -- files -------------------------------------------------------------------


@pytest.fixture
def graph() -> kg.Graph:
    """Entities 0 to 4 named by numbers, as in the Open Graph Benchmark."""
    made = graph_of([(0, 0, 1), (1, 0, 2)], [], [(0, 0, 2), (3, 0, 4)], num_entities=5)
    names = kg.Vocabulary([str(i) for i in range(5)])
    return kg.Graph(
        "made", names, kg.Vocabulary(["0"], kind="relation"), made.train, made.valid, made.test
    )


OGB = {
    "head": np.array([0, 3]),
    "relation": np.array([0, 0]),
    "tail": np.array([2, 4]),
    "tail_neg": np.array([[3, 4], [0, 1]]),
    "head_neg": np.array([[2, 4], [0, 0]]),
    "head_type": np.array(["ignored", "ignored"]),
}


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".jsonl"])
def test_all_formats_hold_the_same_lists(graph, tmp_path, suffix):
    path = tmp_path / f"test{suffix}"
    if suffix == ".npz":
        np.savez(path, **OGB)
    elif suffix == ".parquet":
        pq.write_table(pa.table({name: list(values) for name, values in OGB.items()}), path)
    else:
        rows = [{name: values[row].tolist() for name, values in OGB.items()} for row in (0, 1)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lists = read_candidates(path, graph)
    assert lists.entities.tolist() == [3, 4, 0, 1, 2, 4, 0, 0]
    assert lists.starts.tolist() == [0, 2, 4, 6, 8]
    report = kg.evaluate(kg.DistMult(graph.shape, dim=2), graph, candidates=path)
    assert report.ranks.num_candidates.tolist() == [[3, 3], [3, 3]]


def test_ranks_among_lists_by_hand(graph):
    """DistMult of dim 1 scores h · t; the query (0, ?) of tail 2 has candidates 3 (tied with 2) and
    4 (better).
    """
    model = kg.DistMult(graph.shape, dim=1, reciprocal=False)
    model.entities.data = torch.tensor([[1.0], [0.0], [2.0], [2.0], [5.0]])
    model.relations.data.fill_(1.0)
    report = kg.evaluate(model, graph, candidates=OGB)
    assert report.ranks.mean.tolist() == [[2.5, 1.0], [3.0, 1.0]]
    assert report.mrr == pytest.approx((1 / 2.5 + 1 + 1 / 3 + 1) / 4)


def rows(**changes: object) -> list[dict[str, object]]:
    good = {
        "head": "0",
        "relation": "0",
        "tail": "2",
        "tail_candidates": ["1"],
        "head_candidates": ["1"],
    }
    return [{**good, **changes}, {**good, "head": "3", "tail": "4"}]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            rows(tail_candidates=["1", "9"]),
            ", column tail_candidates, row 1: No entity is named '9'",
        ),
        (rows(relation="x"), ", column relation, row 1: No relation is named 'x'"),
        (
            rows(tail_candidates=None),
            ", column tail_candidates, row 1, is missing; it should be a list",
        ),
        (rows(tail_candidates="1"), ", column tail_candidates, should be lists of names"),
        (rows(head=None), ", column head, row 1, has no name"),
        (
            rows(tail="3"),
            " has no candidates for 1 of the 2 test triples; the first is (0, 0, 2)",
        ),
        (
            rows()[:1],
            " has no candidates for 1 of the 2 test triples; the first is (3, 0, 4)",
        ),
        ([*rows(), *rows()], " has two rows for (0, 0, 2). Remove one."),
        (
            [*rows(), *rows(head="1")[:1]],
            " has 1 rows that are no test triples of made; the first is row 3, (1, 0, 2)",
        ),
        (
            [{"head": "0", "relation": "0", "tail": "2"}],
            " has no column tail_candidates; its columns are head, relation, tail",
        ),
        ([3], ", line 1 should be an object; it is int"),
        ([], " has no column head; its columns are none"),
    ],
)
def test_bad_lists_are_refused(graph, tmp_path, lines, sentence):
    path = tmp_path / "lists.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError) as refused:
        read_candidates(path, graph)
    assert str(refused.value).startswith(f"{path}{sentence}")


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("lists.csv", InvalidValue, "a file of the kind .parquet, .jsonl, .npz"),
        ("missing.npz", DataError, "is not a file; candidate lists were expected"),
        ("broken.npz", DataError, "cannot be read as arrays: "),
        ("broken.parquet", DataError, "cannot be read as Parquet: "),
        ("broken.jsonl", DataError, ", line 1 is not JSON: "),
    ],
)
def test_other_files_are_refused(graph, tmp_path, name, error, sentence):
    path = tmp_path / name
    if name.startswith("broken"):
        path.write_text("{broken")
    with pytest.raises(error) as refused:
        read_candidates(path, graph)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"candidates": {**OGB, "tail": np.array([2])}},
            "The mapping should have as many rows in each column; it has head 2, head_neg 2, "
            "relation 2, tail 1, tail_neg 2.",
        ),
        (
            {"candidates": OGB, "type_constrained": True},
            "Candidates are given in lists or by type constraints, not both. Leave out one.",
        ),
        (
            {"candidates": kg.evaluation.CandidateLists(np.zeros(2, np.int32), np.arange(3))},
            "candidates should be lists for the 2 triples of the split",
        ),
        ({"candidates": OGB, "queries": 3}, "Candidates are lists for all triples of the split."),
    ],
)
def test_candidates_that_do_not_fit_are_refused(graph, arguments, sentence):
    with pytest.raises(RequestError) as refused:
        kg.evaluate(kg.DistMult(graph.shape, dim=1), graph, **arguments)
    assert sentence in str(refused.value).replace("`", "")

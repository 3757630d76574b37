import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dualkg as kg
from dualkg.data.inspection import cardinalities
from dualkg.errors import DamagedFile, InvalidValue
from dualkg.evaluation.ranking import Ranks
from dualkg.evaluation.report import build_report, load_ranks, save_ranks
from tests.conftest import graph_of
from tests.raising import refused


def test_cardinalities_by_hand():
    one_one = [(0, 0, 1), (2, 0, 3)]
    one_many = [(0, 1, 1), (0, 1, 2), (3, 1, 4), (3, 1, 5)]
    many_one = [(t, 2, h) for h, _, t in one_many]
    many_many = [(h, 3, t) for h in range(3) for t in range(3)]
    repeated = [(0, 4, 1)] * 5  # the same triple five times is still one answer
    graph = graph_of(one_one + one_many + many_one + many_many + repeated, num_relations=6)
    assert cardinalities(graph.train, graph.shape) == ["1-1", "1-N", "N-1", "N-N", "1-1", "unseen"]


def test_an_average_of_one_and_a_half_counts_as_many():
    graph = graph_of([(0, 0, 1), (0, 0, 2), (3, 0, 4)])
    assert cardinalities(graph.train, graph.shape) == ["1-N"]


def ranks_of(graph: kg.Graph) -> Ranks:
    return Ranks(graph.test, np.array([[1, 2], [3, 4]]), np.array([[1, 4], [3, 8]]))


@pytest.fixture
def graph() -> kg.Graph:
    return graph_of([(0, 0, 1), (0, 0, 2), (1, 1, 2)], [], [(1, 0, 2), (0, 1, 3)], num_entities=4)


def test_every_view_is_of_the_same_ranks(graph):
    report = build_report(ranks_of(graph), graph, split="test")
    assert report.mrr == pytest.approx((1 + 1 / 3 + 1 / 3 + 1 / 6) / 4)
    assert report.optimistic.mrr == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert report.pessimistic.mrr == pytest.approx((1 + 1 / 4 + 1 / 3 + 1 / 8) / 4)
    assert report.by_direction["tail"].mrr == pytest.approx((1 + 1 / 3) / 2)
    assert report.by_direction["head"].mrr == pytest.approx((1 / 3 + 1 / 6) / 2)
    assert report.by_relation["r0"].mrr == pytest.approx((1 + 1 / 3) / 2)
    assert report.by_cardinality["1-N"].num_queries == 2
    assert report.by_cardinality["1-1"].num_queries == 2
    assert report.num_unseen_triples == 1
    assert report.without_unseen.mrr == pytest.approx((1 + 1 / 3) / 2)


def test_a_report_is_json(graph):
    report_json = json.loads(build_report(ranks_of(graph), graph, split="test").as_json())
    assert report_json["metrics"]["num_queries"] == 4
    assert set(report_json["by_direction"]) == {"tail", "head"}


def test_saved_ranks_load_unchanged(graph, tmp_path):
    ranks = ranks_of(graph)
    save_ranks(ranks, tmp_path / "ranks.parquet")
    again = load_ranks(tmp_path / "ranks.parquet")
    for name in ("triples", "optimistic", "pessimistic"):
        np.testing.assert_array_equal(getattr(ranks, name), getattr(again, name))


def test_ranks_with_ids_that_are_no_ids_are_refused(graph, tmp_path):
    path = tmp_path / "ranks.parquet"
    save_ranks(ranks_of(graph), path)
    assert len(load_ranks(path, graph.shape).triples) == 2
    smaller = kg.GraphShape(graph.shape.num_entities - 1, graph.shape.num_relations)
    with pytest.raises(DamagedFile) as beyond:
        load_ranks(path, smaller)
    assert beyond.value.path == path
    assert beyond.value.reason == "it has ids that are not in the graph"

    table = pq.read_table(path)
    position = table.column_names.index("relation")
    numbers = pa.array([0.5, float("nan")] * (len(table) // 2))
    pq.write_table(table.set_column(position, "relation", numbers), path)
    with pytest.raises(DamagedFile) as no_integers:
        load_ranks(path, graph.shape)
    assert "relation" in no_integers.value.reason


def test_metrics_of_an_empty_split_are_null_in_json(graph):
    report = kg.evaluate(kg.DistMult(graph.shape, dim=2), graph, split="valid")
    report_json = json.loads(report.as_json())
    assert report_json["metrics"]["mrr"] is None
    assert report_json["metrics"]["num_queries"] == 0


def test_an_unknown_split_is_refused(graph):
    with refused(InvalidValue, setting="split", expected="train, valid or test", found="testing"):
        kg.evaluate(kg.DistMult(graph.shape, dim=2), graph, split="testing")

"""Metrics: values by hand, rows of tables, and metrics of one's own."""

import json
import math
import re

import numpy as np
import pytest

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.evaluation.comparison import compare_ranks
from dualkg.evaluation.metrics import (
    METRICS,
    Metric,
    Metrics,
    check_hits,
    columns,
)
from tests.conftest import graph_of

RANKS = np.array([1.0, 2.0, 4.0, 20.0])


@pytest.fixture
def inverse_log_rank(monkeypatch):
    """A registered metric that is not part of dualkg."""
    metric = Metric(
        name="inverse_log_rank",
        label="Inverse log rank",
        title="ILR",
        per_query=lambda ranks: 1 / (1 + np.log(ranks)),
    )
    monkeypatch.setitem(METRICS._registered, metric.name, metric)
    return metric


def test_metrics_by_hand():
    metrics = Metrics.of(RANKS)
    assert metrics.mrr == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 20) / 4)
    assert metrics.mr == pytest.approx(27 / 4)
    assert (metrics.hits_at_1, metrics.hits_at_3, metrics.hits_at_10) == (0.25, 0.5, 0.75)
    assert metrics.amr is None
    assert metrics.amri is None


def test_adjusted_mean_ranks_by_hand():
    """The expectation of a rank among 9 candidates is 5."""
    metrics = Metrics.of(np.array([1.0, 3.0]), np.array([9, 9]))
    assert metrics.amr == pytest.approx(2 / 5)
    assert metrics.amri == pytest.approx(1 - 1 / 4)
    assert Metrics.of(np.array([1.0]), np.array([1])).amri is None


def test_a_tie_across_the_first_place_is_no_hit_at_1():
    assert Metrics.of(np.array([1.5])).hits_at_1 == 0


def test_metrics_of_no_queries_are_nan():
    metrics = Metrics.of(np.array([]))
    assert math.isnan(metrics.mrr)
    assert metrics.row() == ["–"] * 5 + ["0"]
    assert metrics.as_dict()["mrr"] is None


def test_hits_at_other_k():
    metrics = Metrics.of(RANKS, hits=(2, 5))
    assert metrics.hits(2) == 0.5
    assert metrics.hits(10) == 0.75


@pytest.mark.parametrize("hits", [0, [1, -1], [True], ["3"], 1.5])
def test_a_k_is_a_whole_number(hits):
    with pytest.raises(InvalidValue) as error:
        check_hits(hits)
    assert error.value.setting == "hits"


def test_rows_and_their_titles():
    metrics = Metrics.of(RANKS, np.array([9, 9, 9, 50]), hits=(2,))
    assert Metrics.titles() == ["MRR", "H@1", "H@3", "H@10", "MR", "queries"]
    assert metrics.row() == ["0.4500", "0.2500", "0.5000", "0.7500", "6.8", "4"]
    assert Metrics.titles(hits=(2,), adjusted=True) == [
        "MRR",
        "H@2",
        "MR",
        "AMR",
        "AMRI",
        "queries",
    ]
    assert len(metrics.row(hits=(2,), adjusted=True)) == 6


def test_columns_of_short_tables():
    assert columns() == {
        "MRR": "mrr",
        "H@1": "hits_at_1",
        "H@3": "hits_at_3",
        "H@10": "hits_at_10",
    }


def test_metrics_are_read_from_what_was_saved():
    metrics = Metrics.of(RANKS, np.array([9, 9, 9, 50]), hits=(2,))
    assert Metrics.from_dict(json.loads(json.dumps(metrics.as_dict()))) == metrics
    saved = {"mrr": 0.1, "mr": 9.0, "hits_at_1": 0.0, "hits_at_3": 0.1, "hits_at_10": 0.2}
    earlier = Metrics.from_dict({**saved, "num_queries": 10})
    assert (earlier.mrr, earlier.num_queries, earlier.amr) == (0.1, 10, None)


def test_keys_of_json_stay_as_they_are():
    keys = ["mrr", "mr", "hits_at_1", "hits_at_3", "hits_at_10", "num_queries", "amr", "amri"]
    assert list(Metrics.of(RANKS).as_dict()) == keys


# -- a metric of one's own ---------------------------------------------------


def test_a_registered_metric_is_in_reports(inverse_log_rank):
    graph = graph_of([(0, 0, 1), (1, 0, 2)], [], [(0, 0, 2)])
    report = kg.evaluate(kg.DistMult(graph.shape, dim=2), graph)
    expected = np.mean(1 / (1 + np.log(report.ranks.mean)))
    assert report.metrics["inverse_log_rank"] == pytest.approx(expected)
    assert report.as_dict()["by_direction"]["tail"]["inverse_log_rank"] > 0
    assert Metrics.titles()[-2:] == ["ILR", "queries"]
    assert Metrics.from_dict(report.metrics.as_dict()) == report.metrics


def test_runs_are_compared_in_a_registered_metric(inverse_log_rank):
    random = np.random.default_rng(0)
    ranks = random.integers(1, 30, (1, 2, 40)).astype(float)
    comparison = compare_ranks(ranks, ranks + 1, samples=100)
    assert comparison.metrics["inverse_log_rank"].difference > 0
    assert "ILR" in comparison.differences
    assert comparison.as_dict()["inverse_log_rank"]["within_noise"] is False


def test_a_metric_of_all_ranks(monkeypatch):
    median = Metric(
        name="median_rank",
        label="Median rank",
        title="median",
        of_all=lambda ranks, num_candidates: float(np.median(ranks)),
        higher_is_better=False,
        decimals=1,
    )
    monkeypatch.setitem(METRICS._registered, median.name, median)
    metrics = Metrics.of(RANKS)
    assert metrics["median_rank"] == 3.0
    assert metrics.row()[-2:] == ["3.0", "4"]
    assert "median_rank" not in METRICS.compared()


def test_the_command_and_the_page_show_a_registered_metric(
    inverse_log_rank, run_cli, tmp_path, small_graph
):
    kg.train("DistMult", small_graph, epochs=1, out=tmp_path / "run")
    result = run_cli("evaluate", tmp_path / "run", "--json")
    assert "inverse_log_rank" in result.json["metrics"]
    assert re.search(r"\bILR\b", run_cli("evaluate", tmp_path / "run").out)
    page = run_cli("serve", tmp_path / "run", "--get", "/run")
    assert "Inverse log rank" in page.out

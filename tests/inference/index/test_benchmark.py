"""The benchmark of index search: its synthetic table and its page."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import search


def test_a_made_table_has_types_and_skewed_lengths():
    table, queries = search.make_table(3000, 40, num_queries=50)
    again, _ = search.make_table(3000, 40, num_queries=50)
    assert (table.shape, queries.shape, table.dtype) == ((3000, 40), (50, 40), np.float32)
    np.testing.assert_array_equal(table, again)
    lengths = np.linalg.norm(table, axis=1)
    assert (
        np.quantile(lengths, 0.99) / np.median(lengths)
        > 1.8
        > np.median(lengths) / np.quantile(lengths, 0.01) * 0.9
    )
    alike = (table / lengths[:, None]) @ (table / lengths[:, None])[:100].T
    assert np.sort(alike, axis=0)[-10:-1].mean() > np.abs(alike).mean() + 0.3


def point(**stats):
    return {
        **{"effort": 4, "tuned": True, "recall": {"1": 1.0, "10": 0.96, "100": 0.97}},
        **{"queries_per_second": 500.0, "exact_queries_per_second": 20.0},
        **stats,
    }


@pytest.mark.parametrize(
    ("stats", "reached"),
    [({}, True), ({"queries_per_second": 300.0}, False), ({"recall": {"10": 0.94}}, False)],
)
def test_a_verdict_is_of_the_point_that_was_tuned(stats, reached):
    found = search.verdict({"points": [point(tuned=False, recall={"10": 0.1}), point(**stats)]})
    assert found["reached"] is reached


def test_the_section_of_a_page():
    measured = {"points": [point()], "build_seconds": 12.0}
    measured["verdict"] = search.verdict(measured)
    page = search.lines(
        {"one": {"measured": measured}, "two": {"measured": {"failed": "no faiss"}}}
    )
    assert "| one | 0.960 | 0.970 | 500 | 20 | 25.0 × | 12.0 |" in page
    assert "| two | no faiss | – | – | – | – | – |" in page


def test_jobs_are_listed():
    assert search.jobs(1_000_000, 200)[0].name == "1,000,000 × 200, inner product, ivf"

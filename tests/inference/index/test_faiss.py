"""FAISS indexes compared with the exact one."""

import sys
from importlib.util import find_spec
from typing import get_args

import pytest
import torch

from dualkg.errors import InvalidValue, MissingExtra
from dualkg.inference.index import ExactIndex, Metric, NotFinite
from dualkg.inference.index_build import (
    FAISS_KINDS,
    FaissIndex,
    RecallNotReached,
    least_effort,
    num_lists,
    recalls,
    threads,
    tuned,
)

needs_faiss = pytest.mark.skipif(find_spec("faiss") is None, reason="faiss is not installed")


@needs_faiss
@pytest.mark.parametrize("metric", get_args(Metric))
@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_maximum_effort_is_exact(clusters, kind, metric):
    table, queries = clusters
    index = FaissIndex.build(table, metric, kind=kind)
    index.effort = index.max_effort
    best = ExactIndex.build(table, metric).search(queries, 10)
    found = index.search(queries, 10)
    if kind == "ivf":
        assert torch.equal(found.ids, best.ids)
    assert recalls(index, queries, best.ids, [10])[10] > 0.95
    torch.testing.assert_close(found.scores, best.scores, rtol=0.05, atol=0.05)


@needs_faiss
def test_inner_products_by_distance(clusters):
    table, queries = clusters
    index = FaissIndex.build(table, kind="ivf", by_distance=True)
    index.effort = index.max_effort
    best = ExactIndex.build(table).search(queries, 10)
    found = index.search(queries, 10)
    assert torch.equal(found.ids, best.ids)
    torch.testing.assert_close(found.scores, best.scores, rtol=1e-3, atol=1e-3)


@needs_faiss
@pytest.mark.parametrize("kind", FAISS_KINDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_round_trip(clusters, tmp_path, kind, reduced):
    table, queries = clusters
    index = FaissIndex.build(table, kind=kind, by_distance=reduced)
    index.effort = 3
    index.save(tmp_path)
    again = FaissIndex.load(tmp_path, "inner product", index.shape, **index.config)
    for one, other in zip(index.search(queries, 7), again.search(queries, 7), strict=True):
        assert torch.equal(one, other)


@needs_faiss
def test_effort_grows_with_k(clusters):
    """Whatever is asked for beside the usual ten, such as known answers, does not crowd them
    out.
    """
    table, queries = clusters
    index = FaissIndex.build(table, "euclidean", kind="ivf")
    best = ExactIndex.build(table, "euclidean").search(queries, 500).ids
    effort = least_effort(index, queries, best, recall=0.9)
    assert effort is not None
    index.effort = effort
    assert min(recalls(index, queries, best, [10, 50, 200, 500]).values()) >= 0.9


@needs_faiss
def test_rows_that_are_not_found_are_minus_one(clusters):
    table, queries = clusters
    index = FaissIndex.build(table, kind="ivf")
    index.effort = 1
    found = index.search(queries, 5000)
    assert found.ids.shape == (40, 1000)
    missing = found.ids < 0
    assert missing.any()
    assert (found.scores[missing] == -torch.inf).all()
    assert torch.isfinite(found.scores[~missing]).all()


@needs_faiss
def test_a_table_of_few_rows(clusters):
    table, queries = clusters
    for kind in FAISS_KINDS:
        found = FaissIndex.build(table[:3], kind=kind).search(queries, 10)
        assert found.ids.sort(1).values.tolist() == [[0, 1, 2]] * 40


@needs_faiss
def test_least_effort(clusters):
    table, queries = clusters
    best = ExactIndex.build(table, "euclidean").search(queries, 100).ids
    index = tuned(table, "euclidean", kind="ivf", queries=queries, best=best, recall=0.9)
    assert recalls(index, queries, best)[10] >= 0.92
    index.effort -= 1
    assert index.effort == 0 or min(recalls(index, queries, best, [10, 100]).values()) < 0.92


@needs_faiss
def test_unreachable_recall_is_refused(clusters):
    table, queries = clusters
    no_rows = torch.full((40, 100), -5)
    with pytest.raises(RecallNotReached) as error:
        tuned(table, "euclidean", kind="hnsw", queries=queries, best=no_rows, recall=0.9)
    assert (error.value.kind, error.value.wanted, error.value.reached) == ("hnsw", 0.9, 0.0)
    assert "The index hnsw reaches a recall of 0.000" in str(error.value)
    with pytest.raises(InvalidValue) as error:
        tuned(table, "euclidean", kind="hnsw", queries=queries, best=no_rows, recall=95)
    assert (error.value.setting, error.value.found) == ("recall", 95)


@needs_faiss
def test_threads_are_restored():
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@needs_faiss
def test_a_table_or_a_file_that_cannot_be_used_is_refused(clusters, tmp_path):
    table, _ = clusters
    with pytest.raises(NotFinite):
        FaissIndex.build(torch.full((2, 2), torch.nan))
    FaissIndex.build(table, kind="ivf").save(tmp_path)
    with pytest.raises(ValueError, match="its 1,000 rows of 12 numbers are not of 5 × 12"):
        FaissIndex.load(tmp_path, "euclidean", (5, 12), kind="ivf")


def test_a_missing_faiss_is_refused_with_the_install_line(clusters, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra) as error:
        FaissIndex.build(clusters[0])
    assert (error.value.package, error.value.extra) == ("faiss", "index")
    with threads(1):  # speeds of the exact index are measured without it
        assert torch.get_num_threads() == 1


def test_number_of_lists():
    assert [num_lists(rows) for rows in (1, 100, 10_000, 1_000_000)] == [1, 12, 400, 4000]

"""Metrics and bytes of storage formats agree with an index in the same format."""

import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue, Unsupported
from dualkg.inference.index import ExactIndex, measure_storage_formats, quantized, query_vectors
from tests.conftest import graph_of
from tests.raising import refused


@pytest.fixture
def model(small_graph) -> kg.ComplEx:
    return kg.ComplEx(small_graph.shape, dim=10, init_scale=1.0)


def test_bytes_and_metrics_of_storage_formats(model, small_graph):
    points = measure_storage_formats(model, small_graph, shares=[0.5, 0.9])
    assert [point.name for point in points] == [
        "float32",
        "bf16",
        "int8",
        "sparse 50%",
        "sparse 90%",
    ]
    # 30 × 20 numbers; a scale a row; values of 4 bytes, columns of 1, and 31 starts of 2 or of 1.
    assert [point.bytes for point in points] == [
        2400,
        1200,
        600 + 120,
        300 * 5 + 31 * 2,
        60 * 5 + 31,
    ]
    whole = kg.evaluate(model, small_graph).mrr
    assert points[0].metrics.mrr == whole
    assert points[1].metrics.mrr == pytest.approx(whole, abs=0.05)
    assert points[2].metrics.mrr == pytest.approx(whole, abs=0.05)
    assert points[0].as_dict()["metrics"]["mrr"] == whole


@pytest.mark.parametrize("storage", ["bf16", "int8", "sparse"])
@torch.no_grad()
def test_the_quantized_model_scores_as_the_index(model, storage):
    kept, num_bytes = quantized(model, storage)
    index = ExactIndex.build(model.tail_table, storage=storage)
    assert index.num_bytes == num_bytes
    heads = torch.arange(30)
    relations = torch.arange(30) % 4
    found = index.search(query_vectors(kept, heads, relations, "tail"), 30)
    torch.testing.assert_close(
        found.scores, kept.score_tails(heads, relations).gather(1, found.ids)
    )


def test_refusals(model):
    empty = graph_of([(0, 0, 1)], num_entities=30, num_relations=4)
    with refused(Unsupported, what="made", reason="has no test triples to rank"):
        measure_storage_formats(model, empty)
    with refused(InvalidValue, setting="share", found=70, advice="70 % is written 0.7."):
        measure_storage_formats(
            model,
            graph_of([(0, 0, 1)], [], [(0, 0, 2)], num_entities=30, num_relations=4),
            shares=[70],
        )

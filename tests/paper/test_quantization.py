"""Entity embeddings in storage formats of fewer bytes."""

import pytest
import torch

import dualkg as kg
from paper.quantization import int8, measure


def test_each_format_has_its_bytes_and_metrics(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=6, init_scale=1.0)
    points = list(measure(model, small_graph))
    assert [point["storage"] for point in points] == ["float32", "bf16", "int8"] + 5 * ["sparse"]
    numbers = 30 * 12
    assert [point["bytes"] for point in points[:3]] == [4 * numbers, 2 * numbers, numbers + 4 * 30]
    sizes = [point["bytes"] for point in points[3:]]
    assert sizes == sorted(sizes, reverse=True)
    assert points[0]["metrics"]["mrr"] == pytest.approx(kg.evaluate(model, small_graph).mrr)


def test_codes_are_exact_to_half_a_step():
    table = torch.randn(5, 7)
    table[2] = 0
    decoded, _ = int8(table)
    steps = table.abs().amax(1, keepdim=True) / 127
    assert ((decoded - table).abs() <= 0.5001 * steps).all()

"""Memory: the optimizer has to fit beside the model, and what is free."""

import math

import pytest
import torch

import dualkg as kg
from dualkg.training import memory
from dualkg.training.memory import optimizer_bytes
from tests.conftest import graph_of

CPU = torch.device("cpu")
SHAPE = kg.GraphShape(10, 2)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, 84),  # Adagrad's sums of ten entities and four relation ids of 6 numbers
        ({"optimizer.name": "Adam"}, 2 * 84),
        ({"optimizer.name": "SGD"}, 0),
        ({"optimizer.sums": "rows"}, 10 + 4 * 6),
        ({"optimizer.average_from": 0.5}, 2 * 84),
        ({"validation.keep": "best", "validation.every": 1}, 2 * 84),
    ],
)
def test_the_bytes_of_an_optimizer_by_hand(changes, numbers):
    recipe = kg.Recipe().with_changes(changes)
    assert optimizer_bytes(recipe, kg.ComplEx(SHAPE, dim=3)) == {CPU: 4 * numbers}


def test_a_model_whose_optimizer_does_not_fit_is_refused(monkeypatch):
    graph = graph_of([(0, 0, 1), (1, 0, 2)])
    sizes = {"bytes": 4.0 * (3 + 2) * 8}
    monkeypatch.setattr(memory, "available_memory", lambda device, **_: sizes["bytes"])
    kg.train(kg.ComplEx(graph.shape, dim=4), graph, epochs=1)
    sizes["bytes"] -= 1
    with pytest.raises(kg.RequestError, match="The state of Adagrad would need"):
        kg.train(kg.ComplEx(graph.shape, dim=4), graph, epochs=1)


def test_free_memory_is_read_from_linux_and_containers(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert memory._free_on_machine(tmp_path / "meminfo") == 2**21
    assert memory._free_on_machine(tmp_path / "missing") == math.inf
    assert memory._free_in_group(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert memory._free_in_group(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 40\ninactive_file 50\nactive_file 10\n")
    assert memory._free_in_group(tmp_path) == 960
    assert memory.available_memory(CPU) > 0


def test_processes_share_the_memory_of_a_machine():
    whole = memory.available_memory(CPU)
    assert 0 < memory.available_memory(CPU, num_sharing=4) < whole / 2

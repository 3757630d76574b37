"""When a step is captured, and when it is replayed: with a stand-in for the GPU that keeps a list of what was done."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dualkg.training import cuda_graphs
from dualkg.training.cuda_graphs import ROOM, WARM_UP, CudaGraphStep


class FakeStep:
    """Notes the sizes of the batches that it is given."""

    def __init__(self, done):
        self.done = done
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.rate = torch.zeros(())
        self.room = None

    def __call__(self, batch, learning_rate):
        self.done.append(("eager", len(batch)))
        return torch.tensor(0.0)

    def step(self, batch):
        self.done.append(("capture", len(batch)))
        return torch.tensor(0.0)


@pytest.fixture
def done(monkeypatch):
    """What was done, in order; replays are noted by the graph."""
    found: list[tuple[str, int]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: found.append(("replay", 0)))
    for name, value in {
        "current_stream": lambda: stream,
        "stream": lambda other: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": lambda: graph,
        "graph": lambda graph, stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "stream", lambda device, purpose: stream)
    return found


def take(done, sizes):
    step = CudaGraphStep(FakeStep(done))
    for size in sizes:
        step(torch.zeros(size, 3, dtype=torch.int64), 0.1)
    return step


def test_the_full_size_is_captured_after_the_warm_up_and_then_replayed(done):
    take(done, [5] * (WARM_UP + 3))
    assert done == [("eager", 5)] * WARM_UP + [("capture", 5)] + [("replay", 0)] * 3


def test_a_short_batch_is_taken_eagerly_and_never_captured(done):
    """Also where it comes just when a graph is due."""
    take(done, [5] * WARM_UP + [2, 5, 2, 5])
    assert done[WARM_UP:] == [("eager", 2), ("capture", 5), ("replay", 0), ("eager", 2), ("replay", 0)]


def test_a_larger_batch_outgrows_a_graph(done):
    """The arrays that it works on are replaced, so it must not be replayed, and the new ones are made eagerly."""
    take(done, [5] * (WARM_UP + 1) + [7, 5] + [7] * WARM_UP)
    warm_up = [("eager", 7), ("eager", 5)] + [("eager", 7)] * (WARM_UP - 2)
    assert done[WARM_UP:] == [("capture", 5), ("replay", 0), *warm_up, ("capture", 7), ("replay", 0), ("replay", 0)]


def test_room_for_more_questions_outgrows_a_graph_and_less_does_not(done):
    step = take(done, [5] * (WARM_UP + 1))
    step.make_room(3)
    assert step.graph is None
    assert step.step.room == ROOM
    for _ in range(WARM_UP + 1):
        step(torch.zeros(5, 3, dtype=torch.int64), 0.1)
    captured = step.graph
    for num_questions in (2, ROOM, 1):
        step.make_room(num_questions)
    assert step.graph is captured is not None
    step.make_room(ROOM + 1)
    assert step.graph is None
    assert step.step.room == 2 * ROOM

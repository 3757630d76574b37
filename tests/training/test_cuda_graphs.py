"""When a step is captured and when it is replayed, with a fake GPU that records the calls."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dualkg.training import steps
from dualkg.training.steps import CAPACITY_STEP, WARM_UP, CudaGraphStep


class FakeStep:
    """Records the sizes of its batches."""

    def __init__(self, done):
        self.done = done
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.capacity = None

    def __call__(self, batch, learning_rate):
        self.done.append(("eager", len(batch)))
        return torch.tensor(0.0)

    def set_learning_rate(self, learning_rate):
        pass

    def step(self, batch):
        self.done.append(("capture", len(batch)))
        return torch.tensor(0.0)


@pytest.fixture
def done(monkeypatch):
    """The recorded calls, in order."""
    found: list[tuple[str, int]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: found.append(("replay", 0)))
    for name, value in {
        "current_stream": lambda: stream,
        "stream": lambda other: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": lambda: graph,
        "graph": lambda graph, stream, capture_error_mode: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(steps, "stream", lambda device, purpose: stream)
    return found


def take(done, sizes):
    step = CudaGraphStep(FakeStep(done))
    for size in sizes:
        step(torch.zeros(size, 3, dtype=torch.int64), 0.1)
    return step


def test_the_full_batch_size_is_captured_after_warm_up_and_then_replayed(done):
    take(done, [5] * (WARM_UP + 3))
    assert done == [("eager", 5)] * WARM_UP + [("capture", 5)] + [("replay", 0)] * 3


def test_a_short_batch_runs_eagerly_and_is_never_captured(done):
    """Also when a capture is due."""
    take(done, [5] * WARM_UP + [2, 5, 2, 5])
    assert done[WARM_UP:] == [
        ("eager", 2),
        ("capture", 5),
        ("replay", 0),
        ("eager", 2),
        ("replay", 0),
    ]


def test_a_larger_batch_discards_the_graph(done):
    """Its buffers are replaced, so it must not be replayed; the new ones are allocated eagerly."""
    take(done, [5] * (WARM_UP + 1) + [7, 5] + [7] * WARM_UP)
    warm_up = [("eager", 7), ("eager", 5)] + [("eager", 7)] * (WARM_UP - 2)
    assert done[WARM_UP:] == [
        ("capture", 5),
        ("replay", 0),
        *warm_up,
        ("capture", 7),
        ("replay", 0),
        ("replay", 0),
    ]


def test_more_queries_than_the_capacity_discard_the_graph_and_fewer_do_not(done):
    step = take(done, [5] * (WARM_UP + 1))
    step.reserve(3)
    assert step.graph is None
    assert step.step.capacity == CAPACITY_STEP
    for _ in range(WARM_UP + 1):
        step(torch.zeros(5, 3, dtype=torch.int64), 0.1)
    captured = step.graph
    for num_queries in (2, CAPACITY_STEP, 1):
        step.reserve(num_queries)
    assert step.graph is captured is not None
    step.reserve(CAPACITY_STEP + 1)
    assert step.graph is None
    assert step.step.capacity == 2 * CAPACITY_STEP

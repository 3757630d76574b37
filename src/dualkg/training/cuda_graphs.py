"""A step as one CUDA graph: the host says "again", and never waits inside an epoch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dualkg.models.base import Model
from dualkg.training.gpu_step import stream

ROOM = 64  # questions by which the room for them grows
WARM_UP = 3  # steps taken one operation at a time before one is captured: libraries set themselves up in them


class Capturable(Protocol):
    """A step that never waits for the GPU, at a learning rate that is read there."""

    model: Model
    rate: Tensor
    room: int | None

    def __call__(self, batch: Tensor, learning_rate: float, /) -> Tensor: ...

    def step(self, batch: Tensor, /) -> Tensor: ...


class CudaGraphStep:
    """Replays a captured step for batches of the largest size; others, such as a last short one, are taken eagerly."""

    def __init__(self, step: Capturable) -> None:
        self.step = step
        self.stream = stream(step.model.device, "captured")
        self.num_taken = 0
        self.largest = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Tensor
        self.objective: Tensor

    def make_room(self, num_questions: int) -> None:
        """For batches of that many questions, and a few more; what was captured with less room is of no use then."""
        if self.step.room is None or num_questions > self.step.room:
            self.step.room = -(-num_questions // ROOM) * ROOM
            self.num_taken, self.graph = 0, None

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it; the next step overwrites that."""
        if len(batch) > self.largest:  # what a graph works on is about to be outgrown, and made again
            self.largest, self.num_taken, self.graph = len(batch), 0, None
        if self.graph is None and self.num_taken >= WARM_UP and len(batch) == self.largest:
            self._capture(batch)
        if self.graph is None or len(batch) != len(self.batch):
            self.num_taken += 1
            return self._eagerly(batch, learning_rate)
        self.batch.copy_(batch)
        self.step.rate.fill_(learning_rate)
        self.graph.replay()
        return self.objective

    def _eagerly(self, batch: Tensor, learning_rate: float) -> Tensor:
        """On a stream of its own, as capturing asks of the steps before it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            objective = self.step(batch, learning_rate)
        torch.cuda.current_stream().wait_stream(self.stream)
        return objective

    def _capture(self, batch: Tensor) -> None:
        self.batch = batch.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.objective = self.step.step(self.batch)
        self.graph = graph

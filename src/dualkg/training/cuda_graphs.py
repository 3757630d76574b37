"""A training step captured as one CUDA graph, so that the host launches one operation a step and never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualkg.training.fused import stream
from dualkg.training.reference_step import ReferenceStep

if TYPE_CHECKING:
    from dualkg.training.gpu_step import Bf16Step

CAPACITY_STEP = 64  # queries by which the capacity of a captured step grows
WARM_UP = 3  # eager steps before one is captured, in which libraries initialize


class CudaGraphStep:
    """Replays a captured step for batches of the largest size; others, such as a last short one, run eagerly.

    A step must not wait for the GPU, and reads its learning rate from a tensor there.
    """

    def __init__(self, step: Bf16Step | ReferenceStep, *, with_collectives: bool = False) -> None:
        self.step = step
        # NCCL's watchdog calls CUDA in a thread of its own, also while a step is captured.
        self.error_mode = "thread_local" if with_collectives else "global"
        self.stream = stream(step.model.device, "captured")
        self.num_taken = 0
        self.largest = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Tensor
        self.objective: Tensor

    def reserve(self, num_queries: int) -> None:
        """Provide for batches of that many queries, and a few more; a graph with less capacity is discarded."""
        if self.step.capacity is None or num_queries > self.step.capacity:
            self.step.capacity = -(-num_queries // CAPACITY_STEP) * CAPACITY_STEP
            self.num_taken, self.graph = 0, None

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it; the next step overwrites that."""
        if len(batch) > self.largest:  # the buffers that a graph works on are about to be replaced by larger ones
            self.largest, self.num_taken, self.graph = len(batch), 0, None
        if self.graph is None and self.num_taken >= WARM_UP and len(batch) == self.largest:
            self._capture(batch)
        if self.graph is None or len(batch) != len(self.batch):
            self.num_taken += 1
            return self._eagerly(batch, learning_rate)
        self.batch.copy_(batch)
        self.step.set_learning_rate(learning_rate)
        self.graph.replay()
        return self.objective

    def _eagerly(self, batch: Tensor, learning_rate: float) -> Tensor:
        """On a separate stream, as capturing requires of the steps before it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            objective = self.step(batch, learning_rate)
        torch.cuda.current_stream().wait_stream(self.stream)
        return objective

    def _capture(self, batch: Tensor) -> None:
        self.batch = batch.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=self.error_mode):
            self.objective = self.step.step(self.batch)
        self.graph = graph

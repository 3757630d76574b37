"""Training steps: the reference step by autograd, its CUDA graph, and the step of an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.losses.base import BoundLoss
from dualkg.losses.softmax import BoundSampledSoftmax
from dualkg.models.base import Factors, Model
from dualkg.regularizers import Regularizer
from dualkg.training.engines import Engine
from dualkg.training.fused import OneVsAllFusedStep, SampledFusedStep, stream
from dualkg.training.updates import AnyOptimizer

Step = Callable[[Tensor, float], Tensor]
CAPACITY_STEP = 64  # queries by which the capacity of a captured step grows
WARM_UP = 3  # eager steps before one is captured, in which libraries initialize


def check_loss(loss: object) -> None:
    """Refuse what a loss of a user's own returned for a batch, unless it can be minimized.

    Where gradients are disabled, none is expected.
    """
    found = ""
    if loss is None:
        found = "None"
        advice = "Its function may lack a return statement."
    elif not isinstance(loss, Tensor):
        found = _described(loss)
        advice = "Compute it with operations of PyTorch."
    elif loss.dim() > 0:
        found = f"a tensor of shape {tuple(loss.shape)}"
        advice = "Return its mean: losses.mean()."
    elif loss.is_complex():
        found = f"a tensor of type {str(loss.dtype).removeprefix('torch.')}"
        advice = "Return a real number."
    elif torch.is_grad_enabled() and not loss.requires_grad:
        # Beside a regularizer, PyTorch would train on that alone.
        found = "a tensor without a gradient"
        advice = (
            "Compute it from the scores of the model, without detach, item, NumPy or "
            "torch.no_grad()."
        )
    if found:
        raise RequestError(
            "The loss of a batch should be a scalar tensor with a gradient, the mean over the "
            f"batch; {found} was returned. {advice}"
        )


def _described(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


@dataclass
class ReferenceStep:
    """A gradient step on loss plus regularizer for one batch.

    On a GPU it may be captured as a CUDA graph; the optimizer then reads the learning rate from a
    tensor there. With `sparse`, gradients of the entity tables have only the rows of the batch, and
    the optimizer updates only these.
    """

    model: Model
    loss: BoundLoss
    regularizer: Regularizer
    optimizer: AnyOptimizer
    sparse: bool = False

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise RequestError(
                "bind of a loss should return a function of the model and a batch; "
                f"{_described(self.loss)} was returned."
            )

    def objective(self, batch: Tensor) -> Tensor:
        """Loss plus regularizer of a batch `(batch, 3)`, a scalar."""
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        check_loss(loss)
        if not self.regularizer.weight:
            return loss
        return loss + self._penalty(factors)

    def _penalty(self, factors: Factors) -> Tensor:
        if self.regularizer.reads_whole_tables:
            return self.model.sum_over_rows(self.regularizer, factors)
        return self.regularizer(factors)

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        self.set_learning_rate(learning_rate)
        return self.step(batch)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.optimizer.zero_grad(set_to_none=True)
        objective = self.gradients(batch)
        self.optimizer.step()
        return objective

    def gradients(self, batch: Tensor) -> Tensor:
        """Add the gradients of all parameters, and return the objective."""
        with self.model.tables.sparse_gradients(self.sparse):
            objective = self.objective(batch)
        objective.backward()  # type: ignore[no-untyped-call]
        self.model.sum_gradients()
        return objective.detach()


class CudaGraphStep:
    """Replays a captured step for batches of the largest size.

    Other batches, such as a last short one, run eagerly. A step must not wait for the GPU, and
    reads its learning rate from a tensor there.
    """

    def __init__(self, step: Any) -> None:
        self.step = step
        self.stream = stream(step.model.device, "captured")
        self.num_taken = 0
        self.largest = 0
        self.graph: torch.cuda.CUDAGraph | None = None  # with its `batch` and `objective`

    def reserve(self, num_queries: int) -> None:
        """Provide for batches of that many queries, and a few more.

        A graph with less capacity is discarded.
        """
        if self.step.capacity is None or num_queries > self.step.capacity:
            self.step.capacity = -(-num_queries // CAPACITY_STEP) * CAPACITY_STEP
            self._discard()

    def _discard(self) -> None:
        self.num_taken = 0
        self.graph = None

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it; the next step overwrites that."""
        if len(batch) > self.largest:
            # The buffers that a graph works on are about to be replaced by larger ones.
            self.largest = len(batch)
            self._discard()
        if self.graph is None and self.num_taken >= WARM_UP and len(batch) == self.largest:
            self._capture(batch)
        if self.graph is None or len(batch) != len(self.batch):
            return self._run_eagerly(batch, learning_rate)
        self.batch.copy_(batch)
        self.step.set_learning_rate(learning_rate)
        self.graph.replay()
        return self.objective

    def _run_eagerly(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take a step on a separate stream, as capturing requires of the steps before it."""
        self.num_taken += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            objective: Tensor = self.step(batch, learning_rate)
        torch.cuda.current_stream().wait_stream(self.stream)
        return objective

    def _capture(self, batch: Tensor) -> None:
        self.batch = batch.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog calls CUDA in a thread of its own, also while a step is captured.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.objective: Tensor = self.step.step(self.batch)
        self.graph = graph


def build_step(
    engine: Engine, model: Model, loss: BoundLoss, regularizer: Regularizer, optimizer: AnyOptimizer
) -> Step:
    """The step of an engine.

    The fast ones take a bound `OneVsAll`, and kernels also a bound `SampledSoftmax`.
    """
    model.use_kernels(compiled=engine.passes_messages, bf16=engine.precision == "bf16")

    def build(model: Model, optimizer: AnyOptimizer) -> Step:
        return _build_step(engine, model, loss, regularizer, optimizer)

    return model.tables.step(build, model, optimizer, loss)


def _build_step(
    engine: Engine, model: Model, loss: BoundLoss, regularizer: Regularizer, optimizer: AnyOptimizer
) -> Step:
    if engine.step in ("reference", "captured"):
        step = ReferenceStep(model, loss, regularizer, optimizer, sparse=engine.sparse)
        return CudaGraphStep(step) if engine.step == "captured" else step
    # Each engine was chosen because model, loss and optimizer are of the types that its step takes.
    parts: Any = (loss, regularizer, optimizer)
    is_sampled = isinstance(loss, BoundSampledSoftmax)
    if engine.step == "fused":
        if is_sampled:
            return SampledFusedStep(model, *parts)
        return OneVsAllFusedStep(model, *parts, bf16=engine.precision == "bf16")

    from dualkg.training.gpu_step import OneVsAllBf16Step, SampledBf16Step  # It imports Triton.

    kind = SampledBf16Step if is_sampled else OneVsAllBf16Step
    whole: Any = model.whole
    gpu_step = kind(whole, *parts)
    return CudaGraphStep(gpu_step) if model.tables.capturable else gpu_step

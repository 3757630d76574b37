"""The reference step: autograd on loss plus regularizer, which faster steps are tested against."""

from __future__ import annotations

from torch import Tensor

from dualkg.losses.base import BoundLoss
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training.optimizers import AnyOptimizer


class ReferenceStep:
    """Descend on loss plus regularizer for one batch."""

    def __init__(self, model: Model, loss: BoundLoss, regularizer: Regularizer, optimizer: AnyOptimizer) -> None:
        self.model = model
        self.loss = loss
        self.regularizer = regularizer
        self.optimizer = optimizer

    def objective(self, batch: Tensor) -> Tensor:
        """Loss plus regularizer of a batch `(batch, 3)`, a scalar."""
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        if self.regularizer.weight:
            loss = loss + self.regularizer(factors)
        return loss

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return self.step(batch)

    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.optimizer.zero_grad(set_to_none=True)
        objective = self.objective(batch)
        objective.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return objective.detach()


class CapturedStep(ReferenceStep):
    """The reference step for a CUDA graph: autograd starts hundreds of small kernels, which takes most of the time.

    The optimizer reads the learning rate on the device.
    """

    def __init__(self, model: Model, loss: BoundLoss, regularizer: Regularizer, optimizer: AnyOptimizer) -> None:
        super().__init__(model, loss, regularizer, optimizer)
        self.rate: Tensor = optimizer.param_groups[0]["lr"]
        self.room: int | None = None

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        self.rate.fill_(learning_rate)
        return self.step(batch)

"""One step of training, in the plain way: autograd over loss and regularizer."""

from __future__ import annotations

from torch import Tensor

from dualkg.losses import AnyLoss
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training.optimizers import AnyOptimizer


class PlainStep:
    """Descend on loss plus regularizer for one batch. The reference that faster steps are held against."""

    def __init__(self, model: Model, loss: AnyLoss, regularizer: Regularizer, optimizer: AnyOptimizer) -> None:
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

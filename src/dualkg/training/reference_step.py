"""The reference step: autograd on loss plus regularizer, which faster steps are tested against."""

from dataclasses import dataclass

from torch import Tensor

from dualkg.losses.base import BoundLoss
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training.optimizers import AnyOptimizer


@dataclass
class ReferenceStep:
    """A gradient step on loss plus regularizer for one batch.

    On a GPU it may be captured as a CUDA graph; the optimizer then reads the learning rate from a tensor there. With
    `sparse`, gradients of the entity tables have only the rows of the batch, and the optimizer updates only these.
    """

    model: Model
    loss: BoundLoss
    regularizer: Regularizer
    optimizer: AnyOptimizer
    sparse: bool = False
    capacity: int | None = None  # for the queries of a batch, which this step does not group

    def objective(self, batch: Tensor) -> Tensor:
        """Loss plus regularizer of a batch `(batch, 3)`, a scalar."""
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        if self.regularizer.weight:
            loss = loss + self.regularizer(factors)
        return loss

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
        self.model.embedding.sparse_gradients = self.sparse
        try:
            objective = self.objective(batch)
        finally:
            self.model.embedding.sparse_gradients = False
        objective.backward()  # type: ignore[no-untyped-call]
        return objective.detach()

"""The plain step for a CUDA graph: autograd makes hundreds of small kernels, and to start them is most of the time."""

from __future__ import annotations

from torch import Tensor

from dualkg.losses import AnyLoss
from dualkg.models.base import Model
from dualkg.models.distance import ModE, RotatE, TransE
from dualkg.models.hake import HAKE
from dualkg.models.murp import MuRP
from dualkg.models.tucker import TuckER
from dualkg.regularizers import Regularizer, depends_on_batch_only
from dualkg.training.optimizers import AnyOptimizer
from dualkg.training.recipe import Recipe


class ReferenceStep:
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


# Of which no part asks the GPU how large another is; of TuckER, none with batch_norm.
MODELS = (TransE, RotatE, ModE, HAKE, MuRP, TuckER)


class CapturedStep(ReferenceStep):
    """Descend as `ReferenceStep` does, at a learning rate that the optimizer reads on the device."""

    def __init__(self, model: Model, loss: AnyLoss, regularizer: Regularizer, optimizer: AnyOptimizer) -> None:
        super().__init__(model, loss, regularizer, optimizer)
        self.rate: Tensor = optimizer.param_groups[0]["lr"]
        self.room: int | None = None

    @staticmethod
    def applies_to(recipe: Recipe, model: Model, regularizer: Regularizer) -> bool:
        """Whether every triple is asked for the same sides, of a model of ours, and Adam steps on it."""
        return (
            not recipe.loss.relation_weight
            and recipe.training.order == "triples"
            and recipe.optimizer.name == "Adam"
            and model.device.type == "cuda"
            and (model.reciprocal or (recipe.loss.samples and recipe.loss.sides == "both"))
            and type(model) in MODELS
            and depends_on_batch_only(regularizer)
            and (not isinstance(model, TuckER) or model.batch_norm)
        )

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        self.rate.fill_(learning_rate)
        return self.step(batch)

"""The plain step for a CUDA graph: autograd makes hundreds of small kernels, and to start them is most of the time."""

from __future__ import annotations

from torch import Tensor

from dualkg.losses import AnyLoss
from dualkg.models import HAKE, ModE, MuRP, RotatE, TransE, TuckER
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer, sees_batch_alone
from dualkg.training.optimizers import AnyOptimizer
from dualkg.training.recipe import Recipe
from dualkg.training.step import PlainStep

# Of which no part asks the GPU how large another is; of TuckER, none with batch_norm.
MODELS = (TransE, RotatE, ModE, HAKE, MuRP, TuckER)


class CapturedStep(PlainStep):
    """Descend as `PlainStep` does, at a learning rate that the optimizer reads on the device."""

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
            and sees_batch_alone(regularizer)
            and (not isinstance(model, TuckER) or model.batch_norm)
        )

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        self.rate.fill_(learning_rate)
        return self.step(batch)

"""The reference step: autograd on loss plus regularizer, which faster steps are tested against.

It also trains tables that are split by rows over processes, whose number changes the order of some sums alone."""

from dataclasses import dataclass, replace

from torch import Tensor

from dualkg.errors import RequestError
from dualkg.losses.base import BoundLoss
from dualkg.losses.negative_sampling import BoundSampledLoss
from dualkg.losses.softmax import BoundKvsAll, BoundOneVsAll, BoundSampledSoftmax
from dualkg.models.base import Model
from dualkg.models.sharded import Shard, ShardedModel
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
        return loss + self.regularizer(factors) if self.regularizer.weight else loss

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


# -- on tables that are split over processes --------------------------------------------------------------------------


def sharded_loss(loss: BoundLoss, shard: Shard) -> BoundLoss:
    """The same loss for a `ShardedModel`. Losses of sampled negatives need no change: each owner scores its own."""
    if type(loss) is BoundOneVsAll or type(loss) is BoundKvsAll:
        return replace(loss, shard=shard)
    if isinstance(loss, (BoundSampledLoss, BoundSampledSoftmax)):
        return loss
    raise RequestError(f"{type(loss).__name__} is a loss that cannot be trained on several processes.")


@dataclass
class ShardedReferenceStep(ReferenceStep):
    """`ReferenceStep` of a `ShardedModel`: every process has the same objective, and the gradient of its own rows."""

    def objective(self, batch: Tensor) -> Tensor:
        assert isinstance(self.model, ShardedModel)
        if not (self.regularizer.weight and self.regularizer.reads_whole_tables):
            return super().objective(batch)
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        with self.model.local(factors) as here:
            return loss + self.model.shard.sum_of_all(self.regularizer(here))

    def gradients(self, batch: Tensor) -> Tensor:
        assert isinstance(self.model, ShardedModel)
        objective = super().gradients(batch)
        self.model.add_local_gradients(bool(self.regularizer.weight) and self.regularizer.reads_whole_tables)
        return objective

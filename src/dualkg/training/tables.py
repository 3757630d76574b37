"""The entity tables of a model as a fused step sees them: products with them, their gradients, and their update."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.models.base import BilinearModel
from dualkg.training.optimizers import AnyOptimizer
from dualkg.training.workspace import Workspace

Side = Literal["head", "tail"]
CACHED_SCORES, LEAST_ROWS = 8_000_000, 500


class LossAndGradient(NamedTuple):
    """A loss, and its gradient with respect to the images that were scored."""

    loss: Tensor
    images: Tensor


class Tables(ABC):
    """The entity tables of a model, a gradient for each, and what is done with them in a step."""

    def __init__(self, model: BilinearModel, optimizer: AnyOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scores = Workspace()
        self.gradients = {side: torch.empty_like(table.detach()) for side, table in _own_tables(model).items()}

    def cross_entropy(
        self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool
    ) -> LossAndGradient:
        """Σ share · −log softmax(images @ tableᵀ)[target], the gradient of the table kept here, or added to it.

        In one array of batch × entities, and of a large batch in parts of it. Autograd would keep the scores, their
        log-softmax and both gradients; here the scores are turned into the gradient where they stand.
        """
        rows = rows_at_once(self.model)
        parts = [array.split(rows) for array in (images, targets, share)]  # type: ignore[no-untyped-call]
        found = [
            self._part(side, *part, accumulate=accumulate or number > 0)
            for number, part in enumerate(zip(*parts, strict=True))
        ]
        if len(found) == 1:
            return found[0]
        return LossAndGradient(torch.stack([one.loss for one in found]).sum(), torch.cat([one.images for one in found]))

    @abstractmethod
    def _part(self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool) -> LossAndGradient:
        """The same for as many rows as are scored at once."""

    @abstractmethod
    def update(self, learning_rate: float) -> None:
        """Step every table of the model by its gradient."""

    def gradient(self, side: Side) -> Tensor:
        """The gradient of a side's table."""
        return self.gradients.get(side, self.gradients["head"])

    @property
    def shared(self) -> bool:
        """Whether heads and tails are rows of one table."""
        return "tail" not in self.gradients

    def add_from_autograd(self) -> None:
        """A regularizer of one's own may have looked at a whole table."""
        for side, table in _own_tables(self.model).items():
            if table.grad is not None:
                self.gradients[side] += table.grad


class ExactTables(Tables):
    """Tables and products in the precision of the model."""

    def _part(self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool) -> LossAndGradient:
        table, gradient = _table(self.model, side), self.gradient(side)
        scores = torch.mm(images, table.T, out=self.scores.of(len(images), len(table), images))
        losses = _softmax_gradient_(scores, targets)
        torch.addmm(gradient, scores.T, share * images, beta=int(accumulate), out=gradient)
        return LossAndGradient((share.squeeze(-1) * losses).sum(), share * (scores @ table))

    def update(self, learning_rate: float) -> None:
        self.model.entities.grad = self.gradients["head"]
        if not self.shared:
            self.model.tails.grad = self.gradients["tail"]
        self.optimizer.step()


class HalfTables(Tables):
    """Products in bfloat16 on a CPU that has them, with float32 tables behind.

    Each table has a bfloat16 copy that Adagrad writes in the same pass.
    """

    def __init__(self, model: BilinearModel, optimizer: AnyOptimizer) -> None:
        super().__init__(model, optimizer)
        self.copies = {side: table.detach().bfloat16() for side, table in _own_tables(model).items()}
        self.products = Workspace()

    def _part(self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool) -> LossAndGradient:
        copy, gradient = self.copies.get(side, self.copies["head"]), self.gradient(side)
        scores = torch.mm(images.bfloat16(), copy.T, out=self.scores.of(len(images), len(copy), copy))
        losses = _softmax_gradient_(scores, targets)
        product = torch.mm(scores.T, (share * images).bfloat16(), out=self.products.of(len(copy), copy.shape[1], copy))
        gradient.add_(product) if accumulate else gradient.copy_(product)
        upstream = torch.mm(copy.T, scores.T).T  # a third faster than scores @ copy, where a processor has AMX
        return LossAndGradient((share.squeeze(-1) * losses).sum(), share * upstream.float())

    def update(self, learning_rate: float) -> None:
        from dualkg.kernels.cpu.adagrad import adagrad_

        eps = float(self.optimizer.param_groups[0]["eps"])
        for name, table in self.model.named_parameters():
            side: Side | None = {"entities": "head", "tails": "tail"}.get(name)  # type: ignore[assignment]
            gradient = self.gradients[side] if side else table.grad
            if gradient is not None:
                copy = self.copies[side] if side else None
                adagrad_(table.detach(), self.optimizer.state[table]["sum"], gradient, copy, learning_rate, eps=eps)


def rows_at_once(model: BilinearModel) -> int:
    """How many rows of scores exist at once: on a CPU as many as a cache may hold, but enough for full products."""
    if model.device.type != "cpu":
        return sys.maxsize
    return max(LEAST_ROWS, CACHED_SCORES // model.shape.num_entities)


def _softmax_gradient_(scores: Tensor, targets: Tensor) -> Tensor:
    """Overwrite scores by softmax − one-hot and return the losses, `(batch,)`."""
    if scores.device.type == "cpu":
        from dualkg.kernels.cpu.softmax import softmax_gradient_

        return softmax_gradient_(scores, targets, scores.shape[1])
    places = torch.arange(len(targets), device=targets.device), targets
    losses = scores.logsumexp(dim=-1) - scores[places]
    torch.softmax(scores, dim=-1, out=scores)
    scores[places] -= 1
    return losses


def _own_tables(model: BilinearModel) -> dict[Side, nn.Parameter]:
    """The entity tables by side; one alone, the head's, where they are shared."""
    return {"head": model.entities, "tail": model.tails} if model.two_entity_tables else {"head": model.entities}


def _table(model: BilinearModel, side: Side) -> Tensor:
    return (model.head_table if side == "head" else model.tail_table).detach()

"""The entity tables of a model as a fused step sees them: products with them, their gradients, and their update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.models.base import BilinearModel

Side = Literal["head", "tail"]


class LossAndGradient(NamedTuple):
    """A loss, and its gradient with respect to the images that were scored."""

    loss: Tensor
    images: Tensor


class Workspace:
    """An array that is kept from step to step: fresh pages cost as much as the work done on them."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, rows: int, columns: int, like: Tensor) -> Tensor:
        if self._buffer is None or self._buffer.numel() < rows * columns:
            self._buffer = torch.empty(rows * columns, dtype=like.dtype, device=like.device)
        return self._buffer[: rows * columns].view(rows, columns)


class Tables(ABC):
    """The entity tables of a model, a gradient for each, and what is done with them in a step."""

    def __init__(self, model: BilinearModel, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scores = Workspace()
        self.gradients: dict[Side, Tensor] = {}

    @abstractmethod
    def cross_entropy(
        self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool
    ) -> LossAndGradient:
        """Σ share · −log softmax(images @ tableᵀ)[target], the gradient of the table kept here, or added to it."""

    @abstractmethod
    def update(self, rate: Tensor) -> None:
        """Step every table of the model by its gradient."""

    def gradient(self, side: Side) -> Tensor:
        """The gradient of a side's table; its first rows are the table's."""
        return self.gradients.get(side, self.gradients["head"])

    @property
    def shared(self) -> bool:
        """Whether heads and tails are rows of one table."""
        return "tail" not in self.gradients

    def add_from_autograd(self) -> None:
        """A regularizer of one's own may have looked at a whole table."""
        for side, table in _own_tables(self.model).items():
            if table.grad is not None:
                self.gradients[side][: len(table)] += table.grad


class ExactTables(Tables):
    """Tables and products in the precision of the model, updated by PyTorch's optimizer."""

    def __init__(self, model: BilinearModel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.gradients = {side: torch.empty_like(table.detach()) for side, table in _own_tables(model).items()}

    def cross_entropy(
        self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool
    ) -> LossAndGradient:
        """In one array of batch × entities.

        Autograd would keep the scores, their log-softmax and both gradients: four arrays of batch × entities. Here
        the scores are turned into probabilities and then into the gradient where they stand.
        """
        table, gradient = _table(self.model, side), self.gradient(side)
        scores = torch.mm(images, table.T, out=self.scores.of(len(images), len(table), images))
        torch.softmax(scores, dim=-1, out=scores)
        places = torch.arange(len(targets), device=targets.device) * len(table) + targets
        flat = scores.view(-1)
        of_target = flat[places]
        loss = -(share.squeeze(-1) * of_target.clamp_min(torch.finfo(images.dtype).tiny).log()).sum()
        flat[places] = of_target - 1  # the scores are now the gradient, but for the share of each row
        torch.addmm(gradient, scores.T, share * images, beta=int(accumulate), out=gradient)
        return LossAndGradient(loss, share * (scores @ table))

    def update(self, rate: Tensor) -> None:
        self.model.entities.grad = self.gradients["head"]
        if not self.shared:
            self.model.tails.grad = self.gradients["tail"]
        self.optimizer.step()


class HalfTables(Tables):
    """Products in bfloat16 on a GPU, with float32 tables behind them.

    Each table has a bfloat16 copy that the optimizer writes in the same pass, its rows padded to a multiple of 128
    so that every product is aligned.
    """

    def __init__(self, model: BilinearModel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.copies: dict[Side, Tensor] = {}
        for side, table in _own_tables(model).items():
            padded = (-(-len(table) // 128) * 128, table.shape[1])
            self.gradients[side] = torch.zeros(padded, device=table.device)
            self.copies[side] = torch.zeros(padded, dtype=torch.bfloat16, device=table.device)
            self.copies[side][: len(table)] = table.detach()

    def cross_entropy(
        self, side: Side, images: Tensor, targets: Tensor, share: Tensor, *, accumulate: bool
    ) -> LossAndGradient:
        """In one array of bfloat16; the float32 softmax never exists."""
        from dualkg.kernels.gpu.softmax import softmax_gradient_

        copy, gradient = self.copies.get(side, self.copies["head"]), self.gradient(side)
        scores = self.scores.of(len(images), len(copy), copy)
        torch.mm(images.to(copy.dtype), copy.T, out=scores)
        losses = softmax_gradient_(scores, targets, self.model.shape.num_entities)
        step = _product(scores.T, (share * images).to(copy.dtype))
        gradient.add_(step) if accumulate else gradient.copy_(step)
        return LossAndGradient((share.squeeze(-1) * losses).sum(), share * _product(scores, copy))

    def update(self, rate: Tensor) -> None:
        """Each table and its copy in one pass."""
        from dualkg.kernels.gpu.adagrad import adagrad_

        for side, table in _own_tables(self.model).items():
            adagrad_(*self._state(table), self.gradients[side], self.copies[side], rate, eps=self._eps)
        others = [table for name, table in self.model.named_parameters() if name not in ("entities", "tails")]
        for table in others:
            if table.grad is not None:
                adagrad_(*self._state(table), table.grad, None, rate, eps=self._eps)

    def _state(self, table: nn.Parameter) -> tuple[Tensor, Tensor]:
        return table.detach(), self.optimizer.state[table]["sum"]

    @property
    def _eps(self) -> float:
        return float(self.optimizer.param_groups[0]["eps"])


def _own_tables(model: BilinearModel) -> dict[Side, nn.Parameter]:
    """The entity tables by side; one alone, the head's, where they are shared."""
    return {"head": model.entities, "tail": model.tails} if model.two_entity_tables else {"head": model.entities}


def _table(model: BilinearModel, side: Side) -> Tensor:
    return (model.head_table if side == "head" else model.tail_table).detach()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A product of bfloat16 matrices, summed and given in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()

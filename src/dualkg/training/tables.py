"""The entity tables of a model as a fused step sees them: products with them, their gradients, and their update."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.targets import Targets
from dualkg.models.base import EmbeddingModel
from dualkg.training.optimizers import AnyOptimizer
from dualkg.training.workspace import Workspace

Side = Literal["head", "tail"]
SCORE_BYTES, LEAST_ROWS = 32_000_000, 500


class LossAndGradient(NamedTuple):
    """A loss, and its gradient with respect to the images that were scored."""

    loss: Tensor
    images: Tensor


class Tables(ABC):
    """The entity tables of a model, a gradient for each, and what is done with them in a step.

    With `squared`, a score is −‖x − t‖² rather than ⟨x, t⟩, of which the softmax does not see ‖x‖².
    """

    def __init__(self, model: EmbeddingModel, optimizer: AnyOptimizer, *, squared: bool = False) -> None:
        self.squared = squared
        self.model = model
        self.optimizer = optimizer
        self.scores, self.products = Workspace(), Workspace()
        self.gradients = {side: torch.empty_like(table.detach()) for side, table in _own_tables(model).items()}

    def cross_entropy(self, side: Side, images: Tensor, targets: Targets, *, accumulate: bool) -> LossAndGradient:
        """Σ share · −log softmax(scores)[target], the gradient of the table kept here, or added to it.

        In one array of questions × entities, and of many questions in parts of it. Autograd would keep the scores,
        their log-softmax and both gradients; here the scores are turned into the gradient where they stand.
        """
        rows = rows_at_once(self.model, self._scored(side).element_size())
        if len(images) <= rows:
            return self._part(side, images, targets, accumulate=accumulate)
        found = []
        for first in range(0, len(images), rows):
            part = images[first : first + rows]
            of_part = targets.part(first, first + len(part))
            found.append(self._part(side, part, of_part, accumulate=accumulate or first > 0))
        return LossAndGradient(torch.stack([one.loss for one in found]).sum(), torch.cat([one.images for one in found]))

    def _part(self, side: Side, images: Tensor, targets: Targets, *, accumulate: bool) -> LossAndGradient:
        """The same for as many rows as are scored at once."""
        table = self._scored(side)
        scores = self.scores.of(len(images), len(table), table)
        if self.squared:
            images = 2 * images
            torch.addmm(-table.square().sum(-1), images, table.T, out=scores)
        else:
            torch.mm(images.to(table.dtype), table.T, out=scores)
        losses = _softmax_gradient_(scores, targets)
        self._add_product_(self.gradient(side), scores.T, images.to(table.dtype), accumulate=accumulate)
        if self.squared:  # from the norms: each row is as often subtracted as it was asked for, less than it was it
            self.gradient(side).addcmul_(scores.sum(0).unsqueeze(-1), table, value=-2)
        if table.dtype == images.dtype:
            upstream = scores @ table
        else:  # transposed it is a third faster, where a processor has AMX
            upstream = torch.mm(table.T, scores.T).T.to(images.dtype)
        return LossAndGradient(losses.sum(), 2 * upstream if self.squared else upstream)

    def _add_product_(self, total: Tensor, one: Tensor, other: Tensor, *, accumulate: bool) -> None:
        """Add a product to what is in `total`, or put it there; sums are kept in the precision of the model."""
        if one.dtype == total.dtype:
            torch.addmm(total, one, other, beta=int(accumulate), out=total)
            return
        product = torch.mm(one, other, out=self.products.of(len(one), other.shape[1], one))
        total.add_(product) if accumulate else total.copy_(product)

    @abstractmethod
    def _scored(self, side: Side) -> Tensor:
        """The table of a side in the precision of its products."""

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

    def _scored(self, side: Side) -> Tensor:
        return _table(self.model, side)

    def update(self, learning_rate: float) -> None:
        self.model.entities.grad = self.gradients["head"]
        if not self.shared:
            self.model.tails.grad = self.gradients["tail"]
        self.optimizer.step()


class HalfTables(Tables):
    """Products in bfloat16 on a CPU that has them, with float32 tables behind.

    Each table has a bfloat16 copy that Adagrad writes in the same pass.
    """

    def __init__(self, model: EmbeddingModel, optimizer: AnyOptimizer) -> None:
        super().__init__(model, optimizer)
        self.copies = {side: table.detach().bfloat16() for side, table in _own_tables(model).items()}

    def _scored(self, side: Side) -> Tensor:
        return self.copies.get(side, self.copies["head"])

    def update(self, learning_rate: float) -> None:
        from dualkg.kernels.cpu.adagrad import adagrad_

        eps = float(self.optimizer.param_groups[0]["eps"])
        for name, table in self.model.named_parameters():
            side: Side | None = {"entities": "head", "tails": "tail"}.get(name)  # type: ignore[assignment]
            gradient = self.gradients[side] if side else table.grad
            if gradient is not None:
                copy = self.copies[side] if side else None
                adagrad_(table.detach(), self.optimizer.state[table]["sum"], gradient, copy, learning_rate, eps=eps)


def rows_at_once(model: EmbeddingModel, bytes_of_score: int) -> int:
    """How many rows of scores exist at once: on a CPU as many as memory is meant for, but enough for full products."""
    if model.device.type != "cpu":
        return sys.maxsize
    return max(LEAST_ROWS, SCORE_BYTES // (bytes_of_score * model.shape.num_entities))


def _softmax_gradient_(scores: Tensor, targets: Targets) -> Tensor:
    """Overwrite scores by the gradient of the cross entropy and return what each question adds, `(questions,)`."""
    if scores.device.type == "cpu":
        from dualkg.kernels.cpu.softmax import softmax_gradient_

        return softmax_gradient_(scores, targets, scores.shape[1])
    questions = targets.questions
    places, losses = (questions, targets.entities), torch.zeros_like(scores[:, 0])
    weights = torch.zeros_like(losses).index_add_(0, questions, targets.shares)
    losses.index_add_(0, questions, targets.shares * (scores.logsumexp(dim=-1)[questions] - scores[places]))
    torch.softmax(scores, dim=-1, out=scores)
    scores.mul_(weights[:, None]).index_put_(places, -targets.shares, accumulate=True)
    return losses


def _own_tables(model: EmbeddingModel) -> dict[Side, nn.Parameter]:
    """The entity tables by side; one alone, the head's, where they are shared."""
    return {"head": model.entities, "tail": model.tails} if model.two_entity_tables else {"head": model.entities}


def _table(model: EmbeddingModel, side: Side) -> Tensor:
    return (model.head_table if side == "head" else model.tail_table).detach()

"""One step of training without autograd over the scores.

Autograd is left with what is small: the vectors of the batch, their maps, the regularizer. The products with the
entity tables and the softmax between them are `linear_cross_entropy`, and a relation table of matrices is touched
only where the batch touches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.losses import CrossEntropy, cross_entropy
from dualkg.models.base import BilinearModel, Factors, Model
from dualkg.regularizers import Regularizer
from dualkg.training.linear_cross_entropy import Scores, linear_cross_entropy
from dualkg.training.optimizers import can_step_rows, step_rows


@dataclass
class LeafFactors(Factors):
    """Factors whose head and tail vectors are cut off from the tables, so that their gradients stay small."""

    def __post_init__(self) -> None:
        self.head = self.model.head_table.detach()[self.heads].requires_grad_()
        self.tail = self.model.tail_table.detach()[self.tails].requires_grad_()


class FusedStep:
    """Descend on loss plus regularizer for one batch; what `PlainStep` does, in less time and memory."""

    def __init__(
        self, model: Model, loss: CrossEntropy, regularizer: Regularizer, optimizer: torch.optim.Optimizer
    ) -> None:
        self.model = model = model.bilinear
        self.loss = loss
        self.regularizer = regularizer
        self.optimizer = optimizer
        self.scores = Scores()
        self.head_gradient = torch.empty_like(model.head_table.detach())
        self.tail_gradient = (
            torch.empty_like(model.tail_table.detach()) if model.two_entity_tables else self.head_gradient
        )
        # All rows of a relation table get a gradient from relation prediction, and from an optimizer with momentum.
        large = model.relations.shape[1] > model.entities.shape[1]
        self.by_row = large and not loss.relation_weight and can_step_rows(optimizer)

    @staticmethod
    def applies_to(model: Model) -> bool:
        """Whether the scores of all tails are the product that is fused here."""
        return isinstance(model, BilinearModel) and type(model).tail_scores is BilinearModel.tail_scores

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.by_row:
            return self._step_by_row(batch, learning_rate)
        objective = self.gradients(batch)
        self.optimizer.step()
        return objective

    def _step_by_row(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Give the maps only the relations of the batch, and the optimizer only their rows."""
        table = self.model.relations
        distinct, position = torch.unique(batch[:, 1], return_inverse=True)
        present = table.detach()[distinct].requires_grad_()
        table.grad = None  # the optimizer passes over it
        renumbered = torch.stack([batch[:, 0], position, batch[:, 2]], dim=-1)
        objective = self._with_relations(present, lambda: self.gradients(renumbered))
        self.optimizer.step()
        assert present.grad is not None
        step_rows(self.optimizer, table, distinct, present.grad, learning_rate)
        return objective

    def _with_relations(self, relations: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Compute with other relations in the place of the model's table."""
        own = self.model._parameters["relations"]
        self.model._parameters["relations"] = relations  # type: ignore[assignment]
        try:
            return compute()
        finally:
            self.model._parameters["relations"] = own

    def gradients(self, batch: Tensor) -> Tensor:
        """Fill the gradient of every table and return the objective."""
        model = self.model
        for parameter in model.parameters():
            parameter.grad = None
        head_table, tail_table = model.head_table.detach(), model.tail_table.detach()
        f = LeafFactors(model, *batch.unbind(-1))
        images, upstream = [f.mapped_head], list[Tensor]()

        def fit(mapped: Tensor, table: Tensor, targets: Tensor, gradient: Tensor, *, accumulate: bool) -> Tensor:
            found = linear_cross_entropy(
                mapped.detach(),
                table,
                targets,
                weights=self.loss.entity_weights,
                scores=self.scores,
                table_gradient=gradient,
                accumulate=accumulate,
                scale=1.0 if model.reciprocal else 0.5,
            )
            upstream.append(found.images)
            return found.loss

        objective = fit(f.mapped_head, tail_table, f.tails, self.tail_gradient, accumulate=False)
        shared = self.head_gradient is self.tail_gradient
        if not model.reciprocal:
            images.append(f.mapped_tail)
            objective = objective + fit(f.mapped_tail, head_table, f.heads, self.head_gradient, accumulate=shared)
        elif not shared:
            self.head_gradient.zero_()

        small = self._small_terms(f)
        if small is not None:
            images.append(small)
            upstream.append(torch.ones_like(small))
            objective = objective + small.detach()
        torch.autograd.backward(images, upstream)
        self._scatter(f)
        return objective

    def _small_terms(self, f: Factors) -> Tensor | None:
        """What autograd can well do: relation prediction and the regularizer."""
        terms = []
        if self.loss.relation_weight:
            terms.append(self.loss.relation_weight * cross_entropy(self.model.relation_scores(f), f.relations))
        if self.regularizer.weight:
            terms.append(self.regularizer(f))
        return torch.stack(terms).sum() if terms else None

    def _scatter(self, f: Factors) -> None:
        """Add the gradients of the batch's own vectors to those of the tables."""
        for ids, vectors, gradient in ((f.heads, f.head, self.head_gradient), (f.tails, f.tail, self.tail_gradient)):
            if vectors.grad is not None:
                gradient.index_add_(0, ids, vectors.grad)
        self.model.entities.grad = self.head_gradient
        if self.model.two_entity_tables:
            self.model.tails.grad = self.tail_gradient

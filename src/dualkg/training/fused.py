"""One step of training without autograd over the scores.

Autograd is left with what is small: the vectors of the batch, their maps, the regularizer. The products with the
entity tables, the softmax between them and the update are the `tables`', and a relation table of matrices is touched
only where the batch touches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.losses import CrossEntropy, cross_entropy
from dualkg.models import MODELS
from dualkg.models.base import BilinearModel, Factors, Model
from dualkg.regularizers import REGULARIZERS, Regularizer
from dualkg.training.optimizers import AnyOptimizer, can_step_rows, step_rows
from dualkg.training.tables import ExactTables, HalfTables


@dataclass
class LeafFactors(Factors):
    """Factors whose head and tail vectors are cut off from the tables, so that their gradients stay small."""

    def __post_init__(self) -> None:
        self.head = self.model.head_table.detach()[self.heads].requires_grad_()
        self.tail = self.model.tail_table.detach()[self.tails].requires_grad_()


class FusedStep:
    """Descend on loss plus regularizer for one batch; what `PlainStep` does, in less time and memory."""

    def __init__(
        self,
        model: Model,
        loss: CrossEntropy,
        regularizer: Regularizer,
        optimizer: AnyOptimizer,
        *,
        half: bool = False,
    ) -> None:
        self.model = model = model.bilinear
        self.loss = loss
        self.regularizer = regularizer
        self.optimizer = optimizer
        self.tables = HalfTables(model, optimizer) if half else ExactTables(model, optimizer)
        # All rows of a relation table get a gradient from relation prediction, and from an optimizer with momentum.
        # Of classes that are not ours we cannot know what else they do with the ids of relations.
        ours = type(model) in MODELS.values() and type(regularizer) in REGULARIZERS.values()
        large = model.relations.shape[1] > model.entities.shape[1]
        self.by_row = ours and large and not loss.relation_weight and can_step_rows(optimizer)

    @staticmethod
    def applies_to(model: Model) -> bool:
        """Whether the scores of all tails and heads are the products that are fused here."""
        kind = type(model)
        return isinstance(model, BilinearModel) and all(
            getattr(kind, name) is getattr(BilinearModel, name)
            for name in ("tail_scores", "head_scores", "head_table", "tail_table", "factors")
        )

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.by_row:
            return self._step_by_row(batch, learning_rate)
        objective = self.gradients(batch)
        self.tables.update(learning_rate)
        return objective

    def _step_by_row(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Give the maps only the relations of the batch, and the optimizer only their rows."""
        table = self.model.relations
        distinct, position = torch.unique(batch[:, 1], return_inverse=True)
        present = table.detach()[distinct].requires_grad_()
        self.model._parameters["relations"] = present  # type: ignore[assignment]
        try:
            objective = self.gradients(torch.stack([batch[:, 0], position, batch[:, 2]], dim=-1))
        finally:
            self.model._parameters["relations"] = table
        table.grad = None  # so that the update passes over it
        self.tables.update(learning_rate)
        if present.grad is not None:
            step_rows(self.optimizer, table, distinct, present.grad, learning_rate)
        return objective

    def gradients(self, batch: Tensor) -> Tensor:
        """Find the gradient of every table and return the objective."""
        model, tables = self.model, self.tables
        for parameter in model.parameters():
            parameter.grad = None
        f = LeafFactors(model, *batch.unbind(-1))
        scale = 1.0 if model.reciprocal else 0.5
        found = tables.cross_entropy(
            "tail", f.mapped_head.detach(), f.tails, scale * self._share(f.tails), accumulate=False
        )
        objective, images, upstream = found.loss, [f.mapped_head], [found.images]
        if not model.reciprocal:
            share = scale * self._share(f.heads)
            found = tables.cross_entropy("head", f.mapped_tail.detach(), f.heads, share, accumulate=tables.shared)
            objective, images, upstream = objective + found.loss, [*images, f.mapped_tail], [*upstream, found.images]
        elif not tables.shared:
            tables.gradient("head").zero_()
        small = self._small_terms(f)
        if small is not None:
            objective, images, upstream = (
                objective + small.detach(),
                [*images, small],
                [*upstream, torch.ones_like(small)],
            )
        torch.autograd.backward(images, upstream)
        for ids, vectors, gradient in (
            (f.heads, f.head, tables.gradient("head")),
            (f.tails, f.tail, tables.gradient("tail")),
        ):
            if vectors.grad is not None:
                gradient.index_add_(0, ids, vectors.grad)
        tables.add_from_autograd()
        return objective

    def _share(self, targets: Tensor) -> Tensor:
        """What each query counts in the mean, `(batch, 1)`."""
        if self.loss.entity_weights is None:
            return torch.full(
                (len(targets), 1), 1 / len(targets), dtype=self.model.entities.dtype, device=targets.device
            )
        chosen = self.loss.entity_weights[targets]
        return (chosen / chosen.sum()).unsqueeze(-1)

    def _small_terms(self, f: Factors) -> Tensor | None:
        """What autograd can well do: relation prediction and the regularizer."""
        terms = []
        if self.loss.relation_weight:
            terms.append(self.loss.relation_weight * cross_entropy(self.model.relation_scores(f), f.relations))
        if self.regularizer.weight:
            terms.append(self.regularizer(f))
        return torch.stack(terms).sum() if terms else None

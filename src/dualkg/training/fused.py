"""One step of training without autograd over the scores.

The products with the entity tables, the softmax between them and the update are the `tables`'. What is small, the
vectors of the batch, their maps and the regularizer, is left to autograd, or for diagonal models of ours not even that.
A relation table of matrices is touched only where the batch touches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from dualkg.kernels.targets import Targets
from dualkg.losses import CrossEntropy, cross_entropy
from dualkg.losses.questions import Questions
from dualkg.models import MODELS
from dualkg.models.base import Model
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.factors import Factors
from dualkg.regularizers import PowerSum, Regularizer, sees_batch_alone
from dualkg.training.forms import scores_are
from dualkg.training.optimizers import AnyOptimizer, can_step_rows, step_rows
from dualkg.training.tables import ExactTables, HalfTables, LossAndGradient, Side


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
        self.asked = model
        self.model = model = model.embedding
        self.loss = loss
        self.regularizer = regularizer
        self.optimizer = optimizer
        squared = scores_are(self.asked) == "squared distances"
        self.tables = HalfTables(model, optimizer) if half else ExactTables(model, optimizer, squared=squared)
        # All rows of a relation table get a gradient from relation prediction, and from an optimizer with momentum.
        # Of classes that are not ours we cannot know what else they do with the ids of relations, or with the tables.
        ours = type(model) in MODELS.values() and sees_batch_alone(regularizer)
        large = model.relations.shape[1] > model.entities.shape[1]
        linear = isinstance(model, DiagonalModel) and model.linear_in_relations
        self.direct = ours and linear and not loss.relation_weight
        self.by_row = ours and large and not loss.relation_weight and can_step_rows(optimizer)

    @staticmethod
    def applies_to(model: Model) -> bool:
        """Whether all scores are what is fused here, and every table is trained."""
        return scores_are(model) is not None and all(table.requires_grad for table in model.parameters())

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
        for parameter in self.model.parameters():
            parameter.grad = None
        return self._without_autograd(batch) if self.direct else self._with_autograd(batch)

    def _with_autograd(self, batch: Tensor) -> Tensor:
        """Whatever the maps and the regularizer do with the vectors of the batch."""
        f = LeafFactors(self.model, *batch.unbind(-1))
        objective, upstream = self._score(f)
        images = [f.mapped_head] if len(upstream) == 1 else [f.mapped_head, f.mapped_tail]
        small = self._small_terms(f)
        if small is not None:
            objective, images, upstream = (
                objective + small.detach(),
                [*images, small],
                [*upstream, torch.ones_like(small)],
            )
        torch.autograd.backward(images, upstream)
        self._add_rows(f, f.head.grad, f.tail.grad)
        self.tables.add_from_autograd()
        return objective

    @torch.no_grad()
    def _without_autograd(self, batch: Tensor) -> Tensor:
        """Through the maps backwards by the maps themselves: ⟨hR, g⟩ has the gradient gRᵀ, and ⟨tRᵀ, g⟩ has gR."""
        model, regularizer = self.model, self.regularizer
        assert isinstance(model, DiagonalModel)
        assert isinstance(regularizer, PowerSum)
        f = Factors(model, *batch.unbind(-1))
        objective, upstream = self._score(f)
        to = {}
        if regularizer.weight:
            objective = objective + regularizer(f)
            to = regularizer.gradients(f)
        to_mapped_head, to_mapped_tail = (
            _sum(to.get(name), found)
            for name, found in zip_longest(("mapped_head", "mapped_tail"), upstream)  # heads are not always asked for
        )
        assert to_mapped_head is not None
        to_head = _sum(to.get("head"), model.map_tail(to_mapped_head, f.relations))
        to_relation = _sum(to.get("relation"), model.relation_between(f.head, to_mapped_head))
        to_tail = to.get("tail")
        if to_mapped_tail is not None:
            to_tail = _sum(to_tail, model.map_head(to_mapped_tail, f.relations))
            to_relation = _sum(to_relation, model.relation_between(to_mapped_tail, f.tail))
        assert to_relation is not None
        self._add_rows(f, to_head, to_tail)
        model.relations.grad = torch.zeros_like(model.relations).index_add_(0, f.relations, to_relation)
        return objective

    def _score(self, f: Factors) -> tuple[Tensor, list[Tensor]]:
        """The cross entropy, and the gradients of the images that were scored; those of the tables are kept there."""
        model, tables = self.model, self.tables
        scale = 1.0 if model.reciprocal else 0.5
        share = scale * self._share(f.tails)
        found = self._cross_entropy(f, "tail", share, accumulate=False)
        if model.reciprocal:
            if not tables.shared:
                tables.gradient("head").zero_()
            return found.loss, [found.images]
        share = scale * self._share(f.heads)
        other = self._cross_entropy(f, "head", share, accumulate=tables.shared)
        return found.loss + other.loss, [found.images, other.images]

    def _cross_entropy(self, f: Factors, side: Side, share: Tensor, *, accumulate: bool) -> LossAndGradient:
        """Of the entities of one side; through what is dropped of an image, nothing goes back."""
        backward = side == "head"
        images, targets = (f.mapped_tail, f.heads) if backward else (f.mapped_head, f.tails)
        images = images.detach()
        if self.loss.by_question and not backward:
            return self._by_question(f, images, share)
        mask = dropout.mask(f, images, backward=backward) if (dropout := self.loss.dropouts.images) else 1
        one_each = Targets.one_each(targets, share)
        found = self.tables.cross_entropy(side, images * mask, one_each, accumulate=accumulate)
        return found._replace(images=found.images * mask)

    def _by_question(self, f: Factors, images: Tensor, share: Tensor) -> LossAndGradient:
        """Of tails, each question scored once: what its image gets goes back through the first of its triples."""
        questions = Questions.of(f.heads, f.relations)
        first = questions.first
        mask = dropout.mask(f, images, questions=questions) if (dropout := self.loss.dropouts.images) else 1
        targets = Targets(f.tails, share, questions.starts)
        found = self.tables.cross_entropy("tail", images[first] * mask, targets, accumulate=False)
        return found._replace(images=torch.zeros_like(images).index_copy_(0, first, found.images * mask))

    def _add_rows(self, f: Factors, to_head: Tensor | None, to_tail: Tensor | None) -> None:
        if to_head is not None:
            self.tables.gradient("head").index_add_(0, f.heads, to_head)
        if to_tail is not None:
            self.tables.gradient("tail").index_add_(0, f.tails, to_tail)

    def _share(self, targets: Tensor) -> Tensor:
        """What each triple counts in the mean, `(batch,)`."""
        if self.loss.entity_weights is None:
            return torch.full(targets.shape, 1 / len(targets), dtype=self.model.entities.dtype, device=targets.device)
        chosen = self.loss.entity_weights[targets]
        return chosen / chosen.sum()

    def _small_terms(self, f: Factors) -> Tensor | None:
        """What autograd can well do: relation prediction and the regularizer."""
        terms = []
        if self.loss.relation_weight:
            terms.append(self.loss.relation_weight * cross_entropy(self.asked.relation_scores(f), f.relations))
        if self.regularizer.weight:
            terms.append(self.regularizer(f))
        return torch.stack(terms).sum() if terms else None


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    if one is None or other is None:
        return one if other is None else other
    return one + other

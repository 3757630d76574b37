"""The fused step: the gradient of 1-vs-all without autograd, in less time and memory than the reference step."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.scores import Targets
from dualkg.losses.queries import QueryGroups
from dualkg.losses.softmax import BoundOneVsAll, cross_entropy
from dualkg.models.base import EmbeddingModel, Factors, Model, overridden
from dualkg.models.diagonal import DiagonalModel
from dualkg.regularizers import PowerSum, Regularizer, is_power_sum
from dualkg.training.optimizers import AnyOptimizer, can_step_rows, step_rows

# What a subclass may override and still be trained by kernels in place of its maps.
UNUSED_BY_KERNELS = {
    *("config", "entity_vectors", "triple_scores", "candidate_scores", "score", "score_relations"),
    *("table", "relation_table", "init_noise", "default_init_scale", "check_shape"),
}


def has_builtin_maps(model: Model) -> bool:
    """Whether maps, tables and scores of all entities are those of a class of dualkg, which kernels can replace."""
    return overridden(model) <= UNUSED_BY_KERNELS


class Workspace:
    """An array that grows to the largest size asked for: fresh pages cost as much as the work done on them."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Some array `(rows, columns)`, whatever is in it."""
        if self._buffer is None or self._buffer.numel() < rows * columns:
            self._buffer = torch.zeros(rows * columns, dtype=like.dtype, device=like.device)
        return self._buffer[: rows * columns].view(rows, columns)


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

        In one array of queries × entities, and of many queries in parts of it. Autograd would keep the scores,
        their log-softmax and both gradients; here the scores are rotated into the gradient where they stand.
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


class Float32Tables(Tables):
    """Tables and products in the precision of the model."""

    def _scored(self, side: Side) -> Tensor:
        return _table(self.model, side)

    def update(self, learning_rate: float) -> None:
        self.model.entities.grad = self.gradients["head"]
        if not self.shared:
            self.model.tails.grad = self.gradients["tail"]
        self.optimizer.step()


class Bf16Tables(Tables):
    """Products in bfloat16 on a CPU that has them, with float32 tables behind.

    Each table has a bfloat16 copy that Adagrad writes in the same pass.
    """

    def __init__(self, model: EmbeddingModel, optimizer: AnyOptimizer) -> None:
        super().__init__(model, optimizer)
        self.copies = {side: table.detach().bfloat16() for side, table in _own_tables(model).items()}

    def _scored(self, side: Side) -> Tensor:
        return self.copies.get(side, self.copies["head"])

    def update(self, learning_rate: float) -> None:
        from dualkg.kernels.cpu import adagrad_

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
    """Overwrite scores by the gradient of the cross entropy and return what each question adds, `(queries,)`."""
    if scores.device.type == "cpu":
        from dualkg.kernels.cpu import softmax_gradient_

        return softmax_gradient_(scores, targets, scores.shape[1])
    queries = targets.queries
    places, losses = (queries, targets.entities), torch.zeros_like(scores[:, 0])
    weights = torch.zeros_like(losses).index_add_(0, queries, targets.weights)
    losses.index_add_(0, queries, targets.weights * (scores.logsumexp(dim=-1)[queries] - scores[places]))
    torch.softmax(scores, dim=-1, out=scores)
    scores.mul_(weights[:, None]).index_put_(places, -targets.weights, accumulate=True)
    return losses


def _own_tables(model: EmbeddingModel) -> dict[Side, nn.Parameter]:
    """The entity tables by side; one alone, the head's, where they are shared."""
    return {"head": model.entities, "tail": model.tails} if model.two_entity_tables else {"head": model.entities}


def _table(model: EmbeddingModel, side: Side) -> Tensor:
    return (model.head_table if side == "head" else model.tail_table).detach()


@dataclass
class LeafFactors(Factors):
    """Factors whose head and tail vectors are cut off from the tables, so that their gradients stay small."""

    def __post_init__(self) -> None:
        self.head = self.model.head_table.detach()[self.heads].requires_grad_()
        self.tail = self.model.tail_table.detach()[self.tails].requires_grad_()


class FusedStep:
    """Descend on loss plus regularizer for one batch; what `ReferenceStep` does, in less time and memory."""

    def __init__(
        self,
        model: Model,
        loss: BoundOneVsAll,
        regularizer: Regularizer,
        optimizer: AnyOptimizer,
        *,
        bf16: bool = False,
    ) -> None:
        self.scored = model
        self.model = model = model.embedding
        self.loss = loss
        self.regularizer = regularizer
        self.optimizer = optimizer
        squared = self.scored.score_form == "squared distances"
        self.tables = Bf16Tables(model, optimizer) if bf16 else Float32Tables(model, optimizer, squared=squared)
        # All rows of a relation table get a gradient from relation prediction, and from an optimizer with momentum.
        # Other classes may do anything with the ids of relations, or with whole tables.
        known = has_builtin_maps(model) and is_power_sum(regularizer)
        large = model.relations.shape[1] > model.entities.shape[1]
        linear = isinstance(model, DiagonalModel) and model.linear_in_relations
        self.direct = known and linear and not loss.relation_weight
        self.by_row = known and large and not loss.relation_weight and can_step_rows(optimizer)

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
        to_relation = _sum(to.get("relation"), model.relation_query(f.head, to_mapped_head))
        to_tail = to.get("tail")
        if to_mapped_tail is not None:
            to_tail = _sum(to_tail, model.map_head(to_mapped_tail, f.relations))
            to_relation = _sum(to_relation, model.relation_query(to_mapped_tail, f.tail))
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
        if self.loss.grouped_by_query and not backward:
            return self._by_question(f, images, share)
        mask = dropout.mask(f, images, backward=backward) if (dropout := self.loss.dropouts.mapped) else 1
        one_each = Targets.one_each(targets, share)
        found = self.tables.cross_entropy(side, images * mask, one_each, accumulate=accumulate)
        return found._replace(images=found.images * mask)

    def _by_question(self, f: Factors, images: Tensor, share: Tensor) -> LossAndGradient:
        """Of tails, each question scored once: what its image gets goes back through the first of its triples."""
        groups = QueryGroups.of(f.heads, f.relations)
        first = groups.first
        mask = dropout.mask(f, images, groups=groups) if (dropout := self.loss.dropouts.mapped) else 1
        targets = Targets(f.tails, share, groups.starts)
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
            terms.append(self.loss.relation_weight * cross_entropy(self.scored.relation_scores(f), f.relations))
        if self.regularizer.weight:
            terms.append(self.regularizer(f))
        return torch.stack(terms).sum() if terms else None


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    if one is None or other is None:
        return one if other is None else other
    return one + other

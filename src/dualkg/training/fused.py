"""The fused step: the gradient of 1-vs-all without autograd, in less time and memory than the
reference step.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.scores import Targets, softmax_
from dualkg.losses.queries import QueryGroups
from dualkg.losses.softmax import BoundOneVsAll, cross_entropy, target_weights
from dualkg.models.base import EmbeddingModel, Factors, Model, Side, overridden
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.sharded import Shard
from dualkg.regularizers import PowerSum, Regularizer, is_power_sum
from dualkg.training.optimizers import Adagrad, AnyOptimizer, step_rows

# What a subclass may override and still be trained by kernels in place of its maps.
UNUSED_BY_KERNELS = {
    *("config", "entity_vectors", "triple_scores", "candidate_scores", "score", "score_relations"),
    *("table", "relation_table", "init_noise", "default_init_scale", "check_shape"),
}


def has_builtin_maps(model: Model) -> bool:
    """Whether maps, tables and scores of all entities are those of a class of dualkg, which kernels
    can replace.
    """
    return overridden(model) <= UNUSED_BY_KERNELS


class Workspace:
    """A buffer that grows to the largest size requested: new pages cost as much as the work done on
    them.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """An array `(rows, columns)` with arbitrary content."""
        if self._buffer is None or self._buffer.numel() < rows * columns:
            self._buffer = torch.zeros(rows * columns, dtype=like.dtype, device=like.device)
        return self._buffer[: rows * columns].view(rows, columns)


@cache
def stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a device for a purpose."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


SCORE_BYTES = 32_000_000
LEAST_ROWS = 500


class LossAndGradient(NamedTuple):
    """A loss, and its gradient with respect to the mapped vectors that were scored."""

    loss: Tensor
    images: Tensor


class Tables:
    """The entity tables of a model by side, a gradient for each, and the products with them.

    Heads and tails may be rows of one table. With `squared`, a score is −‖x − t‖² rather than ⟨x,
    t⟩; its ‖x‖² has no effect on a softmax. With `bf16`, products are of bfloat16 copies, which
    Adagrad writes together with the tables.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        optimizer: AnyOptimizer,
        *,
        squared: bool = False,
        bf16: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.squared = squared
        self.shared = not model.two_entity_tables
        self.parameters: dict[Side, nn.Parameter] = {"head": model.entities}
        if not self.shared:
            self.parameters["tail"] = model.tails
        self.gradients = {
            side: torch.empty_like(table.detach()) for side, table in self.parameters.items()
        }
        self.copies = (
            {side: table.detach().bfloat16() for side, table in self.parameters.items()}
            if bf16
            else {}
        )
        if isinstance(optimizer, Adagrad):
            optimizer.copies = {
                table: self.copies[side] for side, table in self.parameters.items() if bf16
            }
        self._scores = Workspace()
        self._products = Workspace()

    def gradient(self, side: Side) -> Tensor:
        """The gradient of a side's table."""
        return self.gradients["head" if self.shared else side]

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        """The rows of entities, without a gradient."""
        return (self.model.head_table if side == "head" else self.model.tail_table).detach()[ids]

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        """Add rows to the gradient of a side's table."""
        self.gradient(side).index_add_(0, ids, rows)

    def cross_entropy(
        self, side: Side, images: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        """Σ weight · −log softmax(scores)[target]; the gradient of the table is stored here, or
        added.

        The scores are one array of queries × entities, which the gradient overwrites, and on a CPU
        a block of queries at a time. Autograd would store scores, their log-softmax and both
        gradients.
        """
        rows = rows_at_once(self.model, self._scored(side).element_size())
        if len(images) <= rows:
            return self._block(side, images, targets, accumulate=accumulate)
        found = []
        for first in range(0, len(images), rows):
            block = images[first : first + rows]
            of_block = targets.part(first, first + len(block))
            found.append(self._block(side, block, of_block, accumulate=accumulate or first > 0))
        return LossAndGradient(
            torch.stack([one.loss for one in found]).sum(), torch.cat([one.images for one in found])
        )

    def _block(
        self, side: Side, images: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        """The same for queries that are scored at once."""
        table = self._scored(side)
        images = 2 * images if self.squared else images
        scores = self._scores_of(images, table)
        losses = softmax_gradient_(scores, targets)
        self._add_product_(
            self.gradient(side), scores.T, images.to(table.dtype), accumulate=accumulate
        )
        if self.squared:  # the gradient of −‖t‖²
            self.gradient(side).addcmul_(scores.sum(0).unsqueeze(-1), table, value=-2)
        if table.dtype == images.dtype:
            upstream = scores @ table
        else:  # transposed it is a third faster on a processor with AMX
            upstream = torch.mm(table.T, scores.T).T.to(images.dtype)
        return LossAndGradient(losses.sum(), 2 * upstream if self.squared else upstream)

    def _scores_of(self, images: Tensor, table: Tensor) -> Tensor:
        scores = self._scores.of(len(images), len(table), table)
        if self.squared:
            return torch.addmm(-table.square().sum(-1), images, table.T, out=scores)
        return torch.mm(images.to(table.dtype), table.T, out=scores)

    def _add_product_(self, total: Tensor, one: Tensor, other: Tensor, *, accumulate: bool) -> None:
        """Add a product to `total`, or overwrite it; sums have the precision of the model."""
        if one.dtype == total.dtype:
            torch.addmm(total, one, other, beta=int(accumulate), out=total)
            return
        product = torch.mm(one, other, out=self._products.of(len(one), other.shape[1], one))
        total.add_(product) if accumulate else total.copy_(product)

    def _scored(self, side: Side) -> Tensor:
        """The table of a side in the precision of its products."""
        own: Side = "head" if self.shared else side
        return self.copies[own] if self.copies else self.parameters[own].detach()

    def add_from_autograd(self) -> None:
        """Add the gradients of a regularizer that reads whole tables."""
        for side, table in self.parameters.items():
            if table.grad is not None:
                self.gradients[side] += table.grad

    def update(self) -> None:
        """Update every table of the model by its gradient."""
        for side, table in self.parameters.items():
            table.grad = self.gradients[side]
        self.optimizer.step()


class ShardedTables(Tables):
    """`Tables` of the rows of one process.

    The softmax over its own entities needs no other process. With their logsumexp Zₚ, that of all
    is Z = log Σₚ exp Zₚ, and the gradients by its entities are those of its own softmax, query by
    query times exp(Zₚ − Z). Targets are the fetched rows of the batch, which every process has.
    """

    def __init__(self, *arguments: Any, shard: Shard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shard = shard
        self._fetched: dict[Side, Tensor] = {}

    def rows(self, side: Side, ids: Tensor) -> Tensor:
        table = self.model.head_table if side == "head" else self.model.tail_table
        self._fetched[side] = self.shard.fetch(table.detach(), ids)
        return self._fetched[side].detach()

    def add_rows(self, side: Side, ids: Tensor, rows: Tensor) -> None:
        self.shard.add_rows(self.gradient(side), ids, rows)

    def cross_entropy(
        self, side: Side, images: Tensor, targets: Targets, *, accumulate: bool
    ) -> LossAndGradient:
        table = self._scored(side)
        vectors = self._fetched[side]
        images = 2 * images if self.squared else images
        queries = targets.queries
        weights = torch.zeros_like(images[:, 0]).index_add_(0, queries, targets.weights)
        normalizers = torch.empty_like(weights)
        upstream = torch.empty_like(images)
        size = min(len(images), rows_at_once(self.model, table.element_size()))
        for first in range(0, len(images), size):
            block = slice(first, first + size)
            scores = self._scores_of(images[block], table)
            ours = softmax_(scores, softmax_gradient_).to(images.dtype)
            normalizers[block] = self.shard.log_normalizers(ours[:, None])
            shares = (weights[block] * (ours - normalizers[block]).exp())[:, None]
            scaled = (shares * images[block]).to(table.dtype)
            self._add_product_(
                self.gradient(side), scores.T, scaled, accumulate=accumulate or first > 0
            )
            if self.squared:  # the gradient of −‖t‖²
                self.gradient(side).addcmul_(scores.T @ shares, table, value=-2)
            upstream[block] = (scores @ table).to(images.dtype) * shares
        self.shard.all_reduce(upstream)
        weights = targets.weights[:, None]
        at_targets = (images[queries] * vectors).sum(-1)
        upstream.index_add_(0, queries, -weights * vectors)
        to_targets = -weights * images[queries]
        if self.squared:
            at_targets = at_targets - vectors.square().sum(-1)
            to_targets = to_targets + 2 * weights * vectors
        self.add_rows(side, targets.entities, to_targets)
        loss = (targets.weights * (normalizers[queries] - at_targets)).sum()
        return LossAndGradient(loss, 2 * upstream if self.squared else upstream)


def rows_at_once(model: EmbeddingModel, bytes_of_score: int) -> int:
    """How many rows of scores exist at once: on a CPU as many as fit in `SCORE_BYTES`, and enough
    for full products.
    """
    if model.device.type != "cpu":
        return sys.maxsize
    return max(LEAST_ROWS, SCORE_BYTES // max(bytes_of_score * len(model.entities), 1))


def softmax_gradient_(scores: Tensor, targets: Targets) -> Tensor:
    """Overwrite scores by the gradient of the cross entropy and return the loss of each query,
    `(queries,)`.
    """
    if scores.device.type == "cpu":
        from dualkg.kernels import cpu

        return cpu.softmax_gradient_(scores, targets, scores.shape[1])
    queries = targets.queries
    positions = (queries, targets.entities)
    losses = torch.zeros_like(scores[:, 0])
    weights = torch.zeros_like(losses).index_add_(0, queries, targets.weights)
    losses.index_add_(
        0, queries, targets.weights * (scores.logsumexp(dim=-1)[queries] - scores[positions])
    )
    torch.softmax(scores, dim=-1, out=scores)
    scores.mul_(weights[:, None]).index_put_(positions, -targets.weights, accumulate=True)
    return losses


class FusedStep:
    """The step of `ReferenceStep` in less time and memory."""

    def __init__(
        self,
        model: Model,
        loss: BoundOneVsAll,
        regularizer: Regularizer,
        optimizer: AnyOptimizer,
        *,
        bf16: bool = False,
        tables: Callable[..., Tables] = Tables,
    ) -> None:
        self.scored = model
        self.loss = loss
        self.regularizer = regularizer
        self.optimizer = optimizer
        self.model = model = model.embedding
        squared = self.scored.score_form == "squared distances"
        self.tables = tables(model, optimizer, squared=squared, bf16=bf16)
        # Relation prediction and optimizers with momentum change all rows of a relation table.
        # Classes of one's own may do anything with the ids of relations, or with whole tables.
        known = has_builtin_maps(model) and is_power_sum(regularizer)
        large = model.relations.shape[1] > model.entities.shape[1]
        linear = isinstance(model, DiagonalModel) and model.linear_in_relations
        self.direct = known and linear and not loss.relation_weight
        # Rows without a gradient do not change, so that skipping them is exact; Adam's moments
        # decay.
        exact = isinstance(optimizer, (Adagrad, torch.optim.Adagrad, torch.optim.SGD))
        self.by_row = known and large and not loss.relation_weight and exact

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.by_row:
            return self._step_by_row(batch)
        objective = self.gradients(batch)
        self.tables.update()
        return objective

    def _step_by_row(self, batch: Tensor) -> Tensor:
        """Compute with the relations of the batch only, and update only their rows."""
        table = self.model.relations
        distinct, position = torch.unique(batch[:, 1], return_inverse=True)
        present = table.detach()[distinct].requires_grad_()
        self.model._parameters["relations"] = present  # type: ignore[assignment]
        try:
            objective = self.gradients(torch.stack([batch[:, 0], position, batch[:, 2]], dim=-1))
        finally:
            self.model._parameters["relations"] = table
        table.grad = None  # so that the update skips it
        self.tables.update()
        if present.grad is not None:
            step_rows(self.optimizer, table, distinct, present.grad)
        return objective

    def gradients(self, batch: Tensor) -> Tensor:
        """Find the gradient of every table and return the objective."""
        for parameter in self.model.parameters():
            parameter.grad = None
        return self._without_autograd(batch) if self.direct else self._with_autograd(batch)

    def _with_autograd(self, batch: Tensor) -> Tensor:
        """For any maps and any regularizer."""
        f = Factors(self.model, *batch.unbind(-1))
        # Leaves, so that autograd makes no gradient as large as a table.
        f.head = self.tables.rows("head", f.heads).requires_grad_()
        f.tail = self.tables.rows("tail", f.tails).requires_grad_()
        objective, upstream = self._score(f)
        images = [f.mapped_head] if len(upstream) == 1 else [f.mapped_head, f.mapped_tail]
        terms = []  # that are left to autograd
        if self.loss.relation_weight:
            terms.append(
                self.loss.relation_weight
                * cross_entropy(self.scored.relation_scores(f), f.relations)
            )
        if self.regularizer.weight:
            terms.append(self.regularizer(f))
        if terms:
            total = torch.stack(terms).sum()
            objective = objective + total.detach()
            images = [*images, total]
            upstream = [*upstream, torch.ones_like(total)]
        torch.autograd.backward(images, upstream)
        self._add_rows(f, f.head.grad, f.tail.grad)
        self.tables.add_from_autograd()
        return objective

    @torch.no_grad()
    def _without_autograd(self, batch: Tensor) -> Tensor:
        """For diagonal models, whose maps compute their own gradients: that of ⟨hR, g⟩ is gRᵀ, of
        ⟨tRᵀ, g⟩ gR.
        """
        model = self.model
        regularizer = self.regularizer
        assert isinstance(model, DiagonalModel)
        assert isinstance(regularizer, PowerSum)
        f = Factors(model, *batch.unbind(-1))
        f.head, f.tail = self.tables.rows("head", f.heads), self.tables.rows("tail", f.tails)
        objective, upstream = self._score(f)
        to = {}
        if regularizer.weight:
            objective = objective + regularizer(f)
            to = regularizer.gradients(f)
        to_mapped_head = _sum(to.get("mapped_head"), upstream[0])
        to_mapped_tail = _sum(to.get("mapped_tail"), None if model.reciprocal else upstream[1])
        assert to_mapped_head is not None
        to_head = _sum(to.get("head"), model.map_tail(to_mapped_head, f.relations))
        to_relation = _sum(to.get("relation"), model.relation_query(f.head, to_mapped_head))
        to_tail = to.get("tail")
        if to_mapped_tail is not None:
            to_tail = _sum(to_tail, model.map_head(to_mapped_tail, f.relations))
            to_relation = _sum(to_relation, model.relation_query(to_mapped_tail, f.tail))
        assert to_relation is not None
        self._add_rows(f, to_head, to_tail)
        model.relations.grad = torch.zeros_like(model.relations).index_add_(
            0, f.relations, to_relation
        )
        return objective

    def _score(self, f: Factors) -> tuple[Tensor, list[Tensor]]:
        """The cross entropy, and the gradients of the mapped vectors; those of the tables are
        stored in `tables`.
        """
        tails = self._cross_entropy(f, "tail", accumulate=False)
        if self.model.reciprocal:
            if not self.tables.shared:
                self.tables.gradient("head").zero_()
            return tails.loss, [tails.images]
        heads = self._cross_entropy(f, "head", accumulate=self.tables.shared)
        return tails.loss + heads.loss, [tails.images, heads.images]

    def _cross_entropy(self, f: Factors, side: Side, *, accumulate: bool) -> LossAndGradient:
        """The cross entropy of predicting one side. A query of several triples is scored once, for
        its first triple.
        """
        loss = self.loss
        backward = side == "head"
        images, entities = (f.mapped_tail, f.heads) if backward else (f.mapped_head, f.tails)
        images = images.detach()
        scale = 1.0 if self.model.reciprocal else 0.5
        weights = target_weights(loss.entity_weights, entities, scale=scale, dtype=images.dtype)
        groups = (
            QueryGroups.of(f.heads, f.relations) if loss.grouped_by_query and not backward else None
        )
        mask = (
            dropout.mask(f, images, backward=backward, groups=groups)
            if (dropout := loss.dropouts.mapped)
            else 1
        )
        if groups is None:
            targets = Targets.one_each(entities, weights)
            found = self.tables.cross_entropy(side, images * mask, targets, accumulate=accumulate)
            return found._replace(images=found.images * mask)
        first = groups.first
        targets = Targets(entities, weights, groups.starts)
        found = self.tables.cross_entropy(
            side, images[first] * mask, targets, accumulate=accumulate
        )
        return found._replace(
            images=torch.zeros_like(images).index_copy_(0, first, found.images * mask)
        )

    def _add_rows(self, f: Factors, to_head: Tensor | None, to_tail: Tensor | None) -> None:
        if to_head is not None:
            self.tables.add_rows("head", f.heads, to_head)
        if to_tail is not None:
            self.tables.add_rows("tail", f.tails, to_tail)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of those that are not None."""
    if one is None or other is None:
        return one if other is None else other
    return one + other

"""The fused step: the gradient of a softmax without autograd, in less time and memory."""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualkg.kernels.scores import Targets
from dualkg.losses.negative_sampling import Draws
from dualkg.losses.queries import QueryGroups
from dualkg.losses.softmax import BoundOneVsAll, BoundSampledSoftmax, target_weights
from dualkg.models.base import Factors, Model, overridden
from dualkg.models.diagonal import DiagonalModel
from dualkg.regularizers import PowerSum, Regularizer, is_power_sum
from dualkg.tables.base import Side
from dualkg.tables.gradients import (
    DenseGradients,
    LossAndGradient,
    Negatives,
    SparseGradients,
    Workspace,
    softmax_gradient_,
)
from dualkg.tables.scores import cross_entropy
from dualkg.training.updates import AnyOptimizer, OnePassAdagrad, step_rows, sum_rows

# A class that overrides only these methods is still trained by the kernels of its parent's maps.
UNUSED_BY_KERNELS = {
    "candidate_scores",
    "check_shape",
    "config",
    "default_init_scale",
    "entity_vectors",
    "init_noise",
    "relation_table",
    "score",
    "score_relations",
    "table",
    "triple_scores",
}


def has_builtin_maps(model: Model) -> bool:
    """Whether kernels can replace the maps, tables and scores of a model.

    They can where these are those of a class of dualkg.
    """
    return overridden(model) <= UNUSED_BY_KERNELS


@cache
def stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a device for a purpose."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Call(nn.Module):
    """Calls any function while some parameters of a model are replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)


class FusedStep(ABC):
    """The step of `ReferenceStep` in less time and memory."""

    tables: DenseGradients | SparseGradients

    def __init__(
        self,
        model: Model,
        regularizer: Regularizer,
        optimizer: AnyOptimizer,
        *,
        relation_weight: float,
    ) -> None:
        self.scored = model
        self.model = model.embedding
        self.regularizer = regularizer
        self.optimizer = optimizer
        self.relation_weight = relation_weight
        self.squared = model.score_form == "squared distances"
        self.parameters: dict[Side, nn.Parameter] = {"head": self.model.entities}
        if self.model.two_entity_tables:
            self.parameters["tail"] = self.model.tails
        self._choose_form()

    @abstractmethod
    def _score(self, f: Factors) -> tuple[Tensor, list[Tensor]]:
        """The cross entropy, and the gradients of the mapped vectors.

        The gradients of the tables are stored in `tables`.
        """

    @abstractmethod
    def _update(self) -> None:
        """Step all tables by their gradients."""

    @abstractmethod
    def _prepare(self, batch: Tensor) -> None:
        """Draw what is random in the step of a batch, before its relations are renumbered."""

    def _choose_form(self) -> None:
        """Decide whether autograd is needed, and whether relations are updated by rows."""
        model = self.model
        # Classes of one's own may do anything with the ids of relations, or with whole tables.
        is_known = has_builtin_maps(model) and is_power_sum(self.regularizer)
        is_linear = isinstance(model, DiagonalModel) and model.linear_in_relations
        self.compiled = is_known and is_linear and self._has_kernels()
        # Relation prediction changes all rows of a relation table.
        is_known = is_known and not self.relation_weight
        self.without_autograd = is_known and is_linear
        # Rows without a gradient do not change, so that skipping them is exact; Adam's moments
        # decay.
        exact = (OnePassAdagrad, torch.optim.Adagrad, torch.optim.SGD)
        has_large_relations = model.relations.shape[1] > model.entities.shape[1]
        self.by_row = is_known and has_large_relations and isinstance(self.optimizer, exact)

    def _has_kernels(self) -> bool:
        """Whether compiled kernels know the products of a diagonal model and its regularizer."""
        model = self.model
        assert isinstance(model, DiagonalModel)
        regularizer = self.regularizer
        on_cpu = model.device.type == "cpu"
        is_float32 = all(table.dtype == torch.float32 for table in model.parameters())
        is_product = model.numbers_per_coordinate <= 2 and model.multiplicative_modulus
        if not (on_cpu and is_float32 and is_product and model.reciprocal):
            return False
        from dualkg.kernels.cpu import HAS_NUMBA  # It imports numba.
        from dualkg.kernels.cpu_diagonal import Squares

        assert isinstance(regularizer, PowerSum)
        are_known = set(regularizer.term_weights) <= set(Squares._fields)
        return HAS_NUMBA and regularizer.power == 2 and are_known

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._prepare(batch)
        if self.by_row:
            return self._step_by_row(batch)
        objective = self.gradients(batch)
        self._update()
        return objective

    def _step_by_row(self, batch: Tensor) -> Tensor:
        """Compute with the relations of the batch only, and update only their rows."""
        table = self.model.relations
        distinct, position = torch.unique(batch[:, 1], return_inverse=True)
        present = table.detach()[distinct].requires_grad_()
        renumbered = torch.stack([batch[:, 0], position, batch[:, 2]], dim=-1)
        objective: Tensor = functional_call(
            _Call(self.model), {"model.relations": present}, (self.gradients, renumbered)
        )
        # The update skips a table without a gradient.
        table.grad = None
        self._update()
        if present.grad is not None:
            step_rows(self.optimizer, table, distinct, present.grad)
        return objective

    def gradients(self, batch: Tensor) -> Tensor:
        """Find the gradient of every table and return the objective."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.compiled:
            return self._by_kernels(batch)
        if self.without_autograd:
            return self._without_autograd(batch)
        return self._by_autograd(batch)

    def _by_autograd(self, batch: Tensor) -> Tensor:
        """For any maps and any regularizer."""
        f = Factors(self.model, *batch.unbind(-1))
        # Leaves, so that autograd makes no gradient as large as a table.
        f.head = self.tables.rows("head", f.heads).requires_grad_()
        f.tail = self.tables.rows("tail", f.tails).requires_grad_()
        objective, upstream = self._score(f)
        outputs = [f.mapped_head] if len(upstream) == 1 else [f.mapped_head, f.mapped_tail]
        terms = self._terms_of_autograd(f)
        if terms:
            total = torch.stack(terms).sum()
            objective = objective + total.detach()
            outputs = [*outputs, total]
            upstream = [*upstream, torch.ones_like(total)]
        torch.autograd.backward(outputs, upstream)
        self._add_rows(f, f.head.grad, f.tail.grad)
        if isinstance(self.tables, DenseGradients):
            self.tables.add_from_autograd()
        return objective

    def _terms_of_autograd(self, f: Factors) -> list[Tensor]:
        """The terms of the objective besides the cross entropy of entities."""
        terms = []
        if self.relation_weight:
            loss = cross_entropy(self.scored.relation_scores(f), f.relations)
            terms.append(self.relation_weight * loss)
        if self.regularizer.weight:
            terms.append(self.regularizer(f))
        return terms

    @torch.no_grad()
    def _by_kernels(self, batch: Tensor) -> Tensor:
        """For diagonal models of real or complex numbers on a CPU, by compiled kernels."""
        from dualkg.kernels.cpu_diagonal import (
            DiagonalTables,
            Squares,
            map_triples,
            triple_gradients,
        )

        model = self.model
        regularizer = self.regularizer
        assert isinstance(regularizer, PowerSum)
        weights = {}
        for name, weight in regularizer.term_weights.items():
            weights[name] = weight * regularizer.weight / len(batch)
        squares = Squares(**weights)
        rows = self.tables.of_batch(batch)
        tables = DiagonalTables(
            rows.heads,
            model.relations.detach(),
            rows.tails,
            is_complex=model.numbers_per_coordinate == 2,
        )
        predicts_relations = bool(self.relation_weight)
        mapped = map_triples(tables, rows.triples, squares, predict_relations=predicts_relations)
        f = Factors(model, *batch.unbind(-1))
        f.mapped_head = mapped.mapped_heads
        f.tail = mapped.tails
        objective, [to_mapped_heads] = self._score(f)
        objective = objective + mapped.penalties.sum()

        to_queries = None
        if mapped.relation_queries is not None:
            queries = mapped.relation_queries
            scores = queries @ tables.relations.T
            share = torch.full((len(batch),), self.relation_weight / len(batch))
            targets = Targets.one_each(f.relations, share)
            objective = objective + softmax_gradient_(scores, targets).sum()
            to_queries = scores @ tables.relations
        gradients = triple_gradients(tables, rows.triples, squares, to_mapped_heads, to_queries)
        model.relations.grad = gradients.relations
        if mapped.relation_queries is not None:
            model.relations.grad.addmm_(scores.T, queries)
        self._add_rows(f, gradients.heads, gradients.tails)
        return objective

    @torch.no_grad()
    def _without_autograd(self, batch: Tensor) -> Tensor:
        """For diagonal models, whose maps compute their own gradients.

        The gradient of ⟨hR, g⟩ is gRᵀ, and that of ⟨tRᵀ, g⟩ is gR.
        """
        model = self.model
        regularizer = self.regularizer
        assert isinstance(model, DiagonalModel)
        assert isinstance(regularizer, PowerSum)
        f = Factors(model, *batch.unbind(-1))
        f.head = self.tables.rows("head", f.heads)
        f.tail = self.tables.rows("tail", f.tails)
        objective, upstream = self._score(f)
        slopes: dict[str, Tensor] = {}
        if regularizer.weight:
            objective = objective + regularizer(f)
            slopes = regularizer.gradients(f)
        to_mapped_head = _sum(slopes.get("mapped_head"), upstream[0])
        of_heads = None if model.reciprocal else upstream[1]
        to_mapped_tail = _sum(slopes.get("mapped_tail"), of_heads)
        assert to_mapped_head is not None
        to_head = _sum(slopes.get("head"), model.map_tail(to_mapped_head, f.relations))
        to_relation = _sum(slopes.get("relation"), model.relation_query(f.head, to_mapped_head))
        to_tail = slopes.get("tail")
        if to_mapped_tail is not None:
            to_tail = _sum(to_tail, model.map_head(to_mapped_tail, f.relations))
            to_relation = _sum(to_relation, model.relation_query(to_mapped_tail, f.tail))
        assert to_relation is not None
        self._add_rows(f, to_head, to_tail)
        zeros = torch.zeros_like(model.relations)
        model.relations.grad = zeros.index_add_(0, f.relations, to_relation)
        return objective

    def _add_rows(self, f: Factors, to_head: Tensor | None, to_tail: Tensor | None) -> None:
        if to_head is not None:
            self.tables.add_rows("head", f.heads, to_head)
        if to_tail is not None:
            self.tables.add_rows("tail", f.tails, to_tail)


@final
class OneVsAllFusedStep(FusedStep):
    """The fused step of `OneVsAll`; with `bf16`, products are of bfloat16 copies of the tables."""

    tables: DenseGradients

    def __init__(
        self,
        model: Model,
        loss: BoundOneVsAll,
        regularizer: Regularizer,
        optimizer: AnyOptimizer,
        *,
        bf16: bool = False,
    ) -> None:
        super().__init__(model, regularizer, optimizer, relation_weight=loss.relation_weight)
        self.loss = loss
        self.tables = DenseGradients(model.tables, self.parameters, squared=self.squared, bf16=bf16)
        if isinstance(optimizer, OnePassAdagrad):
            copies = self.tables.copies
            optimizer.copies = {self.parameters[side]: copy for side, copy in copies.items()}

    def _prepare(self, batch: Tensor) -> None:
        """Nothing: dropout follows from the position of a triple."""

    def _update(self) -> None:
        self.tables.set_gradients()
        self.optimizer.step()

    def _score(self, f: Factors) -> tuple[Tensor, list[Tensor]]:
        tails = self._cross_entropy(f, "tail", accumulate=False)
        if self.model.reciprocal:
            if not self.tables.shared:
                self.tables.gradient("head").zero_()
            return tails.loss, [tails.mapped]
        heads = self._cross_entropy(f, "head", accumulate=self.tables.shared)
        return tails.loss + heads.loss, [tails.mapped, heads.mapped]

    def _cross_entropy(self, f: Factors, side: Side, *, accumulate: bool) -> LossAndGradient:
        """The cross entropy of predicting one side.

        A query of several triples is scored once, for its first triple.
        """
        loss = self.loss
        is_backward = side == "head"
        mapped = f.query(side).detach()
        answers = f.answers(side)
        scale = 1.0 if self.model.reciprocal else 0.5
        weights = target_weights(loss.entity_weights, answers, scale=scale, dtype=mapped.dtype)
        groups = None
        if loss.grouped_by_query and not is_backward:
            groups = QueryGroups.of(f.heads, f.relations)
        mask: Tensor | int = 1
        if loss.dropouts.mapped is not None:
            mask = loss.dropouts.mapped.mask(f, mapped, backward=is_backward, groups=groups)
        if groups is None:
            targets = Targets.one_each(answers, weights)
            result = self.tables.cross_entropy(side, mapped * mask, targets, accumulate=accumulate)
            return result._replace(mapped=result.mapped * mask)
        targets = Targets(answers, weights, groups.starts)
        queries = mapped[groups.first] * mask
        result = self.tables.cross_entropy(side, queries, targets, accumulate=accumulate)
        of_triples = torch.zeros_like(mapped)
        of_triples.index_copy_(0, groups.first, result.mapped * mask)
        return result._replace(mapped=of_triples)


@final
class SampledFusedStep(FusedStep):
    """The fused step of `SampledSoftmax` with shared negatives.

    Only the rows that a batch reads have a gradient, and only these are updated. A query of several
    triples is scored once.
    """

    tables: SparseGradients

    def __init__(
        self,
        model: Model,
        loss: BoundSampledSoftmax,
        regularizer: Regularizer,
        optimizer: AnyOptimizer,
    ) -> None:
        super().__init__(model, regularizer, optimizer, relation_weight=loss.relation_weight)
        self.loss = loss
        self.tables = SparseGradients(model.tables, self.parameters)
        self._scores = Workspace()

    def _update(self) -> None:
        self.optimizer.step()
        for table, ids, rows in self.tables.take():
            step_rows(self.optimizer, table, *sum_rows(ids, rows))

    def _prepare(self, batch: Tensor) -> None:
        self.draws = Draws.of(Factors(self.model, *batch.unbind(-1)), seed=self.loss.seed)

    def _score(self, f: Factors) -> tuple[Tensor, list[Tensor]]:
        tails = self._cross_entropy(f, "tail", self.draws)
        if self.model.reciprocal:
            return tails.loss, [tails.mapped]
        heads = self._cross_entropy(f, "head", self.draws.others())
        return tails.loss + heads.loss, [tails.mapped, heads.mapped]

    def _cross_entropy(self, f: Factors, side: Side, draws: Draws) -> LossAndGradient:
        """The sampled cross entropy of predicting one side."""
        loss = self.loss
        negatives = self.tables.own(self._sample(draws))
        candidates = self.tables.rows_of(side, negatives)
        answers = f.answers(side)
        vectors = (f.tail if side == "tail" else f.head).detach()
        mapped = f.query(side).detach()
        if self.squared:
            mapped = 2 * mapped
        scale = 1.0 if self.model.reciprocal else 0.5
        weights = target_weights(loss.entity_weights, answers, scale=scale, dtype=mapped.dtype)
        if loss.grouped_by_query and side == "tail":
            groups = QueryGroups.of(f.heads, f.relations)
            targets = Targets(answers, weights, groups.starts)
            queries = mapped[groups.first]
        else:
            groups = None
            targets = Targets.one_each(answers, weights)
            queries = mapped

        scores = self._scores.of(len(queries), len(candidates), queries)
        offsets = negatives.offsets.to(scores.dtype)
        positives = (mapped * vectors).sum(-1)
        if self.squared:
            offsets = offsets - candidates.square().sum(-1)
            positives = positives - vectors.square().sum(-1)
        torch.addmm(offsets, queries, candidates.T, out=scores)
        hits = negatives.hits(answers)
        value, to_positives = self.tables.sampled_softmax_(scores, positives, hits, targets)

        to_positives = to_positives[:, None]
        to_answers = to_positives * mapped
        to_candidates = scores.T @ queries
        upstream = to_positives * vectors
        to_queries = self.tables.shard.all_reduce(scores @ candidates)
        if groups is None:
            upstream += to_queries
        else:
            upstream.index_add_(0, groups.first, to_queries)
        if self.squared:
            # The gradients of −‖t‖².
            to_answers -= 2 * to_positives * vectors
            to_candidates -= 2 * scores.sum(0)[:, None] * candidates
            upstream *= 2
        self.tables.add_rows(side, answers, to_answers)
        self.tables.add_rows(side, negatives.ids, to_candidates)
        return LossAndGradient(value, upstream)

    def _sample(self, draws: Draws) -> Negatives:
        """Distinct negatives, and what is added to the score of each.

        This is −log of the expected count, and log k for a negative that was drawn k times.
        """
        drawn, log_counts = self.loss.sample(draws)
        negatives, positions, times = torch.unique(drawn, return_inverse=True, return_counts=True)
        of_distinct = log_counts.new_empty(len(negatives))
        of_distinct[positions] = log_counts
        return Negatives(negatives, times.double().log() - of_distinct)


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The sum of those that are not None."""
    if left is None:
        return right
    return left if right is None else left + right

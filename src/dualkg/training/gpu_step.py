"""The bfloat16 step on a GPU: 1-vs-all scores, gradients and Adagrad in Triton kernels, without
autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dualkg.kernels.gpu import diagonal, matrices
from dualkg.kernels.gpu.elementwise import RowGradients, adagrad_, adagrad_rows_
from dualkg.kernels.gpu.scores import sampled_softmax_gradient_, softmax_gradient_
from dualkg.kernels.hardware import matmul_precision
from dualkg.kernels.scores import Targets, softmax_
from dualkg.losses.negative_sampling import Draws
from dualkg.losses.queries import QueryGroups
from dualkg.losses.softmax import BoundOneVsAll, BoundSampledSoftmax, target_weights
from dualkg.models.base import Factors
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.sharded import Shard
from dualkg.regularizers import PowerSum
from dualkg.training.fused import Workspace, stream
from dualkg.training.optimizers import AnyOptimizer

ALIGNED = 8  # bfloat16 numbers in 16 bytes, to which tensor cores want rows aligned
TILE = 128  # rows of a table that a product takes at once


def _padded(rows: int, width: int) -> tuple[int, int]:
    """The shape of a table in products."""
    return -(-rows // TILE) * TILE, -(-width // ALIGNED) * ALIGNED


class Table:
    """A table, the sparse part of its gradient, and for each row the number of the step that last
    added to it.

    A table whose rows are all `scored` also has a bfloat16 copy for the products, and their dense
    gradient. Both are padded, so that products are aligned.
    """

    def __init__(self, parameter: nn.Parameter, sums: Tensor, *, scored: bool) -> None:
        self.parameter = parameter
        self.sums = sums
        (rows, width), device = parameter.shape, parameter.device
        self.rows = torch.zeros(rows, width, device=device)
        self.stamps = torch.zeros(rows, dtype=torch.int32, device=device)
        self.copy: Tensor | None = None
        self.product: Tensor | None = None
        if scored:
            self.copy, self.product = torch.zeros(
                2, *_padded(rows, width), dtype=torch.bfloat16, device=device
            )
            self.copy[:rows, :width] = parameter.detach()
        self.scores = Workspace()
        self.images = Workspace()
        self.weighted = Workspace()

    @property
    def row_gradients(self) -> RowGradients:
        return RowGradients(self.parameter.detach(), self.rows, self.stamps)

    def update(self, step: Bf16Step) -> None:
        adagrad_(
            self.row_gradients, self.sums, product=self.product, copy=self.copy, **step.adagrad
        )


class RelationOps(ABC):
    """The part of a step that depends on how relations map vectors."""

    num_blocks: int  # pieces in which the regularizer of a triple is written

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        self.step = step
        self.regularizer = regularizer
        self.relations = step.model.relations.detach()
        self.relation_sums = step.optimizer.state[step.model.relations]["sum"]

    @property
    def heads(self) -> Table:
        return self.step.sources["entities"]

    @property
    def tails(self) -> Table:
        return self.step.sources.get("tails", self.heads)

    def table(self, column: int) -> Tensor:
        return (self.heads if column == 0 else self.tails).parameter.detach()

    def term_weights(self, size: int) -> dict[str, float]:
        """The weights of a triple's terms in the regularizer of a batch."""
        return {
            name: weight * self.regularizer.weight / size
            for name, weight in self.regularizer.term_weights.items()
        }

    def arguments(self, batch: Tensor) -> dict[str, Any]:
        """What the kernels of all kinds of relations take for `add_gradients`."""
        tables = {
            "heads": self.heads.row_gradients,
            "tails": self.tails.row_gradients,
            "now": self.step.now,
        }
        return {**tables, "weights": self.term_weights(len(batch)), "power": self.regularizer.power}

    @abstractmethod
    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        """Write h R (given column 0) or t Rᵀ (given column 2) of the triples, or h R of the
        queries, into `images`.
        """

    @abstractmethod
    def add_gradients(
        self, batch: Tensor, *, upstream: list[Tensor], pairs: Tensor | None, **options: Any
    ) -> None:
        """Add the gradients of the vectors to the rows of their tables, by options of
        `diagonal.add_gradients_`.
        """

    @abstractmethod
    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        """Update the relations; the regularizer of whole relations is added to `penalty`."""


class DiagonalOps(RelationOps):
    """Relations that act on each coordinate alone."""

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        model = step.model
        assert isinstance(model, DiagonalModel)
        kind = type(model)
        self.num_blocks = diagonal.num_blocks(model.dim)
        self.algebra = diagonal.compile_algebra(
            model.numbers_per_coordinate, kind.times, kind.conjugate
        )
        self.relation_table = Table(model.relations, self.relation_sums, scored=False)

    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        rows = batch if queries is None else batch[queries.first]
        diagonal.map_rows_(
            images,
            rows,
            self.table(given),
            self.relations,
            algebra=self.algebra,
            columns=(given, 1),
        )

    def add_gradients(self, batch: Tensor, **options: Any) -> None:
        own: dict[str, Any] = {
            "relations": self.relation_table.row_gradients,
            "algebra": self.algebra,
        }
        diagonal.add_gradients_(batch, **self.arguments(batch), **own, **options)

    def predict(self, batch: Tensor, weight: float, losses: Tensor) -> Tensor:
        """Score all relations for each pair of entities, write the losses, and return the gradients
        of the pairs.
        """
        relations = self.relations.bfloat16()
        table = self.relation_table
        images = torch.empty(
            len(batch), relations.shape[1], dtype=relations.dtype, device=batch.device
        )
        diagonal.map_rows_(
            images, batch, self.table(0), self.table(2), algebra=self.algebra, columns=(0, 2)
        )
        scores = images @ relations.T
        shares = torch.full_like(losses, weight / len(batch))
        softmax_gradient_(scores, Targets.one_each(batch[:, 1], shares), scores.shape[1], losses)
        table.rows += torch.mm(scores.T, images, out_dtype=torch.float32)
        table.stamps.copy_(
            self.step.now.expand_as(table.stamps)
        )  # the gradient reaches every relation
        return torch.mm(scores, relations, out_dtype=torch.float32)

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self.relation_table.update(self.step)


class MatrixOps(RelationOps):
    """Relations that are matrices: triples are grouped by relation, so that each matrix is read and
    updated once.
    """

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        self.num_blocks = matrices.num_blocks(step.model.dim)
        self.mapped = (Workspace(), Workspace())
        self.to_mapped = (Workspace(), Workspace())
        self.bf16_output = Workspace()
        # t Rᵀ is needed to predict heads, and by some regularizers.
        needed = {"mapped_tail", "head_residual"} & regularizer.term_weights.keys()
        self.maps_tails = len(step.sides) == 2 or bool(needed)

    def _buffers(self, spaces: tuple[Workspace, ...], size: int) -> list[Tensor]:
        return [space.of(size, self.step.model.dim, self.relations) for space in spaces]

    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        """Map all triples: the regularizer and the matrices need them, not the queries alone."""
        if given == 0:
            self.groups = matrices.TriplesByRelation.of(
                batch[:, 1].contiguous(), self.step.model.num_relation_ids
            )
        bf16_output = (
            images if queries is None else self.bf16_output.of(len(batch), images.shape[1], images)
        )
        self._map(batch, given, bf16_output)
        if queries is not None:
            images.copy_(bf16_output[queries.first])

    def _map(self, batch: Tensor, given: int, bf16_output: Tensor | None) -> None:
        output = self._buffers(self.mapped, len(batch))[given // 2]
        options = self._options(batch, given, given == 2)
        matrices.map_rows_(self.table(given), output=output, bf16_output=bf16_output, **options)

    def _options(self, batch: Tensor, column: int, transposed: bool) -> dict[str, Any]:
        relations = {"matrices": self.relations, "groups": self.groups, "transposed": transposed}
        return {**relations, "ids": batch[:, column]}

    def add_gradients(
        self, batch: Tensor, *, upstream: list[Tensor], pairs: Tensor | None, **options: Any
    ) -> None:
        if self.maps_tails and len(upstream) == 1:
            self._map(batch, 2, None)
        mapped, to_mapped = (
            self._buffers(spaces, len(batch)) for spaces in (self.mapped, self.to_mapped)
        )
        buffers: dict[str, Any] = {
            "mapped": mapped,
            "to_mapped": to_mapped,
            "with_tails": self.maps_tails,
        }
        matrices.add_mapped_gradients_(
            batch, **self.arguments(batch), **buffers, upstream=upstream, **options
        )
        sides = [(0, self.heads), (2, self.tails)] if self.maps_tails else [(0, self.heads)]
        for given, table in sides:
            matrices.map_rows_(
                to_mapped[given // 2], rows=table.rows, **self._options(batch, given, given == 0)
            )

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self._pass_over_matrices(batch, penalty, self.relation_sums, step=True)

    def _pass_over_matrices(
        self, batch: Tensor, penalty: Tensor, sums: Tensor, *, step: bool
    ) -> None:
        options: dict[str, Any] = {
            "rate": self.step.rate,
            "eps": self.step.eps,
            "norms": penalty,
            "step": step,
        }
        options |= {"tables": (self.table(0), self.table(2)), "with_tails": self.maps_tails}
        options["of_relation"] = self.term_weights(len(batch)).get("relation", 0.0)
        options["to_mapped"] = self._buffers(self.to_mapped, len(batch))
        matrices.update_matrices_(self.relations, sums, self.groups, batch, **options)


class MixtureOps(MatrixOps):
    """Matrices that are mixtures of a core tensor: formed for each step, which updates the core and
    the mixing rows.
    """

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        parameters = (step.model.relations, step.model.get_parameter("core"))
        self.rows, self.core = (parameter.detach().flatten(1) for parameter in parameters)
        self.sums = [step.optimizer.state[parameter]["sum"].flatten(1) for parameter in parameters]
        self.relations, self.slopes = self.rows.new_zeros(2, len(self.rows), self.core.shape[1])
        self.never = torch.zeros(
            max(len(self.rows), len(self.core)), dtype=torch.int32, device=self.rows.device
        )

    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        if given == 0:
            with matmul_precision("tf32"):
                torch.mm(self.rows, self.core, out=self.relations)
        super().map(batch, given, images, queries)

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self.slopes.zero_()
        self._pass_over_matrices(batch, penalty, self.slopes, step=False)
        with matmul_precision("tf32"):
            of_rows = torch.mm(self.slopes, self.core.T)
            of_core = torch.mm(self.rows.T, self.slopes)
        for table, sums, slope in zip(
            (self.rows, self.core), self.sums, (of_rows, of_core), strict=True
        ):
            adagrad_(
                RowGradients(table, slope, self.never[: len(table)]),
                sums,
                product=slope,
                **self.step.adagrad,
            )


OPS: dict[str | None, type[RelationOps]] = {
    "rows": DiagonalOps,
    "matrices": MatrixOps,
    "mixtures": MixtureOps,
}
BoundSoftmax = BoundOneVsAll | BoundSampledSoftmax
Scored = tuple[
    list[int], Tensor, Tensor
]  # the sides that are predicted, their scores, and the images that gave them


class Bf16Step:
    """The step of `ReferenceStep` with products in bfloat16."""

    def __init__(
        self,
        model: BilinearModel,
        loss: BoundSoftmax,
        regularizer: PowerSum,
        optimizer: AnyOptimizer,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.eps = float(optimizer.param_groups[0]["eps"])
        self.capacity: int | None = (
            None  # for the queries of a batch; as many as it has triples if None
        )
        self.rate = torch.zeros((), device=model.device)
        self.now = torch.zeros((), dtype=torch.int32, device=model.device)
        self.adagrad: dict[str, Any] = {"now": self.now, "rate": self.rate, "eps": self.eps}
        # The given and the predicted column of a triple: tails are predicted, and heads without
        # reciprocal relations.
        self.sides = [(0, 2)] if model.reciprocal else [(0, 2), (2, 0)]
        self.tables = self._tables()
        self.sources = self.tables  # of the rows of heads and tails
        self.relation_ops = OPS[model.relation_kernel](self, regularizer)
        self.side_stream = stream(model.device, "side")

    def _tables(self) -> dict[str, Table]:
        scored = {id(self._table(predicted)) for _, predicted in self.sides}
        return {
            name: Table(table, self.optimizer.state[table]["sum"], scored=id(table) in scored)
            for name, table in self.model.named_parameters()
            if name in ("entities", "tails")
        }

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        self.set_learning_rate(learning_rate)
        return self.step(batch.contiguous())

    def set_learning_rate(self, learning_rate: float) -> None:
        self.rate.fill_(learning_rate)

    @torch.no_grad()
    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.now += 1
        queries = None
        rows = self._rows(batch)
        if self.loss.grouped_by_query:
            capacity = len(batch) if self.capacity is None else self.capacity
            queries = QueryGroups.of(batch[:, 0], batch[:, 1], capacity=capacity)
        num_queries = len(batch) if queries is None else len(queries.starts) - 1
        num_losses = len(self.sides) * num_queries
        num_penalties = self.relation_ops.num_blocks * len(batch)
        num_predicted = len(batch) if self.loss.relation_weight else 0
        parts = torch.zeros(
            num_losses + num_predicted + num_penalties + 1, device=batch.device
        )  # of the objective
        sizes = [num_losses, num_predicted, num_penalties, 1]
        of_entities, of_relations, penalties, rest = torch.split(parts, sizes)
        losses = of_entities.view(len(self.sides), -1)
        images = self._score(batch, rows, queries, losses)
        pairs = None
        if num_predicted:
            assert isinstance(self.relation_ops, DiagonalOps)
            pairs = self.relation_ops.predict(rows, self.loss.relation_weight, of_relations)
        written = {
            "penalties": penalties,
            "query_rows": None if queries is None else queries.rows_of_first,
        }
        self.relation_ops.add_gradients(rows, upstream=images, pairs=pairs, **written)
        self.relation_ops.update_relations(rows, rest[0])
        self._return_gradients(batch)
        torch.cuda.current_stream().wait_stream(self.side_stream)
        for table in self.tables.values():
            table.update(self)
        return parts.sum()

    def _rows(self, batch: Tensor) -> Tensor:
        """The triples by the rows of their heads and tails in `sources`."""
        return batch

    def _fetched(self, size: int) -> Tensor:
        """The rows of a table of a batch, in which each head and each tail has its own, `(2, batch,
        width)`.
        """
        if not self.sources or len(self.sources["entities"].rows) < 2 * size:
            rows = torch.zeros(2 * size, self.model.entities.shape[1], device=self.model.device)
            self.sources = {
                "entities": Table(nn.Parameter(rows, requires_grad=False), rows, scored=False)
            }
        return self.sources["entities"].parameter.detach()[: 2 * size].view(2, size, -1)

    def _return_gradients(self, batch: Tensor) -> None:
        """Add the gradients of the rows in `sources` to those of the tables."""

    def _score(
        self, batch: Tensor, rows: Tensor, queries: QueryGroups | None, losses: Tensor
    ) -> list[Tensor]:
        """Score all entities for the queries of each side, write their losses, and find the
        gradients of the images.
        """
        assert isinstance(self.loss, BoundOneVsAll)
        size = losses.shape[1]
        f = Factors(self.model, *batch.unbind(-1))
        upstream: list[Tensor] = [losses] * len(self.sides)
        for table in self.tables.values():
            sides = [
                side
                for side, (_, column) in enumerate(self.sides)
                if self._table(column) is table.parameter
            ]
            if table.copy is None or table.product is None:
                continue
            images = table.images.of(len(sides) * size, table.copy.shape[1], table.copy)
            scores = table.scores.of(len(sides) * size, len(table.copy), table.copy)
            masks = {}
            for number, part in zip(sides, images.view(len(sides), size, -1), strict=True):
                given, predicted = self.sides[number]
                self.relation_ops.map(rows, given, part, queries)
                if (dropout := self.loss.dropouts.mapped) is not None:
                    masks[number] = dropout.mask(f, part, backward=predicted == 0, groups=queries)
                    part *= masks[number]
            torch.mm(images, table.copy.T, out=scores)
            found, weighted = self._softmax(table, batch, queries, (sides, scores, images), losses)
            for number, part in zip(sides, found.view(len(sides), size, -1), strict=True):
                upstream[number] = part.mul_(masks[number]) if masks else part
            self.side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(
                self.side_stream
            ):  # only the update waits for the gradient of a table
                torch.mm(scores.T, weighted, out=table.product)
        return upstream

    def _softmax(
        self,
        table: Table,
        batch: Tensor,
        queries: QueryGroups | None,
        scored: Scored,
        losses: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Overwrite scores by their gradient. Returns that of the images, and what the scores are
        multiplied by to give the gradient of the table: the images themselves.
        """
        sides, scores, images = scored
        assert table.copy is not None
        for number, part in zip(sides, scores.view(len(sides), losses.shape[1], -1), strict=True):
            targets = self._targets(batch[:, self.sides[number][1]], queries)
            softmax_gradient_(part, targets, self.model.shape.num_entities, losses[number])
        return torch.mm(scores, table.copy, out_dtype=torch.float32), images

    def _targets(self, entities: Tensor, queries: QueryGroups | None) -> Targets:
        weights = target_weights(
            self.loss.entity_weights, entities, scale=1 / len(self.sides), dtype=torch.float32
        )
        return (
            Targets.one_each(entities, weights)
            if queries is None
            else Targets(entities, weights, queries.starts)
        )

    def _table(self, column: int) -> Tensor:
        return self.model.tail_table if column == 2 else self.model.head_table


def _numbered(batch: Tensor) -> Tensor:
    """The triples by the rows of a table of the batch."""
    numbers = torch.arange(len(batch), device=batch.device)
    return torch.stack([numbers, batch[:, 1], numbers + len(batch)], dim=1)


class SampledBf16Step(Bf16Step):
    """The step of sampled softmax with products in bfloat16, which reads only the rows of a batch
    and its negatives.

    Heads and tails are fetched into a table of the batch, and negatives into one for the products.
    All shapes are fixed. Gradients of one row are summed in the order of the batch, when that row
    is updated.
    """

    loss: BoundSampledSoftmax

    def _tables(self) -> dict[str, Table]:
        self.products, self.spaces = (
            Workspace(),
            [tuple(Workspace() for _ in range(3)) for _ in self.sides],
        )
        self.negatives: list[Tensor] = []  # of each side, padded by −1
        return {}

    def _rows(self, batch: Tensor) -> Tensor:
        for column, part in zip((0, 2), self._fetched(len(batch)), strict=True):
            torch.index_select(self._table(column).detach(), 0, batch[:, column], out=part)
        return _numbered(batch)

    def _score(
        self, batch: Tensor, rows: Tensor, queries: QueryGroups | None, losses: Tensor
    ) -> list[Tensor]:
        draws = Draws.of(Factors(self.model, *batch.unbind(-1)), seed=self.loss.seed)
        self.negatives = []
        drawn = (draws, draws.others())[: len(self.sides)]
        of_sides = enumerate(zip(drawn, self._gradients_of_negatives(), losses, strict=True))
        return [self._score_side(batch, rows, number, *of_side) for number, of_side in of_sides]

    def _gradients_of_negatives(self) -> Tensor:
        num, width = _padded(self.loss.loss.num_negatives, self.model.entities.shape[1])
        like = torch.empty((), dtype=torch.bfloat16, device=self.model.device)
        return self.products.of(len(self.sides) * num, width, like).view(-1, num, width)

    def _score_side(
        self,
        batch: Tensor,
        rows: Tensor,
        number: int,
        draws: Draws,
        products: Tensor,
        losses: Tensor,
    ) -> Tensor:
        """Score answers and negatives, write the losses, and find the gradients of mapped vectors
        and negatives.
        """
        (given, predicted), size, (num, padded) = self.sides[number], len(batch), products.shape
        width = self.model.entities.shape[1]
        answers = batch[:, predicted]
        shapes = ((size, padded), (num, padded), (size, num))
        spaces = zip(self.spaces[number], shapes, strict=True)
        images, vectors, scores = (space.of(*shape, products) for space, shape in spaces)
        negatives, log_counts = self.loss.sample(draws)
        self.negatives.append(nn.functional.pad(negatives, (0, num - len(negatives)), value=-1))
        vectors[: len(negatives), :width] = self._table(predicted).detach()[negatives]
        self.relation_ops.map(rows, given, images, None)
        torch.mm(images, vectors.T, out=scores)
        first = size if predicted == 2 else 0
        fetched = self.sources["entities"]
        mapped = images[:, :width].float()
        of_answers = fetched.parameter.detach()[first : first + size]
        sample = (negatives, log_counts.float().expand(len(negatives)).contiguous(), answers)
        weights = target_weights(
            self.loss.entity_weights, answers, scale=1 / len(self.sides), dtype=torch.float32
        )
        to_answers = sampled_softmax_gradient_(
            scores, (mapped * of_answers).sum(-1), sample, weights, losses
        )
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            torch.mm(scores.T, images, out=products)
        found = torch.mm(scores, vectors, out_dtype=torch.float32)
        found[:, :width].addcmul_(to_answers[:, None], of_answers)
        fetched.rows[first : first + size].addcmul_(to_answers[:, None], mapped)
        return found

    def _return_gradients(self, batch: Tensor) -> None:
        """Update the rows of the batch and of the negatives."""
        torch.cuda.current_stream().wait_stream(self.side_stream)
        gradients = self.sources["entities"].rows[: 2 * len(batch)].view(2, len(batch), -1)
        products = self._gradients_of_negatives()
        for table in self.model.entity_tables:
            columns = [column for column in (0, 2) if self._table(column) is table]
            sides = [
                number
                for number, (_, column) in enumerate(self.sides)
                if self._table(column) is table
            ]
            ids = [batch[:, column] for column in columns] + [
                self.negatives[number] for number in sides
            ]
            rows = gradients[columns[0] // 2 : columns[-1] // 2 + 1].flatten(0, 1)
            of_sides = (products[sides[0] : sides[-1] + 1] if sides else products[:0]).flatten(0, 1)
            sums = self.optimizer.state[table]["sum"]
            adagrad_rows_(
                table.detach(), sums, torch.cat(ids), rows, of_sides, rate=self.rate, eps=self.eps
            )
        gradients.zero_()


class ShardedBf16Step(Bf16Step):
    """`Bf16Step` on tables that are split by rows over processes, by the formulas of
    `ShardedTables`.

    All shapes are fixed, so that the step with its collectives can be one CUDA graph.
    """

    def __init__(self, *arguments: Any, shard: Shard) -> None:
        super().__init__(*arguments)
        self.shard = shard
        self.sources = {}

    def _rows(self, batch: Tensor) -> Tensor:
        fetched = self._fetched(len(batch))
        for column, part in zip((0, 2), fetched, strict=True):
            part.copy_(self.shard.own_rows(self._table(column).detach(), batch[:, column]))
        self.shard.all_reduce(fetched)
        return _numbered(batch)

    def _softmax(
        self,
        table: Table,
        batch: Tensor,
        queries: QueryGroups | None,
        scored: Scored,
        losses: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The softmax over the rows of this process is scaled by the share of the sum of all that
        these rows have.
        """
        sides, scores, images = scored
        assert table.copy is not None
        ours = (
            softmax_(scores, self._own_gradient_)
            if self.shard.size
            else losses.new_full((len(scores),), -torch.inf)
        )
        normalizers = self.shard.log_normalizers(ours[:, None])
        query = torch.arange(len(batch), device=batch.device) if queries is None else queries.rows
        weights = [
            self._targets(batch[:, self.sides[number][1]], queries).weights for number in sides
        ]
        totals = torch.zeros(len(sides), losses.shape[1], device=batch.device)
        for total, weight in zip(totals, weights, strict=True):
            total.index_add_(0, query, weight)
        shares = (totals.flatten() * (ours - normalizers).exp())[:, None]
        found = torch.mm(scores, table.copy, out_dtype=torch.float32).mul_(shares)
        self.shard.all_reduce(found)
        weighted = table.weighted.of(len(images), images.shape[1], images)
        torch.mul(images, shares, out=weighted)
        # The terms of the targets, which are rows of the batch.
        fetched = self.sources["entities"]
        width = self.model.entities.shape[1]
        size = losses.shape[1]
        for place, (number, weight) in enumerate(zip(sides, weights, strict=True)):
            first = len(batch) if self.sides[number][1] == 2 else 0
            rows = slice(first, first + len(batch))
            here = slice(place * size, (place + 1) * size)
            vectors = fetched.parameter[rows]
            image = images[here, :width][query].float()
            losses[number].index_add_(
                0, query, weight * (normalizers[here][query] - (image * vectors).sum(-1))
            )
            found[here, :width].index_add_(0, query, -weight[:, None] * vectors)
            fetched.rows[rows].sub_(weight[:, None] * image)
        return found, weighted

    def _own_gradient_(self, scores: Tensor, targets: Targets) -> Tensor:
        losses = torch.zeros(len(scores), device=scores.device)
        softmax_gradient_(scores, targets, self.shard.size, losses)
        return losses

    def _return_gradients(self, batch: Tensor) -> None:
        size = len(batch)
        gradients = self.sources["entities"].rows[: 2 * size]
        for column, part in zip((0, 2), gradients.view(2, size, -1), strict=True):
            table = self.tables.get("tails" if column == 2 else "entities", self.tables["entities"])
            positions = self.shard.positions(batch[:, column])
            self.shard.add_rows(table.rows, batch[:, column], part)
            if self.shard.size:
                table.stamps[positions.clamp(min=0)] = self.now.expand(size)
        gradients.zero_()

"""The bfloat16 step on a GPU: softmax scores, gradients and Adagrad in Triton kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dualkg.kernels.gpu import diagonal, matrices
from dualkg.kernels.gpu.elementwise import RowGradients, adagrad_, adagrad_rows_
from dualkg.kernels.gpu.scores import Sample, softmax_gradient_
from dualkg.kernels.hardware import matmul_precision
from dualkg.kernels.scores import Targets
from dualkg.losses.negative_sampling import Draws
from dualkg.losses.queries import QueryGroups
from dualkg.losses.softmax import BoundOneVsAll, BoundSampledSoftmax, target_weights
from dualkg.models.base import Factors
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.regularizers import PowerSum
from dualkg.tables.base import TABLE_NAMES
from dualkg.tables.gpu import (
    BatchRows,
    Bf16Table,
    Bf16Tables,
    SampledTables,
    ScoredQueries,
    padded_shape,
)
from dualkg.tables.gradients import Workspace
from dualkg.training.fused import stream
from dualkg.training.updates import AnyOptimizer

HEAD = 0  # columns of a triple
TAIL = 2


class RelationOps(ABC):
    """The part of a step that depends on how relations map vectors."""

    num_blocks: int  # pieces in which the regularizer of a triple is written

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        self.step = step
        self.regularizer = regularizer
        self.relations = step.model.relations.detach()
        self.relation_sums = step.optimizer.state[step.model.relations]["sum"]

    @property
    def heads(self) -> Bf16Table:
        return self.step.source(HEAD)

    @property
    def tails(self) -> Bf16Table:
        return self.step.source(TAIL)

    def table(self, column: int) -> Tensor:
        return self.step.source(column).parameter.detach()

    def term_weights(self, size: int) -> dict[str, float]:
        """The weights of a triple's terms in the regularizer of a batch."""
        return {
            name: weight * self.regularizer.weight / size
            for name, weight in self.regularizer.term_weights.items()
        }

    def arguments(self, batch: Tensor) -> dict[str, Any]:
        """What the kernels of all kinds of relations take for `add_gradients`."""
        return {
            "heads": self.heads.row_gradients,
            "tails": self.tails.row_gradients,
            "now": self.step.now,
            "weights": self.term_weights(len(batch)),
            "power": self.regularizer.power,
        }

    @abstractmethod
    def map(self, batch: Tensor, given: int, mapped: Tensor, queries: QueryGroups | None) -> None:
        """Write h R (given column 0) or t Rᵀ (given column 2) of the triples into `mapped`.

        With `queries`, write h R of these.
        """

    @abstractmethod
    def add_gradients(
        self, batch: Tensor, *, upstream: list[Tensor], pairs: Tensor | None, **options: Any
    ) -> None:
        """Add the gradients of the vectors to the rows of their tables.

        The options are those of `diagonal.add_gradients_`.
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
        self.relation_table = Bf16Table(model.relations, self.relation_sums, scored=False)

    def map(self, batch: Tensor, given: int, mapped: Tensor, queries: QueryGroups | None) -> None:
        triples = batch if queries is None else batch[queries.first]
        table = self.table(given)
        options: dict[str, Any] = {"algebra": self.algebra, "columns": (given, 1)}
        diagonal.map_rows_(mapped, triples, table, self.relations, **options)

    def add_gradients(self, batch: Tensor, **options: Any) -> None:
        diagonal.add_gradients_(
            batch,
            **self.arguments(batch),
            relations=self.relation_table.row_gradients,
            algebra=self.algebra,
            **options,
        )

    def predict(self, batch: Tensor, weight: float, losses: Tensor) -> Tensor:
        """Score all relations for each pair of entities, and write the losses.

        Returns the gradients of the pairs.
        """
        relations = self.relations.bfloat16()
        table = self.relation_table
        shape = (len(batch), relations.shape[1])
        mapped = torch.empty(shape, dtype=relations.dtype, device=batch.device)
        options: dict[str, Any] = {"algebra": self.algebra, "columns": (HEAD, TAIL)}
        diagonal.map_rows_(mapped, batch, self.table(HEAD), self.table(TAIL), **options)
        scores = mapped @ relations.T
        shares = torch.full_like(losses, weight / len(batch))
        targets = Targets.one_each(batch[:, 1], shares)
        softmax_gradient_(scores, targets, scores.shape[1], losses)
        table.rows += torch.mm(scores.T, mapped, out_dtype=torch.float32)
        # The gradient reaches every relation.
        table.stamps.copy_(self.step.now.expand_as(table.stamps))
        return torch.mm(scores, relations, out_dtype=torch.float32)

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self.relation_table.update(self.step.adagrad)


class MatrixOps(RelationOps):
    """Relations that are matrices, or mixtures of the matrices of a core tensor.

    Triples are grouped by relation, so that each matrix is read and updated once. Mixtures are
    formed for each step, which updates the core and the mixing rows.
    """

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        self.num_blocks = matrices.num_blocks(step.model.dim)
        self.mapped = (Workspace(), Workspace())
        self.to_mapped = (Workspace(), Workspace())
        self.bf16_output = Workspace()
        # t Rᵀ is needed to predict heads, and by some regularizers.
        regularized = {"mapped_tail", "head_residual"} & regularizer.term_weights.keys()
        self.maps_tails = len(step.sides) == 2 or bool(regularized)
        self.is_mixed = step.model.relation_kernel == "mixtures"
        if self.is_mixed:
            self._prepare_mixtures()

    def _prepare_mixtures(self) -> None:
        """Make space for the matrices of all relations and their gradients."""
        relations = self.step.model.relations
        core = self.step.model.get_parameter("core")
        self.rows = relations.detach().flatten(1)
        self.core = core.detach().flatten(1)
        self.row_sums = self.step.optimizer.state[relations]["sum"].flatten(1)
        self.core_sums = self.step.optimizer.state[core]["sum"].flatten(1)
        self.relations, self.slopes = self.rows.new_zeros(2, len(self.rows), self.core.shape[1])
        # Stamps of rows that no sparse gradient was ever added to.
        most_rows = max(len(self.rows), len(self.core))
        self.never = torch.zeros(most_rows, dtype=torch.int32, device=self.rows.device)

    def _buffers(self, spaces: tuple[Workspace, ...], size: int) -> list[Tensor]:
        return [space.of(size, self.step.model.dim, self.relations) for space in spaces]

    def map(self, batch: Tensor, given: int, mapped: Tensor, queries: QueryGroups | None) -> None:
        """Map all triples: the regularizer and the matrices need them, not the queries alone."""
        if given == HEAD and self.is_mixed:
            with matmul_precision("tf32"):
                torch.mm(self.rows, self.core, out=self.relations)
        if given == HEAD:
            self.groups = matrices.TriplesByRelation.of(
                batch[:, 1].contiguous(), self.step.model.num_relation_ids
            )
        if queries is None:
            self._map(batch, given, mapped)
            return
        of_triples = self.bf16_output.of(len(batch), mapped.shape[1], mapped)
        self._map(batch, given, of_triples)
        mapped.copy_(of_triples[queries.first])

    def _map(self, batch: Tensor, given: int, bf16_output: Tensor | None) -> None:
        output = self._buffers(self.mapped, len(batch))[given // 2]
        options = self._options(batch, given, given == TAIL)
        matrices.map_rows_(self.table(given), output=output, bf16_output=bf16_output, **options)

    def _options(self, batch: Tensor, column: int, transposed: bool) -> dict[str, Any]:
        return {
            "matrices": self.relations,
            "groups": self.groups,
            "transposed": transposed,
            "ids": batch[:, column],
        }

    def add_gradients(
        self, batch: Tensor, *, upstream: list[Tensor], pairs: Tensor | None, **options: Any
    ) -> None:
        if self.maps_tails and len(upstream) == 1:
            self._map(batch, TAIL, None)
        to_mapped = self._buffers(self.to_mapped, len(batch))
        matrices.add_mapped_gradients_(
            batch,
            **self.arguments(batch),
            mapped=self._buffers(self.mapped, len(batch)),
            to_mapped=to_mapped,
            with_tails=self.maps_tails,
            upstream=upstream,
            **options,
        )
        columns = (HEAD, TAIL) if self.maps_tails else (HEAD,)
        for given in columns:
            rows = self.step.source(given).rows
            mapping = self._options(batch, given, given == HEAD)
            matrices.map_rows_(to_mapped[given // 2], rows=rows, **mapping)

    def _pass_over_matrices(
        self, batch: Tensor, penalty: Tensor, sums: Tensor, *, step: bool
    ) -> None:
        matrices.update_matrices_(
            self.relations,
            sums,
            self.groups,
            batch,
            rate=self.step.rate,
            eps=self.step.eps,
            norms=penalty,
            step=step,
            tables=(self.table(HEAD), self.table(TAIL)),
            with_tails=self.maps_tails,
            of_relation=self.term_weights(len(batch)).get("relation", 0.0),
            to_mapped=self._buffers(self.to_mapped, len(batch)),
        )

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        if not self.is_mixed:
            self._pass_over_matrices(batch, penalty, self.relation_sums, step=True)
            return
        self.slopes.zero_()
        self._pass_over_matrices(batch, penalty, self.slopes, step=False)
        with matmul_precision("tf32"):
            of_rows = torch.mm(self.slopes, self.core.T)
            of_core = torch.mm(self.rows.T, self.slopes)
        self._update(self.rows, self.row_sums, of_rows)
        self._update(self.core, self.core_sums, of_core)

    def _update(self, table: Tensor, sums: Tensor, slope: Tensor) -> None:
        gradients = RowGradients(table, slope, self.never[: len(table)])
        adagrad_(gradients, sums, product=slope, **self.step.adagrad)


class Bf16Step(ABC):
    """The step of `ReferenceStep` with products in bfloat16."""

    # Whether triples of one query are neighbours in a batch, and are scored once.
    grouped_by_query = False
    relation_weight: float

    def __init__(
        self, model: BilinearModel, regularizer: PowerSum, optimizer: AnyOptimizer
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.eps = float(optimizer.param_groups[0]["eps"])
        # Space for the queries of a batch; None is as many as it has triples.
        self.capacity: int | None = None
        self.rate = torch.zeros((), device=model.device)
        self.now = torch.zeros((), dtype=torch.int32, device=model.device)
        self.adagrad: dict[str, Any] = {"now": self.now, "rate": self.rate, "eps": self.eps}
        # The given and the predicted column of a triple: tails are predicted, and without
        # reciprocal relations also heads.
        self.sides = [(HEAD, TAIL)] if model.reciprocal else [(HEAD, TAIL), (TAIL, HEAD)]
        self.width = model.entities.shape[1]
        self.side_stream = stream(model.device, "side")
        self._make_tables()
        kind = DiagonalOps if model.relation_kernel == "rows" else MatrixOps
        self.relation_ops: RelationOps = kind(self, regularizer)

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
        rows = self._fetch(batch)
        queries = None
        if self.grouped_by_query:
            capacity = len(batch) if self.capacity is None else self.capacity
            queries = QueryGroups.of(batch[:, 0], batch[:, 1], capacity=capacity)
        num_queries = len(batch) if queries is None else len(queries.starts) - 1
        num_losses = len(self.sides) * num_queries
        num_penalties = self.relation_ops.num_blocks * len(batch)
        num_predicted = len(batch) if self.relation_weight else 0
        sizes = [num_losses, num_predicted, num_penalties, 1]
        parts = torch.zeros(sum(sizes), device=batch.device)
        of_entities, of_relations, penalties, rest = torch.split(parts, sizes)
        losses = of_entities.view(len(self.sides), -1)
        upstream = self._score(batch, rows, queries, losses)
        pairs = None
        if num_predicted:
            assert isinstance(self.relation_ops, DiagonalOps)
            pairs = self.relation_ops.predict(rows, self.relation_weight, of_relations)
        query_rows = None if queries is None else queries.rows_of_first
        self.relation_ops.add_gradients(
            rows, upstream=upstream, pairs=pairs, penalties=penalties, query_rows=query_rows
        )
        self.relation_ops.update_relations(rows, rest[0])
        self._update_tables(batch)
        return parts.sum()

    # -- to be implemented ----------------------------------------------------

    @abstractmethod
    def _make_tables(self) -> None:
        """Make the tables of the step."""

    @abstractmethod
    def source(self, column: int) -> Bf16Table:
        """The table from which rows of heads (column 0) or of tails (column 2) are read."""

    @abstractmethod
    def _fetch(self, batch: Tensor) -> Tensor:
        """The triples by the rows of their heads and tails in `source`."""

    @abstractmethod
    def _score(
        self, batch: Tensor, rows: Tensor, queries: QueryGroups | None, losses: Tensor
    ) -> list[Tensor]:
        """Score candidates for the queries of each side, and write their losses.

        Returns the gradients of the mapped vectors of each side.
        """

    @abstractmethod
    def _update_tables(self, batch: Tensor) -> None:
        """Update the entity tables."""

    # -- shared ---------------------------------------------------------------

    def _entity_table(self, column: int) -> Tensor:
        return self.model.tail_table if column == TAIL else self.model.head_table

    def _target_weights(self, entities: Tensor, entity_weights: Tensor | None) -> Tensor:
        scale = 1 / len(self.sides)
        return target_weights(entity_weights, entities, scale=scale, dtype=torch.float32)

    def _wait_for_side_stream(self) -> None:
        torch.cuda.current_stream().wait_stream(self.side_stream)


class OneVsAllBf16Step(Bf16Step):
    """The step of 1-vs-all with products in bfloat16."""

    def __init__(
        self,
        model: BilinearModel,
        loss: BoundOneVsAll,
        regularizer: PowerSum,
        optimizer: AnyOptimizer,
    ) -> None:
        self.loss = loss
        self.grouped_by_query = loss.grouped_by_query
        self.relation_weight = loss.relation_weight
        super().__init__(model, regularizer, optimizer)

    def _make_tables(self) -> None:
        parameters = dict(zip(TABLE_NAMES, self.model.entity_tables, strict=False))
        predicted = {id(self._entity_table(column)) for _, column in self.sides}
        self.tables = Bf16Tables(
            self.model.tables.shard,
            parameters,
            sums={name: self.optimizer.state[table]["sum"] for name, table in parameters.items()},
            scored={name for name, table in parameters.items() if id(table) in predicted},
        )

    def source(self, column: int) -> Bf16Table:
        return self.tables.source(column)

    def _fetch(self, batch: Tensor) -> Tensor:
        return self.tables.fetch(batch)

    def _score(
        self, batch: Tensor, rows: Tensor, queries: QueryGroups | None, losses: Tensor
    ) -> list[Tensor]:
        upstream: list[Tensor] = [losses] * len(self.sides)
        for table in self.tables.tables.values():
            sides = [
                number
                for number, (_, column) in enumerate(self.sides)
                if self.tables.by_column(column) is table
            ]
            if table.copy is not None:
                gradients = self._score_table(table, sides, batch, rows, queries, losses)
                for number, gradient in zip(sides, gradients, strict=True):
                    upstream[number] = gradient
        return upstream

    def _score_table(
        self,
        table: Bf16Table,
        sides: list[int],
        batch: Tensor,
        rows: Tensor,
        queries: QueryGroups | None,
        losses: Tensor,
    ) -> list[Tensor]:
        """Score a table for the queries of the sides that it answers, at once."""
        assert table.copy is not None
        assert table.product is not None
        size = losses.shape[1]
        mapped = table.mapped.of(len(sides) * size, table.copy.shape[1], table.copy)
        scores = table.scores.of(len(sides) * size, len(table.copy), table.copy)
        masks = self._map_queries(mapped.view(len(sides), size, -1), sides, batch, rows, queries)
        torch.mm(mapped, table.copy.T, out=scores)
        columns = [self.sides[number][1] for number in sides]
        if queries is None:
            query = torch.arange(len(batch), device=batch.device)
        else:
            query = queries.rows
        scored = ScoredQueries(
            scores,
            mapped,
            columns,
            targets=[self._targets(batch[:, column], queries) for column in columns],
            losses=[losses[number] for number in sides],
            query=query,
        )
        upstream, weighted = self.tables.softmax(table, scored)
        gradients = list(upstream.view(len(sides), size, -1))
        for gradient, mask in zip(gradients, masks, strict=True):
            if mask is not None:
                gradient.mul_(mask)
        # Only the update waits for the gradient of a table.
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            torch.mm(scores.T, weighted, out=table.product)
        return gradients

    def _map_queries(
        self,
        mapped: Tensor,
        sides: list[int],
        batch: Tensor,
        rows: Tensor,
        queries: QueryGroups | None,
    ) -> list[Tensor | None]:
        """Write the mapped vectors of each side, and return their dropout masks."""
        dropout = self.loss.dropouts.mapped
        f = Factors(self.model, *batch.unbind(-1))
        masks: list[Tensor | None] = []
        for number, part in zip(sides, mapped, strict=True):
            given, predicted = self.sides[number]
            self.relation_ops.map(rows, given, part, queries)
            mask = None
            if dropout is not None:
                mask = dropout.mask(f, part, backward=predicted == HEAD, groups=queries)
                part *= mask
            masks.append(mask)
        return masks

    def _targets(self, entities: Tensor, queries: QueryGroups | None) -> Targets:
        weights = self._target_weights(entities, self.loss.entity_weights)
        if queries is None:
            return Targets.one_each(entities, weights)
        return Targets(entities, weights, queries.starts)

    def _update_tables(self, batch: Tensor) -> None:
        self.tables.return_gradients(batch, self.now)
        self._wait_for_side_stream()
        self.tables.update(self.adagrad)


class SampledBf16Step(Bf16Step):
    """The step of sampled softmax with products in bfloat16.

    It reads only the rows of a batch and its negatives. Heads and tails are fetched into a table of
    the batch, and the negatives of this process into one for the products. All shapes are fixed.
    Gradients of one row are summed in the order of the batch, when that row is updated.
    """

    def __init__(
        self,
        model: BilinearModel,
        loss: BoundSampledSoftmax,
        regularizer: PowerSum,
        optimizer: AnyOptimizer,
    ) -> None:
        self.loss = loss
        self.relation_weight = loss.relation_weight
        super().__init__(model, regularizer, optimizer)

    def _make_tables(self) -> None:
        self.tables = SampledTables(self.model.tables)
        self.batch_rows = BatchRows(self.width, self.model.device)
        # The most negatives of a batch that this process scores.
        self.most_negatives = self.loss.loss.most_negatives(
            self.model.tables.num_rows, self.loss.num_entities
        )
        self.products = Workspace()
        self.spaces = [(Workspace(), Workspace(), Workspace()) for _ in self.sides]
        self.negatives: list[Tensor] = []  # of each side, padded by −1

    def source(self, column: int) -> Bf16Table:
        return self.batch_rows.table

    def _fetch(self, batch: Tensor) -> Tensor:
        fetched = self.batch_rows.of(len(batch))
        for column, rows in zip((HEAD, TAIL), fetched, strict=True):
            self.tables.fetch(self._entity_table(column).detach(), batch[:, column], rows)
        self.tables.shard.all_reduce(fetched)
        return self.batch_rows.numbered(batch)

    def _score(
        self, batch: Tensor, rows: Tensor, queries: QueryGroups | None, losses: Tensor
    ) -> list[Tensor]:
        draws = Draws.of(Factors(self.model, *batch.unbind(-1)), seed=self.loss.seed)
        self.negatives = []
        products = self._gradients_of_negatives()
        upstream = [self._score_side(batch, rows, 0, draws, products[0], losses[0])]
        if len(self.sides) == 2:
            others = draws.others()
            upstream.append(self._score_side(batch, rows, 1, others, products[1], losses[1]))
        return upstream

    def _gradients_of_negatives(self) -> Tensor:
        """Space for the gradients of the negatives of each side, `(sides, num, width)`."""
        num, width = padded_shape(self.most_negatives, self.width)
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
        """Score answers and negatives of one side, and write the losses.

        The gradients of negatives are written into `products`. Returns those of mapped vectors.
        """
        given, predicted = self.sides[number]
        num, padded_width = products.shape
        size = len(batch)
        width = self.width
        answers = batch[:, predicted]
        mapped_space, vector_space, score_space = self.spaces[number]
        mapped = mapped_space.of(size, padded_width, products)
        vectors = vector_space.of(num, padded_width, products)
        scores = score_space.of(size, num, products)
        drawn, log_counts = self.loss.sample(draws)
        own = self.tables.own(drawn, log_counts, capacity=self.most_negatives)
        positions = own.positions
        self.negatives.append(nn.functional.pad(positions, (0, num - len(positions)), value=-1))
        table = self._entity_table(predicted).detach()
        vectors[: len(positions), :width] = self.tables.rows_of(table, own)
        self.relation_ops.map(rows, given, mapped, None)
        torch.mm(mapped, vectors.T, out=scores)
        first = size if predicted == TAIL else 0
        fetched = self.batch_rows.table
        mapped_rows = mapped[:, :width].float()
        of_answers = fetched.parameter.detach()[first : first + size]
        to_answers = self.tables.softmax_(
            scores,
            (mapped_rows * of_answers).sum(-1),
            Sample(own.ids, own.log_counts, answers),
            self._target_weights(answers, self.loss.entity_weights),
            losses,
        )
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            torch.mm(scores.T, mapped, out=products)
        upstream = torch.mm(scores, vectors, out_dtype=torch.float32)
        self.tables.shard.all_reduce(upstream)
        upstream[:, :width].addcmul_(to_answers[:, None], of_answers)
        fetched.rows[first : first + size].addcmul_(to_answers[:, None], mapped_rows)
        return upstream

    def _update_tables(self, batch: Tensor) -> None:
        """Update the rows of the batch and of the negatives."""
        self._wait_for_side_stream()
        gradients = self.batch_rows.gradients(len(batch))
        products = self._gradients_of_negatives()
        for table in self.model.entity_tables:
            columns = [column for column in (HEAD, TAIL) if self._entity_table(column) is table]
            sides = [
                number
                for number, (_, column) in enumerate(self.sides)
                if self._entity_table(column) is table
            ]
            ids = [self.tables.positions(batch[:, column]) for column in columns]
            ids += [self.negatives[number] for number in sides]
            rows = gradients[columns[0] // 2 : columns[-1] // 2 + 1].flatten(0, 1)
            of_negatives = products[sides[0] : sides[-1] + 1] if sides else products[:0]
            adagrad_rows_(
                table.detach(),
                self.optimizer.state[table]["sum"],
                torch.cat(ids),
                rows,
                of_negatives.flatten(0, 1),
                rate=self.rate,
                eps=self.eps,
            )
        gradients.zero_()

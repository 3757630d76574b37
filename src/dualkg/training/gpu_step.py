"""The step itself: score, take the gradient back, update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dualkg.kernels.hardware import matmul_precision
from dualkg.kernels.scores import Targets
from dualkg.losses.queries import QueryGroups
from dualkg.losses.softmax import BoundOneVsAll
from dualkg.models.base import Factors
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.regularizers import PowerSum
from dualkg.training.fused import Workspace
from dualkg.training.optimizers import AnyOptimizer

if TYPE_CHECKING:
    from dualkg.kernels.gpu.diagonal import RowGradients


@cache
def stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a device for a purpose."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


ALIGNED = 8  # bfloat16 numbers in the 16 bytes that matrix units want rows to start at
TILE = 128  # rows of a table that a product takes at once


@dataclass
class Table:
    """A table, the rows of its gradient that a batch touches, and the stamps that say which those are.

    Where all its rows are `scored`, also a bfloat16 copy for the products and the gradient that comes of them. Both
    are padded, so that products are aligned.
    """

    parameter: nn.Parameter
    sums: Tensor
    scored: bool

    def __post_init__(self) -> None:
        rows, width = self.parameter.shape
        device = self.parameter.device
        self.rows = torch.zeros(rows, width, device=device)
        self.stamps = torch.zeros(rows, dtype=torch.int32, device=device)
        self.copy: Tensor | None = None
        self.product: Tensor | None = None
        if self.scored:
            padded = (-(-rows // TILE) * TILE, -(-width // ALIGNED) * ALIGNED)
            self.copy, self.product = torch.zeros(2, *padded, dtype=torch.bfloat16, device=device)
            self.copy[:rows, :width] = self.parameter.detach()
        self.scores, self.images = Workspace(), Workspace()

    @property
    def row_sums(self) -> RowGradients:
        from dualkg.kernels.gpu.diagonal import RowGradients

        return RowGradients(self.parameter.detach(), self.rows, self.stamps)

    def update(self, now: Tensor, rate: Tensor, eps: float) -> None:
        """Step the table."""
        from dualkg.kernels.gpu.elementwise import adagrad_

        adagrad_(
            self.parameter.detach(),
            self.sums,
            product=self.product,
            rows=self.rows,
            stamps=self.stamps,
            now=now,
            copy=self.copy,
            rate=rate,
            eps=eps,
        )


class Scored(NamedTuple):
    """What images got from being scored: of heads and, where those are asked for, of tails; of what predicts relations.

    The first is of `queries`, where they were scored in place of triples.
    """

    images: list[Tensor]
    pairs: Tensor | None
    queries: QueryGroups | None

    @property
    def places(self) -> Tensor | None:
        return None if self.queries is None else self.queries.rows_of_first


class Vectors(ABC):
    """What a step does with the vectors of a batch and with the relations."""

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        self.step = step
        self.regularizer = regularizer
        self.relations = step.model.relations.detach()
        self.relation_sums = step.optimizer.state[step.model.relations]["sum"]

    @property
    def heads(self) -> Table:
        return self.step.tables["entities"]

    @property
    def tails(self) -> Table:
        return self.step.tables.get("tails", self.heads)

    def table(self, column: int) -> Tensor:
        return (self.heads if column == 0 else self.tails).parameter.detach()

    def shares(self, size: int) -> Mapping[str, float]:
        """The regularizer's shares of one triple, its weight and the mean over the batch in them."""
        return {name: share * self.regularizer.weight / size for name, share in self.regularizer.term_weights.items()}

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """In how many pieces the regularizer of a triple comes."""

    @abstractmethod
    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        """Write h R (given 0) or t Rᵀ (given 2) of the triples, or h R of the queries, into `images`."""

    def pair(self, batch: Tensor, images: Tensor) -> None:
        """Write what relations are predicted by into `images`, of relations that are rows."""
        raise TypeError("relations that are matrices are not predicted by kernels")

    @abstractmethod
    def add_gradients(self, batch: Tensor, scored: Scored, penalties: Tensor) -> None:
        """Add the gradients of the vectors to the rows of their tables, and write the regularizer in pieces."""

    @abstractmethod
    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        """Step the relations; what the regularizer takes of whole relations is added to `penalty`."""

    def add_to_all_relations(self, gradient: Tensor) -> None:
        """What predicting relations asks of each of them, where they are rows."""
        raise TypeError("relations that are matrices are not predicted by kernels")


class Coordinates(Vectors):
    """Relations that act on each coordinate alone."""

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        from dualkg.kernels.gpu.diagonal import Algebra

        super().__init__(step, regularizer)
        model = step.model
        assert isinstance(model, DiagonalModel)
        kind = type(model)
        self.algebra = Algebra.of(model.numbers_per_coordinate, kind.times, kind.conjugate)
        self.table_of_relations = Table(model.relations, self.relation_sums, scored=False)

    @property
    def num_blocks(self) -> int:
        from dualkg.kernels.gpu.diagonal import num_blocks

        return num_blocks(self.step.model.dim)

    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        from dualkg.kernels.gpu.diagonal import map_rows_

        asked = batch if queries is None else batch[queries.first]
        map_rows_(images, asked, self.table(given), self.relations, algebra=self.algebra, column=given)

    def pair(self, batch: Tensor, images: Tensor) -> None:
        from dualkg.kernels.gpu.diagonal import map_pairs_

        map_pairs_(images, batch, self.table(0), self.table(2), algebra=self.algebra)

    def add_gradients(self, batch: Tensor, scored: Scored, penalties: Tensor) -> None:
        from dualkg.kernels.gpu.diagonal import add_gradients_

        add_gradients_(
            batch,
            heads=self.heads.row_sums,
            relations=self.table_of_relations.row_sums,
            tails=self.tails.row_sums,
            now=self.step.now,
            upstream=scored.images,
            weights=self.shares(len(batch)),
            power=self.regularizer.power,
            algebra=self.algebra,
            penalties=penalties,
            query_rows=scored.places,
            pairs=scored.pairs,
        )

    def add_to_all_relations(self, gradient: Tensor) -> None:
        self.table_of_relations.rows += gradient
        self.table_of_relations.stamps.copy_(self.step.now.expand_as(self.table_of_relations.stamps))

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self.table_of_relations.update(self.step.now, self.step.rate, self.step.eps)


class Matrices(Vectors):
    """Relations that are matrices: triples are grouped by relation, and what a matrix needs is done in one pass."""

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        self.mapped, self.to_mapped = (Workspace(), Workspace()), (Workspace(), Workspace())
        self.bf16_output = Workspace()
        # t Rᵀ is needed where heads are asked for, and where the regularizer looks at it.
        self.maps_tails = len(step.sides) == 2 or bool(
            {"mapped_tail", "head_residual"} & regularizer.term_weights.keys()
        )

    @property
    def num_blocks(self) -> int:
        from dualkg.kernels.gpu.matrices import num_blocks

        return num_blocks(self.step.model.dim)

    def _buffers(self, spaces: tuple[Workspace, Workspace], size: int) -> tuple[Tensor, Tensor]:
        one, other = (space.of(size, self.step.model.dim, self.relations) for space in spaces)
        return one, other

    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        """All are mapped, for the regularizer and the matrices ask for all."""
        from dualkg.kernels.gpu.matrices import TriplesByRelation

        if given == 0:
            self.groups = TriplesByRelation.of(batch[:, 1].contiguous(), self.step.model.num_relation_ids)
        if queries is None:
            self._map(batch, given, images)
            return
        bf16_output = self.bf16_output.of(len(batch), images.shape[1], images)
        self._map(batch, given, bf16_output)
        images.copy_(bf16_output[queries.first])

    def _map(self, batch: Tensor, given: int, bf16_output: Tensor | None) -> None:
        from dualkg.kernels.gpu.matrices import map_rows_

        map_rows_(
            self.table(given),
            self.relations,
            self.groups,
            transposed=given == 2,
            ids=batch[:, given],
            output=self._buffers(self.mapped, len(batch))[given // 2],
            bf16_output=bf16_output,
        )

    def add_gradients(self, batch: Tensor, scored: Scored, penalties: Tensor) -> None:
        from dualkg.kernels.gpu.matrices import add_mapped_gradients_, map_rows_

        if self.maps_tails and len(scored.images) == 1:
            self._map(batch, 2, None)
        to_mapped = self._buffers(self.to_mapped, len(batch))
        add_mapped_gradients_(
            batch,
            heads=self.heads.row_sums,
            tails=self.tails.row_sums,
            mapped=self._buffers(self.mapped, len(batch)),
            to_mapped=to_mapped,
            now=self.step.now,
            upstream=scored.images,
            weights=self.shares(len(batch)),
            power=self.regularizer.power,
            with_tails=self.maps_tails,
            penalties=penalties,
            query_rows=scored.places,
        )
        sides = [(0, self.heads), (2, self.tails)] if self.maps_tails else [(0, self.heads)]
        for given, table in sides:
            map_rows_(
                to_mapped[given // 2],
                self.relations,
                self.groups,
                transposed=given == 0,
                ids=batch[:, given],
                rows=table.rows,
            )

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self._pass_over_matrices(batch, penalty, self.relation_sums, step=True)

    def _pass_over_matrices(self, batch: Tensor, penalty: Tensor, sums: Tensor, *, step: bool) -> None:
        from dualkg.kernels.gpu.matrices import update_matrices_

        update_matrices_(
            self.relations,
            sums,
            self.groups,
            batch,
            tables=(self.heads.parameter.detach(), self.tails.parameter.detach()),
            to_mapped=self._buffers(self.to_mapped, len(batch)),
            with_tails=self.maps_tails,
            of_relation=self.shares(len(batch)).get("relation", 0.0),
            norms=penalty,
            rate=self.step.rate,
            eps=self.step.eps,
            step=step,
        )


class Mixtures(Matrices):
    """Matrices that are mixtures of a core: formed for a step, which moves the core and the rows that mix it."""

    def __init__(self, step: Bf16Step, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        model = step.model
        parameters = (model.relations, model.get_parameter("core"))
        self.rows, self.core = (parameter.detach().flatten(1) for parameter in parameters)
        self.sums = [step.optimizer.state[parameter]["sum"].flatten(1) for parameter in parameters]
        self.relations, self.slopes = self.rows.new_zeros(2, len(self.rows), self.core.shape[1])
        self.never = torch.zeros(max(len(self.rows), len(self.core)), dtype=torch.int32, device=model.device)

    def map(self, batch: Tensor, given: int, images: Tensor, queries: QueryGroups | None) -> None:
        if given == 0:
            with matmul_precision("tf32"):
                torch.mm(self.rows, self.core, out=self.relations)
        super().map(batch, given, images, queries)

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        from dualkg.kernels.gpu.elementwise import adagrad_

        self.slopes.zero_()
        self._pass_over_matrices(batch, penalty, self.slopes, step=False)
        with matmul_precision("tf32"):
            of_rows, of_core = torch.mm(self.slopes, self.core.T), torch.mm(self.rows.T, self.slopes)
        for table, sums, slope in zip((self.rows, self.core), self.sums, (of_rows, of_core), strict=True):
            adagrad_(
                table,
                sums,
                product=slope,
                rows=slope,
                stamps=self.never[: len(table)],
                now=self.step.now,
                copy=None,
                rate=self.step.rate,
                eps=self.step.eps,
            )


KERNELS: dict[str | None, type[Vectors]] = {"rows": Coordinates, "matrices": Matrices, "mixtures": Mixtures}


class Bf16Step:
    """Descend on loss plus regularizer for one batch; what `ReferenceStep` does, but for rounding in the products."""

    def __init__(
        self, model: BilinearModel, loss: BoundOneVsAll, regularizer: PowerSum, optimizer: AnyOptimizer
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.eps = float(optimizer.param_groups[0]["eps"])
        if loss.grouped_by_query and not model.reciprocal:
            raise ValueError("queries are grouped for tail prediction, and this model predicts heads too")
        self.room: int | None = None  # for queries of a batch; as many as it has triples if it is not known
        self.rate = torch.zeros((), device=model.device)
        self.now = torch.zeros((), dtype=torch.int32, device=model.device)
        # The side that asks for tails, and without reciprocal relations the one that asks for heads: the column of a
        # triple that is given, and the one that is asked for.
        self.sides = [(0, 2)] if model.reciprocal else [(0, 2), (2, 0)]
        scored = {id(self._asked(asked)) for _, asked in self.sides}
        self.tables = {
            name: Table(table, optimizer.state[table]["sum"], id(table) in scored)
            for name, table in model.named_parameters()
            if name in ("entities", "tails")
        }
        self.vectors = KERNELS[model.relation_kernel](self, regularizer)
        self.beside = stream(model.device, "beside")

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        self.rate.fill_(learning_rate)
        return self.step(batch.contiguous())

    @torch.no_grad()
    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.now += 1
        queries = self._queries(batch)
        num_queries = len(batch) if queries is None else len(queries.starts) - 1
        num_losses, num_penalties = len(self.sides) * num_queries, self.vectors.num_blocks * len(batch)
        num_predicted = len(batch) if self.loss.relation_weight else 0
        parts = torch.zeros(num_losses + num_predicted + num_penalties + 1, device=batch.device)  # of the objective
        sizes = [num_losses, num_predicted, num_penalties, 1]
        of_entities, of_relations, penalties, rest = torch.split(parts, sizes)
        losses = of_entities.view(len(self.sides), -1)
        images = self._score(batch, queries, losses)
        pairs = self._predict_relations(batch, of_relations) if num_predicted else None
        self.vectors.add_gradients(batch, Scored(images, pairs, queries), penalties)
        self.vectors.update_relations(batch, rest[0])
        torch.cuda.current_stream().wait_stream(self.beside)
        for table in self.tables.values():
            table.update(self.now, self.rate, self.eps)
        return parts.sum()

    def _queries(self, batch: Tensor) -> QueryGroups | None:
        """Those of the batch, where some of them may have several answers."""
        if not self.loss.grouped_by_query:
            return None
        return QueryGroups.of(batch[:, 0], batch[:, 1], capacity=len(batch) if self.room is None else self.room)

    def _score(self, batch: Tensor, queries: QueryGroups | None, losses: Tensor) -> list[Tensor]:
        """Score all entities for the queries of each side, write their losses, and find the gradients of the images.

        The gradient of a table goes on beside what follows: nobody waits for it but the update.
        """
        from dualkg.kernels.gpu.scores import softmax_gradient_

        size, f = losses.shape[1], Factors(self.model, *batch.unbind(-1))
        upstream: list[Tensor] = [losses] * len(self.sides)
        for table in self.tables.values():
            sides = [number for number, (_, asked) in enumerate(self.sides) if self._asked(asked) is table.parameter]
            if table.copy is None or table.product is None:
                continue
            images = table.images.of(len(sides) * size, table.copy.shape[1], table.copy)
            scores = table.scores.of(len(sides) * size, len(table.copy), table.copy)
            masks = {}
            for number, part in zip(sides, images.view(len(sides), size, -1), strict=True):
                given, asked = self.sides[number]
                self.vectors.map(batch, given, part, queries)
                if (dropout := self.loss.dropouts.mapped) is not None:
                    masks[number] = dropout.mask(f, part, backward=asked == 0, groups=queries)
                    part *= masks[number]
            torch.mm(images, table.copy.T, out=scores)
            for number, part in zip(sides, scores.view(len(sides), size, -1), strict=True):
                targets = self._targets(batch[:, self.sides[number][1]], queries)
                softmax_gradient_(part, targets, self.model.shape.num_entities, losses[number])
            found = torch.mm(scores, table.copy, out_dtype=torch.float32).view(len(sides), size, -1)
            for number, part in zip(sides, found, strict=True):
                upstream[number] = part.mul_(masks[number]) if masks else part
            self.beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.beside):
                torch.mm(scores.T, images, out=table.product)
        return upstream

    def _targets(self, entities: Tensor, queries: QueryGroups | None) -> Targets:
        shares = self._share(entities)
        return Targets.one_each(entities, shares) if queries is None else Targets(entities, shares, queries.starts)

    def _asked(self, column: int) -> Tensor:
        return self.model.tail_table if column == 2 else self.model.head_table

    def _share(self, targets: Tensor) -> Tensor:
        """What each query counts in the mean."""
        size = len(self.sides)
        if self.loss.entity_weights is None:
            return torch.full(targets.shape, 1 / (len(targets) * size), device=targets.device)
        chosen = self.loss.entity_weights[targets]
        return chosen / (chosen.sum() * size)

    def _predict_relations(self, batch: Tensor, losses: Tensor) -> Tensor:
        """Score all relations for each pair of entities; what the pairs got of it is returned."""
        from dualkg.kernels.gpu.scores import softmax_gradient_

        relations = self.vectors.relations.bfloat16()
        images = torch.empty(len(batch), relations.shape[1], dtype=relations.dtype, device=batch.device)
        self.vectors.pair(batch, images)
        scores = images @ relations.T
        shares = torch.full_like(losses, self.loss.relation_weight / len(batch))
        softmax_gradient_(scores, Targets.one_each(batch[:, 1], shares), scores.shape[1], losses)
        self.vectors.add_to_all_relations(torch.mm(scores.T, images, out_dtype=torch.float32))
        return torch.mm(scores, relations, out_dtype=torch.float32)

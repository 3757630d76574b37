"""One step of training on a GPU: products in bfloat16, everything between them in kernels, nothing by autograd.

The tables stay float32. What has the size of the entities, the tables' own gradient and their update, is done in one
pass each; what has the size of the batch, in two kernels around the products. Nothing asks the host, so that the
whole step can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dualkg.losses import CrossEntropy, cross_entropy
from dualkg.models import MODELS
from dualkg.models.base import BilinearModel, Model
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.rescal import RESCAL
from dualkg.regularizers import REGULARIZERS, PowerSum, Regularizer
from dualkg.training.fused import LeafFactors
from dualkg.training.workspace import Workspace

if TYPE_CHECKING:
    from dualkg.kernels.gpu.coordinates import RowSums

ALIGNED = 8  # bfloat16 numbers in the 16 bytes that matrix units want rows to start at
TILE = 128  # rows of a table that a product takes at once


@dataclass
class Table:
    """A table with what a step keeps beside it; `copy` and `product` only where all its rows are scored."""

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
    def row_sums(self) -> RowSums:
        from dualkg.kernels.gpu.coordinates import RowSums

        return RowSums(self.parameter.detach(), self.rows, self.stamps)

    def update(self, now: Tensor, rate: Tensor, eps: float) -> None:
        from dualkg.kernels.gpu.update import adagrad_

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


class HalfStep:
    """Descend on loss plus regularizer for one batch; what `PlainStep` does, but for rounding in the products."""

    def __init__(
        self, model: BilinearModel, loss: CrossEntropy, regularizer: PowerSum, optimizer: torch.optim.Adagrad
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.eps = float(optimizer.param_groups[0]["eps"])
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
        kind = Coordinates if isinstance(model, DiagonalModel) else Matrices
        self.vectors = kind(self, regularizer)
        self.beside = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    @staticmethod
    def applies_to(
        model: Model, loss: CrossEntropy, regularizer: Regularizer, optimizer: torch.optim.Optimizer
    ) -> bool:
        """Whether model and regularizer are ours, so that kernels know what they do, and can be stepped by rows."""
        ours = type(model) in MODELS.values() and type(regularizer) in REGULARIZERS.values()
        mapped = isinstance(model, DiagonalModel) or (isinstance(model, RESCAL) and not loss.relation_weight)
        return ours and mapped and isinstance(optimizer, torch.optim.Adagrad)

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        self.rate.fill_(learning_rate)
        return self.step(batch.contiguous())

    @torch.no_grad()
    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.now += 1
        num_losses, num_penalties = len(self.sides) * len(batch), self.vectors.num_blocks * len(batch)
        parts = torch.zeros(num_losses + num_penalties + 1, device=batch.device)  # of the objective
        upstream = self._score(batch, parts[:num_losses].view(len(self.sides), -1))
        self.vectors.add_gradients(batch, upstream, parts[num_losses:-1])
        if self.loss.relation_weight:
            parts[-1] += self._predict_relations(batch)
        self.vectors.update_relations(batch, parts[-1])
        torch.cuda.current_stream().wait_stream(self.beside)
        for table in self.tables.values():
            table.update(self.now, self.rate, self.eps)
        return parts.sum()

    def _score(self, batch: Tensor, losses: Tensor) -> list[Tensor]:
        """Score all entities for the queries of each side, write their losses, and find the gradients of the images.

        The gradient of a table goes on beside what follows: nobody waits for it but the update.
        """
        from dualkg.kernels.gpu.softmax import softmax_gradient_

        size = len(batch)
        upstream: list[Tensor] = [losses] * len(self.sides)
        for table in self.tables.values():
            sides = [number for number, (_, asked) in enumerate(self.sides) if self._asked(asked) is table.parameter]
            if table.copy is None or table.product is None:
                continue
            images = table.images.of(len(sides) * size, table.copy.shape[1], table.copy)
            scores = table.scores.of(len(sides) * size, len(table.copy), table.copy)
            for number, part in zip(sides, images.view(len(sides), size, -1), strict=True):
                self.vectors.map(batch, self.sides[number][0], part)
            torch.mm(images, table.copy.T, out=scores)
            for number, part in zip(sides, scores.view(len(sides), size, -1), strict=True):
                targets = batch[:, self.sides[number][1]]
                softmax_gradient_(part, targets, self._share(targets), self.model.shape.num_entities, losses[number])
            found = torch.mm(scores, table.copy, out_dtype=torch.float32).view(len(sides), size, -1)
            for number, part in zip(sides, found, strict=True):
                upstream[number] = part
            self.beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.beside):
                torch.mm(scores.T, images, out=table.product)
        return upstream

    def _asked(self, column: int) -> Tensor:
        return self.model.tail_table if column == 2 else self.model.head_table

    def _share(self, targets: Tensor) -> Tensor:
        """What each query counts in the mean."""
        size = len(self.sides)
        if self.loss.entity_weights is None:
            return torch.full(targets.shape, 1 / (len(targets) * size), device=targets.device)
        chosen = self.loss.entity_weights[targets]
        return chosen / (chosen.sum() * size)

    def _predict_relations(self, batch: Tensor) -> Tensor:
        """Relation prediction by autograd: its scores are few."""
        relations = self.model.relations
        with torch.enable_grad(), torch.autocast("cuda", torch.bfloat16):
            f = LeafFactors(self.model, *batch.unbind(-1))
            loss = self.loss.relation_weight * cross_entropy(self.model.relation_scores(f).float(), f.relations)
            found = torch.autograd.grad(loss, [f.head, f.tail, relations])
        heads, tails = self.tables["entities"], self.tables.get("tails", self.tables["entities"])
        heads.rows.index_add_(0, f.heads, found[0])
        tails.rows.index_add_(0, f.tails, found[1])
        self.vectors.add_to_all_relations(found[2])
        return loss.detach()


class Vectors(ABC):
    """What a step does with the vectors of a batch and with the relations."""

    def __init__(self, step: HalfStep, regularizer: PowerSum) -> None:
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
        return {name: share * self.regularizer.weight / size for name, share in self.regularizer.shares.items()}

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """In how many pieces the regularizer of a triple comes."""

    @abstractmethod
    def map(self, batch: Tensor, given: int, images: Tensor) -> None:
        """Write h R (given 0) or t Rᵀ (given 2) into `images`."""

    @abstractmethod
    def add_gradients(self, batch: Tensor, upstream: list[Tensor], penalties: Tensor) -> None:
        """Add the gradients of the vectors to the rows of their tables, and write the regularizer in pieces.

        `upstream` is what the images got from being scored, of heads and, where those are asked for, of tails.
        """

    @abstractmethod
    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        """Step the relations; what the regularizer takes of whole relations is added to `penalty`."""

    def add_to_all_relations(self, gradient: Tensor) -> None:
        raise NotImplementedError


class Coordinates(Vectors):
    """Relations that act on each coordinate alone."""

    def __init__(self, step: HalfStep, regularizer: PowerSum) -> None:
        from dualkg.kernels.gpu.coordinates import Algebra

        super().__init__(step, regularizer)
        model = step.model
        assert isinstance(model, DiagonalModel)
        kind = type(model)
        self.algebra = Algebra.of(model.numbers_per_coordinate, kind.times, kind.conjugate)
        self.table_of_relations = Table(model.relations, self.relation_sums, scored=False)

    @property
    def num_blocks(self) -> int:
        from dualkg.kernels.gpu.coordinates import num_blocks

        return num_blocks(self.step.model.dim)

    def map(self, batch: Tensor, given: int, images: Tensor) -> None:
        from dualkg.kernels.gpu.coordinates import map_rows_

        map_rows_(images, batch, self.table(given), self.relations, algebra=self.algebra, column=given)

    def add_gradients(self, batch: Tensor, upstream: list[Tensor], penalties: Tensor) -> None:
        from dualkg.kernels.gpu.coordinates import add_gradients_

        add_gradients_(
            batch,
            heads=self.heads.row_sums,
            relations=self.table_of_relations.row_sums,
            tails=self.tails.row_sums,
            now=self.step.now,
            upstream=upstream,
            shares=self.shares(len(batch)),
            power=self.regularizer.power,
            algebra=self.algebra,
            penalties=penalties,
        )

    def add_to_all_relations(self, gradient: Tensor) -> None:
        self.table_of_relations.rows += gradient
        self.table_of_relations.stamps.copy_(self.step.now.expand_as(self.table_of_relations.stamps))

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        self.table_of_relations.update(self.step.now, self.step.rate, self.step.eps)


class Matrices(Vectors):
    """Relations that are matrices: triples are grouped by relation, and what a matrix needs is done in one pass."""

    def __init__(self, step: HalfStep, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        self.mapped, self.to_mapped = (Workspace(), Workspace()), (Workspace(), Workspace())
        # t Rᵀ is needed where heads are asked for, and where the regularizer looks at it.
        self.maps_tails = len(step.sides) == 2 or bool({"mapped_tail", "head_gap"} & regularizer.shares.keys())

    @property
    def num_blocks(self) -> int:
        from dualkg.kernels.gpu.matrices import num_blocks

        return num_blocks(self.step.model.dim)

    def _buffers(self, spaces: tuple[Workspace, Workspace], size: int) -> tuple[Tensor, Tensor]:
        one, other = (space.of(size, self.step.model.dim, self.relations) for space in spaces)
        return one, other

    def map(self, batch: Tensor, given: int, images: Tensor) -> None:
        from dualkg.kernels.gpu.grouped import Groups

        if given == 0:
            self.groups = Groups.of(batch[:, 1].contiguous(), self.step.model.num_relation_ids)
        self._map(batch, given, images)

    def _map(self, batch: Tensor, given: int, half_images: Tensor | None) -> None:
        from dualkg.kernels.gpu.grouped import map_rows_

        map_rows_(
            self.table(given),
            self.relations,
            self.groups,
            transposed=given == 2,
            ids=batch[:, given],
            images=self._buffers(self.mapped, len(batch))[given // 2],
            half_images=half_images,
        )

    def add_gradients(self, batch: Tensor, upstream: list[Tensor], penalties: Tensor) -> None:
        from dualkg.kernels.gpu.grouped import map_rows_
        from dualkg.kernels.gpu.matrices import add_image_gradients_

        if self.maps_tails and len(upstream) == 1:
            self._map(batch, 2, None)
        to_mapped = self._buffers(self.to_mapped, len(batch))
        add_image_gradients_(
            batch,
            heads=self.heads.row_sums,
            tails=self.tails.row_sums,
            mapped=self._buffers(self.mapped, len(batch)),
            to_mapped=to_mapped,
            now=self.step.now,
            upstream=upstream,
            shares=self.shares(len(batch)),
            power=self.regularizer.power,
            with_tails=self.maps_tails,
            penalties=penalties,
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
        from dualkg.kernels.gpu.matrices import update_matrices_

        update_matrices_(
            self.relations,
            self.relation_sums,
            self.groups,
            batch,
            tables=(self.heads.parameter.detach(), self.tails.parameter.detach()),
            to_mapped=self._buffers(self.to_mapped, len(batch)),
            with_tails=self.maps_tails,
            of_relation=self.shares(len(batch)).get("relation", 0.0),
            norms=penalty,
            rate=self.step.rate,
            eps=self.step.eps,
        )

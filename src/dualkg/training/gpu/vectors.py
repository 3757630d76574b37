"""What a step on a GPU does with the vectors of a batch and with the relations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dualkg.kernels.precision import products_in
from dualkg.losses.questions import Questions
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.tucker import TuckER
from dualkg.regularizers import PowerSum
from dualkg.training.gpu.table import Table
from dualkg.training.workspace import Workspace

if TYPE_CHECKING:
    from dualkg.training.gpu.step import HalfStep


class Scored(NamedTuple):
    """What images got from being scored: of heads and, where those are asked for, of tails; of what predicts relations.

    The first is of `questions`, where they were scored in place of triples.
    """

    images: list[Tensor]
    pairs: Tensor | None
    questions: Questions | None

    @property
    def places(self) -> Tensor | None:
        return None if self.questions is None else self.questions.rows_of_first


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
    def map(self, batch: Tensor, given: int, images: Tensor, questions: Questions | None) -> None:
        """Write h R (given 0) or t Rᵀ (given 2) of the triples, or h R of the questions, into `images`."""

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

    def map(self, batch: Tensor, given: int, images: Tensor, questions: Questions | None) -> None:
        from dualkg.kernels.gpu.coordinates import map_rows_

        asked = batch if questions is None else batch[questions.first]
        map_rows_(images, asked, self.table(given), self.relations, algebra=self.algebra, column=given)

    def pair(self, batch: Tensor, images: Tensor) -> None:
        from dualkg.kernels.gpu.coordinates import pair_rows_

        pair_rows_(images, batch, self.table(0), self.table(2), algebra=self.algebra)

    def add_gradients(self, batch: Tensor, scored: Scored, penalties: Tensor) -> None:
        from dualkg.kernels.gpu.coordinates import add_gradients_

        add_gradients_(
            batch,
            heads=self.heads.row_sums,
            relations=self.table_of_relations.row_sums,
            tails=self.tails.row_sums,
            now=self.step.now,
            upstream=scored.images,
            shares=self.shares(len(batch)),
            power=self.regularizer.power,
            algebra=self.algebra,
            penalties=penalties,
            places=scored.places,
            pairs=scored.pairs,
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
        self.half_images = Workspace()
        # t Rᵀ is needed where heads are asked for, and where the regularizer looks at it.
        self.maps_tails = len(step.sides) == 2 or bool({"mapped_tail", "head_gap"} & regularizer.shares.keys())

    @property
    def num_blocks(self) -> int:
        from dualkg.kernels.gpu.matrices import num_blocks

        return num_blocks(self.step.model.dim)

    def _buffers(self, spaces: tuple[Workspace, Workspace], size: int) -> tuple[Tensor, Tensor]:
        one, other = (space.of(size, self.step.model.dim, self.relations) for space in spaces)
        return one, other

    def map(self, batch: Tensor, given: int, images: Tensor, questions: Questions | None) -> None:
        """All are mapped, for the regularizer and the matrices ask for all."""
        from dualkg.kernels.gpu.grouped import Groups

        if given == 0:
            self.groups = Groups.of(batch[:, 1].contiguous(), self.step.model.num_relation_ids)
        if questions is None:
            self._map(batch, given, images)
            return
        half_images = self.half_images.of(len(batch), images.shape[1], images)
        self._map(batch, given, half_images)
        images.copy_(half_images[questions.first])

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

    def add_gradients(self, batch: Tensor, scored: Scored, penalties: Tensor) -> None:
        from dualkg.kernels.gpu.grouped import map_rows_
        from dualkg.kernels.gpu.matrices import add_image_gradients_

        if self.maps_tails and len(scored.images) == 1:
            self._map(batch, 2, None)
        to_mapped = self._buffers(self.to_mapped, len(batch))
        add_image_gradients_(
            batch,
            heads=self.heads.row_sums,
            tails=self.tails.row_sums,
            mapped=self._buffers(self.mapped, len(batch)),
            to_mapped=to_mapped,
            now=self.step.now,
            upstream=scored.images,
            shares=self.shares(len(batch)),
            power=self.regularizer.power,
            with_tails=self.maps_tails,
            penalties=penalties,
            places=scored.places,
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

    def __init__(self, step: HalfStep, regularizer: PowerSum) -> None:
        super().__init__(step, regularizer)
        model = step.model
        assert isinstance(model, TuckER)
        parameters = (model.relations, model.core)
        self.rows, self.core = (parameter.detach().flatten(1) for parameter in parameters)
        self.sums = [step.optimizer.state[parameter]["sum"].flatten(1) for parameter in parameters]
        self.relations, self.slopes = self.rows.new_zeros(2, len(self.rows), self.core.shape[1])
        self.never = torch.zeros(max(len(self.rows), len(self.core)), dtype=torch.int32, device=model.device)

    def map(self, batch: Tensor, given: int, images: Tensor, questions: Questions | None) -> None:
        if given == 0:
            with products_in("tf32"):
                torch.mm(self.rows, self.core, out=self.relations)
        super().map(batch, given, images, questions)

    def update_relations(self, batch: Tensor, penalty: Tensor) -> None:
        from dualkg.kernels.gpu.update import adagrad_

        self.slopes.zero_()
        self._pass_over_matrices(batch, penalty, self.slopes, step=False)
        with products_in("tf32"):
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


def vectors_of(step: HalfStep, regularizer: PowerSum) -> Vectors:
    """By what the relations of the step's model are."""
    if isinstance(step.model, DiagonalModel):
        return Coordinates(step, regularizer)
    return (Mixtures if isinstance(step.model, TuckER) else Matrices)(step, regularizer)

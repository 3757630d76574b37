"""The interface of entity tables: what models, losses, ranking and training steps ask of them.

A model has one or two tables with a row for every entity. An `EntityTables` object decides where
these rows are: all in this process, or some of them, with the rest in other processes. Whatever
depends on that is a method here, so that a new kind of table is one file in this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dualkg.kernels.scores import RankTargets
from dualkg.tables.gradients import GradientTables
from dualkg.tables.lookup import Side, lookup

if TYPE_CHECKING:
    from dualkg.tables.bf16 import Bf16Tables, SampledTables
    from dualkg.tables.row_gradients import RowGradientTables

Draw = Callable[[Tensor], Tensor]  # fills an array with random numbers and returns it
FillRows = Callable[[Tensor, Tensor], Tensor]  # fills `(n, width)` with the numbers of n entities
CountBetter = Callable[[Tensor, Tensor, RankTargets], Tensor]

BLOCK_ROWS = 2**14  # rows of a table that are drawn at a time
# Numbers of a table up to which they are drawn in order, in seconds. Larger tables are drawn row by
# row, whatever the number of processes.
LARGEST_IN_ORDER = 2**28


class EntityScores(ABC):
    """Scores of a batch for all entities, of which this process may have some.

    `values` is `(batch, num_rows)`, a column for every row that this process has.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @abstractmethod
    def all_entities(self) -> Tensor:
        """The scores of all entities in the order of their ids, `(batch, num_entities)`."""

    @abstractmethod
    def cross_entropy(
        self, answers: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
    ) -> Tensor:
        """Mean of −log softmax(scores)[answer], weighted by the weight of the answer."""

    @abstractmethod
    def logsumexp(self) -> Tensor:
        """log Σ exp(score) over all entities, `(batch,)`."""

    @abstractmethod
    def mean(self) -> Tensor:
        """The mean score over all entities, `(batch,)`."""

    @abstractmethod
    def weighted_sum(self, rows: Tensor, entities: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · score of some rows of the batch and entities, `(n,)` each; a scalar."""


class EntityTables(ABC):
    """Where the rows of a model's entity tables are, and how they are read, scored and updated."""

    def __init__(
        self,
        num_entities: int,
        *,
        device: torch.device | None = None,
        initialize: bool = True,
        block_rows: int = BLOCK_ROWS,
        largest_in_order: int = LARGEST_IN_ORDER,
    ) -> None:
        """With a `device`, tables are made there, block by block, and never as a whole on the host.

        Without `initialize`, they are zeros: random numbers take seconds to draw, and saved weights
        replace them. `block_rows` are the rows of a block. Tables of more numbers than
        `largest_in_order` are drawn by row.
        """
        self.num_entities = num_entities
        self.largest_in_order = largest_in_order
        self.block_rows = block_rows
        self.device = device
        self.initialize = initialize
        self._sparse_gradients = False

    # -- which rows -----------------------------------------------------------

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows that this process has."""

    @property
    @abstractmethod
    def has_all_entities(self) -> bool:
        """Whether row i of a table of this process is entity i."""

    @property
    def num_holders(self) -> int:
        """The number of processes over which the rows are divided."""
        return 1

    @property
    def columns_at_once(self) -> int:
        """How many entities of a query are scored at once in a ranking."""
        return self.num_entities

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can contain the steps of these tables."""
        return True

    # -- making tables --------------------------------------------------------

    @abstractmethod
    def draw(self, width: int, draw: Draw) -> Tensor:
        """Random numbers for the rows of this process, `(num_rows, width)`.

        They are those of the same rows of a whole table, whatever the number of processes.
        """

    def draws_by_row(self, width: int) -> bool:
        """Whether a table of this width is so large that each row is drawn by itself."""
        return self.num_entities * width > self.largest_in_order

    def draw_rows(self, width: int, fill: FillRows) -> Tensor:
        """Random numbers for the rows of this process, each of which depends on its entity alone.

        They are drawn in parallel, on the device of the tables.
        """
        table = torch.zeros(self.num_rows, width, device=self.device)
        if self.initialize:
            for start in range(0, self.num_rows, self.block_rows):
                block = table[start : start + self.block_rows]
                ids = self.entities_of(slice(start, start + len(block)))
                fill(block, ids.to(table.device))
        return table

    def entities_of(self, rows: slice) -> Tensor:
        """The entities of some rows of this process."""
        return torch.arange(rows.start, rows.stop)

    @abstractmethod
    def take(self, table: Tensor) -> Tensor:
        """The rows of this process of a whole table `(num_entities, width)`."""

    def _drawn_blocks(self, width: int, draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
        """Entity ids and their numbers, in blocks of a whole table."""
        rows = self.num_entities
        size = self.block_rows
        for start in range(0, max(rows - size, 0) + 1, size):
            # The last block has the rest: PyTorch draws normal numbers by sixteen, and the end of
            # a table again.
            is_last = rows - start < 2 * size
            ids = torch.arange(start, rows if is_last else start + size)
            yield ids, draw(torch.empty(len(ids), width))

    # -- reading rows ---------------------------------------------------------

    @property
    @abstractmethod
    def fetches_rows(self) -> bool:
        """Whether reading rows needs other processes, so that rows are worth keeping."""

    @abstractmethod
    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of any entities by id, `(…, width)`, with their gradient."""

    def own_rows(self, table: Tensor, positions: Tensor) -> Tensor:
        """Rows of this process by their position in its table, `(…, width)`."""
        return lookup(table, positions, sparse=self._sparse_gradients)

    @abstractmethod
    def positions(self, ids: Tensor) -> Tensor:
        """The row of each entity in the table of this process, −1 for rows of other processes."""

    @contextmanager
    def sparse_gradients(self, enabled: bool = True) -> Iterator[None]:
        """Let the gradients of rows that are read in the block have only these rows."""
        before = self._sparse_gradients
        self._sparse_gradients = enabled
        try:
            yield
        finally:
            self._sparse_gradients = before

    # -- scores ---------------------------------------------------------------

    @abstractmethod
    def scores(self, values: Tensor) -> EntityScores:
        """Scores of the entities of this process as a part of the scores of all."""

    @abstractmethod
    def count_better(
        self,
        scores_of: Callable[[slice | None], Tensor],
        known: Tensor,
        targets: RankTargets,
        *,
        count: CountBetter,
    ) -> Tensor:
        """How many candidates score higher than each target, and equal to it: `(num_targets, 2)`.

        `scores_of` returns the scores of some rows of this process, or of all of them. `count` is
        the fastest function for scores of all entities. A row with a score that is not finite has
        counts −1.
        """

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum of a value over all processes, whose gradient every process has."""

    @abstractmethod
    def logsumexp(self, positives: Tensor, scores: Tensor) -> Tensor:
        """log(exp(positive) + Σ exp(score)) of each query, `(batch,)`.

        The scores are those that this process has computed, `(batch, n)`, with any number of
        columns in each process. Every process has the positive scores, `(batch,)`.
        """

    @abstractmethod
    def join(
        self,
        values: Tensor,
        vectors: Sequence[tuple[Tensor, Tensor]],
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> Tensor:
        """Connect values that were computed for the rows of this process to the rest of the batch.

        `vectors` are pairs of a vector of the batch, which every process has, and the leaf that
        `values` were computed from. Gradients of these vectors and of the parameters that every
        process has are summed over all processes.
        """

    # -- training steps -------------------------------------------------------

    @abstractmethod
    def gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter], *, squared: bool, bf16: bool
    ) -> GradientTables:
        """The tables of the fused step."""

    @abstractmethod
    def row_gradient_tables(self, parameters: Mapping[Side, nn.Parameter]) -> RowGradientTables:
        """The tables of the fused step of a sampled softmax."""

    @abstractmethod
    def bf16_tables(
        self, parameters: Mapping[str, nn.Parameter], *, sums: Mapping[str, Tensor], **options: Any
    ) -> Bf16Tables:
        """The tables of the bfloat16 step on a GPU."""

    @abstractmethod
    def sampled_tables(self) -> SampledTables:
        """Where the bfloat16 step of a sampled softmax on a GPU reads and scores rows."""

    @abstractmethod
    def synchronize(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all processes the same bits of the tensors that each of them has whole."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Tensor:
        """Replace values by their sum over all processes."""

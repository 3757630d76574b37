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

from dualkg.kernels.scores import RankTargets, count_in_columns
from dualkg.tables.gradients import GradientTables
from dualkg.tables.lookup import Side, lookup

if TYPE_CHECKING:
    from dualkg.tables.bf16 import Bf16Tables, SampledTables
    from dualkg.tables.row_gradients import RowGradientTables

Draw = Callable[[Tensor], Tensor]  # fills an array with random numbers and returns it
FillRows = Callable[[Tensor, Tensor], Tensor]  # fills `(n, width)` with the numbers of n entities
CountBetter = Callable[[Tensor, Tensor, RankTargets], Tensor]
Step = Callable[[Tensor, float], Tensor]
BuildStep = Callable[[Any, Any], Step]  # the step of a model and an optimizer

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

    @abstractmethod
    def of(self, entities: Tensor) -> Tensor:
        """The score of one entity for each row of the batch, `(batch,)`."""

    @abstractmethod
    def without(self, rows: Tensor, entities: Tensor, *, but: Tensor) -> EntityScores:
        """Scores that are −∞ for some rows of the batch and entities, `(n,)` each.

        The entities `but`, one for each row of the batch, keep theirs.
        """


class EntityTables(ABC):
    """Where the rows of a model's entity tables are, and how they are read, scored and updated.

    Methods that are not abstract are those of a process which has all rows.
    """

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

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all have computed."""
        return True

    # -- which device ---------------------------------------------------------

    @property
    def place(self) -> str:
        """Where the tables are, if not on the device that computes, for people."""
        return ""

    @property
    def copies_rows(self) -> bool:
        """Whether a step is taken on copies of the rows that its batch reads."""
        return False

    def moved(self, table: Tensor, move: Draw) -> Tensor:
        """A table after a function that moves or converts the parameters of a model."""
        return move(table)

    def block(self, table: Tensor, rows: slice, device: torch.device) -> Tensor:
        """Some rows of this process on the device that computes, without a gradient."""
        return table.detach()[rows]

    def bytes_of_copies(self, num_rows: int, row_bytes: float) -> float:
        """Bytes of copies of the rows of batches, of at most `num_rows` each, with their state."""
        return 0.0

    @abstractmethod
    def released(self, model: nn.Module) -> None:
        """Make a trained model one that predicts on the device of its tables."""

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
        if self.initialize and not table.is_meta:
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

    @torch.no_grad()
    def rows_of_all(self, table: Tensor) -> Iterator[Tensor]:
        """The rows of all entities in the order of their ids, in blocks on the host.

        Every process gets all blocks, and has one of them at a time.
        """
        for start in range(0, self.num_entities, self.block_rows):
            ids = torch.arange(start, min(start + self.block_rows, self.num_entities))
            yield self.rows(table, ids.to(table.device)).cpu()

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

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a value over all processes, whose gradient every process has."""
        return values

    def logsumexp(self, positives: Tensor, scores: Tensor) -> Tensor:
        """log(exp(positive) + Σ exp(score)) of each query, `(batch,)`.

        The scores are those that this process has computed, `(batch, n)`, with any number of
        columns in each process. Every process has the positive scores, `(batch,)`.
        """
        return torch.cat([positives[:, None], scores], 1).logsumexp(1)

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
        return values

    # -- training steps -------------------------------------------------------

    def step(self, build: BuildStep, model: Any, optimizer: Any, loss: Any) -> Step:
        """The step that `build` makes of a model and an optimizer, which minimizes a bound loss."""
        return build(model, optimizer)

    def ahead(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same batches, of which some may be prepared before they are used."""
        return batches

    @abstractmethod
    def complete_updates(self) -> None:
        """Wait until the tables have the updates of all steps that were taken."""

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

    def all_reduce(self, values: Tensor) -> Tensor:
        """Replace values by their sum over all processes."""
        return values

    def share(self, values: Tensor) -> Tensor:
        """Replace values by those of the first process."""
        return values


def count_in_blocks(
    scores_of: Callable[[slice], Tensor],
    blocks: Sequence[slice],
    known: Tensor,
    targets: RankTargets,
    *,
    positions: Callable[[Tensor], Tensor],
    all_reduce: Callable[[Tensor], object] = lambda values: None,
    skips_blocks: bool = False,
) -> Tensor:
    """Count as `EntityTables.count_better` does, in blocks of the rows of this process.

    `positions` gives the row of each entity here, or −1. `all_reduce` sums over all processes.
    With `skips_blocks`, blocks without an answer are scored once.
    """
    rows = targets.rows
    answers = positions(targets.answers)
    values: Tensor | None = None
    for block in blocks:
        # One block of one process has the score of an answer.
        is_here = (answers >= block.start) & (answers < block.stop)
        if skips_blocks and not is_here.any():
            continue
        scores = scores_of(block)
        if values is None:
            values = torch.zeros(len(rows), dtype=scores.dtype, device=rows.device)
        if scores.shape[1]:
            columns = (answers - block.start).clamp(0, scores.shape[1] - 1)
            values = torch.where(is_here, scores[rows, columns], values)
    counts = torch.zeros(len(rows), 3, dtype=torch.int64, device=rows.device)
    if values is None:  # there are no targets
        return counts[:, :2].int()
    all_reduce(values)
    for block in blocks:
        if len(blocks) > 1:
            scores = scores_of(block)

        def columns_of(ids: Tensor, block: slice = block) -> Tensor:
            of_ids = positions(ids)
            is_here = (of_ids >= block.start) & (of_ids < block.stop)
            return torch.where(is_here, of_ids - block.start, -1)

        counts += count_in_columns(scores, values, known, targets, columns_of)
    all_reduce(counts)
    is_finite = (counts[:, 2] == 0) & values.isfinite()
    return counts[:, :2].masked_fill(~is_finite[:, None], -1).int()

"""Entity tables: which rows of entities a process has, where they are, and how they are read.

A model has one or two tables with a row for every entity. Models, losses, ranking and training
steps ask an `EntityTables` object for rows and scores, so that they need not know whether the rows
are all in this process, divided over several processes, or in the memory of the host.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualkg.tables.shard import Shard

if TYPE_CHECKING:
    from dualkg.kernels.scores import RankTargets
    from dualkg.tables.scores import EntityScores

Side = Literal["tail", "head"]
Draw = Callable[[Tensor], Tensor]  # fills an array with random numbers and returns it
FillRows = Callable[[Tensor, Tensor], Tensor]  # fills `(n, width)` with the numbers of n entities
ScoresOf = Callable[[slice | None], Tensor]  # scores of some rows of this process, or of all
CountBetter = Callable[[Tensor, Tensor, "RankTargets"], Tensor]
Step = Callable[[Tensor, float], Tensor]
BuildStep = Callable[[Any, Any], Step]  # the step of a model and an optimizer

TABLE_NAMES = ("entities", "tails")  # parameters of a model that have a row for every entity
BLOCK_ROWS = 2**14  # rows of a table that are drawn at a time
# Numbers of a table up to which they are drawn in order, in seconds. Larger tables are drawn row by
# row, whatever the number of processes.
LARGEST_IN_ORDER = 2**28
MAX_COLUMNS = 2**20  # rows of a shard that are scored at a time in a ranking


def lookup(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """Read rows of a table by id.

    An embedding look-up sums its gradient in a fixed order, which indexing does not. With `sparse`,
    the gradient of a table that is a parameter has only the rows that were read.
    """
    return F.embedding(ids, table, sparse=sparse and table.is_leaf)


class EntityTables(ABC):
    """The rows of a shard of a model's entity tables."""

    # Whether the rows are in the memory of the host, and a step is taken on copies of those that
    # its batch reads.
    on_host = False

    def __init__(
        self,
        shard: Shard,
        *,
        device: torch.device | None = None,
        initialize: bool = True,
        block_rows: int = BLOCK_ROWS,
        largest_in_order: int = LARGEST_IN_ORDER,
        capturable: bool = True,
    ) -> None:
        """With a `device`, tables are made there, block by block, and never as a whole on the host.

        Without `initialize`, they are zeros: random numbers take seconds to draw, and saved weights
        replace them. `block_rows` are the rows of a block. Tables of more numbers than
        `largest_in_order` are drawn by row. `capturable` says whether a CUDA graph can contain the
        collectives.
        """
        if not capturable:
            # Gloo, with which processes share a GPU, is not asked for more than all-reduces there.
            shard = replace(shard, least_bytes=sys.maxsize)
        self.shard = shard
        self.num_entities = shard.num_entities
        self.largest_in_order = largest_in_order
        self.block_rows = block_rows
        self.device = device
        self.initialize = initialize
        self.capturable = capturable
        self._sparse_gradients = False

    # -- which rows -----------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of rows that this process has."""
        return self.shard.size

    @property
    def has_all_entities(self) -> bool:
        """Whether row i of a table of this process is entity i."""
        return self.shard.is_whole

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all have computed."""
        return self.shard.process == 0

    @property
    @abstractmethod
    def columns_at_once(self) -> int:
        """How many entities of a query are scored at once in a ranking."""

    def positions(self, ids: Tensor) -> Tensor:
        """The row of each entity in the table of this process, −1 for rows of other processes."""
        return self.shard.positions(ids)

    def entities_of(self, rows: slice) -> Tensor:
        """The entities of some rows of this process."""
        return self.shard.entities(rows)

    # -- which device ---------------------------------------------------------

    def moved(self, table: Tensor, move: Draw) -> Tensor:
        """A table after a function that moves or converts the parameters of a model."""
        return move(table)

    def block(self, table: Tensor, rows: slice, device: torch.device) -> Tensor:
        """Some rows of this process on the device that computes, without a gradient."""
        return table.detach()[rows]

    @abstractmethod
    def release(self, model: nn.Module) -> None:
        """Make a trained model one that predicts on the device of its tables."""

    # -- making tables --------------------------------------------------------

    def draw(self, width: int, draw: Draw) -> Tensor:
        """Random numbers for the rows of this process, `(num_rows, width)`.

        They are those of the same rows of a whole table, whatever the number of processes.
        """
        table = torch.zeros(self.num_rows, width, device=self.device)
        if not self.initialize:
            return table
        if self.shard.is_whole and self.device is None:
            return draw(table)
        for ids, block in self._drawn_blocks(width, draw):
            positions = self.shard.positions(ids)
            is_own = positions >= 0
            table[positions[is_own].to(table.device)] = block[is_own].to(table.device)
        return table

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

    def take(self, table: Tensor) -> Tensor:
        """The rows of this process of a whole table `(num_entities, width)`."""
        return table if len(table) == self.num_rows else table[self.shard.ids]

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
    def fetches_rows(self) -> bool:
        """Whether reading rows needs other processes, so that rows are worth keeping."""
        return not self.shard.is_whole

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

    def scores(self, values: Tensor) -> EntityScores:
        """Scores of the entities of this process as a part of the scores of all."""
        from dualkg.tables.scores import EntityScores

        return EntityScores(values, self.shard)

    @abstractmethod
    def count_better(
        self, scores_of: ScoresOf, known: Tensor, targets: RankTargets, *, count: CountBetter
    ) -> Tensor:
        """How many candidates score higher than each target, and equal to it: `(num_targets, 2)`.

        `count` is the fastest function for scores of all entities. A row with a score that is not
        finite has counts −1.
        """

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a value over all processes, whose gradient every process has."""
        return self.shard.sum_of_all(values)

    def logsumexp(self, positives: Tensor, scores: Tensor) -> Tensor:
        """log(exp(positive) + Σ exp(score)) of each query, `(batch,)`.

        The scores are those that this process has computed, `(batch, n)`, with any number of
        columns in each process. Every process has the positive scores, `(batch,)`.
        """
        return self.shard.log_normalizers(scores, positives)

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
        if self.shard.is_whole:
            return values
        trained = [(name, table) for name, table in parameters if table.requires_grad]
        replicated = [table for name, table in trained if name not in TABLE_NAMES]
        own = [table for name, table in trained if name in TABLE_NAMES]
        inputs = [whole for whole, _ in vectors] + replicated + own
        leaves = [leaf for _, leaf in vectors] + replicated + own
        num_summed = len(leaves) - len(own)
        joined: Tensor = _Join.apply(
            [values], leaves, len(vectors), num_summed, self.shard, *inputs
        )  # type: ignore[no-untyped-call]
        return joined

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

    def synchronize(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all processes the same bits of the tensors that each of them has whole.

        They are copied from process 0: devices of several kinds may add up in another order.
        """
        for name, value in tensors.items():
            if name not in TABLE_NAMES:
                self.shard.share(value)


class DeviceTables(EntityTables):
    """Rows on the device that computes.

    Several processes take each batch whole. Rows of a batch are fetched by an all-reduce in which
    all processes but their owner add zeros. Each process scores its own entities. Gradients of the
    vectors that it scores them by are summed over all processes.
    """

    def __init__(self, shard: Shard, *, max_columns: int = MAX_COLUMNS, **options: Any) -> None:
        """`max_columns` are the rows that are scored at a time in a ranking, where a shard has not
        the rows of all entities. The options are those of `EntityTables`.
        """
        super().__init__(shard, **options)
        self.max_columns = max_columns

    @property
    def columns_at_once(self) -> int:
        """The same in all processes, so that they rank the same blocks of queries."""
        if self.shard.is_whole:
            return self.num_entities
        return min(self.shard.part, self.max_columns)

    def release(self, model: nn.Module) -> None:
        """Nothing: the tables are on the device that computes."""

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.shard.rows(table, ids, self.own_rows)

    def count_better(
        self, scores_of: ScoresOf, known: Tensor, targets: RankTargets, *, count: CountBetter
    ) -> Tensor:
        """Count at once, or in blocks of rows of each process, and add the counts of all."""
        if self.shard.is_whole:
            return count(scores_of(None), known, targets)
        # A process without rows has one empty block.
        starts = range(0, max(self.shard.size, 1), self.max_columns)
        blocks = [slice(start, min(start + self.max_columns, self.shard.size)) for start in starts]
        return count_in_blocks(scores_of, blocks, known, targets, shard=self.shard)

    def complete_updates(self) -> None:
        """Nothing: a step ends with its updates."""


def local_tables(num_entities: int, **options: Any) -> DeviceTables:
    """Tables of one process: the rows of all entities in the order of their ids."""
    return DeviceTables(Shard(num_entities, is_whole=True), **options)


class _Join(torch.autograd.Function):
    """Values that each process has computed for its own rows, as a part of the whole batch.

    The values have a graph of their own, which ends at `leaves`. They come in a list, so that
    autograd does not follow it. The backward pass goes through that graph, and sums the gradients
    of the first `num_summed` leaves over all processes: `num_vectors` vectors of the batch, and the
    tables that every process has. The other leaves are tables, of which each process has its own
    rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        held: list[Tensor],
        leaves: Sequence[Tensor],
        num_vectors: int,
        num_summed: int,
        shard: Shard,
        *inputs: Tensor,
    ) -> Tensor:
        (values,) = held
        ctx.values = values
        ctx.leaves = leaves
        ctx.num_vectors = num_vectors
        ctx.num_summed = num_summed
        ctx.shard = shard
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = upstream
        gradients = torch.autograd.grad(ctx.values, ctx.leaves, gradient, allow_unused=True)
        summed = []
        for number, leaf in enumerate(ctx.leaves[: ctx.num_summed]):
            slope = gradients[number]
            # A process that owns no candidate may not have used a leaf that others have used.
            own = torch.zeros_like(leaf) if slope is None else slope.contiguous().clone()
            # A batch has some of the relations, and all of its own vectors.
            is_table = number >= ctx.num_vectors
            summed.append(ctx.shard.sum_some_rows(own) if is_table else ctx.shard.all_reduce(own))
        return None, None, None, None, None, *summed, *gradients[ctx.num_summed :]


def count_in_blocks(
    scores_of: Callable[[slice], Tensor],
    blocks: Sequence[slice],
    known: Tensor,
    targets: RankTargets,
    *,
    shard: Shard,
    skips_blocks: bool = False,
) -> Tensor:
    """Count as `EntityTables.count_better` does, in blocks of the rows of a shard.

    With `skips_blocks`, blocks without an answer are scored once.
    """
    from dualkg.kernels.scores import count_in_columns

    rows = targets.rows
    answers = shard.positions(targets.answers)
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
    shard.all_reduce(values)
    for block in blocks:
        if len(blocks) > 1:
            scores = scores_of(block)

        def columns_of(ids: Tensor, block: slice = block) -> Tensor:
            positions = shard.positions(ids)
            is_here = (positions >= block.start) & (positions < block.stop)
            return torch.where(is_here, positions - block.start, -1)

        counts += count_in_columns(scores, values, known, targets, columns_of)
    shard.all_reduce(counts)
    is_finite = (counts[:, 2] == 0) & values.isfinite()
    return counts[:, :2].masked_fill(~is_finite[:, None], -1).int()

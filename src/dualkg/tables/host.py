"""Tables in the memory of the host, which may be larger than that of the GPU that computes.

A batch reads few rows. Those are copied to the device, where the step of a model with these rows
alone is taken, and back. `AHEAD` batches are prepared while a step is taken: their rows are read
from the tables by threads, and copied on a stream of their own. So are the rows of the last steps
on their way back. Rows that a batch shares with steps whose rows may not be back yet are replaced
by those on the device, so that every step sees the updates of all before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualkg.errors import InvalidValue, Unsupported
from dualkg.kernels.scores import RankTargets
from dualkg.tables.base import (
    BLOCK_ROWS,
    BuildStep,
    CountBetter,
    Draw,
    EntityTables,
    Step,
    count_in_blocks,
)
from dualkg.tables.local import LocalScores, LocalTables
from dualkg.tables.lookup import Side

if TYPE_CHECKING:
    from dualkg.tables.bf16 import Bf16Tables, LocalSampledTables
    from dualkg.tables.gradients import GradientTables
    from dualkg.tables.row_gradients import LocalRowGradientTables

AHEAD = 3  # batches that are prepared before their step
IN_FLIGHT = 6  # steps whose rows may not be back in the tables when a batch is prepared
ROOM = 1.25  # of the buffers, relative to the rows of the first batch
RANKED_ROWS = 2**14  # rows that are copied and scored at a time in a ranking
PARALLEL_BYTES = 2**20  # from which on copies are divided over threads
PLACE = "entity tables in host memory"


def one_thread() -> Executor:
    return ThreadPoolExecutor(1, "rows of tables in host memory")


class HostTables(EntityTables):
    """All rows in the memory of the host, in the order of the entity ids.

    With `present`, they are the tables of a step: the rows of some entities on the device, whose
    ids are ascending.
    """

    def __init__(
        self,
        num_entities: int,
        *,
        initialize: bool = True,
        block_rows: int = BLOCK_ROWS,
        ranked_rows: int = RANKED_ROWS,
        ahead: int = AHEAD,
        in_flight: int = IN_FLIGHT,
        make_executor: Callable[[], Executor] = one_thread,
        present: Tensor | None = None,
    ) -> None:
        """`ranked_rows` are scored at a time in a ranking.

        While a step is taken, the batches `ahead` of it are prepared, and the rows of up to
        `in_flight` steps, which are more, are on their way back. Rows are read by an executor, and
        written by another, each in the order of the steps.
        """
        if in_flight <= ahead:
            raise InvalidValue("in_flight", expected=f"more than ahead, {ahead}", found=in_flight)
        super().__init__(num_entities, initialize=initialize, block_rows=block_rows)
        self.ranked_rows = ranked_rows
        self.num_ahead = ahead
        self.num_in_flight = in_flight
        self.present = present
        self.make_executor = make_executor
        self.pipeline: HostStep | None = None
        self._blocks = PinnedBlocks()

    # -- which rows -----------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return self.num_entities

    @property
    def has_all_entities(self) -> bool:
        return self.present is None

    @property
    def columns_at_once(self) -> int:
        return min(self.num_entities, self.ranked_rows)

    def positions(self, ids: Tensor) -> Tensor:
        if self.present is None:
            return ids
        return torch.searchsorted(self.present, ids.contiguous())

    # -- which device ---------------------------------------------------------

    @property
    def place(self) -> str:
        return PLACE

    @property
    def copies_rows(self) -> bool:
        return True

    def moved(self, table: Tensor, move: Draw) -> Tensor:
        """The table stays where it is, and gets the type that others get."""
        return table.to(move(table[:0]).dtype)

    def block(self, table: Tensor, rows: slice, device: torch.device) -> Tensor:
        own = table.detach()[rows]
        return self._blocks.copy(own, device) if device.type == "cuda" else own

    def bytes_of_copies(self, num_rows: int, row_bytes: float) -> float:
        """The rows of all batches under way, and the last batch of each entity."""
        num_batches = self.num_ahead + self.num_in_flight + 1  # one that is computed with
        return num_batches * ROOM * num_rows * row_bytes + 8 * self.num_entities

    def released(self, model: nn.Module) -> None:
        self.complete_updates()
        self.pipeline = None
        model.to("cpu")
        for module in model.modules():
            if getattr(module, "_tables", None) is self:
                object.__setattr__(module, "_tables", LocalTables(self.num_entities))

    # -- making tables --------------------------------------------------------

    def draw(self, width: int, draw: Draw) -> Tensor:
        table = torch.zeros(self.num_entities, width)
        return draw(table) if self.initialize else table

    def take(self, table: Tensor) -> Tensor:
        return table

    # -- reading rows ---------------------------------------------------------

    @property
    def fetches_rows(self) -> bool:
        return False

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        if self.present is not None:
            return self.own_rows(table, self.positions(ids))
        return self.own_rows(table, ids.to(table.device)).to(ids.device)

    # -- scores ---------------------------------------------------------------

    def scores(self, values: Tensor) -> LocalScores:
        return LocalScores(values)

    def count_better(
        self,
        scores_of: Callable[[slice | None], Tensor],
        known: Tensor,
        targets: RankTargets,
        *,
        count: CountBetter,
    ) -> Tensor:
        """Count in blocks of rows, each of which is copied to the device."""
        blocks = [
            slice(start, min(start + self.ranked_rows, self.num_entities))
            for start in range(0, self.num_entities, self.ranked_rows)
        ]
        if len(blocks) == 1:
            return count(scores_of(blocks[0]), known, targets)
        return count_in_blocks(
            scores_of, blocks, known, targets, positions=lambda ids: ids, skips_blocks=True
        )

    # -- training steps -------------------------------------------------------

    def step(self, build: BuildStep, model: Any, optimizer: Any, loss: Any) -> Step:
        if not hasattr(loss, "entities_read"):
            raise reads_all_rows()
        self.pipeline = HostStep(self, build, model, optimizer, loss)
        return self.pipeline

    def ahead(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        return batches if self.pipeline is None else self.pipeline.ahead(batches)

    def complete_updates(self) -> None:
        if self.pipeline is not None:
            self.pipeline.complete()

    def gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter], *, squared: bool, bf16: bool
    ) -> GradientTables:
        raise reads_all_rows()

    def row_gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter]
    ) -> LocalRowGradientTables:
        from dualkg.tables.row_gradients import LocalRowGradientTables

        return LocalRowGradientTables(parameters, self.positions)

    def sampled_tables(self) -> LocalSampledTables:
        from dualkg.tables.bf16 import LocalSampledTables  # It imports Triton.

        return LocalSampledTables(self.positions)

    def bf16_tables(
        self, parameters: Mapping[str, nn.Parameter], *, sums: Mapping[str, Tensor], **options: Any
    ) -> Bf16Tables:
        raise reads_all_rows()

    def synchronize(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing: there is one process."""


def reads_all_rows() -> Unsupported:
    return Unsupported(
        "A loss that reads all entities",
        "cannot be trained with entity tables in host memory, of which a step has the rows of its "
        "batch",
        advice="Use SampledSoftmax, NegativeSampling or MarginRanking.",
    )


class PinnedBlocks:
    """Copies blocks of rows to a GPU, each of two buffers in turn while the other is copied."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = [torch.empty(0), torch.empty(0)]
        self._events: list[Any] = [None, None]
        self._num_copied = 0

    def copy(self, rows: Tensor, device: torch.device) -> Tensor:
        number = self._num_copied % 2
        self._num_copied += 1
        if self._events[number] is not None:
            self._events[number].synchronize()
        buffer = self._buffers[number]
        if buffer.numel() < rows.numel() or buffer.dtype != rows.dtype:
            buffer = torch.empty(rows.numel(), dtype=rows.dtype, pin_memory=True)
            self._buffers[number] = buffer
        pinned = buffer[: rows.numel()].view_as(rows)
        pinned.copy_(rows)
        copied = pinned.to(device, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events[number] = event
        return copied


class Streams:
    """The streams of a GPU on which rows are copied while another computes; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            # Planning is short, and the host waits for it.
            self.planning = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self.inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, name: str) -> AbstractContextManager[Any]:
        """A block whose work runs on a stream."""
        return torch.cuda.stream(getattr(self, name)) if self.on_gpu else nullcontext()

    def event(self) -> Any:
        """An event after all work so far of the current stream."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_for_compute(self) -> None:
        """Let the planning stream wait for all that was asked of the current one."""
        if self.on_gpu:
            self.planning.wait_stream(torch.cuda.current_stream())

    def keep_for_compute(self, tensor: Tensor) -> None:
        """Let the memory of a tensor be used again only when the current stream has read it."""
        if self.on_gpu:
            tensor.record_stream(torch.cuda.current_stream())


class TableCopies:
    """One table, or Adagrad's sums of one: on the host, and the rows of batches on the device.

    Each batch has a slot of the buffers `inward` and `outward` on the host, and of `rows` on the
    device. A step is always taken on `current`, so that it can be a CUDA graph.
    """

    def __init__(self, table: Tensor, use: Callable[[Tensor], None]) -> None:
        """`use` makes an array on the device that of the step."""
        self.table = table
        self.use = use
        self.numbers: npt.NDArray[Any] = table.detach().numpy()
        self.inward = torch.empty(0)
        self.outward = torch.empty(0)
        self.rows = torch.empty(0)
        self.current = torch.empty(0)

    def reserve(self, num_batches: int, num_rows: int, device: torch.device) -> None:
        """Make buffers for the rows of some batches."""
        shape = (num_batches, num_rows, self.table.shape[1])
        dtype = self.table.dtype
        on_gpu = device.type == "cuda"
        self.inward = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self.outward = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.current = torch.zeros(shape[1:], dtype=dtype, device=device)
        self.use(self.current)

    def read(self, ids: npt.NDArray[np.int64], slot: int) -> None:
        """Read rows of the table into a buffer."""
        _in_threads(_read_rows, ids, self.numbers, self.inward[slot].numpy())

    def write(self, ids: npt.NDArray[np.int64], slot: int) -> None:
        """Write rows of a buffer into the table."""
        _in_threads(_write_rows, ids, self.numbers, self.outward[slot].numpy())

    def enter(self, slot: int, size: int, to: Tensor, source: Tensor) -> None:
        """Make the rows of a batch current, some of them replaced by rows of batches before."""
        self.current[:size].copy_(self.rows[slot, :size])
        newer = self.rows.flatten(0, 1).index_select(0, source)
        self.current.index_copy_(0, to, newer)

    def leave(self, slot: int, size: int) -> None:
        """Make the current rows those of a batch."""
        self.rows[slot, :size].copy_(self.current[:size])


def _in_threads(copy: Callable[..., None], ids: Any, table: Any, rows: Any) -> None:
    """Copy rows in as many threads as PyTorch uses, or in this one if they are few."""
    if len(ids) * rows[:1].nbytes < PARALLEL_BYTES:
        copy(0, len(ids), ids, table, rows)
        return
    from dualkg.kernels.cpu import in_parallel  # It imports numba.

    in_parallel(copy, len(ids), ids, table, rows)


def _read_rows(start: int, stop: int, ids: Any, table: Any, rows: Any) -> None:
    # Without this mode, NumPy copies the result once more.
    np.take(table, ids[start:stop], axis=0, out=rows[start:stop], mode="clip")


def _write_rows(start: int, stop: int, ids: Any, table: Any, rows: Any) -> None:
    table[ids[start:stop]] = rows[start:stop]


@dataclass
class Window:
    """The rows of a batch on the device.

    `ids` are its entities, ascending. The rows `to` are replaced by the rows `source` of all
    buffers. `loaded` ends with an event after which the rows are on the device.
    """

    batch: Tensor
    number: int
    slot: int
    ids: Tensor
    host_ids: npt.NDArray[np.int64]
    to: Tensor
    source: Tensor
    loaded: Future[Any]


class HostStep:
    """A step on the rows of a batch, which are copied to the device before it and back after it."""

    def __init__(
        self, tables: HostTables, build: BuildStep, model: Any, optimizer: Any, loss: Any
    ) -> None:
        self.model = model
        self.loss = loss
        self.device: torch.device = model.device
        self.num_ahead = tables.num_ahead
        self.num_in_flight = tables.num_in_flight
        self.num_slots = self.num_ahead + self.num_in_flight
        self.num_entities = tables.num_entities
        self.bytes_copied = 0  # in each direction
        self.streams = Streams(self.device)
        self._into = tables.make_executor()
        self._back = tables.make_executor()
        self._replace_tables(optimizer)
        self._build = build
        self.step: Step | None = None  # on buffers of a size that the first batch decides

        self._capacity = 0
        self._num_planned = 0
        self._planned: deque[Window] = deque()
        self._returned: dict[int, Future[None]] = {}
        self._entered: Any = None  # an event after the last replacement of rows
        # For each entity the last batch that read it, and its row in the buffers.
        self._last_batch = torch.full((self.num_entities,), -(2**30), dtype=torch.int32)
        self._last_batch = self._last_batch.to(self.device)
        self._last_row = torch.zeros_like(self._last_batch)

    def _replace_tables(self, optimizer: Any) -> None:
        """Make a model and an optimizer whose entity tables are the rows of a batch."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.present = HostTables(self.num_entities, present=nothing)
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for table in self.model.entity_tables:
            empty = torch.zeros(0, table.shape[1], dtype=table.dtype, device=self.device)
            replaced[table] = nn.Parameter(empty, requires_grad=table.requires_grad)
        self.step_model = self.model.with_rows(self.present, replaced)
        step_optimizer = optimizer.with_tables(replaced)
        self.step_optimizer = step_optimizer
        self.copies: list[TableCopies] = []
        for table, rows in replaced.items():

            def use_rows(values: Tensor, rows: nn.Parameter = rows) -> None:
                rows.data = values

            def use_sums(values: Tensor, rows: nn.Parameter = rows) -> None:
                step_optimizer.state[rows]["sum"] = values

            self.copies.append(TableCopies(table, use_rows))
            self.copies.append(TableCopies(optimizer.state[table]["sum"], use_sums))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its state."""
        return sum(copies.table.shape[1] * copies.table.element_size() for copies in self.copies)

    # -- steps ----------------------------------------------------------------

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        if self._planned and self._planned[0].batch is batch:
            window = self._planned.popleft()
        else:
            self.forget()
            self.streams.wait_for_compute()
            window = self._plan(batch, reserve=True)
        self._enter(window)
        assert self.step is not None
        objective = self.step(batch, learning_rate)
        self._return(window)
        return objective

    def ahead(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same batches, which are prepared while those before them are used.

        After the last of them, the tables have all updates.
        """
        self.forget()
        upcoming: deque[Tensor] = deque()
        is_over = False
        try:
            while True:
                while not is_over and len(upcoming) <= self.num_ahead:
                    with self.streams.on("planning"):
                        batch = next(batches, None)
                    if batch is None:
                        is_over = True
                        break
                    self.streams.keep_for_compute(batch)
                    upcoming.append(batch)
                self._plan_some(upcoming)
                if not upcoming:
                    break
                yield upcoming[0]
                upcoming.popleft()
            self.complete()
        finally:
            self._drop_planned()

    def complete(self) -> None:
        """Wait until the tables have the rows of all steps that were taken."""
        for future in self._returned.values():
            future.result()
        self._returned.clear()

    def forget(self) -> None:
        """Complete all updates, and drop the batches that were prepared."""
        self._drop_planned()
        self.complete()

    def _drop_planned(self) -> None:
        for window in self._planned:
            # It waits; an error in a thread is of no interest any more.
            window.loaded.exception()
        self._planned.clear()
        # From here on, the tables alone are true: no row is taken from a batch before.
        self._num_planned += self.num_slots

    # -- before a step --------------------------------------------------------

    def _plan_some(self, upcoming: Sequence[Tensor]) -> None:
        """Prepare upcoming batches until one does not fit the buffers."""
        for batch in list(upcoming)[len(self._planned) :]:
            if not self._capacity:
                return
            window = self._plan(batch, reserve=False)
            if window is None:
                return
            self._planned.append(window)

    def _plan(self, batch: Tensor, *, reserve: bool) -> Any:
        """Find the rows that a batch reads, and start to copy them.

        Without `reserve`, None is returned if they do not fit the buffers.
        """
        with self.streams.on("planning"):
            factors = self.model.factors(*batch.unbind(-1))
            ids = torch.unique(self.loss.entities_read(self.model, factors))
            if len(ids) > self._capacity:
                if not reserve:
                    return None
                self._reserve(min(int(ROOM * len(ids)), self.num_entities))
            number = self._num_planned
            slot = number % self.num_slots
            last = self._last_batch[ids]
            to = (last > number - self.num_in_flight).nonzero().squeeze(1)
            source = self._last_row[ids[to]].long()
            first = slot * self._capacity
            rows = torch.arange(first, first + len(ids), dtype=torch.int32, device=self.device)
            self._last_batch[ids] = number
            self._last_row[ids] = rows
            host_ids = ids.cpu().numpy()
        self._num_planned += 1
        self.bytes_copied += len(ids) * self.row_bytes
        before = self._returned.get(number - self.num_in_flight)
        self._returned.pop(number - self.num_in_flight - 1, None)
        loaded = self._into.submit(self._load, host_ids, slot, before, self._entered)
        return Window(batch, number, slot, ids, host_ids, to, source, loaded)

    def _reserve(self, num_rows: int) -> None:
        self._capacity = num_rows
        self._num_planned += self.num_slots
        for copies in self.copies:
            copies.reserve(self.num_slots, num_rows, self.device)
        self.present.present = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.step = self._build(self.step_model, self.step_optimizer)

    def _load(
        self, ids: npt.NDArray[np.int64], slot: int, before: Future[None] | None, entered: Any
    ) -> Any:
        """Copy rows to the device.

        The rows of a batch `before` this one are in the tables first. Its buffer is no more needed
        `entered`: batches that replace rows by its rows have done so.
        """
        if before is not None:
            before.result()
        for copies in self.copies:
            copies.read(ids, slot)
        with self.streams.on("inward"):
            self.streams.wait(entered)
            for copies in self.copies:
                rows = copies.inward[slot, : len(ids)]
                copies.rows[slot, : len(ids)].copy_(rows, non_blocking=True)
            return self.streams.event()

    def _enter(self, window: Window) -> None:
        """Make the rows of a batch those of the step."""
        self.streams.wait(window.loaded.result())
        size = len(window.ids)
        assert self.present.present is not None
        # What follows the ids is larger than any, so that they stay ascending.
        self.present.present.fill_(self.num_entities)[:size] = window.ids
        for copies in self.copies:
            copies.enter(window.slot, size, window.to, window.source)
        self._entered = self.streams.event()

    # -- after a step ---------------------------------------------------------

    def _return(self, window: Window) -> None:
        """Start to copy the rows of a batch back to the tables."""
        size = len(window.ids)
        for copies in self.copies:
            copies.leave(window.slot, size)
        stepped = self.streams.event()
        with self.streams.on("outward"):
            self.streams.wait(stepped)
            for copies in self.copies:
                rows = copies.rows[window.slot, :size]
                copies.outward[window.slot, :size].copy_(rows, non_blocking=True)
            copied = self.streams.event()
        self._returned[window.number] = self._back.submit(self._store, window, copied)

    def _store(self, window: Window, copied: Any) -> None:
        """Write the rows of a batch into the tables."""
        if copied is not None:
            copied.synchronize()
        for copies in self.copies:
            copies.write(window.host_ids, window.slot)

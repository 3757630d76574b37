"""Tables in the memory of the host, which may be larger than that of the GPU that computes.

A batch reads few rows. Those are copied to the device, where the step of a model with these rows
alone is taken, and back. `AHEAD` batches are prepared while a step is taken: their rows are copied
on a stream of their own. So are the rows of the last steps on their way back. Rows that a batch
shares with steps whose rows may not be back yet are replaced by those on the device, so that every
step sees the updates of all before it.

A GPU reads and writes the rows itself, in memory that is pinned for it. On a CPU, they are copied
within the memory of the host.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor, nn

from dualkg.errors import InvalidValue, RequestError
from dualkg.kernels.hardware import gpu_kernels_unavailable
from dualkg.kernels.scores import RankTargets
from dualkg.tables.base import (
    BLOCK_ROWS,
    BuildStep,
    CountBetter,
    Draw,
    EntityTables,
    ScoresOf,
    Step,
    count_in_blocks,
    local_tables,
)
from dualkg.tables.shard import Shard

AHEAD = 3  # batches that are prepared before their step
IN_FLIGHT = 6  # steps whose rows may not be back in the tables when a batch is prepared
RANKED_ROWS = 2**14  # rows that are copied and scored at a time in a ranking
# Flags of cuMemHostRegister: for all contexts, and mapped into the memory of the device.
PORTABLE = 1
MAPPED = 2


class HostTables(EntityTables):
    """All rows in the memory of the host, in the order of the entity ids."""

    on_host = True

    def __init__(
        self,
        num_entities: int,
        *,
        initialize: bool = True,
        block_rows: int = BLOCK_ROWS,
        ranked_rows: int = RANKED_ROWS,
        ahead: int = AHEAD,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        """`ranked_rows` are scored at a time in a ranking.

        While a step is taken, the batches `ahead` of it are prepared, and the rows of up to
        `in_flight` steps, which are more, are on their way back.
        """
        if in_flight <= ahead:
            raise InvalidValue("in_flight", expected=f"more than ahead, {ahead}", found=in_flight)
        shard = Shard(num_entities, is_whole=True)
        super().__init__(shard, initialize=initialize, block_rows=block_rows)
        self.ranked_rows = ranked_rows
        self.num_ahead = ahead
        self.num_in_flight = in_flight
        self.pipeline: HostStep | None = None

    @property
    def columns_at_once(self) -> int:
        return min(self.num_entities, self.ranked_rows)

    def moved(self, table: Tensor, move: Draw) -> Tensor:
        """The table stays where it is, and gets the type that others get."""
        return table.to(move(table[:0]).dtype)

    def block(self, table: Tensor, rows: slice, device: torch.device) -> Tensor:
        # Without waiting: the memory is pinned while a model is trained, and does not change.
        return table.detach()[rows].to(device, non_blocking=True)

    def release(self, model: Any) -> None:
        self.complete_updates()
        if self.pipeline is not None:
            self.pipeline.unpin()
            self.pipeline = None
        model.to("cpu")
        model.embedding.set_tables(local_tables(self.num_entities))

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.own_rows(table, ids.to(table.device)).to(ids.device)

    def count_better(
        self, scores_of: ScoresOf, known: Tensor, targets: RankTargets, *, count: CountBetter
    ) -> Tensor:
        """Count in blocks of rows, each of which is copied to the device."""
        starts = range(0, self.num_entities, self.ranked_rows)
        ends = [min(start + self.ranked_rows, self.num_entities) for start in starts]
        blocks = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        if len(blocks) == 1:
            return count(scores_of(blocks[0]), known, targets)
        return count_in_blocks(
            scores_of, blocks, known, targets, shard=self.shard, skips_blocks=True
        )

    # -- training steps -------------------------------------------------------

    def step(self, build: BuildStep, model: Any, optimizer: Any, loss: Any) -> Step:
        self.pipeline = HostStep(self, build, model, optimizer, loss)
        return self.pipeline

    def ahead(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        return batches if self.pipeline is None else self.pipeline.ahead(batches)

    def complete_updates(self) -> None:
        if self.pipeline is not None:
            self.pipeline.complete()


class CopiedRows(EntityTables):
    """The rows of some entities on the device, which a step on tables in host memory is taken on.

    `ids` are these entities, ascending, followed by numbers that are larger than any.
    """

    def __init__(self, num_entities: int, ids: Tensor) -> None:
        super().__init__(Shard(num_entities, is_whole=True))
        self.ids = ids

    @property
    def has_all_entities(self) -> bool:
        return False

    @property
    def columns_at_once(self) -> int:
        return len(self.ids)

    def release(self, model: nn.Module) -> None:
        """Nothing: the model of a step is dropped with its step."""

    def complete_updates(self) -> None:
        """Nothing: the step returns the rows."""

    def positions(self, ids: Tensor) -> Tensor:
        return torch.searchsorted(self.ids, ids.contiguous())

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.own_rows(table, self.positions(ids))

    def count_better(
        self, scores_of: ScoresOf, known: Tensor, targets: RankTargets, *, count: CountBetter
    ) -> Tensor:
        raise NotImplementedError("a ranking compares all entities")


# -- pinned memory --------------------------------------------------------------


class PinnedTable:
    """A table whose memory is pinned, and mapped for the GPU, until this object is dropped."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.detach()
        # The end of the process unpins everything.
        finalize(self, _unpin, self.table).atexit = False


_pinned: WeakValueDictionary[int, PinnedTable] = WeakValueDictionary()


def pin(table: Tensor, device: torch.device) -> PinnedTable | None:
    """Pin the memory of a table for a GPU; None where it is pinned without this object.

    Several steps on one table, as of a training that goes on, share what is pinned.
    """
    if device.type != "cuda" or not table.numel():
        return None
    address = table.data_ptr()
    known = _pinned.get(address)
    if known is not None and known.table.nbytes == table.nbytes:
        return known
    torch.cuda.synchronize(device)  # It makes the context of the device, if there is none yet.
    status = _driver().cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(table.nbytes), PORTABLE | MAPPED
    )
    if status:
        # Small tables may share a page with other memory that is pinned. PyTorch has pages for
        # such, which are no smaller than the next power of two.
        table.data = table.data.pin_memory()
        return None
    pinned = PinnedTable(table)
    _pinned[address] = pinned
    return pinned


def _unpin(table: Tensor) -> None:
    # What the GPU was asked to do with the table is done before.
    torch.cuda.synchronize()
    _driver().cuMemHostUnregister(ctypes.c_void_p(table.data_ptr()))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


# -- steps ------------------------------------------------------------------------


class Streams:
    """The streams of a GPU on which rows are copied while another computes; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            # Planning is short, and copies wait for it.
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

    def keep(self, *tensors: Tensor) -> None:
        """Let the memory of tensors be used again only when the current stream has read it."""
        if self.on_gpu:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream())


class TableCopies:
    """One table, or Adagrad's sums of one: on the host, and the rows of batches on the device.

    Each batch has a slot of `rows` on the device. A step is always taken on `current`, so that it
    can be a CUDA graph.
    """

    def __init__(self, table: Tensor, use: Callable[[Tensor], None], device: torch.device) -> None:
        """`use` makes an array on the device that of the step."""
        self.pinned = pin(table, device)
        self.table = table.detach()
        self.use = use
        self.rows = torch.empty(0)
        self.current = torch.empty(0)

    def reserve(self, num_batches: int, num_rows: int, device: torch.device) -> None:
        """Make buffers for the rows of some batches."""
        shape = (num_batches, num_rows, self.table.shape[1])
        dtype = self.table.dtype
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.current = torch.zeros(shape[1:], dtype=dtype, device=device)
        self.use(self.current)

    def to_device(self, slot: int, ids: Tensor, count: Tensor) -> None:
        """Copy the rows of a batch, of which there are `count`, to the device."""
        if self.rows.is_cpu:
            size = int(count)
            torch.index_select(self.table, 0, ids[:size], out=self.rows[slot, :size])
            return
        from dualkg.kernels.gpu.rows import read_rows  # It imports Triton.

        read_rows(self.table, ids, count, self.rows[slot])

    def to_host(self, slot: int, ids: Tensor, count: Tensor) -> None:
        """Copy the rows of a batch from the device into the table."""
        if self.rows.is_cpu:
            size = int(count)
            self.table.index_copy_(0, ids[:size], self.rows[slot, :size])
            return
        from dualkg.kernels.gpu.rows import write_rows  # It imports Triton.

        write_rows(self.table, ids, count, self.rows[slot])

    def enter(self, source: Tensor) -> None:
        """Make rows of the slots current: those of a batch, or newer ones of batches before."""
        current = self.current[: len(source)]
        torch.index_select(self.rows.flatten(0, 1), 0, source, out=current)

    def leave(self, slot: int, size: int) -> None:
        """Make the current rows those of a batch."""
        self.rows[slot, :size].copy_(self.current[:size])


@dataclass
class Window:
    """The rows of a batch on the device.

    `ids` are its entities, ascending: so many as `count` says, followed by numbers that are larger
    than any. `source` are the newest rows of these entities in all slots, flat. After the event
    `loaded`, the rows are on the device.
    """

    batch: Tensor
    number: int
    slot: int
    ids: Tensor
    count: Tensor
    source: Tensor
    loaded: Any


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
        reason = gpu_kernels_unavailable() if self.device.type == "cuda" else None
        if reason:
            raise RequestError(f"Training with entity tables in host memory on a GPU {reason}.")
        self._num_rows_copied = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.streams = Streams(self.device)
        self._replace_tables(optimizer)
        self._build = build
        self.step: Step | None = None  # on buffers of a size that the first batch decides

        self._capacity = 0
        self._num_planned = 0
        self._planned: deque[Window] = deque()
        # For each batch an event after which its rows are in the tables.
        self._returned: dict[int, Any] = {}
        self._entered: Any = None  # an event after the last replacement of rows
        # For each entity the last batch that read it, and its row in all slots; and one more, for
        # what follows the entities of a batch.
        long_ago = -(2**30)
        self._last_batch = torch.full((self.num_entities + 1,), long_ago, dtype=torch.int32)
        self._last_batch = self._last_batch.to(self.device)
        self._last_row = torch.zeros_like(self._last_batch)
        self._no_id = torch.full((1,), -1, dtype=torch.int64, device=self.device)

    def _replace_tables(self, optimizer: Any) -> None:
        """Make a model and an optimizer whose entity tables are the rows of a batch."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.copied = CopiedRows(self.num_entities, nothing)
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for table in self.model.entity_tables:
            empty = torch.zeros(0, table.shape[1], dtype=table.dtype, device=self.device)
            replaced[table] = nn.Parameter(empty, requires_grad=table.requires_grad)
        self.step_model = self.model.with_rows(self.copied, replaced)
        step_optimizer = optimizer.with_tables(replaced)
        self.step_optimizer = step_optimizer
        self.copies: list[TableCopies] = []
        for table, rows in replaced.items():

            def use_rows(values: Tensor, rows: nn.Parameter = rows) -> None:
                rows.data = values

            def use_sums(values: Tensor, rows: nn.Parameter = rows) -> None:
                step_optimizer.state[rows]["sum"] = values

            sums = optimizer.state[table]["sum"]
            self.copies.append(TableCopies(table, use_rows, self.device))
            self.copies.append(TableCopies(sums, use_sums, self.device))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its state."""
        return sum(copies.table.shape[1] * copies.table.element_size() for copies in self.copies)

    @property
    def bytes_copied(self) -> int:
        """Bytes of all rows of all batches so far, in each direction."""
        return int(self._num_rows_copied) * self.row_bytes

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
                    self.streams.keep(batch)
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
        for written in self._returned.values():
            if written is not None:
                written.synchronize()
        self._returned.clear()

    def unpin(self) -> None:
        """End the step: the memory of the tables is as it was before."""
        self.forget()
        for copies in self.copies:
            copies.pinned = None

    def forget(self) -> None:
        """Complete all updates, and drop the batches that were prepared."""
        self._drop_planned()
        self.complete()

    def _drop_planned(self) -> None:
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
            read = self.loss.entities_read(self.model, factors)
            size = min(len(read), self.num_entities)
            if size > self._capacity:
                if not reserve:
                    return None
                self._reserve(size)
            number = self._num_planned
            slot = number % self.num_slots
            ids, count = self._distinct(read, size)
            own = slot * self._capacity
            rows = torch.arange(own, own + size, dtype=torch.int32, device=self.device)
            is_recent = self._last_batch[ids] > number - self.num_in_flight
            source = torch.where(is_recent, self._last_row[ids], rows)
            self._last_batch.index_fill_(0, ids, number)
            self._last_row.index_copy_(0, ids, rows)
            self._num_rows_copied += count
            planned = self.streams.event()
        self._num_planned += 1
        # The rows of an earlier batch are in the tables before they are read again, and batches
        # that take rows of the same slot have done so.
        before = self._returned.get(number - self.num_in_flight)
        self._returned.pop(number - self.num_in_flight - 1, None)
        with self.streams.on("inward"):
            for event in (before, planned, self._entered):
                self.streams.wait(event)
            for copies in self.copies:
                copies.to_device(slot, ids, count)
            self.streams.keep(ids, count)
            loaded = self.streams.event()
        return Window(batch, number, slot, ids, count, source, loaded)

    def _distinct(self, read: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The distinct entities of a batch, ascending, and how many they are, both on the device.

        The size of the first is known to the host, which does not wait: what is left of it holds a
        number that is larger than any id.
        """
        ordered = read.sort().values
        is_new = ordered.diff(prepend=self._no_id) != 0
        position = is_new.cumsum(0) - 1
        ids = ordered.new_full((size,), self.num_entities)
        ids.scatter_(0, position, ordered)
        return ids, position[-1:] + 1

    def _reserve(self, num_rows: int) -> None:
        self._capacity = num_rows
        self._num_planned += self.num_slots
        for copies in self.copies:
            copies.reserve(self.num_slots, num_rows, self.device)
        self.copied.ids = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.step = self._build(self.step_model, self.step_optimizer)

    def _enter(self, window: Window) -> None:
        """Make the rows of a batch those of the step."""
        self.streams.wait(window.loaded)
        # What follows the ids is larger than any, so that they stay ascending.
        self.copied.ids.fill_(self.num_entities)[: len(window.ids)] = window.ids
        for copies in self.copies:
            copies.enter(window.source)
        self.streams.keep(window.ids, window.source)
        self._entered = self.streams.event()

    # -- after a step ---------------------------------------------------------

    def _return(self, window: Window) -> None:
        """Start to copy the rows of a batch back to the tables."""
        for copies in self.copies:
            copies.leave(window.slot, len(window.ids))
        stepped = self.streams.event()
        with self.streams.on("outward"):
            self.streams.wait(stepped)
            for copies in self.copies:
                copies.to_host(window.slot, window.ids, window.count)
            self.streams.keep(window.ids, window.count)
            self._returned[window.number] = self.streams.event()

"""Tables in the memory of the host, which may be larger than that of the GPU that computes.

A batch reads few rows. Those are copied to the device, where the step of a model with these rows
alone is taken, and back. `AHEAD` batches are prepared while a step is taken: their rows are copied
on a stream of their own. So are the rows of the last steps on their way back. Rows that a batch
shares with steps whose rows may not be back yet are replaced by those on the device, so that every
step sees the updates of all before it.

A GPU reads and writes the rows of pinned tables itself. Where the tables cannot be pinned, threads
copy the rows between the tables and pinned buffers.
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
from dualkg.tables.pinned import pin

if TYPE_CHECKING:
    from dualkg.tables.bf16 import Bf16Tables, LocalSampledTables
    from dualkg.tables.gradients import GradientTables
    from dualkg.tables.row_gradients import LocalRowGradientTables

AHEAD = 3  # batches that are prepared before their step
IN_FLIGHT = 6  # steps whose rows may not be back in the tables when a batch is prepared
RANKED_ROWS = 2**14  # rows that are copied and scored at a time in a ranking
PARALLEL_BYTES = 2**20  # from which on copies are divided over threads
PLACE = "entity tables in host memory"


def one_thread() -> Executor:
    return ThreadPoolExecutor(1, "rows of tables in host memory")


class CallingThread(Executor):
    """Calls functions at once, in the thread that submits them."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **options))
        return future


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
        return num_batches * num_rows * row_bytes + 8 * self.num_entities

    def released(self, model: nn.Module) -> None:
        self.complete_updates()
        if self.pipeline is not None:
            self.pipeline.unpin()
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

    Each batch has a slot of `rows` on the device. If the table is not `pinned`, it has one of the
    buffers `inward` and `outward` on the host, too. A step is always taken on `current`, so that it
    can be a CUDA graph.
    """

    def __init__(self, table: Tensor, use: Callable[[Tensor], None], device: torch.device) -> None:
        """`use` makes an array on the device that of the step."""
        self.table = table.detach()
        self.use = use
        self.pinned = pin(table, device)
        self.numbers: npt.NDArray[Any] = self.table.numpy()
        self.inward = torch.empty(0)
        self.outward = torch.empty(0)
        self.rows = torch.empty(0)
        self.current = torch.empty(0)

    def reserve(self, num_batches: int, num_rows: int, device: torch.device) -> None:
        """Make buffers for the rows of some batches."""
        shape = (num_batches, num_rows, self.table.shape[1])
        dtype = self.table.dtype
        if self.pinned is None:
            on_gpu = device.type == "cuda"
            self.inward = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
            self.outward = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.current = torch.zeros(shape[1:], dtype=dtype, device=device)
        self.use(self.current)

    def read(self, ids: npt.NDArray[np.int64], slot: int) -> None:
        """Read rows of the table into a buffer of the host."""
        _in_threads(_read_rows, ids, self.numbers, self.inward[slot].numpy())

    def write(self, ids: npt.NDArray[np.int64], slot: int) -> None:
        """Write rows of a buffer of the host into the table."""
        _in_threads(_write_rows, ids, self.numbers, self.outward[slot].numpy())

    def to_device(self, slot: int, ids: Tensor, count: Tensor) -> None:
        """Copy the rows of a batch, of which there are `count`, to the device."""
        from dualkg.kernels.gpu.rows import read_rows  # It imports Triton.

        read_rows(self.table, ids, count, self.rows[slot])

    def to_host(self, slot: int, ids: Tensor, count: Tensor) -> None:
        """Copy the rows of a batch from the device into the table."""
        from dualkg.kernels.gpu.rows import write_rows  # It imports Triton.

        write_rows(self.table, ids, count, self.rows[slot])

    def buffer_to_device(self, slot: int, size: int) -> None:
        self.rows[slot, :size].copy_(self.inward[slot, :size], non_blocking=True)

    def buffer_to_host(self, slot: int, size: int) -> None:
        self.outward[slot, :size].copy_(self.rows[slot, :size], non_blocking=True)

    def enter(self, source: Tensor) -> None:
        """Make rows of the slots current: those of a batch, or newer ones of batches before."""
        current = self.current[: len(source)]
        torch.index_select(self.rows.flatten(0, 1), 0, source, out=current)

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

    `ids` are its entities, ascending: so many as `count` says, followed by numbers that are larger
    than any. Threads that copy rows have the entities alone as `host_ids`. `source` are the newest
    rows of these entities in all slots, flat. `loaded` ends with an event after which the rows are
    on the device.
    """

    batch: Tensor
    number: int
    slot: int
    ids: Tensor
    count: Tensor
    host_ids: npt.NDArray[np.int64] | None
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
        self._num_rows_copied = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.streams = Streams(self.device)
        self._replace_tables(optimizer)
        self.is_pinned = all(copies.pinned is not None for copies in self.copies)
        if not self.is_pinned:
            for copies in self.copies:
                copies.pinned = None
        make_executor = CallingThread if self.is_pinned else tables.make_executor
        self._into = make_executor()
        self._back = make_executor()
        self._build = build
        self.step: Step | None = None  # on buffers of a size that the first batch decides

        self._capacity = 0
        self._num_planned = 0
        self._planned: deque[Window] = deque()
        # For each batch what ends with an event after which its rows are in the tables.
        self._returned: dict[int, Future[Any]] = {}
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
        for returned in self._returned.values():
            written = returned.result()
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
            # The host waits here, unless the device reads the tables itself.
            host_ids = None if self.is_pinned else ids[: int(count)].cpu().numpy()
            planned = self.streams.event()
        self._num_planned += 1
        before = self._returned.get(number - self.num_in_flight)
        self._returned.pop(number - self.num_in_flight - 1, None)
        after = [planned, self._entered]
        loaded = self._into.submit(self._load, slot, ids, count, host_ids, before, after)
        return Window(batch, number, slot, ids, count, host_ids, source, loaded)

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
        self.present.present = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.step = self._build(self.step_model, self.step_optimizer)

    def _load(
        self,
        slot: int,
        ids: Tensor,
        count: Tensor,
        host_ids: npt.NDArray[np.int64] | None,
        before: Future[Any] | None,
        after: Sequence[Any],
    ) -> Any:
        """Copy rows to the device.

        The rows of a batch `before` this one are in the tables first. The copies wait for the
        events `after`: the ids are known, and batches that replace rows by rows of the same slot
        have done so.
        """
        written = None if before is None else before.result()
        if host_ids is not None:
            for copies in self.copies:
                copies.read(host_ids, slot)
        with self.streams.on("inward"):
            for event in (written, *after):
                self.streams.wait(event)
            for copies in self.copies:
                if host_ids is None:
                    copies.to_device(slot, ids, count)
                else:
                    copies.buffer_to_device(slot, len(host_ids))
            self.streams.keep(ids, count)
            return self.streams.event()

    def _enter(self, window: Window) -> None:
        """Make the rows of a batch those of the step."""
        self.streams.wait(window.loaded.result())
        assert self.present.present is not None
        # What follows the ids is larger than any, so that they stay ascending.
        self.present.present.fill_(self.num_entities)[: len(window.ids)] = window.ids
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
                if window.host_ids is None:
                    copies.to_host(window.slot, window.ids, window.count)
                else:
                    copies.buffer_to_host(window.slot, len(window.host_ids))
            self.streams.keep(window.ids, window.count)
            copied = self.streams.event()
        self._returned[window.number] = self._back.submit(self._store, window, copied)

    def _store(self, window: Window, copied: Any) -> Any:
        """Write the rows of a batch into the tables, where the device has not done so itself."""
        if window.host_ids is None:
            return copied
        if copied is not None:
            copied.synchronize()
        for copies in self.copies:
            copies.write(window.host_ids, window.slot)
        return None

"""The processes that train one model, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualkg.tables.liveness import Liveness

T = TypeVar("T")
TEXT_END = b"\xff"  # a byte that no text in UTF-8 has


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model.

    `capturable` says whether a CUDA graph can contain the collectives, which is so with NCCL.
    Several processes have a `liveness`, by which they wait for each other without a limit of time.
    """

    index: int
    count: int
    device: torch.device
    capturable: bool = True
    liveness: Liveness | None = None
    num_sharing: int = 1  # processes that share the memory of the device, this one included

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder, shows progress and calls callbacks."""
        return self.index == 0

    def in_turn(self, function: Callable[[], T]) -> T:
        """Call a function in process 0, then in one process per machine, and then in the others.

        What process 0 caches is then read by others. All wait as long as those whose turn it is
        live, and fail if one fails.
        """
        if self.liveness is None:
            return function()
        hosts = self.liveness.hosts
        own_turn = 2
        if hosts.index(hosts[self.index]) == self.index:
            own_turn = 0 if self.first else 1
        results = [self.together(function if turn == own_turn else _nothing) for turn in range(3)]
        result: Any = results[own_turn]
        return result  # type: ignore[no-any-return]

    def together(self, function: Callable[[], T]) -> T:
        """Call a function in all processes at once; all wait for all, and fail if one fails."""
        return function() if self.liveness is None else self.liveness.call(function)

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Call a function in process 0 alone when all are here.

        The others wait, and fail if it fails.
        """
        self.largest(0)
        return self.together(function if self.first else _nothing)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag if self.count == 1 else bool(self.largest(flag)[0])

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.count > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()

    def gather(self, text: str) -> list[str]:
        """The texts of all processes, by their index."""
        if self.count == 1:
            return [text]
        own = text.encode()
        size = int(self.largest(len(own))[0])
        # What is sent has one size, and a text ends at a byte that UTF-8 does not have.
        padded = torch.tensor(list(own.ljust(size + 1, TEXT_END)), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(received, padded)
        texts = []
        for numbers in received:
            content, _, _ = bytes(numbers.tolist()).partition(TEXT_END)
            texts.append(content.decode())
        return texts

    def share(self, values: Tensor) -> Tensor:
        """Replace values by those of process 0."""
        if self.count > 1:
            dist.broadcast(values, src=0)
        return values

    def own_part(self, number: int) -> slice:
        """The part of this process of that many things."""
        return slice(self.index * number // self.count, (self.index + 1) * number // self.count)

    def join_rows(self, own: Tensor, number: int) -> Tensor:
        """That many rows, of which each process has computed its own part.

        The gradient of the own rows is that of the whole in this process, in which all agree.
        """
        joined: Tensor = _JoinedRows.apply(own, number, self)  # type: ignore[no-untyped-call]
        return joined

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of parameters that all processes have."""
        if self.count == 1:
            return
        gradients = [table.grad for table in parameters if table.grad is not None]
        total = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(total)
        parts = total.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class _JoinedRows(torch.autograd.Function):
    """Rows of all processes; those of others have no gradient here."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, number: int, group: Processes) -> Tensor:
        ctx.part = group.own_part(number)
        whole = own.new_zeros(number, *own.shape[1:])
        whole[ctx.part] = own
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.part], None, None


def _nothing() -> None:
    """Have nothing to do where other processes have."""


def one_process(device: torch.device) -> Processes:
    """A single process, which agrees with itself."""
    return Processes(0, 1, device)

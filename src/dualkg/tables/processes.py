"""The processes that train one model, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from dualkg.errors import DualkgError

T = TypeVar("T")


class OtherProcessFailed(DualkgError):
    """Process 0 has failed, and has reported why."""

    silent = True

    def __init__(self) -> None:
        super().__init__("Process 0 has refused.")


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model.

    `capturable` says whether a CUDA graph can contain the collectives, which is so with NCCL.
    """

    index: int
    count: int
    device: torch.device
    capturable: bool = True

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder, shows progress and calls callbacks."""
        return self.index == 0

    def first_then_all(self, function: Callable[[], T]) -> T:
        """Call a function in process 0 and then, unless that fails, in the others."""
        result = self.on_first(function)
        return function() if result is None else result

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Call a function in process 0 alone when all are here.

        The others wait, and fail if it fails.
        """
        self.largest(0)
        result = None
        failure: BaseException | None = None
        if self.first:
            try:
                result = function()
            except BaseException as error:
                failure = error
        failed = self.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise OtherProcessFailed
        return result

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag if self.count == 1 else bool(self.largest(flag)[0])

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.count > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()


def one_process(device: torch.device) -> Processes:
    """A single process, which agrees with itself."""
    return Processes(0, 1, device)

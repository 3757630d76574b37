"""What a run costs: seconds of training, of getting ready for it and of ranking, and the peak of memory."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

# In these kernels are compiled, and on a GPU a step is captured as a graph.
STEPS_OF_WARM_UP = {"cpu": 1, "cuda": 5}


@dataclass(frozen=True)
class Costs:
    """`training_seconds` are of the epochs, without their warm-up and without validation.

    Of a run that was resumed, warm-up and peak are those of the last process.
    """

    warm_up_seconds: float
    training_seconds: float
    ranking_seconds: float
    peak_mib: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 3) for name, value in asdict(self).items()}


class WarmUp:
    """Times the first steps, and the first one of any other size, apart from those after them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self._taken: Counter[int] = Counter()

    def take(self, step: Callable[[Tensor, float], Tensor], batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step. On a GPU the host waits for the first ones, and never again."""
        first = next(iter(self._taken), len(batch))
        if self._taken[len(batch)] >= (STEPS_OF_WARM_UP[self.device.type] if len(batch) == first else 1):
            return step(batch, learning_rate)
        self._taken[len(batch)] += 1
        self._wait()
        started = time.perf_counter()
        objective = step(batch, learning_rate)
        self._wait()
        self.seconds += time.perf_counter() - started
        return objective

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Clock:
    """Seconds since it was made, without those of a warm-up."""

    def __init__(self, warm_up: WarmUp) -> None:
        self._warm_up = warm_up
        self._started = time.perf_counter() - warm_up.seconds

    def passed(self) -> float:
        return time.perf_counter() - self._started - self._warm_up.seconds


def reset_peak(device: torch.device) -> None:
    """Count a GPU's memory from here, without what earlier runs left; a process's own is counted from its start."""
    if device.type == "cuda":
        gc.collect()  # Python clears cycles by the number of objects, not by what they hold
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    """On a GPU what PyTorch had allocated at most, on a CPU what the process had; Windows does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

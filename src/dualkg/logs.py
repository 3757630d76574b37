"""Log lines of long computations, through the logger `dualkg` of Python's `logging`."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("dualkg")
clock = time.monotonic  # replaced in tests
SECONDS = 10.0  # between two lines of one computation
FORMAT = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")


class ProgressLog:
    """Logs the first line about a computation, then at most one every `SECONDS`, and the last.

    Without `first`, a computation that is shorter than `SECONDS` logs only what is marked as last.
    """

    def __init__(self, title: str, *, first: bool = True) -> None:
        self.title = title
        self._next = float("-inf") if first else clock() + SECONDS

    def __call__(self, text: Callable[[], str], *, last: bool = False) -> None:
        """Log `title: text()` if a line is due; the text is computed only then."""
        is_due = last or clock() >= self._next
        if is_due and logger.isEnabledFor(logging.INFO):
            self._next = clock() + SECONDS
            logger.info("%s: %s", self.title, text())

    def count(self, done: int, total: int, things: str) -> None:
        """Log `title: 1,000 of 5,000 things`."""
        self(lambda: f"{done:,} of {total:,} {things}", last=done >= total)


class TimeLeft:
    """Estimates the time left of a computation; its first call is at the start."""

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._done_before = 0.0

    def __call__(self, done: float, total: float) -> float | None:
        """Seconds of what is left of `total`, at the speed so far; None at the start."""
        if self._started_at is None:
            self._started_at = clock()
            self._done_before = done
        done_here = done - self._done_before
        if done_here <= 0:
            return None
        return max(0.0, total - done) * (clock() - self._started_at) / done_here


def describe_seconds(seconds: float) -> str:
    """`40 s`, `3 min`, `1.5 h`."""
    if seconds < 1:
        return "a second"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def describe_time_left(seconds: float | None, *, prefix: str = "about") -> str:
    """`about 3 min left`, or nothing where that is not known."""
    return "" if seconds is None else f"{prefix} {describe_seconds(seconds)} left"


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Write the lines to stderr with their time, for a program whose stderr is no terminal."""
    handler = logging.StreamHandler()
    level = logger.level
    handler.setFormatter(FORMAT)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

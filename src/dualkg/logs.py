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

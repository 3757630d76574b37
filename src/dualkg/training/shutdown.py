"""Graceful shutdown: a signal asks a training to end, and torchrun waits for its checkpoint."""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

LAUNCHED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_SECONDS = 30  # that torchrun waits for processes to end, unless it is told otherwise


class GracefulShutdown:
    """Whether a shutdown was requested."""

    requested = False

    def listening(self) -> AbstractContextManager[None]:
        """Turn the first Ctrl-C or TERM into a request; a Ctrl-C after it interrupts."""
        return signal_handler(self._request, signal.SIGINT, signal.SIGTERM)

    def _request(self, number: int, frame: object) -> None:
        # A batch system sends TERM to all processes of a job, and a launcher passes it on to them:
        # a second one is the same request.
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def signal_handler(
    handler: Callable[[int, Any], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Replace the handler of signals for the duration of a block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def shutdown_warning(seconds: float, environment: Mapping[str, str]) -> str:
    """What to set if torchrun would kill processes before they have written a checkpoint."""
    if LAUNCHED_BY_TORCHRUN not in environment:
        return ""
    given = environment.get(SHUTDOWN_TIMEOUT, "")
    limit = int(given) if given.isdecimal() else SHUTDOWN_SECONDS
    if seconds <= limit:
        return ""
    return (
        f"A checkpoint takes {seconds:.0f} s, and torchrun kills processes {limit} s after it has "
        "told them to end: a run that is stopped would resume from the checkpoint before. Set "
        f"{SHUTDOWN_TIMEOUT}={math.ceil(2 * seconds)} for torchrun, and give its job as long."
    )

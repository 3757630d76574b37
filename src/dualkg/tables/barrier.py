"""A barrier at which processes wait for each other as long as each shows signs of life.

A collective fails after a fixed time. Reading a graph may take longer than that, so a process that
works sends signs of life to the store by which the processes have met, and the others wait.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dualkg.errors import DualkgError

T = TypeVar("T")
FIRST_PAUSE = 0.001  # seconds between two looks at the store, which double
LONGEST_PAUSE = 0.2


class Pace(NamedTuple):
    """Seconds between signs of life, and those that are waited for.

    A process that has arrived is taken for dead after `silence`, and one that has not after
    `arrival`. A process that fails ends when all know of it, or after `farewell`.
    """

    beat: float = 2.0
    silence: float = 60.0
    arrival: float = 600.0
    farewell: float = 10.0


class OtherProcessFailed(DualkgError):
    """Another process has failed, and has reported why."""

    silent = True

    def __init__(self) -> None:
        super().__init__("Another process has failed.")


class ProcessSilent(DualkgError):
    """A process that others wait for has ended without a word, or its machine is gone."""

    def __init__(self, index: int, host: str, seconds: float) -> None:
        super().__init__(
            f"Process {index} on {host} has shown no sign of life for {seconds:g} s: it was "
            "killed, or its machine cannot be reached. Start all processes again."
        )
        self.index = index
        self.host = host
        self.seconds = seconds


class Barrier:
    """The meetings of some processes, which all call it as often and in the same order."""

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        *,
        pace: Pace | None = None,
        host: str | None = None,
    ) -> None:
        """`host` is the name of this machine, unless another is given."""
        self.index = index
        self.count = count
        self.pace = pace or Pace()
        self._store = PrefixStore("dualkg", store)
        self._store.set(f"host/{index}", host or socket.gethostname())
        self._num_meetings = 0

    @cached_property
    def hosts(self) -> list[str]:
        """The name of the machine of each process."""
        return [self._store.get(f"host/{index}").decode() for index in range(self.count)]

    @property
    def turn_after(self) -> int | None:
        """The process whose turn is before this one's, where one per machine comes first."""
        if self.index == 0:
            return None
        first_here = self.hosts.index(self.hosts[self.index])
        return 0 if first_here == self.index else first_here

    def call(self, function: Callable[[], T], *, after: int | None = None) -> T:
        """Call a function, if wished `after` that of another process, and wait for all.

        If it fails in one process, that raises the error, and the others `OtherProcessFailed`. If
        it fails in several, the first reports it.
        """
        self._num_meetings += 1
        store = PrefixStore(str(self._num_meetings), self._store)
        return _Meeting(store, self).call(function, after)


class _Meeting:
    """One call of a barrier. The store counts who has ended, failed, noticed that, and left."""

    def __init__(self, store: Store, barrier: Barrier) -> None:
        self.store = store
        self.barrier = barrier
        self.index = barrier.index
        self.count = barrier.count
        self.pace = barrier.pace

    def call(self, function: Callable[[], T], after: int | None) -> T:
        with self._signs_of_life():
            try:
                if after is not None:
                    self._wait(lambda: self.store.check([f"end/{after}"]), watched=after)
                result = function()
                self.store.set(f"end/{self.index}", "")
                self.store.add("ended", 1)
                # Each watches the next, so that the store has little to do.
                following = (self.index + 1) % self.count
                self._wait(lambda: self._number("ended") == self.count, watched=following)
                self._leave()
            except OtherProcessFailed:
                raise
            except BaseException as error:
                self._fail(error)
                raise
        return result

    def _number(self, name: str) -> int:
        return int(self.store.add(name, 0))

    def _wait(self, is_over: Callable[[], bool], *, watched: int) -> None:
        """Wait for a condition, unless a process fails or the watched one is silent."""
        pause = FIRST_PAUSE
        num_signs = -1
        last_sign = time.monotonic()
        while not is_over():
            if self._number("failed"):
                self.store.add("noticed", 1)
                raise OtherProcessFailed
            if self._number(f"signs/{watched}") != num_signs:
                num_signs = self._number(f"signs/{watched}")
                last_sign = time.monotonic()
            limit = self.pace.silence if num_signs else self.pace.arrival
            if time.monotonic() - last_sign > limit:
                raise ProcessSilent(watched, self.barrier.hosts[watched], limit)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _leave(self) -> None:
        """Leave when all have ended; process 0 last, as the store may end with it."""
        self.store.add("left", 1)
        if self.index == 0:
            self._wait(lambda: self._number("left") == self.count, watched=self.count - 1)

    def _fail(self, error: BaseException) -> None:
        """Let the others know of a failure, the first of which is reported."""
        with suppress(RuntimeError):  # the store is gone
            is_first = self.store.add("failed", 1) == 1
            if not is_first and isinstance(error, DualkgError):
                error.silent = True
            deadline = time.monotonic() + self.pace.farewell
            while time.monotonic() < deadline:
                if self._number("failed") + self._number("noticed") >= self.count:
                    break
                time.sleep(LONGEST_PAUSE / 10)

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Count signs of life in the store from another thread."""
        is_over = threading.Event()
        name = f"signs/{self.index}"
        self.store.add(name, 1)

        def send() -> None:
            with suppress(RuntimeError):  # the store is gone, which the main thread finds out
                while not is_over.wait(self.pace.beat):
                    self.store.add(name, 1)

        thread = threading.Thread(target=send, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

"""Signs of life of the processes of a training, and meetings at which they wait for each other.

A collective that waits for a dead process fails after ten minutes, and inside of a CUDA graph it
never does: nobody watches it there. So each process sends signs of life to the store by which the
processes have met, from a thread, and watches those of the next one. A dead process ends the others
instead of a hang, and a meeting needs no limit of time: reading a graph may take long.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dualkg.errors import DualkgError

T = TypeVar("T")
FIRST_PAUSE = 0.001  # seconds between two reads of the store, which double
LONGEST_PAUSE = 0.2
NAME = "dualkg"  # of what is in the store


class Pace(NamedTuple):
    """Seconds between signs of life, and those that are waited for.

    A process is taken for dead after `silence`. A process that fails ends when all know of it, or
    after `farewell`.
    """

    beat: float = 2.0
    silence: float = 60.0
    farewell: float = 10.0


class OtherProcessFailed(DualkgError):
    """Another process has failed, and has reported why."""

    silent = True

    def __init__(self) -> None:
        super().__init__("Another process has failed.")


def end_process(error: DualkgError) -> None:
    """End this process at once, as its main thread may wait for ever."""
    print(f"dualkg: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class Liveness:
    """The meetings of this process with the others, its signs of life, and the watch over the next.

    `end` is called with an error if the next process is silent for `pace.silence` seconds, if the
    store cannot be reached for as long, or `pace.farewell` seconds after a process has failed. Time
    in which this process was stopped does not count. All processes meet as often and in the same
    order.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        *,
        pace: Pace | None = None,
        host: str | None = None,
        end: Callable[[DualkgError], None] = end_process,
    ) -> None:
        """`host` is the name of this machine, unless another is given."""
        self.index = index
        self.count = count
        self.pace = pace or Pace()
        self.end = end
        self.watched = (index + 1) % count
        self._met_at = store
        self._store = PrefixStore(NAME, store)
        self._store.set(f"host/{index}", host or socket.gethostname())
        self._num_meetings = 0
        self._is_over = threading.Event()
        self._quiet = 0.0  # seconds since a sign of the watched process
        self._unreachable = 0.0  # seconds since an answer of the store
        self._since_failure = 0.0
        self._failed: int | None = None
        self._known_hosts: list[str] = []  # which a message may need when the store is gone
        self._threads = [
            threading.Thread(target=work, name="signs of life", daemon=True)
            for work in (self._beat, self._watch)
        ]

    @cached_property
    def hosts(self) -> list[str]:
        """The name of the machine of each process."""
        return [self._store.get(f"host/{index}").decode() for index in range(self.count)]

    # -- meetings -------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Call a function, and wait until all processes have called theirs.

        If it fails in one process, that raises the error, and the others `OtherProcessFailed`. If
        it fails in several, the first reports it.
        """
        self._num_meetings += 1
        meeting = PrefixStore(str(self._num_meetings), self._store)
        try:
            result = function()
            meeting.add("ended", 1)
            self._wait(meeting, "ended")
            meeting.add("left", 1)
            if self.index == 0:
                # The store may end with this process.
                self._wait(meeting, "left")
        except OtherProcessFailed:
            raise
        except BaseException as error:
            self._report(meeting, error)
            raise
        return result

    def _wait(self, meeting: Store, name: str) -> None:
        """Wait until all processes have counted themselves, or one has failed."""
        pause = FIRST_PAUSE
        while _number(meeting, name) < self.count:
            if _number(meeting, "failed"):
                meeting.add("noticed", 1)
                raise OtherProcessFailed
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _report(self, meeting: Store, error: BaseException) -> None:
        """Let the others know of a failure, the first of which is reported."""
        with suppress(RuntimeError):  # the store is gone
            is_first = meeting.add("failed", 1) == 1
            if not is_first and isinstance(error, DualkgError):
                error.silent = True
            deadline = time.monotonic() + self.pace.farewell
            while time.monotonic() < deadline:
                if _number(meeting, "failed") + _number(meeting, "noticed") >= self.count:
                    break
                time.sleep(LONGEST_PAUSE / 10)

    # -- signs of life --------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, *, failed: bool = False) -> None:
        """Leave, which the others may do later; if this process has failed, they have to soon."""
        self._is_over.set()
        # The store may not answer.
        leaving = threading.Thread(target=self._leave, args=(failed,), daemon=True)
        leaving.start()
        leaving.join(self.pace.farewell)

    def _leave(self, failed: bool) -> None:
        with suppress(RuntimeError):  # the store is gone
            if failed:
                self._store.compare_set("failed", "", str(self.index))
                return
            self._store.set(f"left/{self.index}", "")
            others = [f"left/{index}" for index in range(1, self.count)]
            # The store ends with process 0, so that the others are to leave before.
            while self.index == 0 and not self._store.check(others):
                time.sleep(self.pace.beat / 100)

    def _beat(self) -> None:
        """Send signs, and read those of the watched process; the store may not answer."""
        # The main thread may wait at its own connection. To make another one takes minutes if
        # process 0 has died, in which the watch goes on.
        try:
            connection = self._met_at.clone()  # type: ignore[attr-defined]
        except RuntimeError:
            self._is_over.wait()
            return
        store = PrefixStore(NAME, connection)
        hosts = [f"host/{index}" for index in range(self.count)]
        num_signs = -1
        while not self._is_over.wait(self.pace.beat):
            with suppress(RuntimeError):
                store.add(f"signs/{self.index}", 1)
                before = num_signs
                num_signs = _number(store, f"signs/{self.watched}")
                if num_signs != before or store.check([f"left/{self.watched}"]):
                    self._quiet = 0.0
                if self._failed is None and store.check(["failed"]):
                    self._failed = int(store.get("failed"))
                self._unreachable = 0.0
                if not self._known_hosts and store.check(hosts):
                    self._known_hosts = [store.get(host).decode() for host in hosts]
                if store.check(["left/0"]):
                    return  # the store ends with process 0, and this process soon

    def _watch(self) -> None:
        pause = self.pace.beat / 2
        before = time.monotonic()
        while not self._is_over.wait(pause):
            now = time.monotonic()
            elapsed = min(now - before, 2 * pause)
            before = now
            if not self._threads[0].is_alive():
                return
            self._quiet += elapsed
            self._unreachable += elapsed
            if self._failed is not None:
                self._since_failure += elapsed
            error = self._error()
            if error is not None:
                self.end(error)
                return

    def _error(self) -> DualkgError | None:
        if self._failed is not None and self._since_failure > self.pace.farewell:
            name = self._name(self._failed)
            return DualkgError(f"{name} has failed; see its message.")
        if self._unreachable > self.pace.silence:
            return self._silent(0)  # which has the store
        if self._quiet > self.pace.silence:
            return self._silent(self.watched)
        return None

    def _silent(self, process: int) -> DualkgError:
        return DualkgError(
            f"{self._name(process)} has shown no sign of life for {self.pace.silence:g} s: it was "
            "killed, or its machine cannot be reached. Start all processes again."
        )

    def _name(self, process: int) -> str:
        host = self._known_hosts[process] if self._known_hosts else "an unknown host"
        return f"Process {process} on {host}"


def _number(store: Store, name: str) -> int:
    return int(store.add(name, 0))

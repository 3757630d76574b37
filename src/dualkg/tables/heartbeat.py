"""Signs of life of processes while they train: a dead one ends the others instead of a hang.

A collective that waits for a dead process fails after ten minutes, and inside of a CUDA graph it
never does: nobody watches it there. So each process sends signs of life to the store by which the
processes have met, from a thread, and watches those of the next one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dualkg.errors import DualkgError
from dualkg.tables.barrier import Pace, ProcessSilent


class ProcessFailed(DualkgError):
    """Another process has ended with an error, which it reports."""

    def __init__(self, index: int, host: str) -> None:
        super().__init__(f"Process {index} on {host} has failed; see its message.")
        self.index = index
        self.host = host


def end_process(error: DualkgError) -> None:
    """End this process at once, as its main thread may wait for ever."""
    print(f"dualkg: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class Heartbeat:
    """The signs of life of this process, and the watch over the next one.

    `end` is called with an error if the next process is silent for `pace.silence` seconds, if the
    store cannot be reached for as long, or `pace.farewell` seconds after a process has failed. Time
    in which this process was stopped does not count.
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
        self.host = host or socket.gethostname()
        self.pace = pace or Pace()
        self.end = end
        self.watched = (index + 1) % count
        self._met_at = store
        self._store = PrefixStore("dualkg heartbeat", store)
        self._hosts: dict[int, str] = {}  # of the processes that an error may name
        self._is_over = threading.Event()
        self._quiet = 0.0  # seconds since a sign of the watched process
        self._unreachable = 0.0  # seconds since an answer of the store
        self._since_failure = 0.0
        self._failed: int | None = None
        self._threads = [
            threading.Thread(target=work, name="heartbeat", daemon=True)
            for work in (self._beat, self._watch)
        ]

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
            else:
                self._store.set(f"left/{self.index}", "")
                if self.index == 0:
                    self._wait_for_others()

    def _wait_for_others(self) -> None:
        """The store ends with process 0, so that the others are to leave before."""
        others = [f"left/{index}" for index in range(1, self.count)]
        deadline = time.monotonic() + self.pace.farewell
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(self.pace.beat / 100)

    def _beat(self) -> None:
        """Send signs, and look for those of the watched process; the store may not answer."""
        # The main thread may wait at its own connection. To make another one takes minutes if
        # process 0 has died, in which the watch goes on.
        try:
            connection = self._met_at.clone()  # type: ignore[attr-defined]
        except RuntimeError:
            self._is_over.wait()
            return
        self._store = PrefixStore("dualkg heartbeat", connection)
        num_signs = -1
        with suppress(RuntimeError):
            self._store.set(f"host/{self.index}", self.host)
        while not self._is_over.wait(self.pace.beat):
            with suppress(RuntimeError):
                self._store.add(f"signs/{self.index}", 1)
                before = num_signs
                num_signs = self._store.add(f"signs/{self.watched}", 0)
                if num_signs != before or self._store.check([f"left/{self.watched}"]):
                    self._quiet = 0.0
                if self._failed is None and self._store.check(["failed"]):
                    self._failed = int(self._store.get("failed"))
                self._unreachable = 0.0
                for process in (0, self.watched, self._failed):
                    if process is not None:
                        self._learn_host(process)
                if self._store.check(["left/0"]):
                    return  # the store ends with process 0, and this process soon

    def _learn_host(self, process: int) -> None:
        if process not in self._hosts and self._store.check([f"host/{process}"]):
            self._hosts[process] = self._store.get(f"host/{process}").decode()

    def _host_of(self, process: int) -> str:
        """The machine of a process; the store may no longer say it."""
        return self._hosts.get(process, "an unknown host")

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
            error = self._error(elapsed)
            if error is not None:
                self.end(error)
                return

    def _error(self, elapsed: float) -> DualkgError | None:
        silence = self.pace.silence
        if self._failed is not None:
            self._since_failure += elapsed
            if self._since_failure > self.pace.farewell:
                return ProcessFailed(self._failed, self._host_of(self._failed))
        if self._unreachable > silence:
            # The store is in process 0.
            return ProcessSilent(0, self._host_of(0), silence)
        if self._quiet > silence:
            return ProcessSilent(self.watched, self._host_of(self.watched), silence)
        return None

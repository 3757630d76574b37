"""Turns of clients: who has used least comes next, so that none waits for all work of another."""

import asyncio
import heapq
import ipaddress
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Generic, TypeVar

from dualkg.serve.errors import ServerStopping

Item = TypeVar("Item")
ACTIVE_SECONDS = 1.0  # in which a client has sent a request
BURST_SECONDS = 0.05  # that a client may use at once
MAX_REST = 1.0  # seconds
MAX_SEEN = 1000  # clients
Result = TypeVar("Result")


@lru_cache(4096)
def client_of(address: tuple[str, int] | None) -> str:
    """The client of an address: an IPv4 address, or the first half of an IPv6 address."""
    host = address[0] if address else ""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:  # a proxy may write anything
        return host
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped:
        return str(ip.ipv4_mapped)
    return ip.exploded[:19]


class FairQueue(Generic[Item]):
    """Items of several clients, each client's in their order.

    The next item is that of the client whose items have cost least. A client that comes, or comes
    back, begins with what the last item of the others stood at: it has saved nothing up.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[tuple[Item, float]]] = {}
        self._used: dict[str, float] = {}  # by the clients that have items
        self._turns: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def num_clients(self) -> int:
        return len(self._items)

    def waiting(self, client: str) -> int:
        """The number of items of a client."""
        return len(self._items.get(client, ()))

    def put(self, client: str, item: Item, *, cost: float) -> None:
        if client not in self._items:
            self._items[client] = deque()
            self._used[client] = max(self._used.get(client, 0.0), self._now)
            self._push(client)
        self._items[client].append((item, cost))
        self._length += 1

    def take(self, *, without: Callable[[str], bool] = lambda client: False) -> Item | None:
        """The next item, of no client that is left out; None if there is none."""
        left_out = []
        taken: Item | None = None
        while self._turns and taken is None:
            turn = heapq.heappop(self._turns)
            client = turn[2]
            if without(client):
                left_out.append(turn)
                continue
            taken, cost = self._items[client].popleft()
            self._length -= 1
            self._now = turn[0]
            self._used[client] = self._now + cost
            if self._items[client]:
                self._push(client)
            else:
                del self._items[client]
                self._forget()
        for turn in left_out:
            heapq.heappush(self._turns, turn)
        return taken

    def _push(self, client: str) -> None:
        heapq.heappush(self._turns, (self._used[client], next(self._order), client))

    def _forget(self) -> None:
        """Forget clients that have waited long enough to begin again with the others."""
        if len(self._used) > 2 * len(self._items) + 100:
            self._used = {
                client: used
                for client, used in self._used.items()
                if client in self._items or used > self._now
            }


class Shares:
    """Turns of work that takes long: one of a client at a time, and no more than its share of time.

    Beside n other active clients, the share of a client is 1 / (n + 1) of the time. What it has
    used beyond that, and a burst, it waits for before its next turn.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._used: dict[str, tuple[float, float]] = {}  # seconds, and when they were counted
        self._seen: dict[str, float] = {}

    def see(self, client: str) -> None:
        """Note that a client is active."""
        now = time.monotonic()
        self._seen[client] = now
        if len(self._seen) > MAX_SEEN:
            recent = {one: seen for one, seen in self._seen.items() if now - seen < ACTIVE_SECONDS}
            self._seen = recent
            self._locks = {one: lock for one, lock in self._locks.items() if lock.locked()}
            self._used = {one: used for one, used in self._used.items() if one in recent}

    def share(self) -> float:
        """The share of the time of each client."""
        now = time.monotonic()
        num_active = sum(now - seen < ACTIVE_SECONDS for seen in self._seen.values())
        return 1 / max(1, num_active)

    def excess(self, client: str, *, now: float, share: float) -> float:
        """The seconds that a client has used beyond its share and a burst."""
        seconds, counted = self._used.get(client, (0.0, now))
        return max(0.0, seconds - (now - counted) * share)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """The turn of some work of a client."""
        async with self._locks.setdefault(client, asyncio.Lock()):
            share = self.share()
            used = self.excess(client, now=time.monotonic(), share=share)
            if used > BURST_SECONDS:
                await asyncio.sleep(min(MAX_REST, (used - BURST_SECONDS) / share))
            started = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                used = self.excess(client, now=now, share=self.share())
                self._used[client] = (used + now - started, now)


class FairThreads:
    """Threads for work of several clients, of which one has at most `most_of_one`.

    Work is taken in turns. It costs the same for each, since nobody knows what it will take; what
    takes long occupies its threads, and no other client's.
    """

    def __init__(self, num_threads: int, *, most_of_one: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._most_of_one = most_of_one
        self._running: dict[str, int] = {}
        self._waiting: FairQueue[tuple[str, Callable[[], object], asyncio.Future[object]]]
        self._waiting = FairQueue()
        self._has_stopped = False

    async def run(self, work: Callable[[], Result], *, client: str = "") -> Result:
        """Do some work; what has begun runs to its end even if its request is cancelled."""
        if self._has_stopped:
            raise ServerStopping
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, (client, work, future), cost=1.0)  # type: ignore[arg-type]
        self._start()
        return await future

    def _start(self) -> None:
        while self._num_free:
            item = self._waiting.take(without=self._has_enough)
            if item is None:
                return
            client, work, future = item
            if future.done():  # its request was cancelled
                continue
            self._num_free -= 1
            self._running[client] = self._running.get(client, 0) + 1
            loop = future.get_loop()
            started = self._threads.submit(work)
            started.add_done_callback(_in_loop(loop, self._end, client, future))

    def _has_enough(self, client: str) -> bool:
        return bool(client) and self._running.get(client, 0) >= self._most_of_one

    def _end(
        self, client: str, future: "asyncio.Future[object]", finished: "Future[object]"
    ) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        if not future.done():
            error = finished.exception()
            if error is None:
                future.set_result(finished.result())
            else:
                future.set_exception(error)
        self._start()

    def stop(self) -> None:
        """Refuse the work that waits, and all that comes."""
        self._has_stopped = True
        while (item := self._waiting.take()) is not None:
            future = item[2]
            if not future.done():
                future.set_exception(ServerStopping())
        self._threads.shutdown(wait=False)


def _in_loop(
    loop: asyncio.AbstractEventLoop, end: Callable[..., None], *arguments: object
) -> Callable[["Future[object]"], None]:
    """A callback that tells an event loop, if it still runs, that some work has ended."""

    def call(finished: "Future[object]") -> None:
        if not loop.is_closed() and not finished.cancelled():
            loop.call_soon_threadsafe(partial(end, *arguments, finished))

    return call

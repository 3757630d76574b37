"""Ordinary clients of a server, over HTTP by hand: their latencies, statuses and failures.

`python -m benchmarks.torture.clients JSON` runs them in a process of its own.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NUM_CLIENTS = 64
PAUSE = 0.5  # mean seconds between two requests of a client
HEALTH_PAUSE = 0.25
MAX_WAIT = 10.0  # seconds a client waits for a response
MAX_FAILURES = 10  # failures that are told in words
SecondsLeft = Callable[[], float]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


# -- HTTP by hand: a client must be able to break the rules ------------------


async def connect(port: int, source: str | None = None) -> Connection:
    local = None if source is None else (source, 0)
    return await asyncio.open_connection("127.0.0.1", port, local_addr=local)


def head_of(path: str, *, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; `ConnectionError` if the server closed the connection first."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = await _read_chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise ConnectionError(str(error)) from None
    return int(status.split()[1]), headers, body


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        body += chunk[:-2]
    await reader.readline()
    return body


# -- what clients do ---------------------------------------------------------


@dataclass
class Observed:
    """What all clients of a phase have seen."""

    seconds: list[float] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    sent_again: int = 0

    def as_dict(self) -> dict[str, Any]:
        told = {"num_failures": len(self.failures), "failures": self.failures[:MAX_FAILURES]}
        return vars(self) | told


class Client:
    """Sends requests over one connection.

    It is opened again when the server has closed it between two requests.
    """

    def __init__(self, port: int, observed: Observed) -> None:
        self.port = port
        self.observed = observed
        self.connection: Connection | None = None

    async def request(self, path: str) -> None:
        """Send a request, and note how it ended."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(MAX_WAIT):
                status, body = await self._response(path)
        except (OSError, TimeoutError) as error:
            seconds = time.perf_counter() - started
            self.observed.failures.append(f"{path}: {error!r} after {seconds:.2f} s")
            self.close()
            return
        self.observed.seconds.append(time.perf_counter() - started)
        self.observed.statuses[str(status)] += 1
        if status != 200:
            self.observed.failures.append(f"{path}: {status} {body[:200]!r}")

    async def _response(self, path: str) -> tuple[int, bytes]:
        if self.connection is not None and not self.connection[0].at_eof():
            try:
                return await self._exchange(self.connection, path)
            except OSError:
                # A request on a reused connection may be sent again (RFC 9112, 9.3.1).
                self.close()
                self.observed.sent_again += 1
        self.connection = await connect(self.port)
        try:
            return await self._exchange(self.connection, path)
        except OSError:
            self.close()
            raise

    async def _exchange(self, connection: Connection, path: str) -> tuple[int, bytes]:
        reader, writer = connection
        writer.write(head_of(path))
        status, _, body = await read_response(reader)
        return status, body

    def close(self) -> None:
        if self.connection:
            self.connection[1].close()
            self.connection = None


async def ordinary_client(
    port: int, paths: list[str], left: SecondsLeft, *, observed: Observed, seed: int
) -> None:
    """Send requests with pauses."""
    chance = random.Random(seed)
    client = Client(port, observed)
    await asyncio.sleep(chance.uniform(0, PAUSE))
    while left() > 0:
        await client.request(chance.choice(paths))
        await asyncio.sleep(chance.uniform(0, 2 * PAUSE))
    client.close()


async def health_check(port: int, left: SecondsLeft, observed: Observed) -> None:
    """`/health` over a new connection, several times a second."""
    while left() > 0:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(MAX_WAIT):
                reader, writer = await connect(port)
                writer.write(head_of("/health", headers="Connection: close\r\n"))
                status, _, _ = await read_response(reader)
                writer.close()
        except (OSError, TimeoutError) as error:
            seconds = time.perf_counter() - started
            observed.failures.append(f"/health: {error!r} after {seconds:.2f} s")
        else:
            observed.health_seconds.append(time.perf_counter() - started)
            if status != 200:
                observed.failures.append(f"/health: {status}")
        await asyncio.sleep(HEALTH_PAUSE)


def ordinary_clients(port: int, paths: list[str], seconds: float, *, seed: int) -> dict[str, Any]:
    """Latencies, statuses and failures of all clients of a phase."""
    observed = Observed()

    async def run() -> None:
        end = time.monotonic() + seconds

        def left() -> float:
            return end - time.monotonic()

        clients = [health_check(port, left, observed)]
        for number in range(NUM_CLIENTS):
            clients.append(
                ordinary_client(port, paths, left, observed=observed, seed=seed + number)
            )
        await asyncio.gather(*clients)

    asyncio.run(run())
    return observed.as_dict()


if __name__ == "__main__":
    print(json.dumps(ordinary_clients(**json.loads(sys.argv[1]))))

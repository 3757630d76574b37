"""Clients that break the rules of HTTP, of several kinds; each connects again when it was closed.

`python -m benchmarks.torture.abusers JSON` runs one kind in a process of its own.
"""

import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.torture.clients import Connection, SecondsLeft, connect, head_of, read_response

OTHER_ADDRESS = "127.0.0.2"  # of every second abuser
HOLD_SECONDS = 30  # that a connection is held without a byte
NUM_ABUSERS = {
    "slow headers": 1050,
    "slow bodies": 1000,
    "aborted streams": 16,
    "aborted requests": 16,
    "slow readers": 100,
    "malformed": 16,
    "idle": 10_000,
}


@dataclass
class Abuser:
    """The address of an abuser, the time that it has, and its random choices."""

    port: int
    source: str | None
    left: SecondsLeft
    chance: random.Random

    async def connect(self) -> Connection:
        return await connect(self.port, self.source)

    @property
    def hold_seconds(self) -> float:
        """How long it holds a connection: to the end of the phase, or for `HOLD_SECONDS`."""
        return max(0.1, min(HOLD_SECONDS, self.left()))


# -- slow requests -----------------------------------------------------------


async def slow_headers(abuser: Abuser) -> str:
    start = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
    return await _drip(await abuser.connect(), start, abuser.left)


async def slow_bodies(abuser: Abuser) -> str:
    start = head_of("/api/score", method="POST", headers="Content-Length: 100000\r\n") + b"["
    return await _drip(await abuser.connect(), start, abuser.left)


async def _drip(connection: Connection, start: bytes, left: SecondsLeft) -> str:
    """Send the start of a request and then a byte each second; the answer that ends it."""
    reader, writer = connection
    writer.write(start)
    answer = asyncio.ensure_future(read_response(reader))
    try:
        while left() > 0:
            done, _ = await asyncio.wait([answer], timeout=1)
            if done:
                status, headers, _ = answer.result()
                return str(status) if "retry-after" in headers else f"{status} without Retry-After"
            writer.write(b"x")
        return "held to the end"
    finally:
        answer.cancel()
        writer.close()


# -- aborted requests --------------------------------------------------------


async def aborted_streams(abuser: Abuser) -> str:
    """Begin a completion and reset the connection after a while."""
    reader, writer = await abuser.connect()
    writer.write(head_of("/api/complete?top=10000"))
    num_bytes = abuser.chance.randrange(1, 5000)
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(num_bytes), abuser.chance.uniform(0, 2))
    return _reset(writer)


async def aborted_requests(abuser: Abuser) -> str:
    """Send a whole request and reset the connection without reading."""
    _, writer = await abuser.connect()
    path = abuser.chance.choice(["/api/runs", "/api/entities?q=fr", "/", "/static/style.css"])
    writer.write(head_of(path))
    await asyncio.sleep(abuser.chance.uniform(0, 0.02))
    return _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> str:
    no_linger = struct.pack("ii", 1, 0)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    writer.transport.abort()
    return "aborted"


# -- connections that are held -----------------------------------------------


async def slow_readers(abuser: Abuser) -> str:
    """Long responses that are not read: few requests, since many would be work that slows others
    down by itself.
    """
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    if abuser.source:
        connection.bind((abuser.source, 0))
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, ("127.0.0.1", abuser.port))
        connection.send(head_of("/openapi.json") * 4)  # 230 KB, more than the system buffers
        await asyncio.sleep(abuser.hold_seconds)
        return "held"
    finally:
        connection.close()


async def idle(abuser: Abuser) -> str:
    """Hold a connection without a byte."""
    reader, writer = await abuser.connect()
    try:
        await asyncio.wait_for(reader.read(1), abuser.hold_seconds)
    finally:
        writer.close()
    return "closed"


# -- malformed requests ------------------------------------------------------


async def malformed(abuser: Abuser) -> str:
    """Bytes that are no request, or the end of one that is none."""
    reader, writer = await abuser.connect()
    writer.write(abuser.chance.choice(malformed_requests(abuser.chance)))
    try:
        status, _, _ = await asyncio.wait_for(read_response(reader), 20)
    finally:
        writer.close()
    return f"{status} where 4xx was expected" if status >= 500 and status != 503 else "answered"


def malformed_requests(chance: random.Random) -> list[bytes]:
    def post(path: str, header: str) -> bytes:
        return head_of(path, method="POST", headers=f"{header}\r\n")

    noise = chance.randbytes(chance.randrange(1, 2000))
    pipelined_noise = chance.randbytes(100)
    many_headers = "".join(f"X-{number}: y\r\n" for number in range(chance.randrange(20_000)))
    chunked = "Transfer-Encoding: chunked"
    return [
        noise,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /api/runs HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        post("/api/score", chunked) + b"zz\r\n" + b"x" * 50,
        post("/api/score", "Content-Length: 99999999") + b"\xff" * 70_000,
        post("/api/no", chunked) + b"5\r\nhello\r\nnonsense\r\n",
        head_of("/health") + pipelined_noise,
        post("/api/score", "Content-Length: 70000") + b"[" * 70_000,
        head_of("/", headers="Upgrade: websocket\r\nConnection: upgrade\r\n"),
        head_of("/", headers=many_headers),
        head_of("/" + "%" * 3000),
    ]


# -- all of a kind -----------------------------------------------------------

KINDS: dict[str, Callable[[Abuser], Awaitable[str]]] = {
    "slow headers": slow_headers,
    "slow bodies": slow_bodies,
    "aborted streams": aborted_streams,
    "aborted requests": aborted_requests,
    "slow readers": slow_readers,
    "malformed": malformed,
    "idle": idle,
}


def abuse(kind: str, port: int, seconds: float, *, seed: int) -> dict[str, int]:
    """What the connections of one kind of abuser came to."""
    outcomes: Counter[str] = Counter()
    num_abusers = NUM_ABUSERS[kind]
    # Where there are many, each pauses for longer.
    longest_pause = max(1.0, min(10.0, num_abusers / 100))

    async def run_abuser(abuser: Abuser) -> None:
        await asyncio.sleep(abuser.chance.uniform(0, seconds / 3))
        while abuser.left() > 0:
            try:
                outcomes[await KINDS[kind](abuser)] += 1
            except (OSError, TimeoutError) as error:  # closed by the server
                outcomes[type(error).__name__] += 1
            await asyncio.sleep(abuser.chance.uniform(0, longest_pause))

    async def run() -> None:
        end = time.monotonic() + seconds
        abusers = []
        for number in range(num_abusers):
            source = OTHER_ADDRESS if number % 2 else None
            chance = random.Random(seed * 100_003 + number)
            abusers.append(Abuser(port, source, lambda: end - time.monotonic(), chance))
        await asyncio.gather(*map(run_abuser, abusers))

    asyncio.run(run())
    return dict(outcomes)


if __name__ == "__main__":
    print(json.dumps(abuse(**json.loads(sys.argv[1]))))

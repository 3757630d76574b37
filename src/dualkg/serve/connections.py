"""Limits on connections: the time of incomplete requests, and which to close if there are too many.

uvicorn limits neither the time of a header nor the connections of a client, and above its limit of
all connections it refuses every request. Here a connection without a complete request is closed to
make room for a new one. `benchmarks/connections.py` compares both.
"""

import asyncio
import logging
import math
import resource
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dualkg.serve.fairness import client_of
from dualkg.serve.limits import Limits
from dualkg.serve.replies import RETRY, ErrorReply

# Seconds by which a connection that has had a response counts as younger than others.
IDLE_CREDIT = 1.0
# Connections that are closed before requests are answered again: to close a thousand takes 50 ms.
CLOSED_AT_ONCE = 16
# Files beside two for each connection, since new connections arrive before old ones are closed.
SPARE_FILES = 256


class Phase(Enum):
    """What a connection is doing."""

    HEAD = auto()  # nothing has arrived, or a part of address and headers
    BODY = auto()  # a part of the body has arrived
    IDLE = auto()  # between two requests
    SENDING = auto()  # waits for its client to read
    ANSWERING = auto()


# Seconds that a connection has to send its first or next request, even if there are too many.
GRACE = {Phase.HEAD: 0.5, Phase.IDLE: IDLE_CREDIT}


class Connection(H11Protocol):
    """A connection of uvicorn that can be observed and refused.

    It refuses a large head unparsed, and malformed data without a traceback in the log.
    """

    def __init__(self, *, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._last_state: object = None
        self._unchanged_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_name = client_of(self.client)

    def handle_events(self) -> None:
        # h11 takes 0.1 s for 10,000 lines, and applies its limit of bytes to what it has parsed.
        if self.conn.their_state is h11.IDLE and self._has_large_head():
            message = (
                "The address and headers of a request must have at most "
                f"{self._limits.header_bytes:,} bytes and {self._limits.header_lines:,} lines."
            )
            self.refuse(ErrorReply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message))
            return
        super().handle_events()

    def _has_large_head(self) -> bool:
        received = self.conn.trailing_data[0]
        head = received.partition(b"\r\n\r\n")[0]
        too_many_lines = head.count(b"\n") > self._limits.header_lines
        return too_many_lines or len(head) > self._limits.header_bytes

    def send_400_response(self, msg: str) -> None:
        can_respond = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if can_respond:
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def phase(self) -> Phase:
        if self.flow.write_paused or self.transport.is_closing():
            return Phase.SENDING
        if self.cycle is None:
            return Phase.HEAD
        if self.cycle.response_complete:
            return Phase.HEAD if self.conn.trailing_data[0] else Phase.IDLE
        return Phase.BODY if self.cycle.more_body else Phase.ANSWERING

    def observe(self, now: float) -> "Observation":
        """What the connection is doing, and since when it has made no progress."""
        phase = self.phase
        unsent_bytes = 0
        if phase is Phase.SENDING:
            unsent_bytes = self.transport.get_write_buffer_size()

        state = (phase, self.cycle, unsent_bytes)
        if state != self._last_state:
            self._last_state = state
            self._unchanged_since = now
        return Observation(self, self.client_name, phase, self._unchanged_since)

    def refuse(self, reply: ErrorReply) -> None:
        """Close the connection; a client that has sent a part of a request is told why."""
        phase = self.phase
        if phase is Phase.SENDING:
            self.transport.abort()
            return

        awaits_body = phase is Phase.BODY and not self.cycle.response_started
        if awaits_body or self.conn.trailing_data[0]:
            self.transport.write(_response(reply))
        self.transport.close()


def _response(reply: ErrorReply) -> bytes:
    """The bytes of a response after which the connection is closed."""
    status = HTTPStatus(reply.status)
    response = reply.as_json()
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    lines += [b"connection: close", b"", bytes(response.body)]
    return b"\r\n".join(lines)


@dataclass(frozen=True)
class Observation:
    """A connection at a check; `since` is the time of its last progress that a check has seen."""

    connection: Connection
    client: str
    phase: Phase
    since: float


@dataclass(frozen=True)
class Refusal:
    """A connection to close, and what its client is told."""

    connection: Connection
    reply: ErrorReply


class LimitedServer(uvicorn.Server):
    """uvicorn that checks all connections ten times a second.

    Connections are closed by what they were doing at the check, not when another one arrives: a
    request that arrives together with a thousand empty connections is read first.
    """

    def __init__(self, config: uvicorn.Config, *, limits: Limits) -> None:
        super().__init__(config)
        self._limits = limits

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        observations = []
        for connection in self.server_state.connections:
            assert isinstance(connection, Connection)
            observations.append(connection.observe(now))
        await close_all(connections_to_close(observations, limits=self._limits, now=now))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; after a second Ctrl-C what is left is cancelled, which is no error to log."""
        await super().shutdown(sockets)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True


async def close_all(refusals: Iterable[Refusal]) -> None:
    """Close connections, a few at a time, so that requests are answered meanwhile."""
    for number, refusal in enumerate(refusals, start=1):
        request_has_arrived = refusal.connection.phase is Phase.ANSWERING
        if not request_has_arrived:
            refusal.connection.refuse(refusal.reply)
        if number % CLOSED_AT_ONCE == 0:
            await asyncio.sleep(0)


def connections_to_close(
    observations: Iterable[Observation], *, limits: Limits, now: float
) -> list[Refusal]:
    """The connections that are too slow, then those that are too many, the oldest first."""
    held: Counter[str] = Counter()
    slow: list[Observation] = []
    waiting: list[Observation] = []
    for observation in observations:
        held[observation.client] += 1
        if observation.phase is Phase.ANSWERING:
            continue
        is_slow = now - observation.since > _time_limit(observation.phase, limits)
        (slow if is_slow else waiting).append(observation)

    message = f"A request did not arrive within {limits.receive_seconds:g} seconds."
    too_slow = ErrorReply(HTTPStatus.SERVICE_UNAVAILABLE, message, headers=RETRY)
    refusals = [Refusal(observation.connection, too_slow) for observation in slow]
    held.subtract(observation.client for observation in slow)
    return refusals + _excess(waiting, held, limits=limits, now=now)


def _time_limit(phase: Phase, limits: Limits) -> float:
    if phase is Phase.BODY:
        return math.inf  # the middleware limits the time of a body
    if phase is Phase.IDLE:
        # uvicorn closes idle connections, too, unless bytes keep arriving.
        return limits.idle_seconds + 1
    return limits.receive_seconds


def _excess(
    waiting: list[Observation], held: Counter[str], *, limits: Limits, now: float
) -> list[Refusal]:
    """The connections without a request that are too many, of one client or of all.

    `held` is the number of all connections by client.
    """
    num_held = held.total()
    if num_held <= min(limits.connections, limits.client_connections):
        return []

    client_is_full = _too_many(
        HTTPStatus.TOO_MANY_REQUESTS, f"{limits.client_connections:,} connections of one client"
    )
    server_is_full = _too_many(
        HTTPStatus.SERVICE_UNAVAILABLE, f"{limits.connections:,} connections"
    )
    held = held.copy()
    refusals = []
    for observation in sorted(waiting, key=_age_order):
        has_grace = now - observation.since < GRACE.get(observation.phase, 0)
        if has_grace and num_held <= 2 * limits.connections:
            continue
        if held[observation.client] > limits.client_connections:
            refusals.append(Refusal(observation.connection, client_is_full))
        elif num_held > limits.connections:
            refusals.append(Refusal(observation.connection, server_is_full))
        else:
            continue
        held[observation.client] -= 1
        num_held -= 1
    return refusals


def _age_order(observation: Observation) -> float:
    credit = IDLE_CREDIT if observation.phase is Phase.IDLE else 0.0
    return observation.since + credit


def _too_many(status: HTTPStatus, held: str) -> ErrorReply:
    message = (
        f"This server holds {held}, and this one had no complete request. Try again in a moment."
    )
    return ErrorReply(status, message, headers=RETRY)


def within_file_limit(limits: Limits) -> Limits:
    """Limits on connections that the process has files for.

    The limit of open files is raised as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files, connections = fit_into_files(limits.connections, soft=soft, hard=hard)
    if files != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return replace(limits, connections=connections)


def fit_into_files(connections: int, *, soft: int, hard: int) -> tuple[int, int]:
    """The soft limit of open files to set, and the connections that it has room for."""
    wanted = 2 * connections + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft, connections

    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    room = (files - SPARE_FILES) // 2
    return files, max(1, min(connections, room))

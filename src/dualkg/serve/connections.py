"""Connections: time limits of incomplete requests, and which connections are closed when there are
too many.

uvicorn limits neither the time of a header nor the connections of a client, and above its limit of
all connections it refuses every request. Here a connection without a complete request is closed for
a new one.
"""

import asyncio
import json
import math
import resource
from collections import Counter
from dataclasses import replace
from enum import IntEnum
from http import HTTPStatus

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dualkg.serve.limits import Limits
from dualkg.serve.middleware import client_of

MAX_HEADERS = 100
LARGE = "The address and headers of a request must have at most {:,} bytes and {:,} lines."
SLOW = "A request did not arrive within {:g} seconds."
FULL = "This server holds {:,} connections{}, and this one had no complete request. Try again in a moment."
IDLE_CREDIT = 1.0  # seconds by which a connection that has had a response counts as younger
CLOSED_AT_ONCE = 16  # a thousand would take 50 ms, in which no request is answered
SPARE_FILES = (
    256  # beside two for each connection, since new ones arrive before old ones are closed
)


class Phase(IntEnum):
    """What a connection is doing."""

    HEAD = 0  # nothing has arrived, or a part of address and headers
    BODY = 1  # a part of the body has arrived
    IDLE = 2  # between two requests
    SENDING = 3  # waits for its client to read
    ANSWERING = 4


# Seconds that a connection has to send its first or next request, even if there are too many.
GRACE: dict[Phase | None, float] = {Phase.HEAD: 0.5, Phase.IDLE: IDLE_CREDIT}


class Connection(H11Protocol):
    """A connection of uvicorn that refuses a large head unparsed, and malformed data without a
    traceback.
    """

    phase: Phase | None = None  # at the last check
    since = 0.0  # when it was first seen so
    _seen: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_name = client_of(self.client)

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            limit = self.config.h11_max_incomplete_event_size
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]
            if head.count(b"\n") > MAX_HEADERS or len(head) > (
                limit or math.inf
            ):  # h11 takes 0.1 s for 10,000 lines
                self.refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, LARGE.format(limit, MAX_HEADERS)
                )
                return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def observe(self, now: float) -> Phase:
        """What the connection is doing; `since` is the time of the first check that saw the same,
        without progress.
        """
        cycle = self.cycle
        left = 0
        if self.flow.write_paused or self.transport.is_closing():
            phase = Phase.SENDING
            left = self.transport.get_write_buffer_size()
        elif cycle is None:
            phase = Phase.HEAD
        elif cycle.response_complete:
            phase = Phase.HEAD if self.conn.trailing_data[0] else Phase.IDLE
        else:
            phase = Phase.BODY if cycle.more_body else Phase.ANSWERING
        if phase is not self.phase or (cycle, left) != self._seen:
            self.phase = phase
            self.since = now
            self._seen = (cycle, left)
        return phase

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Close the connection; a client that has sent a part of a request is told why."""
        phase = self.observe(0.0)
        if phase is Phase.SENDING:
            self.transport.abort()
            return
        if (phase is Phase.BODY and not self.cycle.response_started) or self.conn.trailing_data[0]:
            body = json.dumps({"error": message, "suggestions": []})
            head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            retry = "Retry-After: 1\r\n" if status in (429, 503) else ""
            self.transport.write(f"{head}{retry}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()


Refusal = tuple[Connection, HTTPStatus, str]


class LimitedServer(uvicorn.Server):
    """uvicorn that checks all connections ten times a second.

    Connections are closed by what they were doing at the check, not when another one arrives: a
    request that arrives together with a thousand empty connections is read first.
    """

    def __init__(self, config: uvicorn.Config, *, limits: Limits) -> None:
        super().__init__(config)
        self._limits = within_file_limit(limits)

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        for number, (one, status, message) in enumerate(self.check_connections(now), 1):
            if one.observe(now) is not Phase.ANSWERING:  # its request may have arrived meanwhile
                one.refuse(status, message)
            if number % CLOSED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return await super().on_tick(counter)

    def check_connections(self, now: float) -> list[Refusal]:
        """What to close: what is too slow, then what is too much, the oldest first."""
        limits = self._limits
        # The middleware limits the time of a body. uvicorn closes idle connections too, unless
        # bytes keep arriving.
        seconds = dict.fromkeys((Phase.HEAD, Phase.SENDING), limits.receive_seconds)
        seconds |= {Phase.BODY: math.inf, Phase.IDLE: limits.idle_seconds + 1}
        held: Counter[str] = Counter()
        slow: list[Connection] = []
        waiting: list[Connection] = []
        for one in self.server_state.connections:
            assert isinstance(one, Connection)
            held[one.client_name] += 1
            if (phase := one.observe(now)) is not Phase.ANSWERING:
                (slow if now - one.since > seconds[phase] else waiting).append(one)
        held.subtract(one.client_name for one in slow)
        message = SLOW.format(limits.receive_seconds)
        refusals: list[Refusal] = [(one, HTTPStatus.SERVICE_UNAVAILABLE, message) for one in slow]
        num_held = held.total()
        if num_held <= min(limits.connections, limits.client_connections):
            return refusals
        waiting.sort(key=lambda one: one.since + (one.phase is Phase.IDLE) * IDLE_CREDIT)
        for one in waiting:
            if now - one.since < GRACE.get(one.phase, 0) and num_held <= 2 * limits.connections:
                continue
            if held[one.client_name] > limits.client_connections:
                message = FULL.format(limits.client_connections, " of one client")
                refusals.append((one, HTTPStatus.TOO_MANY_REQUESTS, message))
            elif num_held > limits.connections:
                refusals.append(
                    (one, HTTPStatus.SERVICE_UNAVAILABLE, FULL.format(limits.connections, ""))
                )
            else:
                continue
            held[one.client_name] -= 1
            num_held -= 1
        return refusals


def within_file_limit(limits: Limits) -> Limits:
    """Limits on connections that the process has files for; its limit of open files is raised as
    far as it goes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * limits.connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(
            limits, connections=max(1, min(limits.connections, (soft - SPARE_FILES) // 2))
        )
    return limits

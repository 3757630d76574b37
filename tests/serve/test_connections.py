"""Connections that are slow, too many, or send nonsense; and the requests of others meanwhile."""

import asyncio
import json
import resource
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress

import httpx
import numpy as np
import pytest

from dualkg.serve.app import application
from dualkg.serve.connections import (
    CLOSED_AT_ONCE,
    Observation,
    Phase,
    Refusal,
    close_all,
    connections_to_close,
    fit_into_files,
)
from dualkg.serve.limits import Limits
from dualkg.serve.middleware import client_of as client_name
from dualkg.serve.replies import ErrorReply
from tests.processes import LIMIT, until
from tests.serve.conftest import running

HALF = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nX-Half: "
POST = b"POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
RUNS = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"


class FakeConnection:
    """A connection without a socket."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.is_closed = False

    def refuse(self, reply: ErrorReply) -> None:
        self.is_closed = True


def observed(phase: Phase, *, since: float = 10.0) -> Observation:
    return Observation(FakeConnection(phase), "client", phase, since)


@pytest.fixture
def connect():
    """Open a connection to a client's server and send something."""
    with ExitStack() as stack:

        def opened(client: httpx.Client, sent: bytes = b"") -> socket.socket:
            address = client.base_url.host, client.base_url.port
            made = stack.enter_context(socket.create_connection(address, timeout=LIMIT))
            made.sendall(sent)
            return made

        yield opened


def answer(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, object]]:
    """Status, headers and JSON of the response that the server closes the connection with."""
    received = b""
    while part := connection.recv(2**16):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, json.loads(body)


def ends(connection: socket.socket) -> bool:
    """Whether the server closes the connection without a response."""
    return connection.recv(1) == b""


def test_half_headers_do_not_shut_others_out(client_of, connect):
    client = client_of(Limits(connections=100, client_connections=20))
    held = [connect(client, HALF) for _ in range(60)]
    for _ in range(5):
        with httpx.Client(base_url=client.base_url, timeout=LIMIT) as other:
            assert other.get("/api/runs").status_code == 200
            assert other.get("/health").status_code == 200
    until(lambda: len(select.select(held, [], [], 0)[0]) >= 40)
    status, headers, body = answer(select.select(held, [], [], 0)[0][0])
    assert (status, headers["retry-after"], headers["connection"]) == (429, "1", "close")
    assert body["error"].startswith(
        "This server holds 20 connections of one client, and this one had no complete"
    )


def test_new_connections_do_not_close_the_idle_ones():
    """An idle connection was closed in place of connections that had just arrived."""
    limits = Limits(connections=8, client_connections=2)
    observations = [observed(Phase.IDLE), *(observed(Phase.HEAD) for _ in range(3))]
    assert connections_to_close(observations, limits=limits, now=10.2) == []
    refusals = connections_to_close(observations, limits=limits, now=10.6)
    assert [refusal.connection.phase for refusal in refusals] == [Phase.HEAD, Phase.HEAD]
    assert {refusal.reply.status for refusal in refusals} == {429}


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [(Phase.HEAD, 10), (Phase.SENDING, 10), (Phase.IDLE, 6)],
)
def test_time_limits(phase, seconds):
    limits = Limits(receive_seconds=10, idle_seconds=5)
    observations = [observed(phase, since=0.0), observed(Phase.ANSWERING, since=0.0)]
    assert connections_to_close(observations, limits=limits, now=seconds) == []
    [refusal] = connections_to_close(observations, limits=limits, now=seconds + 0.1)
    assert refusal.connection is observations[0].connection
    assert refusal.reply.status == 503


def test_requests_are_answered_while_many_connections_are_closed():
    """A thousand connections that were closed at once made all requests wait."""
    connections = [FakeConnection(Phase.HEAD) for _ in range(3 * CLOSED_AT_ONCE)]
    refusals = [Refusal(connection, ErrorReply(503, "")) for connection in connections]
    closed_by_turn = []

    async def others() -> None:
        while True:
            closed_by_turn.append(sum(connection.is_closed for connection in connections))
            if len(closed_by_turn) == 2:
                # A connection that waits to be closed gets its request.
                late = next(connection for connection in connections if not connection.is_closed)
                late.phase = Phase.ANSWERING
            await asyncio.sleep(0)

    async def run() -> None:
        other = asyncio.create_task(others())
        await close_all(refusals)
        other.cancel()

    asyncio.run(run())
    assert 0 < max(np.diff(closed_by_turn)) <= CLOSED_AT_ONCE
    still_open = [connection.phase for connection in connections if not connection.is_closed]
    assert still_open == [Phase.ANSWERING]


def test_slow_bodies_and_empty_connections_make_room(client_of, connect):
    client = client_of(Limits(connections=10, client_connections=100))
    body = connect(client, POST + b"\r\n[")
    empty = connect(client)
    # The oldest go first, by what was seen at a check.
    until(
        lambda: (
            connect(client, HALF) is not None
            and len(select.select([body, empty], [], [], 0.02)[0]) == 2
        )
    )
    status, headers, found = answer(body)
    assert (status, headers["retry-after"]) == (503, "1")
    assert found["error"].startswith(
        "This server holds 10 connections, and this one had no complete request."
    )
    assert ends(empty)
    assert client.get("/api/runs").status_code == 200


def test_a_head_has_a_time_limit(client_of, connect):
    client = client_of(Limits(receive_seconds=0.1))
    status, headers, body = answer(connect(client, HALF))
    assert (status, headers["retry-after"]) == (503, "1")
    assert body["error"] == "A request did not arrive within 0.1 seconds."
    assert ends(connect(client))
    second = connect(client, RUNS + HALF)
    assert second.recv(12) == b"HTTP/1.1 200"
    while second.recv(2**16):
        pass


def test_bytes_after_a_refusal_do_not_hold_a_connection(client_of, connect):
    """uvicorn's own limit on idle connections ends with the first byte."""
    client = client_of(Limits(idle_seconds=1), token="secret")
    refused = connect(client, POST + b"\r\n")
    refused.settimeout(0.02)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            refused.sendall(b"x")
            if refused.recv(2**16) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    assert time.monotonic() < deadline


def test_a_client_that_does_not_read_is_cut_off(served, connect):
    app = application(served, limits=Limits(receive_seconds=0.1, idle_seconds=0))
    with running(app) as (address, server), httpx.Client(base_url=address, timeout=LIMIT) as client:
        slow = connect(client)
        until(lambda: len(server.server_state.connections) == 1)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        with suppress(BlockingIOError, ConnectionError):
            for _ in range(1000):
                slow.sendall(RUNS.replace(b"/api/runs", b"/static/style.css"))
        until(lambda: not server.server_state.connections)


@pytest.mark.parametrize(
    ("limits", "status", "message"),
    [
        (
            Limits(client_connections=2),
            429,
            "2 requests of this client are in progress. Try again in a moment.",
        ),
        (Limits(connections=2), 503, "2 requests are in progress. Try again in a moment."),
    ],
)
def test_requests_in_progress_are_limited(client_of, blocked, limits, status, message):
    client = client_of(limits, runs=blocked.runs)
    query = {"head": "thing 30", "relation": "likes"}
    replies: list[int] = []

    def ask() -> None:
        replies.append(
            httpx.get(f"{client.base_url}/api/tails", params=query, timeout=LIMIT).status_code
        )

    with blocked:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: httpx.get(f"{client.base_url}/api/runs", timeout=LIMIT).status_code == status)
        refused = httpx.get(f"{client.base_url}/api/runs", timeout=LIMIT)
        assert (refused.headers["retry-after"], refused.json()["error"]) == ("1", message)
        assert httpx.get(f"{client.base_url}/health", timeout=LIMIT).json() == {"status": "ok"}
    for thread in threads:
        thread.join()
    assert replies == [200, 200]
    assert client.get("/api/runs").status_code == 200


def test_the_bodies_of_all_requests_are_limited(client_of, connect):
    client = client_of(Limits(all_body_bytes=1500))
    first = connect(client, POST + b"\r\n" + b"[" * 900)
    until(lambda: client.post("/api/score", content=b" " * 1000).status_code == 503)
    reply = client.post("/api/score", content=b" " * 1000)
    assert reply.headers["retry-after"] == "1"
    assert (
        reply.json()["error"]
        == "The server is receiving more than it can hold. Try again in a moment."
    )
    first.close()
    until(lambda: client.post("/api/score", content=b" " * 1000).status_code == 422)


CHUNKED = POST.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")
MALFORMED = [
    b"\xff\x00nonsense\r\n\r\n",
    RUNS + b"nonsense\r\n\r\n",
    RUNS + b"\x00" * 1000,
    CHUNKED + b"\r\nzz\r\n",
    CHUNKED.replace(b"/api/score", b"/api/no") + b"\r\n5\r\nhello\r\nzz\r\n",
    POST.replace(b"1000", b"99999999") + b"\r\n" + b"x" * 100_000,
    RUNS.replace(b"\r\n\r\n", b"\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"),
]


def test_malformed_requests_leave_nothing_in_the_log(client_of, connect, capfd, caplog):
    client = client_of(Limits(receive_seconds=0.1, idle_seconds=1))
    connections = [connect(client, sent) for sent in MALFORMED]
    # A request to another host is refused before its body, which is malformed, has arrived.
    refused = connect(client, CHUNKED.replace(b"localhost", b"other.example") + b"\r\n")
    assert refused.recv(12) == b"HTTP/1.1 400"
    with suppress(ConnectionError):
        refused.sendall(b"zz\r\n")
    for connection in [*connections, refused]:
        with suppress(ConnectionError):
            while connection.recv(2**16):
                pass
    assert client.get("/health").status_code == 200
    assert capfd.readouterr().err == ""
    assert [
        record for record in caplog.records if record.name in ("asyncio", "uvicorn.error")
    ] == []


def test_who_counts_as_one_client():
    assert client_name(None) == ""
    assert client_name(("10.0.0.1", 1)) == client_name(("::ffff:10.0.0.1", 2))
    assert client_name(("10.0.0.1", 1)) != client_name(("10.0.0.2", 1))
    assert client_name(("2001:db8::1", 1)) == client_name(("2001:db8::2:1", 1))
    assert client_name(("2001:db8::1", 1)) != client_name(("2001:db8:0:1::1", 1))
    assert client_name(("anything", 1)) == "anything"


@pytest.mark.parametrize(
    ("soft", "hard", "fitting"),
    [
        (1024, 100_000, (2256, 1000)),
        (1024, resource.RLIM_INFINITY, (2256, 1000)),
        (1024, 1024, (1024, 384)),
        (100, 100, (100, 1)),
        (10**6, 10**6, (10**6, 1000)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, (resource.RLIM_INFINITY, 1000)),
    ],
)
def test_connections_fit_into_the_limit_of_open_files(soft, hard, fitting):
    assert fit_into_files(1000, soft=soft, hard=hard) == fitting

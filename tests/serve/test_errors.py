"""Requests that are refused, servers that cannot start, and their sentences."""

import asyncio
import errno
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import httpx
import pytest

from dualkg.errors import DivergedError, InvalidValue, RequestError
from dualkg.serve.app import application
from dualkg.serve.errors import BusyError, Forbidden, NotFound, error_reply
from dualkg.serve.middleware import RequestMiddleware
from dualkg.serve.served import ServedRuns
from dualkg.serve.server import bind, check_access, request_once
from dualkg.serve.service import Limits
from tests.processes import Started, until

TAILS = {"head": "thing 30", "relation": "likes"}
MANY = b'{"triples": [' + b",".join([b"[0,0,0]"] * 1001) + b"]}"
UNKNOWN_RUN = "No served run is named 'other'. Available: 'calibrated', 'plain'."
UNREADABLE = "The body cannot be read as JSON: "

# Address, parameters, status, kind, and the beginning of the sentence.
REFUSED = [
    ("/api/tails", {"head": "Twnty"}, 404, "NotFound", "No entity is named 'Twnty'. Did you"),
    ("/api/tails", {"relation": "like"}, 404, "NotFound", "No relation is named 'like'. Did"),
    ("/api/tails", {"run": "other"}, 404, "NotFound", UNKNOWN_RUN),
    ("/api/tails", {"k": 0}, 422, "InvalidValue", "k must be at least 1; got '0'."),
    ("/api/tails", {"k": 1001}, 422, "InvalidValue", "k must be at most 1,000; got '1001'."),
    ("/api/tails", {"k": "ten"}, 422, "InvalidValue", "k must be an integer; got 'ten'."),
    ("/api/tails", {"known": "hide"}, 422, "InvalidValue", "known must be 'mark' or 'omit'; got"),
    ("/api/tails", {"head": "x" * 2001}, 422, "InvalidValue", "head must have at most 2,000"),
    ("/api/tails", {"head": None}, 422, "InvalidValue", "head is missing."),
    (
        "/api/prediction-set",
        {"entity": "Twenty", "coverage": 1},
        422,
        "InvalidValue",
        "coverage must be below 1.0; got '1'.",
    ),
    ("/api/compare", {"a": "plain", "b": "other"}, 404, "NotFound", UNKNOWN_RUN),
    ("/api/nothing", {}, 404, "NotFound", "There is nothing at this address. /docs lists all"),
    ("/query.json", {"relation": None}, 400, "RequestError", "Name the relation to find the tail."),
    (
        "/api/paths",
        {"start": "Twenty", "end": "Twenty"},
        400,
        "RequestError",
        "A path is between two entities; both are 'Twenty'.",
    ),
    ("/training.json", {"name": "none"}, 404, "NotFound", "No training is named 'none'."),
]


@pytest.mark.parametrize(("path", "params", "status", "kind", "message"), REFUSED)
def test_a_wrong_request_gets_a_sentence(client, path, params, status, kind, message):
    given = {name: value for name, value in (TAILS | params).items() if value is not None}
    reply = client.get(path, params=given)
    body = reply.json()
    assert (reply.status_code, body["status"], body["kind"]) == (status, status, kind)
    assert body["error"].startswith(message)


def test_similar_names_are_suggested(client):
    reply = client.get("/api/tails", params=TAILS | {"head": "Twnty"}).json()
    assert "Did you mean 'Twenty'" in reply["error"]
    assert reply["suggestions"][0] == "thing 20"


def test_the_message_is_that_of_the_command_line(client, run_cli, run_folders):
    result = run_cli("predict", run_folders[0], "--head", "Twnty", "--relation", "likes")
    assert result.code == 2
    reply = client.get("/api/tails", params=TAILS | {"head": "Twnty"})
    assert result.err == f"dualkg: {reply.json()['error']}\n"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "The body is not JSON: "),
        (b"{}", 422, "triples is missing."),
        (b'{"triples": []}', 422, "triples must have at least 1 items; got 0."),
        (b'{"triples": [["a", "b"]]}', 422, "triples.0.2 is missing."),
        (b'{"triples": [[1.5, "likes", "a"]]}', 422, "triples.0.0 must be text; got '1.5'."),
        (b'{"triples": [["\\ud800", "likes", "a"]]}', 422, "triples.0.0 must be text; got"),
        (MANY, 422, "triples must have at most 1,000 items; got 1,001."),
        (b'{"triples": [[0, 0, 40]]}', 404, "There is no entity 40: ids go from 0 to 39."),
        (b"[" * 100_000, 400, f"{UNREADABLE}it is nested too deeply."),
        (b'{"triples": [["\xff", "likes", "a"]]}', 400, f"{UNREADABLE}'utf-8' codec can't"),
        (b"9" * 5000, 400, f"{UNREADABLE}Exceeds the limit"),
    ],
)
def test_a_wrong_body_gets_a_sentence(client, body, status, message):
    reply = client.post("/api/score", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status
    assert reply.json()["error"].startswith(message)


def test_a_wrong_method(client):
    reply = client.post("/api/tails")
    assert (reply.status_code, reply.json()["error"], reply.headers["allow"]) == (
        405,
        "This address accepts GET; got POST.",
        "GET",
    )


def test_a_large_body_is_not_read(client_of):
    client = client_of(Limits(body_bytes=1000))
    large = b'{"triples": [' + b" " * 2000 + b"]}"
    message = "A body must have at most 1,000 bytes. Send several requests."
    assert client.post("/api/score", content=large).json()["error"] == message
    in_parts = client.post(
        "/api/score", content=iter([large[:500], large[500:1200], large[1200:]])
    )  # without a declared length
    assert (in_parts.status_code, in_parts.json()["error"]) == (413, message)
    assert client.post("/api/score", json={"triples": [[0, 0, 0]]}).status_code == 200


def test_large_headers_are_refused(client_of):
    client = client_of(Limits())
    with suppress(httpx.NetworkError):  # the server has closed the connection
        assert client.get("/api/runs", headers={"X": "x" * 2_000_000}).status_code == 400
    assert client.get("/api/runs").status_code == 200


def test_too_many_requests_at_once_are_refused(client_of, blocked):
    client = client_of(Limits(requests=1), runs=blocked.runs)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.get("/api/tails", params=TAILS)))
    with blocked:
        asking.start()
        until(lambda: client.get("/api/runs").status_code == 503)
        refused = client.get("/api/runs")
        assert client.get("/health").status_code == 200
    asking.join()
    assert (refused.headers["retry-after"], refused.json()["kind"]) == ("1", "BusyError")
    assert refused.json()["error"] == "1 requests are in progress. Try again in a moment."
    assert answers[0].status_code == 200


def test_a_request_that_takes_too_long_is_cancelled(client_of, blocked):
    client = client_of(Limits(seconds=0.2), runs=blocked.runs)
    with blocked:
        reply = client.get("/api/tails", params=TAILS)
    assert reply.status_code == 503
    assert reply.json()["error"] == "The request took longer than its limit of 0.2 seconds."
    until(lambda: client.get("/api/tails", params=TAILS).status_code == 200)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/secret/run"),
            500,
            "The server could not read or write a file: Read-only file system.",
        ),
        (
            MemoryError("/secret/run"),
            503,
            "The server has not enough memory for this request. Ask for less, or try later.",
        ),
    ],
)
def test_a_disk_or_a_memory_that_fails_has_no_traceback(
    client_of, served, monkeypatch, capfd, error, status, message
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dualkg.serve.runs._details", fail)
    reply = client_of(runs=served).get("/api/run")
    assert (reply.status_code, reply.json()["error"]) == (status, message)
    log = capfd.readouterr().err
    assert "/secret/run" in log
    assert "Traceback" not in log


def test_an_unexpected_exception_is_not_shown(client_of, failing, capfd):
    reply = client_of(runs=failing).get("/api/tails", params=TAILS)
    assert reply.status_code == 500
    assert reply.json()["error"] == "The server failed to answer. The error is in its log."
    lines = [line for line in capfd.readouterr().err.splitlines() if "ZeroDivisionError" in line]
    assert len(lines) == 1
    assert lines[0].startswith('{"failed": "/api/tails"')


def test_a_token_is_required(client_of):
    client = client_of(token="open sesame")
    for header in (
        {},
        {"Authorization": "Bearer open"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic !"},
    ):
        for address in ("/api/runs", "/docs", "/openapi.json", "/metrics", "/nothing"):
            reply = client.get(address, headers=header)
            assert reply.status_code == 401
            assert "Authorization: Bearer TOKEN" in reply.json()["error"]
    assert (
        client.get("/api/runs", headers={"Authorization": "Bearer open sesame"}).status_code == 200
    )
    assert client.get("/api/runs", auth=("anybody", "open sesame")).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert (
        client.get(
            "/api/runs", headers={"Authorization": "Bearer open sesame", "Host": "kg.example"}
        ).status_code
        == 200
    )


OTHER_HOSTS = [
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "[2001:db8::1]:80",
    "",
    ":80",
    "[::1].evil.example",
    "[::1%.evil.example]",
    "]::1[",
    "::1",
    "localhost:80@evil.example",
    "localhost@evil.example",
    "localhost,evil.example",
    "evil.example#localhost",
    "localhost..",
    "127.0.0.1:80:80",
    "127.0.0.1:999999",
]


def test_other_host_names_are_refused_without_a_token(client):
    for host in OTHER_HOSTS:
        reply = client.get("/api/runs", headers={"Host": host})
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("This server answers requests to localhost only.")
    for host in (
        "localhost:8000",
        "localhost:",
        "localhost.",
        "127.0.0.1",
        "127.9.9.9:1",
        "[::1]:8000",
        "LOCALHOST",
    ):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_a_loopback_host_needs_no_token(host):
    check_access(host, None)


def test_a_public_host_with_a_token():
    check_access("0.0.0.0", "secret")


BAD_TOKEN = "A token must consist of ASCII letters, digits and punctuation"
START_UP = [
    (lambda: ServedRuns([]), "Name at least one run to serve."),
    (lambda: Limits(seconds=-1), "A time limit must be above 0 seconds; got -1."),
    (lambda: request_once(None, "entity"), "An address must begin with a slash, such as /entity"),
    (lambda: check_access("127.0.0.1", ""), BAD_TOKEN),
    (lambda: check_access("127.0.0.1", "schlüssel"), BAD_TOKEN),
    (lambda: check_access("127.0.0.1", "a\nb"), BAD_TOKEN),
    (
        lambda: check_access("::", None),
        "On :: other machines could reach the server. Protect it with `token`, or leave out `host`",
    ),
    (lambda: check_access("kg.example", None), "On kg.example other machines could reach the"),
    (lambda: bind("no.such.host.invalid", 0), "The host no.such.host.invalid cannot be used: "),
    (lambda: bind("a" * 64 + ".example", 0), "The host aaaaaaa"),
    (lambda: bind("\udc80", 0), "The host "),
]


@pytest.mark.parametrize(("start", "message"), START_UP)
def test_a_server_that_cannot_start_says_why(start, message):
    with pytest.raises(RequestError) as error:
        start()
    assert str(error.value).startswith(message)


def test_a_port_in_use():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"Port {port} of 127.0.0.1 cannot be used: Address"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("a"), 404),
        (Forbidden("a"), 403),
        (InvalidValue("k", expected="at least 1", found=0), 400),
        (BusyError("a"), 503),
        (DivergedError("a"), 500),
    ],
)
def test_the_status_of_an_error_is_that_of_its_class(error, status):
    reply = error_reply(error)
    assert (reply.status, reply.message, reply.kind) == (status, str(error), type(error).__name__)
    assert ("Retry-After" in reply.headers) == (status == 503)


def exchange(address: str, request: bytes) -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def test_a_request_with_two_lengths_is_refused_and_closed(address):
    """A proxy could take the rest of its body for another request."""
    body = b'{"triples": []}'
    head = (
        b"POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    smuggled = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = exchange(address, head + b"f\r\n" + body + b"\r\n0\r\n\r\n" + smuggled)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    assert b"both Content-Length and Transfer-Encoding" in received


def test_a_request_that_is_cancelled_gets_503(served):
    """A server that stops gives up what it is answering, after a second Ctrl-C at once."""

    async def wait_for_ever(scope, receive, send):
        await asyncio.Event().wait()

    sent = []

    async def request() -> None:
        service = application(served).state.service
        middleware = RequestMiddleware(wait_for_ever, service=service, checks=[])
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/tails",
            "headers": [],
            "query_string": b"",
        }
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b""})

        async def send(message):
            sent.append(message)

        task = asyncio.create_task(middleware(scope, messages.get, send))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    asyncio.run(request())
    assert sent[0]["status"] == 503
    assert b"The server is stopping." in sent[1]["body"]


SLOW = """
import sys, threading, time
from pathlib import Path
from dualkg.serve import runs
from dualkg.serve.app import application
from dualkg.serve.service import Limits
from dualkg.serve.server import bind, serve
from dualkg.serve.served import ServedRuns

def wait(*_, **__):
    print("waiting", flush=True)
    time.sleep(600)

runs._details = wait
app = application(ServedRuns.load([Path(sys.argv[1])], device="cpu"))
serve(app, bind("127.0.0.1", 0), limits=Limits(), on_start=lambda a: print(a, flush=True))
print("ended", flush=True)
import os
os._exit(0)
"""


SEARCHING = """
import sys, time
from pathlib import Path
from dualkg.serve.app import application
from dualkg.serve.service import Limits
from dualkg.serve.server import bind, serve
from dualkg.serve.served import ServedRuns

def search(*_, on_progress, **__):
    while True:
        on_progress(1, 2)
        time.sleep(0.01)

served = ServedRuns.load([Path(sys.argv[1])], device="cpu")
for run in served:
    run.__dict__["complete"] = search
app = application(served)
serve(app, bind("127.0.0.1", 0), limits=Limits(), on_start=lambda a: print(a, flush=True))
print("ended", flush=True)
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_a_search_for_new_facts_without_a_traceback(run_folders):
    with Started(SEARCHING, run_folders[0]) as process:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{address}/api/complete") as lines:
            assert json.loads(lines.readline())["kind"] == "progress"
            for _ in range(2):
                os.kill(process.pid, signal.SIGINT)
                time.sleep(0.5)  # signals that arrive together are one
            assert process.stdout.readline() == "ended\n"
        ended = process.finish()
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.slow
def test_clients_are_told_that_a_server_stops_however_often_it_is_interrupted(run_folders):
    with Started(SLOW, run_folders[0]) as process:
        address = process.stdout.readline().strip()
        replies = []
        request = b"GET /api/run HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client = threading.Thread(target=lambda: replies.append(exchange(address, request)))
        client.start()
        assert process.stdout.readline() == "waiting\n"
        for _ in range(3):
            with suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, signal.SIGINT)
            time.sleep(0.5)  # signals that arrive together are one
        until(lambda: bool(replies))
        client.join()
    assert b" 500 " not in replies[0].partition(b"\r\n")[0]

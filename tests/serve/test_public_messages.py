"""What clients are told: no folders of the server, no two lengths, and 503 when it stops."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from dualkg.errors import DamagedFile, InvalidValue, Unsupported
from dualkg.inference.decisions import DecisionsNotStored, without_formula
from dualkg.serve.app import application
from dualkg.serve.errors import public_message
from dualkg.serve.middleware import RequestMiddleware
from tests.processes import Started, until

SECRET = Path("/srv/secret/runs/world")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DamagedFile(SECRET / "map.parquet", "no"), "map.parquet is damaged: no."),
        (
            DecisionsNotStored(SECRET / "decisions.jsonl", "full"),
            "decisions.jsonl cannot be written: full. Nothing was stored.",
        ),
        (
            Unsupported(f"The graph of the run {SECRET}", f"has '{SECRET}/graph' (see /api/run)"),
            "The graph of the run world has 'graph' (see /api/run).",
        ),
        (
            InvalidValue("k", expected="a number", found="/m/0abc/d"),
            "k should be a number; '/m/0abc/d' was given.",
        ),
    ],
)
def test_folders_of_the_server_are_not_shown(error, message):
    assert public_message(error) == message


def test_a_damaged_file_of_a_run_is_named_without_its_folder(client_of, served):
    folder = Path(served.default.run.folder)
    path = folder / "decisions.jsonl"
    path.write_text("damaged\n")
    try:
        reply = client_of().get("/api/decisions")
    finally:
        path.unlink()
    assert reply.status_code == 400
    assert "decisions.jsonl" in reply.json()["error"]
    assert str(folder.parent) not in reply.text


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


@pytest.mark.parametrize(
    "cell",
    [
        "=1+1",
        " =1",
        "\ufeff=1",
        "\u200b+1",
        "\x00@a",
        "\x01x",
        "\t=1",
        "\r-1",
        "＝1",
        "﹢1",
        "⁺1",
        "\u202e=1",
        "\u00ad-1",
        "\u0301=1",
        "\n=1",
    ],
)
def test_formulas_behind_characters_that_are_not_seen_are_guarded(cell):
    assert without_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["France", "", "a=1", "é", " a", "日本", "'a", "5"])
def test_other_cells_are_as_they_were(cell):
    assert without_formula(cell) == cell


def test_a_cell_that_looks_guarded_is_guarded_itself():
    """Otherwise the reader, which takes one guard off, would change the name."""
    assert without_formula("'=1") == "''=1"


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
from dualkg.serve.limits import Limits
from dualkg.serve.server import bind, serve
from dualkg.serve.service import ServedRuns

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
from dualkg.serve.limits import Limits
from dualkg.serve.server import bind, serve
from dualkg.serve.service import ServedRuns

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

"""One request without a port."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.types import Message

from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.serve.limits import Limits
from dualkg.serve.middleware import is_loopback

if TYPE_CHECKING:
    import uvicorn


@dataclass
class Reply:
    """What a request was answered with."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def request_once(app: FastAPI, address: str, *, token: str | None = None) -> Reply:
    """Ask an application for an address such as `/entity/France.json`, as if it had come by HTTP."""
    return asyncio.run(_ask(app, address, token=token))


async def _ask(app: FastAPI, address: str, *, token: str | None) -> Reply:
    if not address.startswith("/"):
        raise RequestError(f"An address begins with a slash, such as /entity/France.json; '{address}' came.")
    parts = urlsplit(f"http://localhost{address}")
    headers = [(b"host", b"localhost")]
    if token is not None:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": unquote(parts.path, errors="replace"),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": headers,
        "server": ("localhost", 80),
        "client": None,
    }
    reply, never = Reply(), asyncio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await never.wait()  # nobody goes away
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    return reply


# Seconds after which Python lets another thread have its turn. The thread that answers gives up its turn with every
# product and asks for it again; by default it would wait 5 ms each time, while requests are read.
SWITCH = 0.0005


def check_reach(host: str, token: str | None) -> None:
    """Refuse to be reached by other machines without a token, and a token that is none."""
    if token is not None and (not token.strip() or not token.isascii() or not token.isprintable()):
        raise RequestError("A token is made of ASCII letters, digits and signs, and is not empty.")
    if token is None and not is_loopback(host):
        raise RequestError(
            f"On {host} other machines could reach the server. Give them a token with --token, or leave out --host."
        )


def bind(host: str, port: int) -> socket.socket:
    """A port that listens; 0 is any that is free. One that cannot be had is told in a sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"There is no {host} to be reached by: {error.strerror or error}.") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        why = error.strerror or error
        raise RequestError(f"Port {port} of {host} cannot be had: {why}. Name another with --port.") from None
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_for(app: FastAPI, *, limits: Limits) -> uvicorn.Server:
    """uvicorn with bounds on what it holds for a request that is not whole yet, and on how many there are."""
    with optional_import("uvicorn", purpose="Serving a run"):
        import uvicorn
    sys.setswitchinterval(SWITCH)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",  # the other parser is faster, and takes headers without end
            h11_max_incomplete_event_size=limits.head,
            limit_concurrency=limits.connections,
            log_level="warning",
            access_log=False,  # ours writes lines that no address can break: journal.py
            server_header=False,
            timeout_graceful_shutdown=round(limits.closing_seconds),
        )
    )


def serve(
    app: FastAPI,
    listening: socket.socket,
    *,
    limits: Limits,
    tell: Callable[[str], None],
    open_browser: bool = False,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM; those under way then are still answered."""
    server = server_for(app, limits=limits)
    before = signal.signal(signal.SIGTERM, _stop)
    tell(address_of(listening))
    if open_browser:  # one of a terminal lasts until it is closed
        threading.Thread(target=webbrowser.open, args=[address_of(listening)], daemon=True).start()
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has ended well, and then tells why
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

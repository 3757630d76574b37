"""Running an application: on a port by uvicorn, or for one request in this process."""

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.types import Message, Scope

from dualkg.extras import optional_import
from dualkg.serve.app import description
from dualkg.serve.errors import (
    InvalidAddress,
    InvalidToken,
    UnprotectedHost,
    UnusableHost,
    UnusablePort,
)
from dualkg.serve.limits import Limits
from dualkg.serve.middleware import is_loopback

if TYPE_CHECKING:
    import uvicorn

# Seconds after which Python switches threads. The thread that predicts releases the interpreter
# with every operation of PyTorch, some thirty a batch, and then waits to get it back: by default
# 5 ms each time, while requests are being read. `benchmarks/serving.py` measures it.
SWITCH_INTERVAL = 0.00005
# Commands collect no garbage; a server must, or its memory grows by 5 KB a request.
GC_THRESHOLDS = (5000, 10, 10)
BACKLOG = 2048  # connections that wait to be accepted
# uvloop accepts one connection of a socket in each round of the loop. A round of a busy server
# answers all that have sent a request, so that the last of 64 new ones would wait a second.
ACCEPTED_AT_ONCE = 16


@dataclass
class Reply:
    """The response to a request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def request_once(app: FastAPI, address: str, *, token: str | None = None) -> Reply:
    """The response of an application to a GET request, without a port.

    The address is such as `/entity/France.json`.
    """
    if not address.startswith("/"):
        raise InvalidAddress(address)

    reply = Reply()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            for name, value in message["headers"]:
                reply.headers[name.decode("latin-1")] = value.decode("latin-1")
        else:
            reply.body += message.get("body", b"")

    async def request() -> None:
        # A second message would be a disconnect; it never arrives.
        messages = asyncio.Queue[Message]()
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        async with app.router.lifespan_context(app):
            await app(_scope(address, token), messages.get, send)

    asyncio.run(request())
    return reply


def _scope(address: str, token: str | None) -> Scope:
    """What an ASGI server knows of a GET request."""
    parts = urlsplit(f"http://localhost{address}")
    headers = [(b"host", b"localhost")]
    if token is not None:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    return {
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


def check_access(host: str, token: str | None) -> None:
    """Refuse a host that other machines reach without a token, and an invalid token."""
    if token is None:
        if not is_loopback(host):
            raise UnprotectedHost(host)
        return

    fits_into_header = token.isascii() and token.isprintable()
    if not token.strip() or not fits_into_header:
        raise InvalidToken


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            address, family=family, backlog=BACKLOG, dualstack_ipv6=dualstack
        )
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnusableHost(host, reason=reason) from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UnusablePort(port, host=host, reason=reason) from None


def accepting_sockets(listening: socket.socket) -> list[socket.socket]:
    """A listening socket several times: the loop accepts one connection of each in a round."""
    return [listening, *(listening.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]


def freeze_memory() -> None:
    """Exempt what is loaded by now from garbage collection: it lives as long as the server."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_for(app: FastAPI, *, limits: Limits) -> "uvicorn.Server":
    """uvicorn with limits on connections and on incomplete requests, in number, size and time."""
    with optional_import("uvicorn", purpose="Serving a run"):
        import uvicorn

        from dualkg.serve.connections import Connection, LimitedServer, within_file_limit

    sys.setswitchinterval(SWITCH_INTERVAL)
    limits = within_file_limit(limits)
    config = uvicorn.Config(
        app,
        # Connections are read by h11: httptools is faster, but reads headers without limit.
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        ws="none",
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=limits.idle_seconds,
        log_level="error",  # a warning for each malformed request would fill the log
        access_log=False,  # the middleware writes lines that no address can break
        server_header=False,
        timeout_graceful_shutdown=round(limits.shutdown_seconds),
    )
    return LimitedServer(config, limits=limits)


def serve(
    app: FastAPI,
    listening: socket.socket,
    *,
    limits: Limits,
    on_start: Callable[[str], None],
    open_browser: bool = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM; requests in progress are then still answered.

    `on_start` gets the address.
    """
    server = server_for(app, limits=limits)
    address = address_of(listening)
    description(app)  # made now, so that no request waits for it

    freeze_memory()
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    on_start(address)
    if open_browser:
        # In a thread, since a browser in a terminal runs until it is closed.
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    try:
        server.run(sockets=accepting_sockets(listening))
    except KeyboardInterrupt:  # raised again by uvicorn after its graceful shutdown
        pass
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

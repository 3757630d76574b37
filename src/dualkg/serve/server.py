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
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.types import Message

from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.serve.app import description
from dualkg.serve.limits import Limits
from dualkg.serve.middleware import is_loopback

if TYPE_CHECKING:
    import uvicorn

# Seconds after which Python switches threads. The thread that predicts releases the interpreter
# with every product and then waits to get it back: by default 5 ms each time, while requests are
# being read.
SWITCH_INTERVAL = 0.0005
GC_THRESHOLDS = (
    5000,
    10,
    10,
)  # commands collect no garbage; a server must, or its memory grows by 5 KB a request


@dataclass
class Reply:
    """The response to a request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def request_once(app: FastAPI, address: str, *, token: str | None = None) -> Reply:
    """The response of an application to a GET request such as `/entity/France.json`, without a
    port.
    """
    if not address.startswith("/"):
        raise RequestError(
            f"An address must begin with a slash, such as /entity/France.json; got '{address}'."
        )
    parts = urlsplit(f"http://localhost{address}")
    authorization = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
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
        "headers": [(b"host", b"localhost"), *authorization],
        "server": ("localhost", 80),
        "client": None,
    }
    reply = Reply()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {
                key.decode("latin-1"): value.decode("latin-1") for key, value in message["headers"]
            }
        else:
            reply.body += message.get("body", b"")

    async def request() -> None:
        messages = asyncio.Queue[
            Message
        ]()  # a second message, which would be a disconnect, never arrives
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        async with app.router.lifespan_context(app):
            await app(scope, messages.get, send)

    asyncio.run(request())
    return reply


def check_access(host: str, token: str | None) -> None:
    """Refuse a host that other machines reach without a token, and a token that no header can
    hold.
    """
    if token is not None and (not token.strip() or not token.isascii() or not token.isprintable()):
        raise RequestError(
            "A token must consist of ASCII letters, digits and punctuation, and must not be empty."
        )
    if token is None and not is_loopback(host):
        raise RequestError(
            f"On {host} other machines could reach the server. Protect it with --token, or leave "
            "out --host."
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except (socket.gaierror, UnicodeError) as error:
        raise RequestError(
            f"The host {host} cannot be used: {getattr(error, 'strerror', error)}."
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise RequestError(
            f"Port {port} of {host} cannot be used: {reason}. Choose another with --port."
        ) from None


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_for(app: FastAPI, *, limits: Limits) -> "uvicorn.Server":
    """uvicorn with limits on connections and on incomplete requests, in number, size and time."""
    with optional_import("uvicorn", purpose="Serving a run"):
        import uvicorn

        from dualkg.serve.connections import Connection, LimitedServer
    sys.setswitchinterval(SWITCH_INTERVAL)
    config = uvicorn.Config(
        app,
        http=Connection,  # by h11: httptools is faster, but reads headers without limit
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
    """Serve until Ctrl-C or SIGTERM; requests in progress are then still answered. `on_start` gets
    the address.
    """
    server = server_for(app, limits=limits)
    description(app)  # which the first request for it, and all others, would wait for
    gc.collect()
    gc.freeze()  # what is loaded by now lives as long as the server
    gc.set_threshold(*GC_THRESHOLDS)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    on_start(address_of(listening))
    if open_browser:  # in a thread: a browser in a terminal runs until it is closed
        threading.Thread(target=webbrowser.open, args=[address_of(listening)], daemon=True).start()
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # raised again by uvicorn after its graceful shutdown
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)

"""Running an application: on a port by uvicorn, for one request, or beside a training."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.types import Message, Scope

from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.serve.app import application, description
from dualkg.serve.middleware import is_loopback
from dualkg.serve.served import ServedRuns
from dualkg.serve.service import Limits

if TYPE_CHECKING:
    import uvicorn

# Commands collect no garbage; a server must, or its memory grows by 5 KB a request.
GC_THRESHOLDS = (5000, 10, 10)
BACKLOG = 2048  # connections that wait to be accepted


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
        raise RequestError(
            f"An address must begin with a slash, such as /entity/France.json; got '{address}'."
        )

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
            raise RequestError(
                f"On {host} other machines could reach the server. Protect it with `token`, or "
                "leave out `host`."
            )
        return

    fits_into_header = token.isascii() and token.isprintable()
    if not token.strip() or not fits_into_header:
        # The token is a secret, so the message does not quote it.
        raise RequestError(
            "A token must consist of ASCII letters, digits and punctuation, and must not be empty."
        )


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
        raise RequestError(f"The host {host} cannot be used: {reason}.") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RequestError(
            f"Port {port} of {host} cannot be used: {reason}. Choose another with `port`."
        ) from None


def freeze_memory() -> None:
    """Exempt what is loaded by now from garbage collection: it lives as long as the server."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_for(app: FastAPI, *, limits: Limits) -> "uvicorn.Server":
    """uvicorn with limits on connections, on the size of headers and on idle time.

    It has no limit on the time of a header or on the connections of one client: on an open network
    a proxy stands before it.
    """
    with optional_import("uvicorn", purpose="Serving a run"):
        import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",  # httptools is faster, but reads headers without limit
        ws="none",
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=limits.idle_seconds,
        log_level="error",  # a warning for each malformed request would fill the log
        access_log=False,  # the middleware writes lines that no address can break
        server_header=False,
        timeout_graceful_shutdown=round(limits.shutdown_seconds),
    )
    server = uvicorn.Server(config)
    # What a second Ctrl-C cancels is no error to log.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.force_exit)
    return server


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A context that SIGTERM ends as Ctrl-C does, without an error."""
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:  # raised again by uvicorn after its graceful shutdown
        pass
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


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
    with ended_by_signals():
        on_start(address)
        if open_browser:
            # In a thread, since a browser in a terminal runs until it is closed.
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        server.run(sockets=[listening])


class LiveServer:
    """Shows a training of this process, `dualkg train --serve`, and then serves the run.

    The server runs in a thread. As a context, it ends with the block.
    """

    def __init__(self, folder: Path, *, port: int, device: str | None = None) -> None:
        self._socket = bind("127.0.0.1", port)
        limits = Limits()
        app = application(ServedRuns([], in_training=[folder]), limits=limits, device=device)
        self._trainings = app.state.service.trainings
        self.training = self._trainings.show(folder)
        self._server = server_for(app, limits=limits)
        # uvicorn leaves signals to the main thread, which trains.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    @property
    def address(self) -> str:
        return address_of(self._socket)

    @property
    def is_started(self) -> bool:
        return self._server.started

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def reporter(self) -> Callable[[Any], None]:
        """A subscriber of the events of the training."""
        from dualkg.serve.training_process import Reporter

        return Reporter(lambda **line: self.training.receive(line))

    def serve_result(self) -> None:
        """Calibrate and serve the run of the training, which has ended."""
        from dualkg.serve.training_process import calibrate_result

        calibrate_result(self.training.folder, lambda **line: self.training.receive(line))
        self._trainings.load(self.training)

    def wait(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        with ended_by_signals():
            self._thread.join()

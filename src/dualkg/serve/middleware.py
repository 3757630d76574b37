"""Middleware: checks of headers, limits of body and time, and the observation of every request.

Starlette's TrustedHostMiddleware accepts neither `[::1]:8000` nor upper case, and its refusal is
not a message in JSON; its GZipMiddleware holds back the lines of a stream. So the hosts are checked
here, and responses are not compressed.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.errors import RETRY, ErrorReply, environment_reply
from dualkg.serve.service import Service
from dualkg.serve.templating import error_response

Check = Callable[[Scope, Headers], ErrorReply | None]
# A name, an IPv4 address or an IPv6 address in brackets; then perhaps a port.
HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[0-9a-zA-Z.-]+))(?::\d{0,5})?", re.ASCII)
# Addresses that stream a completion, or wait for one.
COMPLETIONS = (
    "/api/complete",
    "/facts/rows",
    "/facts.json",
    "/table/new-facts.csv",
    "/table/new-facts.json",
)
# Addresses that change something, and what they accept.
PROTECTED = {"/api/decisions": "Decisions", "/api/training": "Trainings"}
FILES = "/api/training/files"  # accepts files
MAX_LOGGED_PATH = 500  # characters
MAX_LOGGED_ERROR = 2000
GRACE = 5.0  # seconds in which a stream may end itself with a message
CLOSE = {"Connection": "close"}
# Two servers may disagree where such a request ends (RFC 9112, 6.3), so the connection is closed.
TWO_LENGTHS = ErrorReply(
    400, "A request must not have both Content-Length and Transfer-Encoding.", headers=CLOSE
)
STOPPED = ErrorReply(503, "The server is stopping.", headers=RETRY | CLOSE)
FAILED = ErrorReply(500, "The server failed to answer. The error is in its log.")
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="dualkg", Basic realm="dualkg", charset="UTF-8"'}
# No page loads anything from another host, and nothing in a name can become a script.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cache-control": b"no-cache",  # browsers revalidate styles and scripts by their ETag
    b"content-security-policy": POLICY.encode(),
}


def requires_token(token: str) -> Check:
    """Check the token: `Authorization: Bearer TOKEN`, or the password of any user (Basic).

    Browsers can ask for a password. Digests are compared in constant time, which reveals neither
    the characters nor the length of the token.
    """
    expected = hashlib.sha256(token.encode()).digest()
    message = "This server requires a token: send the header 'Authorization: Bearer TOKEN'."
    refusal = ErrorReply(401, message, headers=CHALLENGE)

    def check(scope: Scope, headers: Headers) -> ErrorReply | None:
        sent = hashlib.sha256(_sent_token(headers.get("authorization", ""))).digest()
        is_public = scope["path"] == "/health"
        if is_public or hmac.compare_digest(sent, expected):
            return None
        return refusal

    return check


def _sent_token(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    credentials = value.strip().encode("latin-1", "replace")
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() != "basic":
        return b""
    try:
        user_and_password = base64.b64decode(credentials, validate=True)
    except binascii.Error:
        return b""
    return user_and_password.partition(b":")[2]


def loopback_host(scope: Scope, headers: Headers) -> ErrorReply | None:
    """Without a token, requests must name this machine as their host, which stops DNS rebinding."""
    host = HOST.fullmatch(headers.get("host", ""))
    if host and is_loopback(host["v6"] or host["name"]):
        return None
    message = "This server answers requests to localhost only. Start it with --token for others."
    return ErrorReply(400, message)


def is_loopback(host: str) -> bool:
    if host.lower().removesuffix(".") == "localhost":
        return True
    has_zone = "%" in host  # which may be any text
    try:
        return ipaddress.ip_address(host).is_loopback and not has_zone
    except ValueError:
        return False


def same_origin(scope: Scope, headers: Headers) -> ErrorReply | None:
    """Refuse changes that a page of another host sends.

    A browser sends the origin of its page with every POST; a program sends none. Changes must be
    JSON, which a form of another host cannot send.
    """
    protected = [what for path, what in PROTECTED.items() if scope["path"].startswith(path)]
    if scope["method"] in ("GET", "HEAD", "OPTIONS") or not protected:
        return None
    [what] = protected
    if not _is_same_origin(headers):
        message = (
            f"{what} are accepted from this server's own pages only; this one came from another."
        )
        return ErrorReply(403, message)

    content_type = headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if scope["method"] == "POST" and media_type != "application/json":
        message = (
            f"{what} must be sent with 'Content-Type: application/json'; "
            f"got '{content_type or 'none'}'."
        )
        return ErrorReply(415, message)
    return None


def _is_same_origin(headers: Headers) -> bool:
    """Whether neither header names another origin."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    if "origin" not in headers:
        return True
    # A proxy that terminates HTTPS changes the scheme; it passes the host on unchanged, with its
    # port.
    scheme, _, origin_host = headers["origin"].lower().partition("://")
    host = headers.get("host", "").lower()
    return scheme in ("http", "https") and host != "" and origin_host == host


class Exchange:
    """A request that is being answered, and what is known of its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.headers = Headers(scope=scope)
        self.status = 0  # of the response, once it has begun
        self.route = "other"  # as in the OpenAPI description, for addresses that have one
        self._send = send
        self._started = time.perf_counter()

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def request(self) -> Scope:
        """The request as routes see it: HEAD is a GET whose body is not sent."""
        return {**self.scope, "method": "GET"} if self.scope["method"] == "HEAD" else self.scope

    async def send(self, message: Message) -> None:
        """Send a part of the response; security headers are added to those that it has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            present = {name for name, _ in message["headers"]}
            for name, value in HEADERS.items():
                if name not in present:
                    message["headers"].append((name, value))
        await self._send(message)
        if message["type"] == "http.response.start" and self.scope["method"] == "HEAD":
            await self._send({"type": "http.response.body", "body": b""})
            raise HeadSent


class HeadSent(Exception):
    """The response to a HEAD request is complete; the rest of it, such as a stream, is not made."""


class RequestMiddleware:
    """The only middleware: checks, limits, security headers, metrics, access log and failures."""

    def __init__(self, app: ASGIApp, *, service: Service, checks: Sequence[Check]) -> None:
        self._app = app
        self._service = service
        self._checks = checks
        self._num_answering = 0  # complete requests
        self._body_bytes = 0  # of the requests that are being received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        exchange = Exchange(scope, receive, send)
        self._service.metrics.in_progress.inc()
        try:
            await self._answer_in_time(exchange)
        finally:
            self._service.metrics.in_progress.dec()
            self._record(exchange)

    async def _answer_in_time(self, exchange: Exchange) -> None:
        """Answer a request; one that fails or takes too long gets a message."""
        limit = self._time_limit(exchange.path)
        try:
            async with asyncio.timeout(limit):
                await self._answer(exchange)
        except HeadSent:
            return
        except TimeoutError:
            message = f"The request took longer than its limit of {limit:g} seconds."
            await _fail(exchange, ErrorReply(503, message, headers=RETRY))
        except (asyncio.CancelledError, KeyboardInterrupt):
            # The server gives up what it is answering when it stops. uvicorn would reply that it
            # failed.
            await _fail(exchange, STOPPED)
        except Exception as error:
            reply = environment_reply(error)
            if reply is None:
                write_log(failed=exchange.route, trace=traceback.format_exc())
            else:
                write_log(failed=exchange.route, error=str(error)[:MAX_LOGGED_ERROR])
            await _fail(exchange, reply or FAILED)

    def _time_limit(self, path: str) -> float:
        limits = self._service.limits
        return limits.stream_seconds + GRACE if path in COMPLETIONS else limits.seconds

    def _body_limit(self, path: str) -> int:
        """The bytes that the body of a request may have."""
        accepts_files = path == FILES and self._service.trainings.is_allowed
        return self._service.limits.file_bytes if accepts_files else self._service.limits.body_bytes

    async def _answer(self, exchange: Exchange) -> None:
        body = await self._accept(exchange)
        if body is None:
            return
        if isinstance(body, ErrorReply):
            await body.as_json()(exchange.scope, exchange.receive, exchange.send)
            return
        scope = exchange.request
        self._num_answering += 1
        try:
            await self._app(scope, _with_body(body, exchange.receive), exchange.send)
        finally:
            self._num_answering -= 1
            exchange.route = str(getattr(scope.get("route"), "path_format", "other"))

    async def _accept(self, exchange: Exchange) -> bytes | ErrorReply | None:
        """The body of a request, or its refusal, or None if the client has gone."""
        refusal = self._refusal(exchange)
        if refusal:
            return refusal
        body = await self._read_body(exchange)
        if isinstance(body, bytes):
            return self._overload(exchange) or body
        return body

    def _refusal(self, exchange: Exchange) -> ErrorReply | None:
        if "content-length" in exchange.headers and "transfer-encoding" in exchange.headers:
            return TWO_LENGTHS
        for check in self._checks:
            refusal = check(exchange.scope, exchange.headers)
            if refusal:
                return refusal
        return None

    async def _read_body(self, exchange: Exchange) -> bytes | ErrorReply | None:
        """The body of a request, a refusal if it is too large, or None if the client has gone."""
        limits = self._service.limits
        most = self._body_limit(exchange.path)
        too_large = ErrorReply(
            413, f"A body must have at most {most:,} bytes. Send several requests.", headers=CLOSE
        )
        declared_length = exchange.headers.get("content-length", "")
        if declared_length.isdecimal() and int(declared_length[:20]) > most:
            return too_large

        body = bytearray()
        more_body = True
        try:
            while more_body:
                event = await exchange.receive()
                if event["type"] == "http.disconnect":
                    return None
                part = event.get("body", b"")
                more_body = event.get("more_body", False)
                body += part
                self._body_bytes += len(part)
                if self._body_bytes > limits.all_body_bytes:
                    message = (
                        "The server is receiving more than it can hold. Try again in a moment."
                    )
                    return ErrorReply(503, message, headers=RETRY | CLOSE)
                if len(body) > most:
                    return too_large
        finally:
            self._body_bytes -= len(body)
        return bytes(body)

    def _overload(self, exchange: Exchange) -> ErrorReply | None:
        """The refusal of a request if too many are in progress; monitoring is always answered."""
        most = self._service.limits.requests
        if exchange.path == "/health" or self._num_answering < most:
            return None
        message = f"{most:,} requests are in progress. Try again in a moment."
        return ErrorReply(503, message, headers=RETRY | CLOSE)

    def _record(self, exchange: Exchange) -> None:
        """Add a request to the metrics and to the access log."""
        seconds = exchange.seconds
        self._service.metrics.request(exchange.route, exchange.status, seconds)
        if self._service.access_log:
            write_log(
                method=exchange.scope["method"],
                path=exchange.path[:MAX_LOGGED_PATH],
                status=exchange.status,
                ms=round(seconds * 1000, 2),
            )


async def _fail(exchange: Exchange, reply: ErrorReply) -> None:
    """Send an error, unless the response has begun."""
    if exchange.status:
        return
    response = await error_response(Request(exchange.request), reply)
    await response(exchange.scope, exchange.receive, exchange.send)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """A body that has been read as the first message; the next one is a disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def write_log(**line: Any) -> None:
    """Write a line of JSON on stderr.

    JSON escapes line breaks, quotes and terminal control codes in an address.
    """
    print(json.dumps(line), file=sys.stderr, flush=True)

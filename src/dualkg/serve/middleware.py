"""Middleware: checks of headers, the body limit, the deadline, and the observation of every request.

Starlette's TrustedHostMiddleware accepts neither `[::1]:8000` nor upper case, and its refusal is not a message in JSON;
its GZipMiddleware holds back the lines of a stream. Both checks are therefore written here, or left out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import time
import traceback
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.errors import ErrorReply
from dualkg.serve.limits import Limits
from dualkg.serve.service import Service
from dualkg.serve.templating import error_response

Check = Callable[[Scope, Headers], ErrorReply | None]
STREAMED = ("/api/complete", "/facts/rows", "/facts.json")  # the last one waits for the same completion
GRACE = 5.0  # seconds in which a stream may end itself with a message
FAILED = ErrorReply(500, "The server failed to answer. The error is in its log.")
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    # No page loads anything from another host, and nothing in a name can become a script.
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}


class RequestChecks:
    """Refuses a request when one of the checks does; they see its address and headers."""

    def __init__(self, app: ASGIApp, *, checks: Sequence[Check]) -> None:
        self._app, self._checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            for check in self._checks:
                if refusal := check(scope, headers):
                    await refusal.as_json()(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def requires_token(token: str) -> Check:
    """The token as `Authorization: Bearer TOKEN`, or as the password of any user (Basic), which browsers can ask for.

    Digests are compared in constant time, which reveals neither the characters nor the length of the token.
    """
    expected = hashlib.sha256(token.encode()).digest()
    challenge = {"WWW-Authenticate": 'Bearer realm="dualkg", Basic realm="dualkg", charset="UTF-8"'}
    message = "This server requires a token: send the header 'Authorization: Bearer TOKEN'."

    def check(scope: Scope, headers: Headers) -> ErrorReply | None:
        sent = hashlib.sha256(_sent_token(headers.get("authorization", ""))).digest()
        if scope["path"] == "/health" or hmac.compare_digest(sent, expected):
            return None
        return ErrorReply(401, message, headers=challenge)

    return check


def _sent_token(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    sent = value.strip().encode("latin-1", "replace")
    if scheme.lower() == "bearer":
        return sent
    try:
        return base64.b64decode(sent, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except binascii.Error:
        return b""


def loopback_host(scope: Scope, headers: Headers) -> ErrorReply | None:
    """Without a token, requests must name this machine as their host, which stops DNS rebinding."""
    host = headers.get("host") or "localhost"
    if host.startswith("["):
        host = host.partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if is_loopback(host):
        return None
    return ErrorReply(400, "This server answers requests to localhost only. Start it with --token for other names.")


def is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def header_limit(max_bytes: int) -> Check:
    """Refuses a large head that arrived whole; the server itself stops reading one that does not end."""

    def check(scope: Scope, headers: Headers) -> ErrorReply | None:
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) <= max_bytes:
            return None
        message = f"The address and headers of a request must have at most {max_bytes:,} bytes."
        return ErrorReply(431, message, headers={"Connection": "close"})

    return check


def same_origin(scope: Scope, headers: Headers) -> ErrorReply | None:
    """Decisions come from this server's pages or from a program, and as JSON, which a form of another host cannot send.

    A browser sends the origin of its page with every POST; a program sends none.
    """
    if scope["method"] in ("GET", "HEAD", "OPTIONS") or scope["path"] != "/api/decisions":
        return None
    if not _is_same_origin(headers):
        return ErrorReply(403, "Decisions are accepted from this server's own pages only; this one came from another.")
    sent = headers.get("content-type", "")
    if scope["method"] == "POST" and sent.partition(";")[0].strip().lower() != "application/json":
        message = f"Decisions must be sent with 'Content-Type: application/json'; got '{sent or 'none'}'."
        return ErrorReply(415, message)
    return None


def _is_same_origin(headers: Headers) -> bool:
    """Whether neither header names another origin."""
    origin = headers.get("origin")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    # A proxy that terminates HTTPS changes the scheme; it passes the host on unchanged, with its port.
    return parts.scheme in ("http", "https") and parts.netloc.lower() == headers.get("host", "").lower() != ""


class BodyLimit:
    """Reads the body first, and stops as soon as it is too large, whatever its declared length."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        too_large, more, body = declared.isdecimal() and int(declared) > self._max, True, bytearray()
        while more and not too_large:
            message = await receive()
            body += message.get("body", b"")
            too_large, more = len(body) > self._max, message.get("more_body", False)
        if too_large:
            text = f"A body must have at most {self._max:,} bytes. Send several requests."
            await ErrorReply(413, text, headers={"Connection": "close"}).as_json()(scope, receive, send)
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)


class Deadline:
    """Cancels a request when its time is over; a query that is still queued is then never computed."""

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        limits = self._limits
        seconds = limits.stream_seconds + GRACE if scope["path"] in STREAMED else limits.seconds
        try:
            async with asyncio.timeout(seconds):
                await self._app(scope, receive, send_noted)
        except TimeoutError:
            if started:
                raise
            message = f"The request took longer than its limit of {seconds:g} seconds."
            reply = await error_response(Request(scope), ErrorReply(503, message, headers={"Retry-After": "1"}))
            await reply(scope, receive, send)


class Observer:
    """Outermost middleware: security headers, metrics, access log, and a message for unexpected exceptions."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._metrics, self._log = app, service.metrics, service.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {key for key, _ in message["headers"]}
                added = ((key, value) for key, value in HEADERS.items() if key not in present)
                message["headers"] = [*message["headers"], *added]
            await send(message)

        self._metrics.in_progress.inc()
        try:
            await self._app(scope, receive, send_observed)
        except Exception:
            self._log.failure(_route_of(scope), traceback.format_exc())
            if not status:
                await (await error_response(Request(scope), FAILED))(scope, receive, send_observed)
        finally:
            self._metrics.in_progress.dec()
            seconds = time.perf_counter() - started
            self._metrics.request(_route_of(scope), status, seconds)
            self._log.request(scope["method"], scope["path"], status, seconds)


def _route_of(scope: Scope) -> str:
    """The route as in the OpenAPI description; `other` for addresses that have none."""
    return str(getattr(scope.get("route"), "path_format", "other"))

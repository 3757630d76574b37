"""Middleware: checks of headers, limits of body and time, and the observation of every request.

Starlette's TrustedHostMiddleware accepts neither `[::1]:8000` nor upper case, and its refusal is not a message in JSON;
its GZipMiddleware holds back the lines of a stream. Both checks are therefore written here, or left out.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import time
import traceback
from collections.abc import Callable, Sequence

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.errors import ErrorReply
from dualkg.serve.metrics import write_log
from dualkg.serve.service import Service
from dualkg.serve.templating import error_response

Check = Callable[[Scope, Headers], ErrorReply | None]
STREAMED = ("/api/complete", "/facts/rows", "/facts.json")  # the last one waits for the same completion
MAX_LOGGED_PATH = 500  # characters
GRACE = 5.0  # seconds in which a stream may end itself with a message
FAILED = ErrorReply(500, "The server failed to answer. The error is in its log.")
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cache-control": b"no-cache",  # browsers revalidate styles and scripts by their ETag
    # No page loads anything from another host, and nothing in a name can become a script.
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}


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
    if is_loopback(re.sub(r":\d*$", "", headers.get("host") or "localhost")):
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
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    if "origin" not in headers:
        return True
    # A proxy that terminates HTTPS changes the scheme; it passes the host on unchanged, with its port.
    scheme, _, host = headers["origin"].lower().partition("://")
    return scheme in ("http", "https") and host == headers.get("host", "").lower() != ""


class RequestMiddleware:
    """The only middleware: checks, limits of body and time, security headers, metrics, access log and failures."""

    def __init__(self, app: ASGIApp, *, service: Service, checks: Sequence[Check]) -> None:
        self._app, self._service, self._checks = app, service, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, limits, headers = self._service, self._service.limits, Headers(scope=scope)
        started, status, body_size = time.perf_counter(), 0, 0
        limit = limits.stream_seconds + GRACE if scope["path"] in STREAMED else limits.seconds

        async def receive_limited() -> Message:
            nonlocal body_size
            message = await receive()
            body_size += len(message.get("body", b""))
            if body_size > limits.body_bytes:
                text = f"A body must have at most {limits.body_bytes:,} bytes. Send several requests."
                raise HTTPException(413, text, headers={"Connection": "close"})
            return message

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {key for key, _ in message["headers"]}
                message["headers"] += [(key, value) for key, value in HEADERS.items() if key not in present]
            await send(message)

        service.metrics.in_progress.inc()
        try:
            if refusal := next(filter(None, (check(scope, headers) for check in self._checks)), None):
                await refusal.as_json()(scope, receive, send_observed)
            else:
                async with asyncio.timeout(limit):
                    await self._app(scope, receive_limited, send_observed)
        except Exception as error:
            reply = FAILED
            if isinstance(error, TimeoutError) and not status:
                message = f"The request took longer than its limit of {limit:g} seconds."
                reply = ErrorReply(503, message, headers={"Retry-After": "1"})
            else:
                write_log(failed=_route_of(scope), trace=traceback.format_exc())
            if not status:
                await (await error_response(Request(scope), reply))(scope, receive, send_observed)
        finally:
            service.metrics.in_progress.dec()
            seconds = time.perf_counter() - started
            service.metrics.request(_route_of(scope), status, seconds)
            if service.access_log:
                path = scope["path"][:MAX_LOGGED_PATH]
                write_log(method=scope["method"], path=path, status=status, ms=round(seconds * 1000, 2))


def _route_of(scope: Scope) -> str:
    """The route as in the OpenAPI description; `other` for addresses that have none."""
    return str(getattr(scope.get("route"), "path_format", "other"))

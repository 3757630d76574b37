"""Middleware: checks of headers, limits of body and time, and the observation of every request.

Starlette's TrustedHostMiddleware accepts neither `[::1]:8000` nor upper case, and its refusal is
not a message in JSON; its GZipMiddleware holds back the lines of a stream. Both checks are
therefore written here, or left out.
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
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.errors import ErrorReply
from dualkg.serve.service import Service
from dualkg.serve.templating import error_response

# A name, an IPv4 address or an IPv6 address in brackets; then perhaps a port.
HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[0-9a-zA-Z.-]+))(?::\d{0,5})?", re.ASCII)
Check = Callable[[Scope, Headers], ErrorReply | None]
STREAMED = (
    "/api/complete",
    "/facts/rows",
    "/facts.json",
)  # the last one waits for the same completion
MAX_LOGGED_PATH = 500  # characters
GRACE = 5.0  # seconds in which a stream may end itself with a message
RETRY = {"Retry-After": "1"}
CLOSE = {"Connection": "close"}
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
    """The token as `Authorization: Bearer TOKEN`, or as the password of any user (Basic), which
    browsers can ask for.

    Digests are compared in constant time, which reveals neither the characters nor the length of
    the token.
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
        return (
            base64.b64decode(sent, validate=True).partition(b":")[2]
            if scheme.lower() == "basic"
            else b""
        )
    except binascii.Error:
        return b""


def loopback_host(scope: Scope, headers: Headers) -> ErrorReply | None:
    """Without a token, requests must name this machine as their host, which stops DNS rebinding."""
    found = HOST.fullmatch(headers.get("host", ""))
    if found and is_loopback(found["v6"] or found["name"]):
        return None
    return ErrorReply(
        400,
        "This server answers requests to localhost only. Start it with --token for other names.",
    )


def is_loopback(host: str) -> bool:
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback and "%" not in host  # a zone may be any text
    except ValueError:
        return False


@lru_cache(4096)
def client_of(address: tuple[str, int] | None) -> str:
    """The client that an address belongs to: an IPv4 address, or the first half of an IPv6
    address.
    """
    try:
        found = ipaddress.ip_address(address[0] if address else "")
    except ValueError:  # a proxy may write anything
        return address[0] if address else ""
    if found.version == 6 and found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(found) if found.version == 4 else found.exploded[:19]


def same_origin(scope: Scope, headers: Headers) -> ErrorReply | None:
    """Decisions come from this server's pages or from a program, and as JSON, which a form of
    another host cannot send.

    A browser sends the origin of its page with every POST; a program sends none.
    """
    if scope["method"] in ("GET", "HEAD", "OPTIONS") or scope["path"] != "/api/decisions":
        return None
    if not _is_same_origin(headers):
        return ErrorReply(
            403,
            "Decisions are accepted from this server's own pages only; this one came from another.",
        )
    sent = headers.get("content-type", "")
    if scope["method"] == "POST" and sent.partition(";")[0].strip().lower() != "application/json":
        message = (
            f"Decisions must be sent with 'Content-Type: application/json'; got '{sent or 'none'}'."
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
    scheme, _, host = headers["origin"].lower().partition("://")
    return scheme in ("http", "https") and host == headers.get("host", "").lower() != ""


class RequestMiddleware:
    """The only middleware: checks, limits of body and time, security headers, metrics, access log
    and failures.
    """

    def __init__(self, app: ASGIApp, *, service: Service, checks: Sequence[Check]) -> None:
        self._app = app
        self._service = service
        self._checks = checks
        self._answering: Counter[str] = Counter()  # complete requests by client
        self._body_bytes = 0  # of the requests that are being received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service
        limits = self._service.limits
        headers = Headers(scope=scope)
        started = time.perf_counter()
        status = 0
        client = client_of(scope.get("client"))
        limit = limits.stream_seconds + GRACE if scope["path"] in STREAMED else limits.seconds

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {key for key, _ in message["headers"]}
                message["headers"] += [
                    (key, value) for key, value in HEADERS.items() if key not in present
                ]
            await send(message)

        service.metrics.in_progress.inc()
        try:
            async with asyncio.timeout(limit):
                refusal = next(
                    filter(None, (check(scope, headers) for check in self._checks)), None
                )
                body = refusal or await self._read_body(headers, receive)
                if isinstance(body, bytes):
                    body = self._overload(scope, client) or body
                if isinstance(body, ErrorReply):
                    await body.as_json()(scope, receive, send_observed)
                elif body is not None:
                    self._answering[client] += 1
                    try:
                        await self._app(scope, _with_body(body, receive), send_observed)
                    finally:
                        self._answering[client] -= 1
                        if not self._answering[client]:
                            del self._answering[client]
        except Exception as error:
            reply = FAILED
            if isinstance(error, TimeoutError):
                message = f"The request took longer than its limit of {limit:g} seconds."
                reply = ErrorReply(503, message, headers=RETRY)
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
                write_log(
                    method=scope["method"], path=path, status=status, ms=round(seconds * 1000, 2)
                )

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes | ErrorReply | None:
        """The body of a request, a refusal if it is too large, or None if the client has gone."""
        limits = self._service.limits
        body = bytearray()
        declared = headers.get("content-length", "")
        more = True
        too_large = declared.isdecimal() and int(declared[:20]) > limits.body_bytes
        try:
            while more and not too_large:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                self._body_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
                too_large = len(body) > limits.body_bytes
                if self._body_bytes > limits.all_body_bytes:
                    text = "The server is receiving more than it can hold. Try again in a moment."
                    return ErrorReply(503, text, headers=RETRY | CLOSE)
        finally:
            self._body_bytes -= len(body)
        if too_large:
            text = f"A body must have at most {limits.body_bytes:,} bytes. Send several requests."
            return ErrorReply(413, text, headers=CLOSE)
        return bytes(body)

    def _overload(self, scope: Scope, client: str) -> ErrorReply | None:
        """The refusal of a request if its client or the server has too many; monitoring is answered
        regardless.
        """
        limits = self._service.limits
        if scope["path"] == "/health":
            return None
        if self._answering[client] >= limits.client_connections:
            message = f"{limits.client_connections:,} requests of this client are in progress. Try again in a moment."
            return ErrorReply(429, message, headers=RETRY | CLOSE)
        if self._answering.total() >= limits.connections:
            message = f"{limits.connections:,} requests are in progress. Try again in a moment."
            return ErrorReply(503, message, headers=RETRY | CLOSE)
        return None


def _with_body(body: bytes, receive: Receive) -> Receive:
    """A body that has been read as the first message; the next one is a disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def _route_of(scope: Scope) -> str:
    """The route as in the OpenAPI description; `other` for addresses that have none."""
    return str(getattr(scope.get("route"), "path_format", "other"))


def write_log(**line: Any) -> None:
    """A line of JSON on stderr; JSON escapes line breaks, quotes and terminal control codes in an
    address.
    """
    print(json.dumps(line), file=sys.stderr, flush=True)

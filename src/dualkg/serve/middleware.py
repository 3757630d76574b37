"""Bodies up to a size."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.errors import DualkgError, RequestError
from dualkg.serve.batching import BusyError
from dualkg.serve.limits import Limits
from dualkg.serve.metrics import Counts, Journal
from dualkg.serve.schemas import Problem
from dualkg.serve.state import UnknownError


def problem(
    status: int, sentence: str, *, near: Sequence[str] = (), headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(
        Problem(error=sentence, near=list(near)).model_dump(), status_code=status, headers=dict(headers or {})
    )


def header_of(scope: Scope, name: bytes) -> str | None:
    """The value of a header, or none; bytes that are no text are read as Latin-1, as HTTP has them."""
    found = next((value for key, value in scope["headers"] if key == name), None)
    return None if found is None else found.decode("latin-1")


class BodyLimit:
    """Reads the body before anything else does, and stops where it is too large, whatever its length was said to be."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        said = header_of(scope, b"content-length") or "0"
        body = None if said.isdecimal() and int(said) > self._most else await self._read(receive)
        if body is None:
            sentence = f"A body has at most {self._most:,} bytes; more came. Ask in several requests."
            await problem(413, sentence, headers={"Connection": "close"})(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or none where it is too large."""
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._most:
                return None
            if not message.get("more_body", False):
                return bytes(body)


class HeadLimit:
    """Refuses what came whole and is too large; what does not end is not read on by the server itself."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _size(scope) > self._most:
            sentence = f"The address and headers of a request have at most {self._most:,} bytes; more came."
            await problem(431, sentence, headers={"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _size(scope: Scope) -> int:
    lines = sum(len(name) + len(value) for name, value in scope["headers"])
    return lines + len(scope.get("raw_path") or b"") + len(scope["query_string"])


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, and reached from it alone."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class OwnHost:
    """Without a token, requests must name this machine as their host; with one, any name will do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_loopback(_without_port(header_of(scope, b"host") or "localhost")):
            sentence = "This server answers requests to localhost alone. Start it with --token to be reached by a name."
            await problem(400, sentence)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[")
    return host.rpartition(":")[0] if host.count(":") == 1 else host


WRITING = ("/api/decisions",)
READING = ("GET", "HEAD", "OPTIONS")


class OwnOrigin:
    """A browser says with every POST where its page came from; a program says nothing of it.

    A body must be called JSON besides: that no form of another host can do, nor a script without asking first.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READING or scope["path"] not in WRITING:
            await self._app(scope, receive, send)
        elif not is_own(scope):
            sentence = "Decisions are taken from this server's own pages alone; this request came from another."
            await problem(403, sentence)(scope, receive, send)
        elif scope["method"] == "POST" and not is_json(scope):
            came = header_of(scope, b"content-type") or "none"
            sentence = f"Decisions are sent as JSON: with the header 'Content-Type: application/json'; '{came}' came."
            await problem(415, sentence)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def is_own(scope: Scope) -> bool:
    """Whether a request came from a page of this host, or from no page at all. Of two headers both must say so."""
    site, origin = header_of(scope, b"sec-fetch-site"), header_of(scope, b"origin")
    if site is not None and site != "same-origin":
        return False
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    # A proxy that speaks HTTPS changes the scheme; the host, with its port, is passed on as it came.
    host = (header_of(scope, b"host") or "").lower()
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host != ""


def is_json(scope: Scope) -> bool:
    kind = (header_of(scope, b"content-type") or "").partition(";")[0]
    return kind.strip().lower() == "application/json"


SHOWN = 100  # letters of a value that is quoted


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    sentence: str
    near: Sequence[str] = ()  # names that may have been meant
    headers: Mapping[str, str] = field(default_factory=dict)


Tell = Callable[[Request, Refusal], Awaitable[Response]]


def tell_in_sentences(app: FastAPI, tell: Tell) -> None:
    """Every refusal is told by `tell`: to people on a page, to programs in the shape of a Problem."""

    async def told(request: Request, error: Exception) -> Response:
        return await tell(request, refusal_of(error, request.method))

    for kind in (DualkgError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, told)


def refusal_of(error: Exception, method: str) -> Refusal:
    """What went wrong with a request by GET, POST or another method."""
    match error:
        case UnknownError():
            return Refusal(404, str(error), near=error.near)
        case RequestError():
            return Refusal(400, str(error))
        case BusyError():
            return Refusal(503, str(error), headers={"Retry-After": "1"})
        case RequestValidationError():
            return Refusal(422, sentence_of(error.errors()[0]))
        case HTTPException(status_code=404):
            return Refusal(404, "There is nothing at this address. What can be asked is at /docs.")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "GET")
            return Refusal(405, f"This address is asked by {allowed}; {method} came.", headers=error.headers or {})
        case HTTPException():
            return Refusal(error.status_code, str(error.detail), headers=error.headers or {})
    return Refusal(500, str(error))


def sentence_of(error: dict[str, Any]) -> str:
    """What pydantic says of a value, in a sentence of ours."""
    place = [part for part in error["loc"] if part not in ("query", "path", "body")]
    name = ".".join(map(str, place)) or "The body"
    came, limits = _quoted(error.get("input")), error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"{name} is missing."
        case "json_invalid":
            return f"The body is not JSON: {limits.get('error', 'it cannot be read')}."
        case "greater_than_equal" if name == "k":
            return f"At least one answer must be asked for; k is {error['input']}."
        case "greater_than_equal":
            return f"{name} is at least {limits['ge']:,}; {came} came."
        case "less_than_equal":
            return f"{name} is at most {limits['le']:,}; {came} came."
        case "greater_than":
            return f"{name} is above {limits['gt']:,}; {came} came."
        case "less_than":
            return f"{name} is below {limits['lt']:,}; {came} came."
        case "literal_error" if name == "known":
            return f"Known answers are marked or left out: 'mark' or 'omit'; {came} came."
        case "literal_error":
            return f"{name} is one of {limits['expected']}; {came} came."
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return f"{name} is a whole number; {came} came."
        case "float_parsing" | "float_type" | "finite_number":
            return f"{name} is a number; {came} came."
        case "bool_parsing" | "bool_type":
            return f"{name} is true or false; {came} came."
        case "string_too_long":
            return f"{name} has at most {limits['max_length']:,} letters; {len(error['input']):,} came."
        case "too_long":
            return f"{name} has at most {limits['max_length']:,} items; {limits['actual_length']:,} came."
        case "too_short":
            return f"{name} has at least {limits['min_length']:,} items; {limits['actual_length']:,} came."
    return f"{name} cannot be used: {error['msg'].lower()}."


def _quoted(value: object) -> str:
    text = str(value)
    return f"'{text[:SHOWN]}…'" if len(text) > SHOWN else f"'{text}'"


STREAMED = ("/api/complete", "/facts.json")  # the second waits for the same list
GRACE = 5.0  # seconds in which a stream may end by itself, with a sentence


class Deadline:
    """Gives a request up when its time is over; one that still waits for its turn is never begun."""

    def __init__(self, app: ASGIApp, *, limits: Limits, tell: Tell) -> None:
        self._app, self._limits, self._tell = app, limits, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        limits = self._limits
        seconds = limits.long_seconds + GRACE if scope["path"] in STREAMED else limits.seconds
        try:
            async with asyncio.timeout(seconds):
                await self._app(scope, receive, noticed)
        except TimeoutError:
            if begun:
                raise
            sentence = f"The answer took longer than the {seconds:g} seconds that a request may take."
            reply = await self._tell(Request(scope), Refusal(503, sentence, headers={"Retry-After": "1"}))
            await reply(scope, receive, send)


OPEN = ("/health",)


class TokenGuard:
    """As `Authorization: Bearer TOKEN`; or, so that a browser can ask for it, as the password of any user (Basic)."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._digest = _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._fits(header_of(scope, b"authorization") or ""):
            await self._app(scope, receive, send)
            return
        asked = {"WWW-Authenticate": 'Bearer realm="dualkg", Basic realm="dualkg", charset="UTF-8"'}
        sentence = "This server asks for a token: send it as the header 'Authorization: Bearer TOKEN'."
        await problem(401, sentence, headers=asked)(scope, receive, send)

    def _fits(self, header: str) -> bool:
        """Digests are compared, in a time that tells nothing of the token: neither its letters nor its length."""
        return hmac.compare_digest(_digest(given_token(header)), self._digest)


def given_token(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    given = value.strip().encode("latin-1", "replace")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


FAILED = Refusal(500, "The server failed to answer. What happened is written where it runs.")
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    # No page loads anything from another host, and nothing in a name can become a script.
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}


class OnProgress:
    """The outermost guard."""

    def __init__(self, app: ASGIApp, *, counts: Counts, journal: Journal, tell: Tell) -> None:
        self._app, self._counts, self._journal, self._tell = app, counts, journal, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                there = {key for key, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((k, v) for k, v in HEADERS.items() if k not in there)]
            await send(message)

        self._counts.under_way += 1
        try:
            await self._app(scope, receive, watched)
        except Exception:
            self._journal.failure(route_of(scope), traceback.format_exc())
            if not status:
                reply = await self._tell(Request(scope), FAILED)
                await reply(scope, receive, watched)
        finally:
            self._counts.under_way -= 1
            seconds = time.perf_counter() - started
            self._counts.request(route_of(scope), status, seconds)
            self._journal.request(scope["method"], scope["path"], status, seconds)


def route_of(scope: Scope) -> str:
    """The route as the OpenAPI description has it; `other` for addresses that have none."""
    return str(getattr(scope.get("route"), "path_format", "other"))

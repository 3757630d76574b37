"""Every request is counted and, where that was asked for, written down; what fails unforeseen ends as a sentence."""

from __future__ import annotations

import time
import traceback

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.counts import Counts
from dualkg.serve.guards.sentences import Refusal, Tell
from dualkg.serve.journal import Journal

FAILED = Refusal(500, "The server failed to answer. What happened is written where it runs.")
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    # No page loads anything from another host, and nothing in a name can become a script.
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}


class Watch:
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

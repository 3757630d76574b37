"""A time limit for every request."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.guards.sentences import Refusal, Tell
from dualkg.serve.limits import Limits

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

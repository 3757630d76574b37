"""Bodies up to a size."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualkg.serve.guards.replies import header_of, problem


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

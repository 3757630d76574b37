"""Addresses and headers up to a size."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from dualkg.serve.guards.replies import problem


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

"""A token that every request must have."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from dualkg.serve.guards.replies import header_of, problem

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

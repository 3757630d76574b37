"""Writing from this server's own pages and from programs, never from a page of another host."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from dualkg.serve.guards.replies import header_of, problem

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

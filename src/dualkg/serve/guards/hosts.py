"""Only requests meant for this server: a page of another host cannot have its name point here and read the answers."""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from dualkg.serve.guards.replies import header_of, problem


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

"""One request without a port."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.types import Message

from dualkg.errors import RequestError


@dataclass
class Reply:
    """What a request was answered with."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def ask_once(app: FastAPI, address: str, *, token: str | None = None) -> Reply:
    """Ask an application for an address such as `/entity/France.json`, as if it had come by HTTP."""
    return asyncio.run(_ask(app, address, token=token))


async def _ask(app: FastAPI, address: str, *, token: str | None) -> Reply:
    if not address.startswith("/"):
        raise RequestError(f"An address begins with a slash, such as /entity/France.json; '{address}' came.")
    parts = urlsplit(f"http://localhost{address}")
    headers = [(b"host", b"localhost")]
    if token is not None:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": unquote(parts.path, errors="replace"),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": headers,
        "server": ("localhost", 80),
        "client": None,
    }
    reply, never = Reply(), asyncio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await never.wait()  # nobody goes away
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    return reply

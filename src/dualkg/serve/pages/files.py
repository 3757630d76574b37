"""The files that pages load: styles and scripts, all of them in this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from dualkg.serve.routes.choices import router

routes = router("pages")
KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent."""

    body: bytes
    kind: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """By name. A request can only name one of these, so that no address is a path."""
    found = {}
    for file in resources.files("dualkg.serve.pages").joinpath("static").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = StaticFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return found


@routes.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def static_file(request: Request, name: str) -> Response:
    """Kept by browsers, who ask each time whether it is still the same."""
    file = static_files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    given = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in given or "*" in given:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)

"""Short answers of guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi.responses import JSONResponse
from starlette.types import Scope

from dualkg.serve.shapes.problems import Problem


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

"""What goes wrong, as the sentences that the command line gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dualkg.errors import DualkgError, RequestError
from dualkg.serve.asking import BusyError
from dualkg.serve.runs import UnknownError

SHOWN = 100  # letters of a value that is quoted


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    sentence: str
    near: Sequence[str] = ()  # names that may have been meant
    headers: Mapping[str, str] = field(default_factory=dict)


Tell = Callable[[Request, Refusal], Awaitable[Response]]


def tell_in_sentences(app: FastAPI, tell: Tell) -> None:
    """Every refusal is told by `tell`: to people on a page, to programs in the shape of a Problem."""

    async def told(request: Request, error: Exception) -> Response:
        return await tell(request, refusal_of(error, request.method))

    for kind in (DualkgError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, told)


def refusal_of(error: Exception, method: str) -> Refusal:
    """What went wrong with a request by GET, POST or another method."""
    match error:
        case UnknownError():
            return Refusal(404, str(error), near=error.near)
        case RequestError():
            return Refusal(400, str(error))
        case BusyError():
            return Refusal(503, str(error), headers={"Retry-After": "1"})
        case RequestValidationError():
            return Refusal(422, sentence_of(error.errors()[0]))
        case HTTPException(status_code=404):
            return Refusal(404, "There is nothing at this address. What can be asked is at /docs.")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "GET")
            return Refusal(405, f"This address is asked by {allowed}; {method} came.", headers=error.headers or {})
        case HTTPException():
            return Refusal(error.status_code, str(error.detail), headers=error.headers or {})
    return Refusal(500, str(error))


def sentence_of(error: dict[str, Any]) -> str:
    """What pydantic says of a value, in a sentence of ours."""
    place = [part for part in error["loc"] if part not in ("query", "path", "body")]
    name = ".".join(map(str, place)) or "The body"
    came, limits = _quoted(error.get("input")), error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"{name} is missing."
        case "json_invalid":
            return f"The body is not JSON: {limits.get('error', 'it cannot be read')}."
        case "greater_than_equal" if name == "k":
            return f"At least one answer must be asked for; k is {error['input']}."
        case "greater_than_equal":
            return f"{name} is at least {limits['ge']:,}; {came} came."
        case "less_than_equal":
            return f"{name} is at most {limits['le']:,}; {came} came."
        case "greater_than":
            return f"{name} is above {limits['gt']:,}; {came} came."
        case "less_than":
            return f"{name} is below {limits['lt']:,}; {came} came."
        case "literal_error" if name == "known":
            return f"Known answers are marked or left out: 'mark' or 'omit'; {came} came."
        case "literal_error":
            return f"{name} is one of {limits['expected']}; {came} came."
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return f"{name} is a whole number; {came} came."
        case "float_parsing" | "float_type" | "finite_number":
            return f"{name} is a number; {came} came."
        case "bool_parsing" | "bool_type":
            return f"{name} is true or false; {came} came."
        case "string_too_long":
            return f"{name} has at most {limits['max_length']:,} letters; {len(error['input']):,} came."
        case "too_long":
            return f"{name} has at most {limits['max_length']:,} items; {limits['actual_length']:,} came."
        case "too_short":
            return f"{name} has at least {limits['min_length']:,} items; {limits['actual_length']:,} came."
    return f"{name} cannot be used: {error['msg'].lower()}."


def _quoted(value: object) -> str:
    text = str(value)
    return f"'{text[:SHOWN]}…'" if len(text) > SHOWN else f"'{text}'"

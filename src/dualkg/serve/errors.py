"""Errors as HTTP responses: a status and the message that the command line would print."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dualkg.errors import RequestError
from dualkg.serve.schemas import Error
from dualkg.serve.service import BusyError, UnknownNameError

MAX_QUOTED = 100  # characters of a quoted value
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "The request was wrong."},
    401: {"model": Error, "description": "A token is required."},
    404: {"model": Error, "description": "Nothing has this name."},
    413: {"model": Error, "description": "The body is too large."},
    422: {"model": Error, "description": "A value is not valid."},
    429: {"model": Error, "description": "This client has too many requests in progress."},
    431: {"model": Error, "description": "The address and headers are too large."},
    503: {"model": Error, "description": "The server is busy, or the request took too long."},
}
MESSAGES = {  # by the type of a pydantic error, with its context
    "missing": "{name} is missing.",
    "json_invalid": "The body is not JSON: {error}.",
    "greater_than_equal": "{name} must be at least {ge:,}; {got}.",
    "less_than_equal": "{name} must be at most {le:,}; {got}.",
    "greater_than": "{name} must be above {gt:,}; {got}.",
    "less_than": "{name} must be below {lt:,}; {got}.",
    "literal_error": "{name} must be {expected}; {got}.",
    **dict.fromkeys(
        ("int_parsing", "int_type", "int_from_float", "int_parsing_size"),
        "{name} must be an integer; {got}.",
    ),
    **dict.fromkeys(
        ("float_parsing", "float_type", "finite_number"), "{name} must be a number; {got}."
    ),
    **dict.fromkeys(("bool_parsing", "bool_type"), "{name} must be true or false; {got}."),
    **dict.fromkeys(("string_type", "string_unicode"), "{name} must be text; {got}."),
    "string_too_long": "{name} must have at most {max_length:,} characters; got {length:,}.",
    "too_long": "{name} must have at most {max_length:,} items; got {actual_length:,}.",
    "too_short": "{name} must have at least {min_length:,} items; got {actual_length:,}.",
}


@dataclass(frozen=True)
class ErrorReply:
    """Status, message and headers of a response to a request that was not answered."""

    status: int
    message: str
    suggestions: Sequence[str] = ()  # similar names
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> JSONResponse:
        body = Error(error=self.message, suggestions=list(self.suggestions)).model_dump()
        return JSONResponse(body, status_code=self.status, headers=dict(self.headers))


def error_reply(error: Exception, method: str = "GET") -> ErrorReply:
    match error:
        case UnknownNameError():
            return ErrorReply(404, str(error), suggestions=error.suggestions)
        case RequestError():
            return ErrorReply(400, str(error))
        case BusyError():
            return ErrorReply(503, str(error), headers={"Retry-After": "1"})
        case RequestValidationError():
            return ErrorReply(422, validation_message(error.errors()[0]))
        case HTTPException(
            status_code=400, __cause__=Exception() as cause
        ):  # by FastAPI, of a body
            reason = "it is nested too deeply" if isinstance(cause, RecursionError) else str(cause)
            return ErrorReply(400, f"The body cannot be read as JSON: {reason}.")
        case HTTPException(status_code=404):
            return ErrorReply(404, "There is nothing at this address. /docs lists all addresses.")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "GET")
            return ErrorReply(
                405, f"This address accepts {allowed}; got {method}.", headers=error.headers or {}
            )
        case HTTPException():
            return ErrorReply(error.status_code, str(error.detail), headers=error.headers or {})
    return ErrorReply(500, str(error))


def validation_message(error: dict[str, Any]) -> str:
    """Pydantic's description of a wrong value as a sentence."""
    hidden = (
        "query",
        "path",
        "body",
        "constrained-str",
    )  # the last is pydantic's word for one type of several
    name = ".".join(str(part) for part in error["loc"] if part not in hidden) or "The body"
    value = (
        str(error.get("input")).encode(errors="backslashreplace").decode()
    )  # JSON may hold half a character
    got = f"got '{value[:MAX_QUOTED]}…'" if len(value) > MAX_QUOTED else f"got '{value}'"
    message = MESSAGES.get(error["type"], "{name} is not valid: {reason}.")
    values = {"name": name, "got": got, "length": len(value), "reason": error["msg"].lower()}
    return message.format(**values | error.get("ctx", {}))

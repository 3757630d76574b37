"""Errors of the server, their status codes, and the JSON that replies to a request with an error.

The sentence of an error is sent as it is, with its kind and status.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dualkg.errors import DualkgError, RequestError, out_of_memory
from dualkg.serve.schemas import Error


class NotFound(RequestError):
    """A request names something unknown; `suggestions` are similar names, best first.

    `part` is the part of a triple that has the name, if it is one.
    """

    def __init__(self, message: str, *, suggestions: Sequence[str] = (), part: str = "") -> None:
        super().__init__(message)
        self.suggestions = list(suggestions)
        self.part = part


class Forbidden(RequestError):
    """The server was not started to do what a request asks for."""


class BusyError(DualkgError):
    """The server has more to do than it accepts; the same request may succeed later."""


class FolderGone(DualkgError):
    """The folder of a run was moved, removed or replaced after the server had loaded it."""


# The status of an error by its class; the first class that fits counts.
STATUS: tuple[tuple[type[Exception], int], ...] = (
    (NotFound, 404),
    (Forbidden, 403),
    (RequestError, 400),
    (RequestValidationError, 422),
    (BusyError, 503),
    (FolderGone, 503),
    (Exception, 500),
)
# Kind and description of replies by status.
KINDS = {
    400: ("RequestError", "The request was wrong."),
    401: ("Unauthorized", "A token is required."),
    403: ("Forbidden", "The server does not accept this, or not from a page of another host."),
    404: ("NotFound", "Nothing has this name."),
    405: ("MethodNotAllowed", "The address does not accept this method."),
    413: ("TooLarge", "The body is too large."),
    415: ("NotJson", "The content type is not JSON."),
    422: ("InvalidValue", "A value is not valid."),
    500: ("ServerError", "The server failed."),
    503: ("BusyError", "The server is busy, the request took too long, or the run is gone."),
}
# Seconds after which a client may try again.
RETRY = {"Retry-After": "1"}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The replies with an error of some addresses, for the OpenAPI description."""
    return {status: {"model": Error, "description": KINDS[status][1]} for status in statuses}


RESPONSES = responses(400, 401, 404, 413, 422, 503)
MAX_QUOTED = 100  # characters of a quoted value
NOT_AN_INTEGER = "{name} must be an integer; {got}."
NOT_A_NUMBER = "{name} must be a number; {got}."
NOT_A_BOOLEAN = "{name} must be true or false; {got}."
NOT_TEXT = "{name} must be text; {got}."
OTHERWISE_INVALID = "{name} is not valid: {reason}."
# By the type of a pydantic error. The placeholders are filled from the context of the error.
MESSAGES = {
    "missing": "{name} is missing.",
    "json_invalid": "The body is not JSON: {error}.",
    "greater_than_equal": "{name} must be at least {ge:,}; {got}.",
    "less_than_equal": "{name} must be at most {le:,}; {got}.",
    "greater_than": "{name} must be above {gt:,}; {got}.",
    "less_than": "{name} must be below {lt:,}; {got}.",
    "literal_error": "{name} must be {expected}; {got}.",
    "int_parsing": NOT_AN_INTEGER,
    "int_parsing_size": NOT_AN_INTEGER,
    "int_type": NOT_AN_INTEGER,
    "int_from_float": NOT_AN_INTEGER,
    "float_parsing": NOT_A_NUMBER,
    "float_type": NOT_A_NUMBER,
    "finite_number": NOT_A_NUMBER,
    "bool_parsing": NOT_A_BOOLEAN,
    "bool_type": NOT_A_BOOLEAN,
    "string_type": NOT_TEXT,
    "string_unicode": NOT_TEXT,
    "string_too_long": "{name} must have at most {max_length:,} characters; got {length:,}.",
    "too_long": "{name} must have at most {max_length:,} items; got {actual_length:,}.",
    "too_short": "{name} must have at least {min_length:,} items; got {actual_length:,}.",
}
# Parts of the location of a pydantic error that say nothing to the sender of a request. The last
# is pydantic's word for one type of several.
UNNAMED_LOCATIONS = ("query", "path", "body", "constrained-str")


@dataclass(frozen=True)
class ErrorReply:
    """Status, sentence, kind and headers of a response to a request that was not answered."""

    status: int
    message: str
    kind: str = ""
    suggestions: Sequence[str] = ()  # similar names
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> JSONResponse:
        body = Error(
            error=self.message,
            kind=self.kind or KINDS[self.status][0],
            status=self.status,
            suggestions=list(self.suggestions),
        )
        return JSONResponse(body.model_dump(), self.status, headers=dict(self.headers))


def error_reply(error: Exception, method: str = "GET") -> ErrorReply:
    """The reply to a request by `method` that failed with an error."""
    if isinstance(error, HTTPException):
        return _reply_to_framework(error, method)
    if isinstance(error, RequestValidationError):
        return ErrorReply(422, validation_message(error.errors()[0]))
    return ErrorReply(
        next(status for kind, status in STATUS if isinstance(error, kind)),
        str(error),
        kind=type(error).__name__,
        suggestions=getattr(error, "suggestions", ()),
        headers=RETRY if isinstance(error, BusyError) else {},
    )


def environment_reply(error: Exception) -> ErrorReply | None:
    """The reply if the disk or the memory failed, which is no fault of the program.

    The file, or the size, is in the log.
    """
    if out_of_memory(error):
        message = "The server has not enough memory for this request. Ask for less, or try later."
        return ErrorReply(503, message, headers=RETRY)
    if isinstance(error, OSError):
        return ErrorReply(500, reason_of(error))
    return None


def reason_of(error: DualkgError | OSError) -> str:
    """Why something failed, for somebody who did not ask for a file and cannot see it."""
    if isinstance(error, DualkgError):
        return str(error)
    reason = error.strerror or type(error).__name__
    return f"The server could not read or write a file: {reason}."


def _reply_to_framework(error: HTTPException, method: str) -> ErrorReply:
    """The reply to an error of Starlette or FastAPI."""
    headers = error.headers or {}
    match error:
        case HTTPException(status_code=400, __cause__=Exception() as cause):
            # FastAPI could not read the body.
            reason = "it is nested too deeply" if isinstance(cause, RecursionError) else str(cause)
            return ErrorReply(400, f"The body cannot be read as JSON: {reason}.")
        case HTTPException(status_code=404):
            return ErrorReply(404, "There is nothing at this address. /docs lists all addresses.")
        case HTTPException(status_code=405):
            allowed = headers.get("Allow", "GET")
            message = f"This address accepts {allowed}; got {method}."
            return ErrorReply(405, message, headers=headers)
    return ErrorReply(error.status_code, str(error.detail), "HTTPException", headers=headers)


def validation_message(error: dict[str, Any]) -> str:
    """Pydantic's description of a wrong value as a sentence."""
    location = [str(part) for part in error["loc"] if part not in UNNAMED_LOCATIONS]
    # JSON may hold half of a character, which cannot be encoded.
    value = str(error.get("input")).encode(errors="backslashreplace").decode()
    quoted = value if len(value) <= MAX_QUOTED else f"{value[:MAX_QUOTED]}…"

    values = {
        "name": ".".join(location) or "The body",
        "got": f"got '{quoted}'",
        "length": len(value),
        "reason": error["msg"].lower(),
        **error.get("ctx", {}),
    }
    template = MESSAGES.get(error["type"], OTHERWISE_INVALID)
    return template.format(**values)

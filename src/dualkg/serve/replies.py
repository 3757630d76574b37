"""Errors as HTTP responses: a status, and the message in the words of a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dualkg.errors import DualkgError, RequestError, out_of_memory
from dualkg.serve.errors import (
    BusyError,
    DecisionsRefused,
    ServedFolderGone,
    TrainingRefused,
    UnknownNameError,
    UnknownRunError,
    UnknownTraining,
    public_message,
    public_reason,
)
from dualkg.serve.schemas import Error

MAX_QUOTED = 100  # characters of a quoted value
RETRY = {"Retry-After": "1"}
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "The request was wrong."},
    401: {"model": Error, "description": "A token is required."},
    404: {"model": Error, "description": "Nothing has this name."},
    413: {"model": Error, "description": "The body is too large."},
    422: {"model": Error, "description": "A value is not valid."},
    429: {"model": Error, "description": "This client has too many requests in progress."},
    431: {"model": Error, "description": "The address and headers are too large."},
    503: {
        "model": Error,
        "description": "The server is busy, the request took too long, or the run is gone.",
    },
}

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
    """Status, message and headers of a response to a request that was not answered."""

    status: int
    message: str
    suggestions: Sequence[str] = ()  # similar names
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> JSONResponse:
        body = Error(error=self.message, suggestions=list(self.suggestions)).model_dump()
        return JSONResponse(body, status_code=self.status, headers=dict(self.headers))


def error_reply(error: Exception, method: str = "GET") -> ErrorReply:
    """The reply to a request by `method` that failed with an error."""
    if isinstance(error, DualkgError):
        return _reply_to_own(error)
    if isinstance(error, RequestValidationError):
        return ErrorReply(422, validation_message(error.errors()[0]))
    if isinstance(error, HTTPException):
        return _reply_to_framework(error, method)
    return ErrorReply(500, str(error))


def environment_reply(error: Exception) -> ErrorReply | None:
    """The reply if the disk or the memory failed, which no change of the program would mend.

    The file, or the size, is in the log.
    """
    if out_of_memory(error):
        message = "The server has not enough memory for this request. Ask for less, or try later."
        return ErrorReply(503, message, headers=RETRY)
    if isinstance(error, OSError):
        return ErrorReply(500, public_reason(error))
    return None


def _reply_to_own(error: DualkgError) -> ErrorReply:
    message = public_message(error)
    match error:
        case UnknownNameError():
            return ErrorReply(404, message, suggestions=error.suggestions)
        case UnknownRunError():
            return ErrorReply(404, message, suggestions=error.served)
        case UnknownTraining():
            return ErrorReply(404, message)
        case DecisionsRefused() | TrainingRefused():
            return ErrorReply(403, message)
        case RequestError():
            return ErrorReply(400, message)
        case BusyError():
            return ErrorReply(503, message, headers=RETRY)
        case ServedFolderGone():
            return ErrorReply(503, message)
    return ErrorReply(500, message)


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
    return ErrorReply(error.status_code, str(error.detail), headers=headers)


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

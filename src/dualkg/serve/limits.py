"""How much one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from dualkg.errors import RequestError

# Those of the OpenAPI description.
MOST_ANSWERS = 1000  # to one question
MOST_TRIPLES = 1000  # scored by one request
MOST_NEW = 10_000  # triples of one completion
MOST_FOUND = 100  # names found by a few letters
LONGEST_NAME = 2000  # letters


@dataclass(frozen=True)
class Limits:
    """Those that a server is started with."""

    seconds: float = 30.0  # for a request
    long_seconds: float = 600.0  # for one that streams its answer
    head: int = 2**16  # bytes of address and headers
    body: int = 2**20  # bytes
    connections: int = 1000
    waiting: int = 1000  # questions that wait to be answered
    closing_seconds: float = 30.0  # for requests under way when the server stops

    def __post_init__(self) -> None:
        for name in ("seconds", "long_seconds"):
            if not getattr(self, name) > 0:
                raise RequestError(f"A time limit is above 0 seconds; {getattr(self, name):g} came.")

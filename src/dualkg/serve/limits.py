"""Limits on what one request may ask for, and on what the server holds at a time."""

from dataclasses import dataclass

from dualkg.errors import RequestError

# Part of the OpenAPI description.
MAX_PREDICTIONS = 1000  # of one query
MAX_TRIPLES = 1000  # scored or decided on by one request
MAX_NEW_TRIPLES = 10_000  # of one completion
MAX_MATCHES = 100  # of one name search
MAX_NAME_LENGTH = 2000  # characters


@dataclass(frozen=True)
class Limits:
    """Limits that a server is started with."""

    seconds: float = 30.0  # for a request
    stream_seconds: float = 600.0  # for one that streams its response
    header_bytes: int = 2**17  # address and headers; four names of any characters take 96,000
    body_bytes: int = 2**20
    all_body_bytes: int = 2**26  # of all requests that are being received
    receive_seconds: float = (
        10.0  # for address and headers to arrive, and for a client to read the end of a response
    )
    idle_seconds: int = 5  # between two requests of a connection
    connections: int = 1000
    client_connections: int = 256  # of one client, and requests of it at a time
    queued_queries: int = 1000
    shutdown_seconds: float = 30.0  # for requests in progress when the server stops

    def __post_init__(self) -> None:
        for name in ("seconds", "stream_seconds"):
            if not getattr(self, name) > 0:
                raise RequestError(
                    f"A time limit must be above 0 seconds; got {getattr(self, name):g}."
                )

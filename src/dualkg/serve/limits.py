"""Limits on what one request may ask for, and on what the server holds at a time."""

from dataclasses import dataclass

from dualkg.serve.errors import InvalidTimeLimit

# Part of the OpenAPI description.
MAX_PREDICTIONS = 1000  # of one query
MAX_TRIPLES = 1000  # scored or decided on by one request
MAX_NEW_TRIPLES = 10_000  # of one completion
MAX_MATCHES = 100  # of one name search
MAX_NAME_LENGTH = 2000  # characters


@dataclass(frozen=True)
class Limits:
    """Limits that a server is started with."""

    # Seconds for a request, and for one that streams its response.
    seconds: float = 30.0
    stream_seconds: float = 600.0
    # Address and headers of a request; four names of any characters take 96,000 bytes.
    header_bytes: int = 2**17
    header_lines: int = 100
    # The body of a request, and the bodies of all requests that are being received.
    body_bytes: int = 2**20
    all_body_bytes: int = 2**26
    # The body of a request with a file to train on.
    file_bytes: int = 2**24
    # Seconds for address and headers to arrive, and for a client to read the end of a response.
    receive_seconds: float = 10.0
    # Seconds between two requests of a connection.
    idle_seconds: int = 5
    # Connections, and requests that are being answered: of all clients and of one client.
    connections: int = 1000
    client_connections: int = 256
    # Queries that wait for the model.
    queued_queries: int = 1000
    # The part of `seconds` that a request waits for a map of all entities.
    map_share: float = 0.8
    # Seconds for requests in progress when the server stops.
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        for limit in ("seconds", "stream_seconds"):
            seconds = getattr(self, limit)
            if not seconds > 0:
                raise InvalidTimeLimit(limit, seconds=seconds)

"""What a missing `serve` extra is answered with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dualkg.errors import RequestError


@contextmanager
def needing(package: str) -> Iterator[None]:
    """Around the import of a package: where it is not there, the line that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise RequestError(f"Serving a run needs {package}. Install it: pip install 'dualkg[serve]'") from None

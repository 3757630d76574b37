"""What a missing `analysis` extra is answered with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dualkg.errors import RequestError


@contextmanager
def needing(package: str, *, to: str) -> Iterator[None]:
    """Around the import of a package: where it is not there, the line that installs it."""
    try:
        yield
    except ImportError:
        raise RequestError(f"{to} needs {package}. Install it: pip install 'dualkg[analysis]'") from None

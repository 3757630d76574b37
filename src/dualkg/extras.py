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


def check_extra() -> None:
    """Ask for what figures need before anything is trained for one."""
    with needing("matplotlib", to="A figure"):
        import matplotlib.figure  # noqa: F401
    with needing("scikit-learn", to="A figure"):
        import sklearn.manifold  # noqa: F401


@contextmanager
def needing_to_serve(package: str) -> Iterator[None]:
    """Around the import of a package: where it is not there, the line that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise RequestError(f"Serving a run needs {package}. Install it: pip install 'dualkg[serve]'") from None

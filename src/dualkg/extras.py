"""Optional dependencies: a missing one raises an error with the line that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from dualkg.errors import RequestError

EXTRAS = {
    "pyoxigraph": "rdf",
    "optuna": "search",
    "faiss": "index",
    "matplotlib": "analysis",
    "scikit-learn": "analysis",
    "scipy": "analysis",
    "openTSNE": "analysis",
    "fastapi": "serve",
    "uvicorn": "serve",
    "jinja2": "serve",
    "prometheus-client": "serve",
    "rapidfuzz": "serve",
}


@contextmanager
def optional_import(package: str, *, purpose: str) -> Iterator[None]:
    """Wrap the import of an optional package; `purpose` begins the sentence of the error."""
    try:
        yield
    except ImportError:
        line = f"pip install 'dualkg[{EXTRAS[package]}]'"
        raise RequestError(f"{purpose} needs {package}. Install it: {line}") from None


def check_figure_packages() -> None:
    """Raise before a long computation if the packages that draw its figure are missing."""
    with optional_import("matplotlib", purpose="A figure"):
        import matplotlib.figure  # noqa: F401
    with optional_import("scikit-learn", purpose="A figure"):
        import sklearn.manifold  # noqa: F401

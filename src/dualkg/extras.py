"""Optional dependencies: a missing one raises an error with the line that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from dualkg.errors import RequestError

EXTRAS = {"pyoxigraph": "rdf", "optuna": "search", "faiss": "index"}
EXTRAS |= dict.fromkeys(("matplotlib", "scikit-learn", "scipy", "openTSNE"), "analysis")
EXTRAS |= dict.fromkeys(("fastapi", "uvicorn", "jinja2", "prometheus-client", "rapidfuzz"), "serve")
EXTRAS |= dict.fromkeys(("tensorboard", "mlflow", "wandb"), "tracking")


@contextmanager
def optional_import(package: str, *, purpose: str) -> Iterator[None]:
    """Wrap the import of an optional package; `purpose` begins the sentence of the error."""
    try:
        yield
    except ImportError:
        line = f"pip install 'dualkg[{EXTRAS[package]}]'"
        raise RequestError(f"{purpose} needs {package}. Install it: {line}") from None

"""Optional dependencies, whose errors have the line that installs them; and trust in the classes
that files name.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dualkg.errors import MissingExtra, RequestError

EXTRAS = {"pyoxigraph": "rdf", "optuna": "search", "faiss": "index"}
EXTRAS |= dict.fromkeys(("matplotlib", "scikit-learn", "scipy", "openTSNE"), "analysis")
EXTRAS |= dict.fromkeys(("fastapi", "uvicorn", "jinja2", "prometheus-client", "rapidfuzz"), "serve")
EXTRAS |= dict.fromkeys(("tensorboard", "mlflow", "wandb"), "tracking")
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def optional_import(package: str, *, purpose: str) -> Iterator[None]:
    """Wrap the import of an optional package; `purpose` begins the sentence of the error."""
    try:
        yield
    except ImportError:
        raise MissingExtra(package, EXTRAS[package], purpose=purpose) from None


@contextmanager
def trusted_code(trust: bool) -> Iterator[None]:
    """Let files that are read in the block name classes to import; without trust, what was allowed
    before holds.
    """
    before = _trusted.set(trust or _trusted.get())
    try:
        yield
    finally:
        _trusted.reset(before)


def check_trusted(names: Iterable[object], *, source: object) -> None:
    """Refuse `package.module:Class` in a file, unless it is trusted or the program has imported
    that module.
    """
    for name in names:
        if (
            isinstance(name, str)
            and ":" in name
            and not _trusted.get()
            and name.partition(":")[0] not in sys.modules
        ):
            raise RequestError(
                f"{source} names the class {name}, which is not part of dualkg, and importing it "
                "runs its code. If you trust those who wrote both, use trust_code=True."
            )

"""Optional dependencies, and trust in the classes that files name."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dualkg.errors import MissingExtra, RequestError

EXTRAS = {
    "pyoxigraph": "rdf",
    "optuna": "search",
    "faiss": "index",
    **dict.fromkeys(("matplotlib", "scikit-learn", "scipy", "openTSNE"), "analysis"),
    **dict.fromkeys(("fastapi", "uvicorn", "jinja2", "prometheus-client"), "serve"),
    **dict.fromkeys(("tensorboard", "mlflow", "wandb"), "tracking"),
}
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


class UntrustedCode(RequestError):
    """A file names a class of another package, and importing it would run its code."""

    def __init__(self, source: object, name: str) -> None:
        super().__init__(
            f"{source} names the class {name}, which is not part of dualkg, and importing it runs "
            "its code. If you trust those who wrote both, use `trust_code=True`."
        )
        self.source = source
        self.name = name


@contextmanager
def optional_import(package: str, *, purpose: str) -> Iterator[None]:
    """Wrap the import of an optional package; `purpose` begins the sentence of the error."""
    try:
        yield
    except ImportError:
        raise MissingExtra(package, EXTRAS[package], purpose=purpose) from None


@contextmanager
def trusted_code(trust: bool) -> Iterator[None]:
    """Let files that are read in the block name classes to import.

    Without trust, what was allowed before holds.
    """
    token = _trusted.set(trust or _trusted.get())
    try:
        yield
    finally:
        _trusted.reset(token)


def check_trusted(names: Iterable[object], *, source: object) -> None:
    """Refuse `package.module:Class` in a file that is not trusted.

    A module that the program has imported already is allowed.
    """
    if _trusted.get():
        return
    for name in names:
        if not isinstance(name, str) or ":" not in name:
            continue
        module = name.partition(":")[0]
        if module not in sys.modules:
            raise UntrustedCode(source, name)

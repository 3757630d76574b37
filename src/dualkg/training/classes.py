"""Classes by name: registered ones in any case, and a user's own as `package.module:Class`."""

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dualkg.errors import RequestError, UnknownName, close_matches


def import_failed(name: str, reason: str) -> RequestError:
    """The error of a class of the user's own that cannot be imported."""
    return RequestError(f"'{name}' cannot be imported: {reason}.")


def name_of(instance: object, registered: Mapping[str, type]) -> str:
    """The short name of a class that is registered, `package.module:Class` of any other."""
    kind = type(instance)
    for name, candidate in registered.items():
        if candidate is kind:
            return name
    return f"{kind.__module__}:{kind.__qualname__}"


def known_name(name: Any, known: Iterable[str]) -> Any:
    """The known name that differs in case and hyphens alone (`complex`, `1-vs-all`).

    Any other value is returned as it is.
    """
    if not isinstance(name, str):
        return name
    folded = _folded(name)
    return next((candidate for candidate in known if _folded(candidate) == folded), name)


def _folded(name: str) -> str:
    letters = "".join(name.casefold().split()).replace("-", "").replace("_", "")
    return letters.replace("1vs", "onevs")


def find_class(name: str, registered: Mapping[str, type], base: type) -> Any:
    """The class of a short name, or of `package.module:Class`.

    Modules are found on the Python path and in the working folder.
    """
    name = known_name(name, registered)
    if name in registered:
        return registered[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise UnknownName(
            base.__name__.removeprefix("Embedding").lower(),
            name,
            suggestions=close_matches(name, registered),
            known=list(registered),
            advice="Your own class is named package.module:Class.",
        )
    module = _import(module_name, name)
    if not hasattr(module, class_name):
        raise import_failed(name, f"the module {module_name} has no {class_name}")
    kind = getattr(module, class_name)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        actual = "another class" if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise RequestError(
            f"'{name}' should be a subclass of dualkg's {base.__name__}; it is {actual}."
        )
    if inspect.isabstract(kind):
        missing = ", ".join(_abstract_methods(kind))
        raise RequestError(f"'{name}' does not implement {missing}, which a class needs.")
    return kind


def _abstract_methods(kind: type) -> list[str]:
    names = []
    for name in dir(kind):
        if getattr(getattr(kind, name, None), "__isabstractmethod__", False):
            names.append(name)
    return names


def _import(module_name: str, name: str) -> Any:
    working_folder = str(Path.cwd())
    sys.path.insert(0, working_folder)  # a console script does not have it on its path
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise import_failed(name, f"{type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(working_folder)

"""Registries: the classes that recipes, commands and file suffixes name.

A class registers itself where it is defined:

    @MODELS.register
    class ComplEx(DiagonalModel): ...

Other packages add classes by entry points. A package whose pyproject.toml has

    [project.entry-points."dualkg.models"]
    MyModel = "my_package:MyModel"

makes `MyModel` a name that every recipe can use. It is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from dualkg.errors import DualkgError, RequestError

T = TypeVar("T")
C = TypeVar("C")


class Registry(Mapping[str, T]):
    """What has been registered under a name, and what entry points of `group` offer.

    `kind` is the noun of messages, such as "model".
    """

    def __init__(self, kind: str, *, group: str) -> None:
        self.kind = kind
        self.group = group
        self._registered: dict[str, T] = {}

    def register(self, item: C) -> C:
        """Register a class under its own name, as a decorator."""
        name: str = item.__name__  # type: ignore[attr-defined]
        self.add(name, item)  # type: ignore[arg-type]
        return item

    def named(self, name: str) -> Callable[[C], C]:
        """A decorator that registers a class or a function under another name than its own."""

        def register(item: C) -> C:
            self.add(name, item)  # type: ignore[arg-type]
            return item

        return register

    def add(self, name: str, item: T) -> None:
        if self._registered.get(name, item) is not item:
            raise RequestError(
                f"The {self.kind} {name} is registered already, and a name means one class. Choose "
                "another name."
            )
        self._registered[name] = item

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def __getitem__(self, name: str) -> T:
        if name not in self._registered and name in self._plugins:
            try:
                self._registered[name] = self._plugins[name].load()
            except Exception as error:
                raise DualkgError(
                    f"The entry point {name} of the group {self.group} cannot be imported: "
                    f"{type(error).__name__}: {error}. Update or uninstall the package that "
                    "declares it."
                ) from error
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._registered
        yield from (name for name in self._plugins if name not in self._registered)

    def __len__(self) -> int:
        return len({*self._registered, *self._plugins})

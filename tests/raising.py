"""Errors that tests expect: their class and their parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


def check_error(error: BaseException, kind: type[BaseException], /, **parameters: Any) -> None:
    """Compare the class of an error, which is not a subclass, and the parameters that are named."""
    assert type(error) is kind
    assert {name: getattr(error, name) for name in parameters} == parameters


@contextmanager
def refused(kind: type[E], /, **parameters: Any) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of a class with these parameters."""
    with pytest.raises(kind) as caught:
        yield caught
    check_error(caught.value, kind, **parameters)

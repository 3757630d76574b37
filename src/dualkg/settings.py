"""Validated, immutable settings: tables of recipes, losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dualkg.errors import PYTHON, InvalidValue, RequestError, Words, close_settings, one_of


class UnknownSetting(RequestError):
    """Settings have no such key; `suggestions` are similar keys, and `known` those that exist."""

    def __init__(
        self, setting: str, owner: str, *, suggestions: Sequence[str], known: Sequence[str]
    ) -> None:
        super().__init__()
        self.setting = setting
        self.owner = owner
        self.suggestions = list(suggestions)
        self.known = list(known)

    def message(self, words: Words = PYTHON) -> str:
        similar = one_of(self.suggestions)
        listed = f" There are: {', '.join(self.known)}."
        return f"{words.key(self.setting)} is not a setting of {self.owner}.{similar or listed}"


class InvalidSettings(RequestError):
    """Settings that are valid one by one cannot be combined.

    `where` is the table that has them, or empty where several tables are meant.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__()
        self.where = where
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.where}: {self.reason}." if self.where else f"{self.reason}."


class Settings(BaseModel):
    """Immutable settings that refuse unknown keys; a wrong value raises a `RequestError`.

    `table` is the table of a recipe that holds them, and `owner` the name in messages about an
    unknown key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    table: ClassVar[str] = ""
    owner: ClassVar[str] = ""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise validation_error(
                error,
                type(self).model_fields,
                table=self.table,
                owner=self.owner,
                elsewhere=self.keys_elsewhere,
            ) from None

    @classmethod
    def keys_elsewhere(cls, key: str) -> Sequence[str]:
        """Keys of other tables that an unknown key may stand for."""
        return ()


def validation_error(
    error: ValidationError,
    known: Iterable[str],
    *,
    table: str = "",
    owner: str = "",
    elsewhere: Callable[[str], Sequence[str]] | None = None,
) -> RequestError:
    """The first problem of a validation.

    `known` are the keys to choose from, and `elsewhere` finds those of other tables.
    """
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    setting = ".".join([table, *path] if table else path)

    if problem["type"] == "extra_forbidden":
        key = path[-1]
        suggestions = close_settings(key, known)
        if not suggestions and elsewhere:
            suggestions = list(elsewhere(key))
        return UnknownSetting(
            setting, owner or error.title, suggestions=suggestions, known=list(known)
        )
    if problem["type"] == "value_error":
        return InvalidSettings(setting, problem["msg"].removeprefix("Value error, "))
    expected = problem["msg"].removeprefix("Input should be ")
    if problem["type"] == "int_parsing_size":
        # The only message that does not say what the input should be.
        expected = "a valid integer of fewer digits"
    return InvalidValue(setting, expected=expected, found=problem["input"])

"""Validated, immutable settings: tables of recipes, losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dualkg.errors import InvalidValue, RequestError, close_settings, one_of


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
        advice = one_of(suggestions) or f" There are: {', '.join(known)}."
        return RequestError(f"`{setting}` is not a setting of {owner or error.title}.{advice}")
    if problem["type"] == "value_error":
        reason = problem["msg"].removeprefix("Value error, ")
        return RequestError(f"{setting}: {reason}." if setting else f"{reason}.")
    expected = problem["msg"].removeprefix("Input should be ")
    if problem["type"] == "int_parsing_size":
        # The only message that does not say what the input should be.
        expected = "a valid integer of fewer digits"
    return InvalidValue(setting, expected=expected, found=problem["input"])

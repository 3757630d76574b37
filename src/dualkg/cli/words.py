"""How the command line spells the arguments and recipe keys in sentences of the library."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import suppress

# Options of `train` by the keys of a recipe that they set.
SETTINGS = {
    "model.name": "--model",
    "loss.name": "--loss",
    "regularizer.name": "--regularizer",
    "regularizer.weight": "--weight",
    "model.dim": "--dim",
    "training.epochs": "--epochs",
    "training.batch_size": "--batch-size",
    "optimizer.name": "--optimizer",
    "optimizer.learning_rate": "--lr",
    "validation.patience": "--patience",
    "validation.queries": "--validation-queries",
    "training.seed": "--seed",
    "training.engine": "--engine",
}
DATA_SETTINGS = {
    "data.split": "--split",
    "data.labels": "--labels",
    "data.delimiter": "--delimiter",
    "data.max_size": "--max-size",
    "data.columns": "--columns",
    "data.decisions": "--with-decisions",
}
# Options whose names are not those of the keyword arguments in Python.
OPTIONS = {"k": "--top", "callbacks": "--track"}
MARKED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)(?: ?= ?([^`]*))?`")  # as sentences mark options


def as_options(sentence: str) -> str:
    """A sentence of the library, with the arguments and keys that it marks as options."""
    return MARKED.sub(lambda mark: as_option(mark[1], mark[2]), sentence)


def as_option(name: str, value: str | None = None) -> str:
    """An argument or recipe key of Python, with its value, as an option of a command.

    Examples:
        >>> as_option("overwrite", "True")
        '--overwrite'
        >>> as_option("training.epochs", "5")
        '--epochs 5'
        >>> as_option("columns", "(1, 2, 3)")
        '--columns 1,2,3'
        >>> as_option("columns", "[1, 2, 3]")
        '--columns 1,2,3'
    """
    if value and value[0] in "(['\"":
        with suppress(ValueError, SyntaxError):  # a list or a text of Python
            value = _text(ast.literal_eval(value))
    known = SETTINGS.get(name) or DATA_SETTINGS.get(name) or OPTIONS.get(name)
    if "." in name and known is None:
        return name if value is None else f"--set {shlex.quote(f'{name}={value}')}"
    option = known or f"--{name.replace('_', '-')}"
    if value in (None, "True"):
        return option
    if value == "False":
        return f"--no-{option.removeprefix('--')}"
    return f"{option} {shlex.quote(value)}"


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return str(value)

"""How the command line spells options, recipe keys and calls in messages of the library."""

from __future__ import annotations

import ast
import json
import re
import shlex
from contextlib import suppress
from typing import Any

from dualkg.errors import Sentence, Words

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
COMMANDS = {"fit": "train"}  # whose names are not those of the functions
MARKED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)(?: ?= ?([^`]*))?`")  # as sentences mark options


class CommandWords(Words):
    """Options are `--columns 1,2,3`, keys `--epochs 5` or `--set a.b=c`, and calls commands."""

    def marked(self, text: str) -> str:
        return MARKED.sub(lambda mark: as_option(mark[1], mark[2]), text)

    def option(self, name: str, value: object = None) -> str:
        option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if value is None or value is True:
            return option
        if value is False:
            return f"--no-{option.removeprefix('--')}"
        return f"{option} {shlex.quote(_text(value))}"

    def key(self, key: str, value: object = None) -> str:
        option = SETTINGS.get(key) or DATA_SETTINGS.get(key)
        if value is None:
            return option or key
        if option:
            return f"{option} {shlex.quote(_text(value))}"
        return f"--set {shlex.quote(f'{key}={_toml(value)}')}"

    def call(self, name: str, *arguments: object, **options: object) -> str:
        words = ["dualkg", COMMANDS.get(name, name).replace("_", "-")]
        words += [shlex.quote(str(argument)) for argument in arguments]
        words += [self.option(option, value) for option, value in options.items()]
        return " ".join(words)


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
    if value is not None:
        value = re.sub(r"[][()'\"]|(?<=,) ", "", value)
    known = SETTINGS.get(name) or DATA_SETTINGS.get(name) or OPTIONS.get(name)
    if "." in name and known is None:
        return name if value is None else f"--set {shlex.quote(f'{name}={value}')}"
    option = known or f"--{name.replace('_', '-')}"
    if value in (None, "True"):
        return option
    if value == "False":
        return f"--no-{option.removeprefix('--')}"
    with suppress(ValueError, SyntaxError):  # a value in Python
        value = _text(ast.literal_eval(value))
    return f"{option} {shlex.quote(value)}"


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return str(value)


def _toml(value: Any) -> str:
    """A value of --set: text needs no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


COMMAND = CommandWords()


def in_words(text: str | Sentence) -> str:
    """A note of the library for a reader of the command line."""
    return text.in_words(COMMAND) if isinstance(text, Sentence) else COMMAND.marked(text)

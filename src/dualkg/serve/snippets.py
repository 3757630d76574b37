"""A query of a page as text to copy: for curl, for Python, and as a command."""

import shlex
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from dualkg.serve.service import RequestContext

Options = Mapping[str, str | int | float | bool | None]


class Snippet(NamedTuple):
    """A text to copy, and what it is for."""

    title: str
    text: str


class CopiedQuery(NamedTuple):
    """A query in the three ways to send it.

    `path` and `parameters` are those of the API, `options` those of `command`. In `python`, RUN
    stands for the run.
    """

    path: str
    parameters: Options
    command: str
    options: Options
    python: str


def snippets(context: RequestContext, query: CopiedQuery) -> list[Snippet]:
    """The texts for a query; the command and Python read the run by its name."""
    return [
        Snippet("curl", _curl(context, query)),
        Snippet("Python", query.python.replace("RUN", repr(context.run.name), 1)),
        Snippet("command", command(query.command, context.run.name, query.options)),
    ]


def _curl(context: RequestContext, query: CopiedQuery) -> str:
    parameters = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.parameters.items()
        if value is not None
    }
    if not context.is_default_run:
        parameters["run"] = context.run.name
    request = context.request
    address = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}{query.path}"
    if parameters:
        address = f"{address}?{urlencode(parameters)}"
    header = ""
    if context.service.needs_token:
        # The token itself is a secret, and no part of a page.
        header = ' -H "Authorization: Bearer $DUALKG_TOKEN"'
    return f"curl{header} {shell_word(address)}"


def predictor_call(method: str, *arguments: object, **options: object) -> str:
    """Python that loads the run RUN and calls a method of its predictor."""
    return (
        "import dualkg as kg\n\n"
        "predictor = kg.load_run(RUN).predictor()\n"
        f"predictor.{method}({call_arguments(*arguments, **options)})"
    )


def call_arguments(*arguments: object, **options: object) -> str:
    texts = [repr(argument) for argument in arguments]
    texts += [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return ", ".join(texts)


def command(name: str, run: str, options: Options) -> str:
    """A command of dualkg; a value that begins with a hyphen is joined to its option."""
    folder = f"./{run}" if run.startswith("-") else run
    words = ["dualkg", name, shell_word(folder)]
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif str(value).startswith("-"):
            words.append(f"{flag}={shell_word(str(value))}")
        else:
            words += [flag, shell_word(str(value))]
    return " ".join(words)


def shell_word(text: str) -> str:
    """A text as one word of a shell, without line ends and characters that are not seen."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(_shown(letter) for letter in escaped) + "'"


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"

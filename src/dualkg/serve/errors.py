"""Errors of the server: their parameters, and how options and calls are spelled over HTTP.

`replies.py` gives each error its status.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlencode

from dualkg.errors import PYTHON, DualkgError, InvalidValue, RequestError, UnknownName, Words


class HttpWords(Words):
    """Options are parameters of a request, and calls are addresses.

    What only the operator of the server can do is spelled as on the command line.
    """

    operator_options: ClassVar[frozenset[str]] = frozenset(
        {
            "allow_training",
            "device",
            "host",
            "out",
            "overwrite",
            "port",
            "read_only",
            "threads",
            "timeout",
            "token",
            "trust_code",
        }
    )
    # Arguments of functions whose parameters have another name, since a request repeats them.
    parameters: ClassVar[Mapping[str, str]] = {"relations": "relation", "heads": "head"}
    # Commands that are also addresses; the run is that of the request.
    addresses: ClassVar[Mapping[str, str]] = {
        "complete": "/api/complete",
        "explain": "/api/explain",
        "similar": "/api/similar",
    }

    def option(self, name: str, value: object = None) -> str:
        if name in self.operator_options:
            return _command_option(name, value)

        parameter = self.parameters.get(name, name)
        return parameter if value is None else f"{parameter}={_parameter_value(value)}"

    def key(self, key: str, value: object = None) -> str:
        return key if value is None else f"{key} = {value}"

    def call(self, name: str, *arguments: object, **options: object) -> str:
        if name not in self.addresses:
            return _command(name, *arguments, **options)

        parameters = {
            self.parameters.get(option, option): _parameter_value(value)
            for option, value in options.items()
        }
        address = self.addresses[name]
        return f"{address}?{urlencode(parameters)}" if parameters else address


HTTP = HttpWords()


# An absolute path up to the name of its file; addresses of the API are none.
FOLDERS = re.compile(r"(?<![\w./])/(?!api/)(?:[^\s/'\"()]+/)+(?=[^\s/])")


def public_message(error: DualkgError) -> str:
    """The message of an error in the words of a request, without the folders of this machine.

    Names that a request has sent are quoted as they are, since some contain slashes.
    """
    message = error.in_words(HTTP)
    if isinstance(error, UnknownNameError | UnknownRunError | UnknownName | InvalidValue):
        return message
    for value in vars(error).values():
        if isinstance(value, Path) and value.name:
            message = message.replace(str(value), value.name)
    return FOLDERS.sub("", message)


def public_reason(error: DualkgError | OSError) -> str:
    """Why something failed, for somebody who did not ask for a file and cannot see it."""
    if isinstance(error, DualkgError):
        return public_message(error)
    reason = error.strerror or type(error).__name__
    return f"The server could not read or write a file: {reason}."


def _parameter_value(value: object) -> str:
    """A value as a query parameter spells it: `true`, and text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _command(name: str, *arguments: object, **options: object) -> str:
    words = ["dualkg", name]
    words += [shlex.quote(str(argument)) for argument in arguments]
    words += [_command_option(option, value) for option, value in options.items()]
    return " ".join(words)


def _command_option(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if value is False:
        return f"--no-{option}"
    if value is None or value is True:
        return f"--{option}"
    return f"--{option} {shlex.quote(str(value))}"


# -- requests that name something unknown ------------------------------------


class UnknownNameError(RequestError):
    """A part of a triple has an unknown name; `suggestions` are similar ones, best first.

    `problem` is the error of the vocabulary, which words the message.
    """

    def __init__(
        self, problem: RequestError, *, part: str, suggestions: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.problem = problem
        self.part = part
        self.suggestions = list(suggestions)

    def message(self, words: Words = PYTHON) -> str:
        return self.problem.message(words)


class UnknownRunError(RequestError):
    """No run with this name is served."""

    def __init__(self, name: str, *, served: Sequence[str]) -> None:
        super().__init__()
        self.name = name
        self.served = list(served)

    def message(self, words: Words = PYTHON) -> str:
        served = ", ".join(f"'{name}'" for name in self.served)
        return f"No served run is named '{self.name}'. Available: {served}."


# -- requests that cannot be answered ----------------------------------------


class IncompleteQuery(RequestError):
    """Fewer than two parts of a triple were named; `find` is the part to find."""

    def __init__(self, *, find: str, missing: Sequence[str]) -> None:
        super().__init__()
        self.find = find
        self.missing = list(missing)

    def message(self, words: Words = PYTHON) -> str:
        return f"Name the {' and the '.join(self.missing)} to find the {self.find}."


class NothingToCompareWith(RequestError):
    """A comparison was requested, and only one run is served."""

    def message(self, words: Words = PYTHON) -> str:
        both = words.call("serve", "RUN", "RUN")
        return f"A comparison needs two runs, and one is served. Serve both: {both}"


class DecisionsRefused(RequestError):
    """The server was started to be read only."""

    def message(self, words: Words = PYTHON) -> str:
        read_only = words.option("read_only", True)
        return f"This server was started with {read_only} and accepts no decisions."


class UnsavedRun(RequestError):
    """A run without a folder has no place for decisions."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run

    def message(self, words: Words = PYTHON) -> str:
        return f"The run {self.run} has no folder to store decisions in. Save it first."


class ServedFolderGone(DualkgError):
    """The folder of a run was moved, removed or replaced after the server had loaded it."""

    def __init__(self, run: str, folder: Path) -> None:
        super().__init__()
        self.run = run
        self.folder = folder

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"The folder {self.folder} of the run {self.run} was moved, removed or replaced after "
            "the server had loaded it, so decisions are neither read nor saved. Put it back, or "
            "restart the server."
        )


class TrainingRefused(RequestError):
    """The server was not started to train."""

    def message(self, words: Words = PYTHON) -> str:
        return (
            "This server does not train. Start it with "
            f"{words.option('allow_training', True)} to train on files in the browser."
        )


class UnreadableUpload(RequestError):
    """A file that was sent to be trained on cannot be read."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__()
        self.name = name
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.name} cannot be read as triples: {self.reason}."


class UnknownUpload(RequestError):
    """A training names a file that was not sent, or that was removed for newer ones."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def message(self, words: Words = PYTHON) -> str:
        return f"No file {self.file} was sent. Send it again."


class InvalidRunName(RequestError):
    """The name of a new run is taken, or not one for a folder."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"'{self.name}' cannot be the name of the run: it must be new, and consist of letters, "
            "digits, points, hyphens and underscores."
        )


class UnknownTraining(RequestError):
    """No training has this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def message(self, words: Words = PYTHON) -> str:
        return f"No training is named '{self.name}'."


# -- a server that has too much to do ----------------------------------------


class BusyError(DualkgError):
    """The server has more to do than it accepts; the same request may succeed later.

    It is abstract.
    """


class StillInTraining(BusyError):
    """No run is served yet: those of a server are still in training."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)

    def message(self, words: Words = PYTHON) -> str:
        runs = ", ".join(self.names)
        return f"{runs}: still in training. /train shows how far that is."


class QueueFull(BusyError):
    """As many queries as the server accepts are waiting for the model."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__()
        self.num_waiting = num_waiting

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.num_waiting:,} queries are waiting already. Try again in a moment."


class CompletionRunning(BusyError):
    """One completion runs at a time."""

    def message(self, words: Words = PYTHON) -> str:
        return "Another completion is running. Try again when it has finished."


class ServerStopping(BusyError):
    """The server has been told to stop, and begins no more work."""

    def message(self, words: Words = PYTHON) -> str:
        return "The server is stopping."


class TrainingRunning(BusyError):
    """One training runs at a time."""

    def message(self, words: Words = PYTHON) -> str:
        return "Another training is running. Stop it, or try again when it has finished."


class TimeLimitExceeded(BusyError):
    """A request was given up; `subject` is what took too long."""

    def __init__(self, subject: str, *, seconds: float) -> None:
        super().__init__()
        self.subject = subject
        self.seconds = seconds

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.subject} took longer than its limit of {self.seconds:g} seconds."


# -- a server that cannot start ----------------------------------------------


class NoRunsToServe(RequestError):
    """A server was to be started without a run."""

    def message(self, words: Words = PYTHON) -> str:
        return "Name at least one run to serve."


class DuplicateRunName(RequestError):
    """Two runs have the same name, so that requests could not choose between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"Two of the runs are named '{self.name}'. Serve runs from folders with different "
            "names."
        )


class InvalidTimeLimit(RequestError):
    """A time limit of zero or less; `limit` is the name of the limit."""

    def __init__(self, limit: str, *, seconds: float) -> None:
        super().__init__()
        self.limit = limit
        self.seconds = seconds

    def message(self, words: Words = PYTHON) -> str:
        return f"A time limit must be above 0 seconds; got {self.seconds:g}."


class InvalidAddress(RequestError):
    """The address of a request without a port does not begin with a slash."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def message(self, words: Words = PYTHON) -> str:
        return (
            "An address must begin with a slash, such as /entity/France.json; "
            f"got '{self.address}'."
        )


class InvalidToken(RequestError):
    """No header can hold the token. It is a secret, so the message does not quote it."""

    def message(self, words: Words = PYTHON) -> str:
        return (
            "A token must consist of ASCII letters, digits and punctuation, and must not be empty."
        )


class UnprotectedHost(RequestError):
    """Other machines reach the host, and no token is set."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"On {self.host} other machines could reach the server. "
            f"Protect it with {words.option('token')}, or leave out {words.option('host')}."
        )


class UnusableHost(RequestError):
    """The host has no address that can be listened on."""

    def __init__(self, host: str, *, reason: str) -> None:
        super().__init__()
        self.host = host
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"The host {self.host} cannot be used: {self.reason}."


class UnusablePort(RequestError):
    """The port is taken, or this user may not listen on it."""

    def __init__(self, port: int, *, host: str, reason: str) -> None:
        super().__init__()
        self.port = port
        self.host = host
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"Port {self.port} of {self.host} cannot be used: {self.reason}. "
            f"Choose another with {words.option('port')}."
        )

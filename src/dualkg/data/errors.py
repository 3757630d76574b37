"""Errors of data: files, lines and columns that cannot be used, and graphs that are not found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dualkg.errors import (
    PYTHON,
    DataError,
    RequestError,
    Sentence,
    UnknownName,
    Words,
    close_matches,
    one_of,
)

MAX_LISTED = 20  # columns in a message


def literal(text: object) -> str:
    """A text for the template of a `Sentence` with options: its braces are no placeholders."""
    return str(text).replace("{", "{{").replace("}", "}}")


class UnusableData(DataError):
    """A file, a line of it, or an object in memory that cannot be read as triples.

    `source` names the data, and `problem` completes the sentence. `place` is a line or a row, such
    as "line 3", and `advice` is a sentence of its own.
    """

    def __init__(
        self, source: object, problem: str, *, place: str = "", advice: str | Sentence = ""
    ) -> None:
        super().__init__()
        self.source = str(source)
        self.problem = problem
        self.place = place
        self.advice = advice

    def message(self, words: Words = PYTHON) -> str:
        subject = f"{self.source}, {self.place}:" if self.place else self.source
        advice = self.advice.in_words(words) if isinstance(self.advice, Sentence) else self.advice
        return f"{subject} {self.problem}. {advice}".rstrip()


class DamagedData(DataError):
    """A file of triples is damaged, incomplete or of another format; `reason` is its reader's."""

    def __init__(self, source: object, reason: str) -> None:
        super().__init__()
        self.source = str(source)
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.source} is damaged, cut short, or not the kind of file its name says "
            f"({self.reason}). Fetch it or make it again."
        )


class NoTriples(DataError):
    """A file or an object in memory is empty; `remarks` say what was skipped."""

    def __init__(self, source: str, remarks: Sequence[Sentence] = ()) -> None:
        super().__init__()
        self.source = source
        self.remarks = list(remarks)

    def message(self, words: Words = PYTHON) -> str:
        sentences = [f"{self.source} holds no triples; at least one is expected."]
        sentences += [remark.in_words(words) for remark in self.remarks]
        return " ".join(sentences)


class FileMissing(DataError):
    """A file does not exist; `suggestions` are files of its folder with similar names."""

    def __init__(self, path: Path, *, suggestions: Sequence[str] = ()) -> None:
        super().__init__()
        self.path = path
        self.suggestions = list(suggestions)
        self.has_folder = path.parent.is_dir()

    def message(self, words: Words = PYTHON) -> str:
        if not self.has_folder:
            return f"There is no file {self.path}: the folder {self.path.parent} does not exist."
        return f"There is no file {self.path}.{one_of(self.suggestions)}"


class ExpandsTooMuch(DataError):
    """A compressed file expands to more than `limit` bytes, `ratio` times the size of `path`."""

    def __init__(self, source: str, path: Path, *, limit: int, ratio: int) -> None:
        super().__init__()
        self.source = source
        self.path = path
        self.limit = limit
        self.ratio = ratio

    def message(self, words: Words = PYTHON) -> str:
        larger = words.option("max_size", f"{max(1, (8 * self.limit) >> 30)}G")
        return (
            f"{self.source} expands to more than {self.limit / 2**20:,.0f} MiB, "
            f"{self.ratio:,} times the size of {self.path.name}. "
            f"If you expect that, allow more with {larger}."
        )


class UnknownColumn(DataError):
    """A table, a header or a row has no column of a name."""

    def __init__(self, source: str, column: str, known: Sequence[str]) -> None:
        super().__init__()
        self.source = source
        self.column = column
        self.known = list(known)
        self.suggestions = close_matches(column, known)

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.source} has no column named '{self.column}'. "
            f"Its columns are {quoted(self.known)}.{one_of(self.suggestions)}"
        )


class GraphNotFound(RequestError):
    """No graph, file or folder has a name; `suggestions` are similar names, best first."""

    def __init__(self, name: str, *, suggestions: Sequence[str] = ()) -> None:
        super().__init__()
        self.name = name
        self.suggestions = list(suggestions)

    def message(self, words: Words = PYTHON) -> str:
        sentence = f"There is no graph, file or folder '{self.name}'.{one_of(self.suggestions)}"
        return f"{sentence} See: {words.call('datasets')}"


class OtherGraph(DataError):
    """Files have the name of a graph of the catalogue and other contents.

    `found` names the files and completes "`graph` should …; `found`". Files of the catalogue's own
    address can have no other name, so they get no advice.
    """

    def __init__(self, graph: str, *, expected: str, found: str, rename: str = "") -> None:
        super().__init__()
        self.graph = graph
        self.expected = expected
        self.found = found
        self.rename = rename

    def message(self, words: Words = PYTHON) -> str:
        sentence = f"{self.graph} should have {self.expected}; {self.found}."
        if not self.rename:
            return sentence
        return f"{sentence} If it is another graph, give {self.rename} another name."


class DownloadFailed(DataError):
    """A graph of the catalogue could not be downloaded, checked or saved."""

    def __init__(self, graph: str, problem: str, *, advice: str) -> None:
        super().__init__()
        self.graph = graph
        self.problem = problem
        self.advice = advice

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.graph} {self.problem}. {self.advice}"


class DownloadDiscarded(DataError):
    """A download turned out to be another graph, or damaged, and was deleted."""

    def __init__(self, cause: DataError, address: str) -> None:
        super().__init__()
        self.cause = cause
        self.address = address

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.cause.message(words)} The download from {self.address} was deleted."


class CannotSplit(DataError):
    """No triple can go to a split without leaving an entity or a relation unseen in train."""

    def __init__(self, source: str, split: str, *, num_triples: int, alternative: str) -> None:
        super().__init__()
        self.source = source
        self.split = split
        self.num_triples = num_triples
        self.alternative = alternative

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"{self.source} cannot be split: of its {self.num_triples:,} triples none can go to "
            f"{self.split} without leaving an entity or a relation unseen in train (triples of the "
            f"same two entities stay together). Give more triples, or {self.alternative}."
        )


class WrongObject(RequestError):
    """A function was given an object of another type than it takes."""

    def __init__(self, function: str, *, expected: str, found: object, advice: str = "") -> None:
        super().__init__()
        self.function = function
        self.expected = expected
        self.found = type(found)
        self.advice = advice

    def message(self, words: Words = PYTHON) -> str:
        package = self.found.__module__.partition(".")[0]
        prefix = "" if package == "builtins" else f"{package}."
        given = f"an object of type {prefix}{self.found.__qualname__}"
        return f"{self.function} takes {self.expected}; {given} was given. {self.advice}".rstrip()


class NotInVocabulary(UnknownName):
    """A graph has no entity or relation of a name; `number` is how many it has."""

    def __init__(self, kind: str, name: str, *, number: int, suggestions: Sequence[str]) -> None:
        super().__init__(kind, name, suggestions=suggestions)
        self.number = number

    def message(self, words: Words = PYTHON) -> str:
        known = f"among the {self.number:,} known" if self.number else "because none is known"
        return f"No {self.kind} is named '{self.name}' {known}.{one_of(self.suggestions)}"


class UnknownId(RequestError):
    """A graph has no entity or relation of an id; `number` is how many it has."""

    def __init__(self, kind: str, id: int, *, number: int) -> None:
        super().__init__()
        self.kind = kind
        self.id = id
        self.number = number

    def message(self, words: Words = PYTHON) -> str:
        known = f"ids go from 0 to {self.number - 1:,}" if self.number else "none is known"
        return f"There is no {self.kind} {self.id:,}: {known}."


class AmbiguousName(RequestError):
    """A label, or a name without regard to case, that several entities or relations have."""

    def __init__(self, kind: str, name: str, *, matches: Sequence[str], number: int) -> None:
        super().__init__()
        self.kind = kind
        self.name = name
        self.matches = list(matches)
        self.number = number

    def message(self, words: Words = PYTHON) -> str:
        plural = "entities" if self.kind == "entity" else f"{self.kind}s"
        listed = ", ".join(f"'{match}'" for match in self.matches)
        return f"'{self.name}' matches {self.number} {plural}: {listed}. Use one of these names."


def quoted(names: Sequence[str]) -> str:
    """The first names of a list, in quotes."""
    return ", ".join(f"'{name}'" for name in names[:MAX_LISTED])

"""The decision store: new facts that people accepted or rejected, saved with a run as JSON
lines.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from unicodedata import category, normalize

from pydantic import TypeAdapter, ValidationError

from dualkg.errors import PYTHON, DualkgError, RequestError, Words
from dualkg.files import exists, folder_lock, read_bytes, write_text
from dualkg.inference.errors import NameNotForTsv

Verdict = Literal["accepted", "rejected"]
Triple = tuple[str, str, str]
FORMULA = set("=+-@")  # the characters that a formula of a spreadsheet begins with
INVISIBLE = ("C", "Z", "M")  # categories: control and format characters, spaces and marks
COLUMNS = ("head", "relation", "tail", "probability", "decided_at")


class UnreadableDecisions(RequestError):
    """The operating system refuses to read the file of decisions."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__()
        self.path = path
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.path} cannot be read: {self.reason}."


class InvalidDecision(RequestError):
    """A line of the file, counted from 1, is no decision."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__()
        self.path = path
        self.line = line
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return (
            f"Line {self.line:,} of {self.path} is no decision ({self.reason}). Correct or remove "
            "it."
        )


class DecisionsNotStored(DualkgError):
    """The operating system refuses to write the file of decisions."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__()
        self.path = path
        self.reason = reason

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.path} cannot be written: {self.reason}. Nothing was stored."


@dataclass(frozen=True)
class Decision:
    """An accepted or rejected triple, by name, so that other models of the same graph can use it.

    `probability` is that of the time of the decision, by the run whose identity is `made_from`, and
    `decided_at` is ISO 8601 in UTC.
    """

    head: str
    relation: str
    tail: str
    verdict: Verdict
    probability: float | None
    decided_at: str
    made_from: str | None = None

    @property
    def triple(self) -> Triple:
        return self.head, self.relation, self.tail


DECISION = TypeAdapter(Decision)


@dataclass(frozen=True)
class DecisionStore:
    """The decisions of one file, oldest first.

    The file is written atomically, and processes that write it wait for each other. `check` raises
    if the folder is not the right one; it is called before the file is read and, while the folder
    is locked, before it is written.
    """

    path: Path
    check: Callable[[], None] | None = None

    def load(self) -> dict[Triple, Decision]:
        """Return all decisions by triple."""
        if self.check is not None:
            self.check()
        decisions = {}
        for number, line in enumerate(self._lines(), start=1):
            if line.strip():
                decision = self._parse(line, number)
                decisions[decision.triple] = decision
        return decisions

    def _lines(self) -> list[bytes]:
        try:
            if not exists(self.path):
                return []
            return read_bytes(self.path).split(b"\n")
        except OSError as error:
            raise UnreadableDecisions(self.path, str(error.strerror)) from None

    def _parse(self, line: bytes, number: int) -> Decision:
        try:
            return DECISION.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            reason = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise InvalidDecision(self.path, number, reason) from None

    def update(
        self, added: Iterable[Decision], *, removed: Iterable[Triple] = ()
    ) -> dict[Triple, Decision]:
        """Remove and add decisions, replacing earlier ones on the same triple; return all."""
        if self.check is not None:
            self.check()
        try:
            with folder_lock(self.path.parent):
                decisions = self.load()
                for triple in removed:
                    decisions.pop(triple, None)
                for decision in added:
                    # A decision that is changed moves to the end.
                    decisions.pop(decision.triple, None)
                    decisions[decision.triple] = decision
                self._save(decisions.values())
        except OSError as error:
            raise DecisionsNotStored(self.path, str(error.strerror)) from None
        return decisions

    def _save(self, decisions: Iterable[Decision]) -> None:
        lines = [f"{json.dumps(asdict(decision), ensure_ascii=False)}\n" for decision in decisions]
        write_text(self.path, "".join(lines))


def as_tsv(decisions: Iterable[Decision]) -> str:
    """The decisions as TSV with a header, for programs.

    Names are exact, and a name with a tab or a line end is refused.
    """
    lines = []
    for cells in _rows(decisions):
        for column, cell in zip(COLUMNS, cells, strict=True):
            if set(cell) & set("\t\n\r"):
                raise NameNotForTsv(cell, kind=column, alternative="CSV")
        lines.append("\t".join(cells) + "\n")
    return "".join(lines)


def as_csv(decisions: Iterable[Decision]) -> str:
    """The decisions as CSV with a header, for spreadsheets.

    A name that would be a formula begins with an apostrophe. All cells are quoted, since some
    spreadsheets separate them by a semicolon that a name may contain.
    """
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    for cells in _rows(decisions):
        writer.writerow([_without_formula(cell) for cell in cells])
    return out.getvalue()


def _without_formula(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    Some skip characters that are not seen before the first, and read wide or small ones as ASCII.
    """
    seen = next((letter for letter in cell if not category(letter).startswith(INVISIBLE)), "")
    is_formula = normalize("NFKC", seen)[:1] in FORMULA if seen else False
    has_control = category(cell[:1] or "x").startswith("C")
    return f"'{cell}" if is_formula or has_control else cell


def _rows(decisions: Iterable[Decision]) -> Iterator[tuple[str, ...]]:
    """The cells of the header and of each decision."""
    yield COLUMNS
    for decision in decisions:
        probability = "" if decision.probability is None else f"{decision.probability:.6g}"
        yield (*decision.triple, probability, decision.decided_at)

"""The decision store: new facts that people accepted or rejected, saved with a run as JSON
lines.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self
from unicodedata import category, normalize
from urllib.parse import quote

import numpy as np
from pydantic import TypeAdapter, ValidationError

from dualkg.data.graph import Graph
from dualkg.errors import PYTHON, DualkgError, InvalidValue, RequestError, Words
from dualkg.files import exists, folder_lock, read_bytes, write_text
from dualkg.inference.errors import NameNotForTsv

Verdict = Literal["accepted", "rejected"]
Triple = tuple[str, str, str]
FORMULA = set("=+-@")  # the characters that a formula of a spreadsheet begins with
INVISIBLE = ("C", "Z", "M")  # categories: control and format characters, spaces and marks
COLUMNS = (
    "head",
    "relation",
    "tail",
    "probability",
    "decided_at",
    "verdict",
    "decided_by",
    "note",
)
# Formats of files of decisions, by the ending of their names.
IMPORTED = (".csv", ".tsv", ".json", ".jsonl")
IRI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\x00-\x20<>\"{}|^`\\]+")
NAMES_AS_IRIS = "urn:dualkg:"


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
    `decided_at` is ISO 8601 in UTC. `decided_by` and `note` are what a curator gives.
    """

    head: str
    relation: str
    tail: str
    verdict: Verdict
    probability: float | None
    decided_at: str
    made_from: str | None = None
    decided_by: str | None = None
    note: str | None = None

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
        return _read_lines(self._lines(), self.path)

    def _lines(self) -> list[bytes]:
        try:
            if not exists(self.path):
                return []
            return read_bytes(self.path).split(b"\n")
        except OSError as error:
            raise UnreadableDecisions(self.path, str(error.strerror)) from None

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
        write_text(self.path, as_json_lines(decisions))


@dataclass(frozen=True)
class Decided:
    """The decisions on a graph; one on a `symmetric` fact holds in both directions."""

    by_triple: Mapping[Triple, Decision]
    symmetric: frozenset[str] = frozenset()

    @classmethod
    def of(cls, decisions: Mapping[Triple, Decision], graph: Graph) -> Self:
        names = graph.relations.names
        ids = np.flatnonzero(graph.symmetric_relations).tolist()
        return cls(decisions, frozenset(names[id].as_py() for id in ids))

    def __len__(self) -> int:
        return len(self.by_triple)

    def on(self, head: str, relation: str, tail: str) -> Decision | None:
        """The decision on a triple, or on its reverse where that is the same fact."""
        decision = self.by_triple.get((head, relation, tail))
        if decision is None and relation in self.symmetric:
            decision = self.by_triple.get((tail, relation, head))
        return decision

    def verdict(self, head: str, relation: str, tail: str) -> Verdict | None:
        decision = self.on(head, relation, tail)
        return decision.verdict if decision else None

    def directions(self) -> Iterator[tuple[Triple, Decision]]:
        """Each decision with its triple, and again with the reverse where that is the same fact."""
        for triple, decision in self.by_triple.items():
            yield triple, decision
            head, relation, tail = triple
            if relation in self.symmetric and head != tail:
                yield (tail, relation, head), decision

    def without_reverse(self, triple: Triple) -> list[Triple]:
        """The reverse of a triple, if there is a decision on it that one on the triple replaces."""
        head, relation, tail = triple
        reverse = (tail, relation, head)
        is_same_fact = relation in self.symmetric and head != tail
        return [reverse] if is_same_fact and reverse in self.by_triple else []


def _read_lines(lines: Iterable[bytes], path: Path) -> dict[Triple, Decision]:
    decisions = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            decision = DECISION.validate_json(line)
        except ValidationError as error:
            raise InvalidDecision(path, number, _reason(error)) from None
        decisions[decision.triple] = decision
    return decisions


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


# -- files for others --------------------------------------------------------


def as_json_lines(decisions: Iterable[Decision]) -> str:
    lines = [f"{json.dumps(asdict(decision), ensure_ascii=False)}\n" for decision in decisions]
    return "".join(lines)


def as_ntriples(triples: Iterable[Triple]) -> str:
    """Triples as N-Triples, which have no room for a verdict.

    A name that is no IRI is written as one below `urn:dualkg:`, percent-encoded.
    """
    lines = []
    for triple in triples:
        head, relation, tail = (_iri(name) for name in triple)
        lines.append(f"<{head}> <{relation}> <{tail}> .\n")
    return "".join(lines)


def _iri(name: str) -> str:
    return name if IRI.fullmatch(name) else f"{NAMES_AS_IRIS}{quote(name, safe='')}"


def parse_decisions(text: str, name: str, *, verdict: Verdict | None = None) -> list[Decision]:
    """The decisions of a file that was exported, given its text and its name.

    Columns that are missing are filled in; `verdict` is for files without one.
    """
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in IMPORTED:
        raise InvalidValue("file", expected=f"one of {', '.join(IMPORTED)}", found=name)
    text = text.removeprefix("\ufeff")
    if suffix == ".jsonl":
        rows = _parse_json(f"[{','.join(line for line in text.splitlines() if line)}]", path)
    elif suffix == ".json":
        content = _parse_json(text, path)
        rows = content.get("decisions") if isinstance(content, dict) else content
    else:
        rows = _parse_table(text, is_csv=suffix == ".csv")
    if not isinstance(rows, list):
        raise InvalidDecision(path, 1, "there is no list of decisions")

    now = datetime.now(UTC).isoformat(timespec="seconds")
    defaults = {"probability": None, "decided_at": now, "verdict": verdict}
    decisions = []
    # The first line of a table has the names of its columns.
    for number, row in enumerate(rows, start=2 if suffix in (".csv", ".tsv") else 1):
        if not isinstance(row, dict):
            raise InvalidDecision(path, number, "it has no head, relation, tail and verdict")
        given = {key: row[key] for key in row if row[key] not in ("", None)}
        try:
            decisions.append(DECISION.validate_python({**defaults, **given}))
        except ValidationError as error:
            raise InvalidDecision(path, number, _reason(error)) from None
    return decisions


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidDecision(path, getattr(error, "lineno", 1), "it is not JSON") from None


def _parse_table(text: str, *, is_csv: bool) -> list[dict[str, str]]:
    """The rows of a table by column; the cells of a CSV file lose the guard of `as_csv`."""
    if is_csv:
        lines = list(csv.reader(io.StringIO(text, newline="")))
        lines = [[_unguarded(cell) for cell in line] for line in lines if line]
    else:
        lines = [line.rstrip("\r").split("\t") for line in text.split("\n") if line.strip()]
    if not lines:
        return []
    columns = [column.strip().lower() for column in lines[0]]
    return [dict(zip(columns, line, strict=False)) for line in lines[1:]]


def _unguarded(cell: str) -> str:
    rest = cell[1:]
    return rest if cell.startswith("'") and without_formula(rest) == cell else cell


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
        writer.writerow([without_formula(cell) for cell in cells])
    return out.getvalue()


def without_formula(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    Some skip characters that are not seen before the first, and read wide or small ones as ASCII.
    """
    seen = next((letter for letter in cell if not category(letter).startswith(INVISIBLE)), "")
    is_formula = normalize("NFKC", seen)[:1] in FORMULA if seen else False
    has_control = category(cell[:1] or "x").startswith("C")
    # A name that looks guarded gets a guard of its own, so that it is read back as it is.
    is_ambiguous = cell.startswith("'") and without_formula(cell[1:]) == cell
    return f"'{cell}" if is_formula or has_control or is_ambiguous else cell


def _rows(decisions: Iterable[Decision]) -> Iterator[tuple[str, ...]]:
    """The cells of the header and of each decision."""
    yield COLUMNS
    for decision in decisions:
        probability = "" if decision.probability is None else f"{decision.probability:.6g}"
        yield (
            *decision.triple,
            probability,
            decision.decided_at,
            decision.verdict,
            decision.decided_by or "",
            decision.note or "",
        )

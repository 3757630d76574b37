"""The decision store: new facts that people accepted or rejected, saved with a run as JSON
lines.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from dualkg.errors import DualkgError, RequestError
from dualkg.files import folder_lock, write_text

Verdict = Literal["accepted", "rejected"]
Triple = tuple[str, str, str]
FORMULA = set("=+-@＝＋－＠")  # what a formula of a spreadsheet begins with
COLUMNS = ("head", "relation", "tail", "probability", "decided_at")


@dataclass(frozen=True)
class Decision:
    """An accepted or rejected triple; by name, so that it is valid for another model of the same
    graph.
    """

    head: str
    relation: str
    tail: str
    verdict: Verdict
    probability: float | None  # at the time of the decision
    decided_at: str  # ISO 8601 in UTC

    @property
    def triple(self) -> Triple:
        return self.head, self.relation, self.tail


DECISION = TypeAdapter(Decision)


@dataclass(frozen=True)
class DecisionStore:
    """The decisions of one file, oldest first; processes that write it wait for each other, and
    write it atomically.
    """

    path: Path

    def load(self) -> dict[Triple, Decision]:
        """Return all decisions by triple."""
        try:
            lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {error.strerror}.") from None
        decisions = {}
        for number, line in enumerate(lines, 1):
            try:
                one = DECISION.validate_json(line) if line.strip() else None
            except ValidationError as error:
                first = error.errors()[0]
                reason = ": ".join([*map(str, first["loc"]), first["msg"]])
                raise RequestError(
                    f"Line {number:,} of {self.path} is no decision ({reason}). Correct or remove "
                    "it."
                ) from None
            if one:
                decisions[one.triple] = one
        return decisions

    def update(
        self, added: Iterable[Decision], *, removed: Iterable[Triple] = ()
    ) -> dict[Triple, Decision]:
        """Remove and add decisions, replacing earlier ones on the same triple; return all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.path.parent):
            decisions = self.load()
            for triple in removed:
                decisions.pop(triple, None)
            for one in added:
                decisions.pop(one.triple, None)
                decisions[one.triple] = one
            lines = (
                f"{json.dumps(asdict(one), ensure_ascii=False)}\n" for one in decisions.values()
            )
            try:
                write_text(self.path, "".join(lines))
            except OSError as error:
                raise DualkgError(
                    f"{self.path} cannot be written: {error.strerror}. Nothing was stored."
                ) from None
        return decisions


def as_tsv(decisions: Iterable[Decision]) -> str:
    """The decisions as TSV with a header, for programs: names are exact, and one with a tab or line
    end is refused.
    """
    lines = []
    for cells in _cells(decisions):
        if bad := next(
            (cell for cell in cells if any(character in cell for character in "\t\n\r")), None
        ):
            raise RequestError(
                f"The name {bad!r} has a tab or a line end, which TSV cannot hold. Use /facts.csv."
            )
        lines.append("\t".join(cells) + "\n")
    return "".join(lines)


def as_csv(decisions: Iterable[Decision]) -> str:
    """The decisions as CSV with a header, for spreadsheets: a name that would be a formula begins
    with an apostrophe.

    All cells are quoted, since some spreadsheets separate them by a semicolon that a name may
    contain.
    """
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    for cells in _cells(decisions):
        writer.writerow([f"'{cell}" if cell.strip()[:1] in FORMULA else cell for cell in cells])
    return out.getvalue()


def _cells(decisions: Iterable[Decision]) -> Iterator[tuple[str, ...]]:
    yield COLUMNS
    for one in decisions:
        yield (
            *one.triple,
            "" if one.probability is None else f"{one.probability:.6g}",
            one.decided_at,
        )

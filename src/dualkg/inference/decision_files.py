"""Files of decisions for other programs: CSV, TSV, JSON and N-Triples."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from dualkg.delimited import csv_text, tsv_line, with_formula, without_formula
from dualkg.errors import InvalidValue
from dualkg.inference.decisions import DECISION, Decision, Triple, Verdict, invalid_decision

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
        raise invalid_decision(path, 1, "there is no list of decisions")

    now = datetime.now(UTC).isoformat(timespec="seconds")
    defaults = {"probability": None, "decided_at": now, "verdict": verdict}
    decisions = []
    # The first line of a table has the names of its columns.
    for number, row in enumerate(rows, start=2 if suffix in (".csv", ".tsv") else 1):
        if not isinstance(row, dict):
            raise invalid_decision(path, number, "it has no head, relation, tail and verdict")
        given = {key: row[key] for key in row if row[key] not in ("", None)}
        try:
            decisions.append(DECISION.validate_python({**defaults, **given}))
        except ValidationError as error:
            raise invalid_decision(path, number, error) from None
    return decisions


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_decision(path, getattr(error, "lineno", 1), "it is not JSON") from None


def _parse_table(text: str, *, is_csv: bool) -> list[dict[str, str]]:
    """The rows of a table by column; the cells of a CSV file lose the apostrophes of `as_csv`."""
    if is_csv:
        lines = list(csv.reader(io.StringIO(text, newline="")))
        lines = [[with_formula(cell) for cell in line] for line in lines if line]
    else:
        lines = [line.rstrip("\r").split("\t") for line in text.split("\n") if line.strip()]
    if not lines:
        return []
    columns = [column.strip().lower() for column in lines[0]]
    return [dict(zip(columns, line, strict=False)) for line in lines[1:]]


def as_tsv(decisions: Iterable[Decision]) -> str:
    """The decisions as TSV with a header, for programs, with exact names."""
    return "".join(f"{tsv_line(cells, instead='CSV')}\n" for cells in _rows(decisions))


def as_csv(decisions: Iterable[Decision]) -> str:
    """The decisions as CSV with a header, for spreadsheets; no name is a formula."""
    return csv_text([without_formula(cell) for cell in cells] for cells in _rows(decisions))


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

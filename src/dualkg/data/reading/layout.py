"""How the lines of one text file are laid out: separator, columns, header, first line of data."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from dualkg.data.reading.columns import ROLES, Columns, Indices, locate, recognise
from dualkg.data.reading.sources import Source
from dualkg.errors import DataError

FIRST_BYTES = 1 << 20
SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons"}
# No text holds this half of a character, so a cell that ends with it was open at the end of the file.
END = "\ud800"
NEVER_CLOSED = "a quote is opened and not closed. Close it, or double each quote that belongs to a name."


@dataclass(frozen=True)
class Layout:
    """What every line of data must be, and where the first of them starts."""

    separator: str
    quoted: bool
    num_columns: int
    indices: Indices
    roles: tuple[str, ...] = ROLES
    header: bool = False
    start: int = 0
    first_line: int = 1


@dataclass(frozen=True)
class _FirstRow:
    cells: tuple[str, ...]
    start: int
    end: int
    line: int
    next_line: int


def triple_layout(source: Source, columns: Columns | None) -> Layout | None:
    """The layout of a file of triples, or None where the file holds no line at all."""
    separator, first = _opening(source)
    if first is None:
        return None
    recognised = recognise(first.cells)
    if columns is None:
        indices = recognised or (0, 1, 2)
        num_columns = len(first.cells) if recognised else len(ROLES)
    else:
        indices = locate(columns, first.cells, source.name)
        num_columns = len(first.cells)
    header = recognised is not None or any(isinstance(column, str) for column in columns or ())
    start, line = (first.end, first.next_line) if header else (first.start, first.line)
    return Layout(separator, source.suffix == ".csv", num_columns, indices, ROLES, header, start, line)


def label_layout(source: Source) -> Layout | None:
    """The layout of a file of labels: a name and what people call it."""
    separator, first = _opening(source)
    if first is None:
        return None
    quoted = source.suffix == ".csv"
    return Layout(separator, quoted, 2, (0, 1), ("name", "label"), False, first.start, first.line)


def rows(text: io.TextIOBase, separator: str, quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the number of its first line counted from 1.

    A row without cells is one whose quotes cannot be followed, and the last.
    """
    if not quoted:
        for line, content in enumerate(text, 1):
            if cells := content.rstrip("\r\n"):
                yield line, cells.split(separator)
        return
    reader = csv.reader(chain(text, [END]), delimiter=separator)
    before = 0
    try:
        for row in reader:
            if row and row[-1].endswith(END):
                if reader.line_num > before + 1:
                    yield before + 1, []
                return
            if row:
                yield before + 1, row
            before = reader.line_num
    except csv.Error:
        yield before + 1, []


def _opening(source: Source) -> tuple[str, _FirstRow | None]:
    """The separator of a file, and its first row."""
    with source.open() as stream:
        content = stream.read(FIRST_BYTES)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{source.name} should be UTF-8, and it is written in UTF-16. Save it as UTF-8.")
    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    text = content[mark:].decode("utf-8", "surrogateescape")
    if source.suffix != ".csv":
        return "\t", _first_row(text, mark, "\t", quoted=False)
    found = {separator: _first_row(text, mark, separator, quoted=True) for separator in (",", ";")}
    line = text.lstrip("\r\n").partition("\n")[0]
    # A first row without cells is one whose quote is never closed; its first line must do.
    separator, first = max(found.items(), key=lambda item: (item[1] and len(item[1].cells)) or line.count(item[0]) + 1)
    if first is not None and not first.cells:
        raise DataError(f"{source.name}, line {first.line:,}: {NEVER_CLOSED}")
    return separator, first


def _first_row(text: str, mark: int, separator: str, *, quoted: bool) -> _FirstRow | None:
    lines = io.StringIO(text, newline="")
    found = next(rows(lines, separator, quoted), None)
    if found is None:
        return None
    line, cells = found
    end = lines.tell()
    # Only line ends can stand before the first row.
    start = len(text) - len(text.lstrip("\r\n"))
    consumed = len(_bytes(text[:end]))
    next_line = 1 + sum(1 for _ in io.StringIO(text[:end], newline=""))
    readable = tuple(_bytes(cell).decode("utf-8", "replace") for cell in cells)
    return _FirstRow(readable, mark + start, mark + consumed, line, next_line)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

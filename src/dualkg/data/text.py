"""How the lines of one text file are laid out: separator, columns, header, first line of data."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.csv

from dualkg.data.archives import Source
from dualkg.data.columns import NAMES, ROLES, Columns, Indices, Reader, empty_among, locate, recognise
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


def first_bad_line(source: Source, layout: Layout) -> str | None:
    """A sentence about the first line that is not as the layout says, or None where all are."""
    with source.open() as stream:
        stream.read(layout.start)
        with io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="") as text:
            for line, cells in rows(text, layout.separator, layout.quoted):
                if problem := _problem(cells, layout):
                    return f"{source.name}, line {line + layout.first_line - 1:,}: {problem}"
    return None


def _problem(cells: Sequence[str], layout: Layout) -> str | None:
    if not cells:
        return NEVER_CLOSED
    if len(cells) != layout.num_columns:
        return _wrong_number(cells, layout)
    for role, index in zip(layout.roles, layout.indices, strict=True):
        cell = cells[index]
        if not cell and role != "label":
            return f"the {role} is empty. Give it a name, or remove the line."
        if not _is_utf8(cell):
            return f"the {role} is not valid UTF-8 ({_shown(cell)}). Save the file as UTF-8."
    return None


def _wrong_number(cells: Sequence[str], layout: Layout) -> str:
    listed = ", ".join(_shown(cell) for cell in cells[:6]) + (", …" if len(cells) > 6 else "")
    return (
        f"expected {layout.num_columns} columns separated by {SEPARATORS[layout.separator]}, "
        f"found {len(cells)}: {listed}. {_advice(cells, layout)}"
    )


def _advice(cells: Sequence[str], layout: Layout) -> str:
    joined = layout.separator.join(cells)
    if not joined.strip():
        return "Remove the line."
    if len(cells) > layout.num_columns and layout.roles[0] == "head" and not layout.header:
        return "Correct the line, or choose three columns with columns=(1, 2, 3)."
    if len(cells) == 1 and layout.quoted and "\t" in joined:
        return "If tabs separate the columns, give the file a name that ends in .tsv."
    if len(cells) == 1 and not layout.quoted and ("," in joined or ";" in joined):
        return "If commas separate the columns, give the file a name that ends in .csv."
    if len(cells) == 1 and " " in joined:
        return f"If spaces separate the columns, replace them by {SEPARATORS[layout.separator]}."
    return "Correct the line, or remove it."


def _is_utf8(cell: str) -> bool:
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(cell: str) -> str:
    """A cell in quotes, short, with the bytes that are no text as `\\xff`."""
    text = cell.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return f"'{visible[:40]}{'…' if len(visible) > 40 else ''}'"


# Small blocks keep the hash table of each block's names inside the processor's cache.
BLOCK_SIZE = 4 << 20


class TextReader(Reader):
    """Lines of tab-separated columns without any quoting; in a .csv file, of quoted columns."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        layout = triple_layout(self.source, self.columns)
        if layout is None:
            return
        self.header = layout.header and self.columns is None
        yield from _read(self.source, layout)


def read_labels(source: Source) -> dict[str, str]:
    """What people call each name, from a file of two columns; the first label of a name counts."""
    layout = label_layout(source)
    labels: dict[str, str] = {}
    if layout is None:
        return labels
    for block in _read(source, layout):
        names, found = (column.to_pylist() for column in block.columns)
        for name, label in zip(names, found, strict=True):
            if label:
                labels.setdefault(name, label)
    return labels


def _read(source: Source, layout: Layout) -> Iterator[pa.RecordBatch]:
    with source.open() as stream:
        stream.read(layout.start)
        if not stream.peek(1):
            return
        quotes = _Quotes(stream)
        last: list[str] = []
        try:
            with _arrow_reader(quotes if layout.quoted else stream, layout) as reader:
                for block in reader:
                    if any(_holds_empty(block, role) for role in layout.roles if role != "label"):
                        raise _bad(source, layout, "a name is empty")
                    if layout.quoted and block.num_rows:
                        last = [column[-1].as_py() for column in block.columns]
                    yield block
        except pa.ArrowInvalid as error:
            raise _bad(source, layout, str(error)) from error
        # To Arrow a quote that is never closed is one long name: all lines below it would be lost in silence.
        doubtful = quotes.odd or any("\n" in name or "\r" in name for name in last)
        if doubtful and (sentence := first_bad_line(source, layout)):
            raise DataError(sentence)


class _Quotes(io.RawIOBase):
    """A stream that notices whether its quotes are in pairs."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self.odd = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(size)
        self.odd ^= content.count(b'"') % 2 == 1
        return content


def _arrow_reader(stream: object, layout: Layout) -> pa.csv.CSVStreamingReader:
    names = [f"column {number}" for number in range(layout.num_columns)]
    for role, index in zip(layout.roles, layout.indices, strict=True):
        names[index] = role
    return pa.csv.open_csv(
        stream,
        pa.csv.ReadOptions(block_size=BLOCK_SIZE, column_names=names),
        pa.csv.ParseOptions(
            delimiter=layout.separator,
            quote_char='"' if layout.quoted else False,
            escape_char=False,
            newlines_in_values=layout.quoted,
        ),
        pa.csv.ConvertOptions(column_types=dict.fromkeys(layout.roles, NAMES), include_columns=list(layout.roles)),
    )


def _holds_empty(block: pa.RecordBatch, role: str) -> bool:
    return bool(empty_among(block.column(role).dictionary).true_count)


def _bad(source: Source, layout: Layout, noticed: str) -> DataError:
    sentence = first_bad_line(source, layout)
    if sentence is None and "straddl" in noticed:
        sentence = (
            f"{source.name} has a line longer than {BLOCK_SIZE >> 20} MiB, too long for three names. "
            "Look for line ends that are missing or a quote that is never closed."
        )
    return DataError(sentence or f"{source.name} cannot be read as lines of text: {noticed}.")

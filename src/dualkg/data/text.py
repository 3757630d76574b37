"""The reader of tab- and comma-separated text: its layout, its blocks of triples, and errors that name the line."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv

from dualkg.data.archives import Source
from dualkg.data.readers import NAMES, ROLES, Indices, Reader, find_columns, is_empty, recognize_header
from dualkg.errors import DataError

FIRST_BYTES = 1 << 20
BLOCK_SIZE = 4 << 20  # small enough that the hash table of a block's names stays in the processor's cache
SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons"}
# This surrogate occurs in no text, so a cell that ends with it was open at the end of the file.
END = "\ud800"
UNCLOSED_QUOTE = "a quote is opened and not closed. Close it, or double each quote that belongs to a name."


class TextReader(Reader):
    """Lines of tab-separated columns without quoting; in a .csv file, of quoted columns."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        columns, (separator, first) = self.columns, _first_row_of(self.source)
        if first is None:
            return
        named = recognize_header(first.cells)
        num_columns = len(first.cells) if named or columns is not None else len(ROLES)
        indices = named or (0, 1, 2) if columns is None else find_columns(columns, first.cells, self.source.name)
        header = named is not None or any(isinstance(column, str) for column in columns or ())
        if header and columns is None:  # a first line such as `s r t` could also be a triple
            self.remarks.append(f"The first line of {self.source.name} was read as a header.")
        start, line = (first.end, first.next_line) if header else (first.start, first.line)
        yield from _blocks(self.source, Layout(separator, num_columns, indices, ROLES, header, start, line))


def read_labels(source: Source) -> dict[str, str]:
    """Labels by name, from a file of two columns; the first label of a name counts."""
    separator, first = _first_row_of(source)
    if first is None:
        return {}
    layout = Layout(separator, 2, (0, 1), ("name", "label"), False, first.start, first.line)
    labels: dict[str, str] = {}
    for block in _blocks(source, layout):
        for name, label in zip(*(column.to_pylist() for column in block.columns), strict=True):
            if label:
                labels.setdefault(name, label)
    return labels


# -- layout -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The columns that every line must have, and where the first line of data starts."""

    separator: str
    num_columns: int
    indices: Indices
    roles: tuple[str, ...]
    header: bool
    start: int
    first_line: int

    @property
    def quoted(self) -> bool:
        return self.separator != "\t"


class _FirstRow(NamedTuple):
    cells: tuple[str, ...]
    start: int
    end: int
    line: int
    next_line: int


def _first_row_of(source: Source) -> tuple[str, _FirstRow | None]:
    """The separator of a file, and its first row."""
    with source.open() as stream:
        content = stream.read(FIRST_BYTES)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{source.name} should be UTF-8, and it is written in UTF-16. Save it as UTF-8.")
    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    text = content[mark:].decode("utf-8", "surrogateescape")
    if source.suffix != ".csv":
        return "\t", _first_row(text, mark, "\t")
    found = {separator: _first_row(text, mark, separator) for separator in (",", ";")}
    line = text.lstrip("\r\n").partition("\n")[0]
    # A first row without cells has an unclosed quote; then the separators of its first line are counted.
    separator, first = max(found.items(), key=lambda item: (item[1] and len(item[1].cells)) or line.count(item[0]) + 1)
    if first is not None and not first.cells:
        raise DataError(f"{source.name}, line {first.line:,}: {UNCLOSED_QUOTE}")
    return separator, first


def _first_row(text: str, mark: int, separator: str) -> _FirstRow | None:
    lines = io.StringIO(text, newline="")
    found = next(_rows(lines, separator), None)
    if found is None:
        return None
    line, cells = found
    end = lines.tell()
    start = len(text) - len(text.lstrip("\r\n"))  # only line ends can precede the first row
    next_line = 1 + sum(1 for _ in io.StringIO(text[:end], newline=""))
    readable = tuple(_bytes(cell).decode("utf-8", "replace") for cell in cells)
    return _FirstRow(readable, mark + start, mark + len(_bytes(text[:end])), line, next_line)


def _rows(text: io.TextIOBase, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the number of its first line counted from 1.

    A row with an unclosed quote has no cells, and is the last.
    """
    if separator == "\t":
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


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# -- blocks -------------------------------------------------------------------------------------------------


def _blocks(source: Source, layout: Layout) -> Iterator[pa.RecordBatch]:
    with source.open() as stream:
        stream.read(layout.start)
        if not stream.peek(1):
            return
        quotes = _QuoteCounter(stream)
        last: list[str] = []
        try:
            with _arrow_reader(quotes if layout.quoted else stream, layout) as reader:
                for block in reader:
                    required = [role for role in layout.roles if role != "label"]
                    if any(is_empty(block.column(role).dictionary).true_count for role in required):
                        raise _error(source, layout, "a name is empty")
                    if layout.quoted and block.num_rows:
                        last = [column[-1].as_py() for column in block.columns]
                    yield block
        except pa.ArrowInvalid as error:
            raise _error(source, layout, str(error)) from error
        # Arrow reads an unclosed quote as one long name, and would silently lose all lines below it.
        suspicious = quotes.odd or any("\n" in name or "\r" in name for name in last)
        if suspicious and (sentence := first_bad_line(source, layout)):
            raise DataError(sentence)


class _QuoteCounter(io.RawIOBase):
    """A stream that counts whether its quotes are odd in number."""

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


# -- errors -------------------------------------------------------------------------------------------------


def _error(source: Source, layout: Layout, detail: str) -> DataError:
    sentence = first_bad_line(source, layout)
    if sentence is None and "straddl" in detail:
        sentence = (
            f"{source.name} has a line longer than {BLOCK_SIZE >> 20} MiB, too long for three names. "
            "Look for line ends that are missing or a quote that is never closed."
        )
    return DataError(sentence or f"{source.name} cannot be read as lines of text: {detail}.")


def first_bad_line(source: Source, layout: Layout) -> str | None:
    """A sentence about the first line that does not match the layout, or None."""
    with source.open() as stream:
        stream.read(layout.start)
        with io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="") as text:
            for line, cells in _rows(text, layout.separator):
                if problem := _problem(cells, layout):
                    return f"{source.name}, line {line + layout.first_line - 1:,}: {problem}"
    return None


def _problem(cells: Sequence[str], layout: Layout) -> str | None:
    if not cells:
        return UNCLOSED_QUOTE
    if len(cells) != layout.num_columns:
        listed = ", ".join(_quote(cell) for cell in cells[:6]) + (", …" if len(cells) > 6 else "")
        return (
            f"expected {layout.num_columns} columns separated by {SEPARATORS[layout.separator]}, "
            f"found {len(cells)}: {listed}. {_advice(cells, layout)}"
        )
    for role, index in zip(layout.roles, layout.indices, strict=True):
        cell = cells[index]
        if not cell and role != "label":
            return f"the {role} is empty. Give it a name, or remove the line."
        if any("\ud800" <= letter <= "\udfff" for letter in cell):
            return f"the {role} is not valid UTF-8 ({_quote(cell)}). Save the file as UTF-8."
    return None


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


def _quote(cell: str) -> str:
    """A cell in quotes, at most 40 characters, with invalid bytes as `\\xff`."""
    text = _bytes(cell).decode("utf-8", "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return f"'{visible[:40]}{'…' if len(visible) > 40 else ''}'"

"""Readers of text in columns and of OpenKE's files: layout, blocks of triples, and errors that name
the line.
"""

import codecs
import csv
import io
import re
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv

from dualkg.data.archives import Source
from dualkg.data.readers import (
    ROLES,
    Columns,
    Indices,
    Reader,
    find_columns,
    is_empty,
    recognize_header,
)
from dualkg.errors import DataError, RequestError

FIRST_BYTES = 1 << 20
BLOCK_SIZE = (
    4 << 20
)  # small enough that the hash table of a block's names stays in the processor's cache
SEPARATORS = {"\t": "tabs", " ": "spaces", ",": "commas", ";": "semicolons", "|": "vertical bars"}
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " ", "\\t": "\t"}
SNIFFED = 1 << 16  # bytes of a file that must be separated by spaces
# This surrogate occurs in no text, so a cell that ends with it was open at the end of the file.
END = "\ud800"
UNCLOSED_QUOTE = (
    "a quote is opened and not closed. Close it, or double each quote that belongs to a name."
)


class TextReader(Reader):
    """Lines of columns: separated by tabs or spaces, without quoting; in a .csv file, by commas,
    with quotes.
    """

    def __init__(
        self, source: Source, columns: Columns | None = None, delimiter: str | None = None
    ) -> None:
        super().__init__(source, columns)
        self.delimiter = None if delimiter is None else parse_delimiter(delimiter)

    def blocks(self) -> Generator[pa.RecordBatch]:
        columns, (separator, first) = (
            self.columns,
            _first_row(self.data, self.delimiter, sniff=True),
        )
        if first is None:
            return
        if separator == " " and self.delimiter is None:
            self.remarks.append(f"The columns of {self.name} are separated by spaces.")
        named = recognize_header(first.cells)
        num_columns = len(first.cells) if named or columns is not None else len(ROLES)
        indices = (
            named or (0, 1, 2) if columns is None else find_columns(columns, first.cells, self.name)
        )
        header = named is not None or any(isinstance(column, str) for column in columns or ())
        if header and columns is None:  # a first line such as `s r t` could also be a triple
            self.remarks.append(f"The first line of {self.name} was read as a header.")
        elif (
            not header
            and len(first.cells) == num_columns
            and (tuple(columns or ()) != (1, 2, 3) or num_columns > 3)
        ):
            self.first_line = tuple(first.cells[index].strip() for index in indices)
        layout = Layout(separator, num_columns, indices, ROLES, first.num_lines if header else 0)
        yield from _blocks(self.data, layout, self)


def parse_delimiter(delimiter: str) -> str:
    """One character, or its name."""
    found = DELIMITERS.get(delimiter, delimiter)
    if len(found) != 1 or not found.isascii() or found.isalnum() or found in '"\r\n':
        raise RequestError(
            "A delimiter is one character such as ',' or '|', or one of tab, space, comma, "
            f"semicolon and pipe; '{delimiter}' was given."
        )
    return found


class OpenKeReader(Reader):
    """`train2id.txt`: the number of triples, then ids of head, tail and relation; names come from
    other files.
    """

    def __init__(
        self, source: Source, columns: Columns | None, names: Mapping[str, Mapping[str, str]]
    ) -> None:
        super().__init__(source, columns)
        self.names_of = names

    def blocks(self) -> Generator[pa.RecordBatch]:
        if self.columns is not None:
            raise RequestError(
                f"{self.name} is a file of OpenKE, whose columns are known. Leave columns out."
            )
        _, first = _first_row(self.data, " ")
        if first is None or len(first.cells) != 1 or not first.cells[0].isdecimal():
            found = f"'{' '.join(first.cells)}'" if first else "nothing"
            raise DataError(
                f"{self.name}, line 1: expected the number of triples, as in files of OpenKE, "
                f"found {found}."
            )
        if not self.names_of:
            self.remarks.append(
                f"{self.name} is read without entity2id.txt and relation2id.txt: its ids are the "
                "names."
            )
        num_triples = 0
        for block in _blocks(self.data, Layout(" ", 3, (0, 2, 1), ROLES, first.num_lines), self):
            num_triples += block.num_rows
            yield pa.RecordBatch.from_arrays(
                [self._named(role, block.column(role)) for role in ROLES], names=ROLES
            )
        if num_triples != int(first.cells[0]):
            raise DataError(
                f"{self.name} should have {int(first.cells[0]):,} triples, by its first line, and "
                f"it has {num_triples:,}. Fetch it or make it again."
            )

    def _named(self, role: str, column: pa.DictionaryArray) -> pa.DictionaryArray:
        file = "relation2id" if role == "relation" else "entity2id"
        if (names := self.names_of.get(file)) is None:
            return column
        ids = column.dictionary.to_pylist()
        if unknown := [id for id in ids if id not in names]:
            raise DataError(
                f"{self.name}: the {role} {unknown[0]} is not one of the {len(names):,} ids of "
                f"{file}.txt."
            )
        return pa.DictionaryArray.from_arrays(
            column.indices, pa.array([names[id] for id in ids], pa.string())
        )


def read_openke_names(source: Source) -> dict[str, str]:
    """Names by id, from `entity2id.txt` or `relation2id.txt`: a number of lines, then a name and an
    id in each.
    """
    names: dict[str, str] = {}
    with source.open() as stream, io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape") as text:
        lines = (
            (number, line.strip()) for number, line in enumerate(text, start=1) if line.strip()
        )
        next(lines, None)
        for number, line in lines:
            name, _, id = line.rpartition("\t" if "\t" in line else " ")
            if not name.strip() or not id.strip().isdecimal() or _readable(line) != line:
                raise DataError(
                    f"{source.name}, line {number:,}: expected a name and its id, found "
                    f"{_quote(line)}."
                )
            names[id.strip()] = name.strip()
    if len(set(names.values())) < len(names):
        raise DataError(
            f"{source.name} has ids with the same name. Give every id a name of its own."
        )
    return names


def read_labels(source: Source) -> dict[str, str]:
    """Labels by name, from a file of two columns; the first label of a name counts."""
    separator, first = _first_row(source)
    if first is None:
        return {}
    labels: dict[str, str] = {}
    for block in _blocks(source, Layout(separator, 2, (0, 1), ("name", "label"), 0)):
        for name, label in zip(*(column.to_pylist() for column in block.columns), strict=True):
            if label.strip():
                labels.setdefault(name.strip(), label.strip())
    return labels


# -- layout ------------------------------------------------------------------


class Layout(NamedTuple):
    """The columns that every line must have, and the number of lines that a header takes."""

    separator: str
    num_columns: int
    indices: Indices
    roles: tuple[str, ...]
    num_skipped: int

    @property
    def quoted(self) -> bool:
        return self.separator not in "\t "


class _Row(NamedTuple):
    cells: list[str]
    line: int
    num_lines: int  # from the beginning of the file to the end of the row


def _first_row(
    source: Source, delimiter: str | None = None, *, sniff: bool = False
) -> tuple[str, _Row | None]:
    """The separator of a file, and its first row; `sniff` recognizes three columns separated by
    spaces.
    """
    with source.open() as stream:
        content = stream.read(FIRST_BYTES)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{source.name} should be UTF-8, and it is written in UTF-16. Save it as UTF-8."
        )
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    if delimiter is None and source.suffix != ".csv":
        delimiter = " " if sniff and _separated_by_spaces(text[:SNIFFED]) else "\t"
    separators = [delimiter] if delimiter else [",", ";"]
    found = {
        separator: next(_rows(io.StringIO(text, newline=""), separator), None)
        for separator in separators
    }
    line = text.lstrip("\r\n").partition("\n")[0]
    # A first row without cells has an unclosed quote; then the separators of its first line are
    # counted.
    separator, first = max(
        found.items(), key=lambda item: (item[1] and len(item[1].cells)) or line.count(item[0]) + 1
    )
    if first is not None and not first.cells:
        raise DataError(f"{source.name}, line {first.line:,}: {UNCLOSED_QUOTE}")
    return separator, first and first._replace(cells=[_readable(cell) for cell in first.cells])


def _separated_by_spaces(text: str) -> bool:
    """Whether every line has three columns separated by spaces, and none has a tab."""
    lines = [
        line for line in text.splitlines()[: -1 if len(text) == SNIFFED else None] if line.strip()
    ]
    return bool(lines) and all(
        "\t" not in line and len(line.split()) == len(ROLES) for line in lines
    )


def _rows(text: io.TextIOBase, separator: str) -> Iterator[_Row]:
    """Each row that is not blank; one with an unclosed quote has no cells, and is the last."""
    if separator in "\t ":
        for line, content in enumerate(text, 1):
            if cells := content.rstrip("\r\n") if separator == "\t" else content.strip(" \t\r\n"):
                yield _Row(re.split("\t" if separator == "\t" else "[ \t]+", cells), line, line)
        return
    reader = csv.reader(chain(text, [END]), delimiter=separator)
    before = 0
    try:
        for row in reader:
            if row and row[-1].endswith(END):
                if reader.line_num > before + 1:
                    yield _Row([], before + 1, before + 1)
                return
            if row:
                yield _Row(row, before + 1, reader.line_num)
            before = reader.line_num
    except csv.Error:
        yield _Row([], before + 1, before + 1)


def _readable(text: str, errors: str = "replace") -> str:
    """A text with its invalid bytes, which were read as surrogates, replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", errors)


# -- blocks ------------------------------------------------------------------


def _blocks(
    source: Source, layout: Layout, reader: Reader | None = None
) -> Iterator[pa.RecordBatch]:
    """Blocks of the columns of a layout; for a reader, without the blanks around names, which it
    counts.
    """
    names = [f"column {number}" for number in range(layout.num_columns)]
    for role, index in zip(layout.roles, layout.indices, strict=True):
        names[index] = role
    types = dict.fromkeys(layout.roles, pa.dictionary(pa.int32(), pa.string()))
    options = (
        pa.csv.ReadOptions(block_size=BLOCK_SIZE, column_names=names, skip_rows=layout.num_skipped),
        pa.csv.ParseOptions(
            delimiter="\t" if layout.separator == " " else layout.separator,
            quote_char='"' if layout.quoted else False,
            escape_char=False,
            newlines_in_values=layout.quoted,
        ),
        pa.csv.ConvertOptions(column_types=types, include_columns=layout.roles),
    )
    with source.open() as stream:
        stream.read(len(codecs.BOM_UTF8) if stream.peek(3).startswith(codecs.BOM_UTF8) else 0)
        parts: Any = _Parts(stream, layout.separator)
        last: list[str] = []
        try:
            with pa.csv.open_csv(parts, *options) as blocks:
                for block in blocks:
                    if reader:
                        columns = [reader.strip(column) for column in block.columns]
                        block = pa.RecordBatch.from_arrays(columns, names=layout.roles)
                    if any(
                        is_empty(block[role].dictionary).any()
                        for role in layout.roles
                        if role != "label"
                    ):
                        raise _error(source, layout, "a name is empty")
                    if layout.quoted and block.num_rows:
                        last = [column[-1].as_py() for column in block.columns]
                    yield block
        except pa.ArrowInvalid as error:
            if "Could not skip" in str(error):  # the header ends with the file
                return
            error.__traceback__ = None  # its frames have the stream
            used = weakref.ref(parts)
            parts = blocks = None
            for _ in range(200):
                if used() is None:
                    break
                time.sleep(0.005)  # a thread of Arrow has it
            raise _error(source, layout, str(error)) from error
        # Arrow reads an unclosed quote as one long name, and would silently lose all lines below
        # it.
        suspicious = parts.num_quotes % 2 or any("\n" in name or "\r" in name for name in last)
        if suspicious and (sentence := first_bad_line(source, layout)):
            raise DataError(sentence)


class _Parts(io.RawIOBase):
    """A stream in large parts, its quotes counted; of columns separated by blanks, whole lines with
    tabs instead.

    After an error, threads of Arrow may drop what they have read. If Python ends meanwhile, and
    they have objects of Python, the process is aborted: so they read into memory of Arrow.
    """

    def __init__(self, stream: Any, separator: str) -> None:
        self._stream = stream
        self._separator = separator
        self.num_quotes = 0

    def readable(self) -> bool:
        return True

    def read_buffer(self, size: int = -1, /) -> pa.Buffer:
        content: bytes = self._stream.read(BLOCK_SIZE)
        if self._separator == " ":
            if content and not content.endswith(b"\n"):
                content += self._stream.readline()
            content = b"\n".join(
                re.sub(rb"[ \t]+", b"\t", line.strip(b" \t\r")) for line in content.split(b"\n")
            )
        elif self._separator != "\t":
            self.num_quotes += content.count(b'"')
        buffer = pa.allocate_buffer(len(content))
        memoryview(buffer).cast("B")[:] = content
        return buffer


# -- errors ------------------------------------------------------------------


def _error(source: Source, layout: Layout, detail: str) -> DataError:
    sentence = first_bad_line(source, layout)
    if sentence is None and "straddl" in detail:
        sentence = (
            f"{source.name} has a line longer than {BLOCK_SIZE >> 20} MiB, too long for three "
            "names. Look for line ends that are missing or a quote that is never closed."
        )
    return DataError(sentence or f"{source.name} cannot be read as lines of text: {detail}.")


def first_bad_line(source: Source, layout: Layout) -> str | None:
    """A sentence about the first line that does not match the layout, or None."""
    with (
        source.open() as stream,
        io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text,
    ):
        for row in _rows(text, layout.separator):
            if row.line > layout.num_skipped and (problem := _problem(row.cells, layout)):
                return f"{source.name}, line {row.line:,}: {problem}"
    return None


def _problem(cells: Sequence[str], layout: Layout) -> str | None:
    if not cells:
        return UNCLOSED_QUOTE
    if len(cells) != layout.num_columns:
        listed = ", ".join(_quote(cell) for cell in cells[:6]) + (", …" if len(cells) > 6 else "")
        separators = SEPARATORS.get(layout.separator, f"'{layout.separator}'")
        return (
            f"expected {layout.num_columns} columns separated by {separators}, "
            f"found {len(cells)}: {listed}. {_advice(cells, layout)}"
        )
    for role, index in zip(layout.roles, layout.indices, strict=True):
        cell = cells[index]
        if not cell.strip() and role != "label":
            return f"the {role} is empty. Give it a name, or remove the line."
        if _readable(cell) != cell:
            return f"the {role} is not valid UTF-8 ({_quote(cell)}). Save the file as UTF-8."
    return None


def _advice(cells: Sequence[str], layout: Layout) -> str:
    joined = layout.separator.join(cells)
    if not joined.strip():
        return "Remove the line."
    if layout.roles[0] != "head":
        return "Correct the line, or remove it."
    if len(cells) > layout.num_columns and not layout.num_skipped:
        return "Correct the line, or choose three columns with columns=(1, 2, 3), or by name if line 1 is a header."
    if len(cells) == 1:
        if joined.lstrip().startswith(("{", "[")):
            return "If each line is JSON, give the file a name that ends in .jsonl."
        for name, separator in DELIMITERS.items():
            if separator in joined:
                return f"If {SEPARATORS[separator]} separate the columns, use delimiter='{name}'."
        if joined.count(":") == len(ROLES) - 1:
            return "If colons separate the columns, use delimiter=':'."
    return "Correct the line, or remove it."


def _quote(cell: str) -> str:
    """A cell in quotes, at most 40 characters, with invalid bytes as `\\xff`."""
    text = _readable(cell, "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return f"'{visible[:40]}{'…' if len(visible) > 40 else ''}'"

"""Text in columns: its layout, blocks of its lines, and errors that name the line."""

import codecs
import csv
import io
import queue
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv

from dualkg.data.archives import Source
from dualkg.data.columns import ROLES, Columns, Indices, find_columns
from dualkg.data.errors import UnusableData
from dualkg.data.readers import Reader, ReadOptions, is_empty
from dualkg.errors import DataError, InvalidValue, Sentence

FIRST_BYTES = 1 << 20  # in which the first row must end
SNIFFED_BYTES = 1 << 16  # that show whether columns are separated by spaces
MAX_COMMENTS = 1000  # lines above the first row
COMMENT = "#"
SEPARATORS = {"\t": "tabs", " ": "spaces", ",": "commas", ";": "semicolons", "|": "vertical bars"}
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " ", "\\t": "\t"}
# Appended to the end of a file. It occurs in no text: a cell that ends with it was not closed.
END = "\ud800"
RELEASE_SECONDS = 1.0  # in which a thread of Arrow lets go of a file; it takes milliseconds


class Problem(NamedTuple):
    """What is wrong with a line, and what to do about it."""

    text: str
    advice: str | Sentence


UNCLOSED_QUOTE = Problem(
    "a quote is opened and not closed", "Close it, or double each quote that belongs to a name."
)


def parse_delimiter(delimiter: str) -> str:
    """One character, or its name."""
    character = DELIMITERS.get(delimiter, delimiter)
    is_one_sign = len(character) == 1 and character.isascii() and not character.isalnum()
    if not is_one_sign or character in '"\r\n':
        raise InvalidValue(
            "delimiter",
            expected="one character such as ',' or '|', or one of tab, space, comma, semicolon and "
            "pipe",
            found=delimiter,
        )
    return character


def read_labels(source: Source, columns: Columns | None = None) -> dict[str, str]:
    """Labels by name, from a file of two columns; the first label of a name counts.

    `columns` are the names of both in the header of a file with more columns.
    """
    labels: dict[str, str] = {}
    for name, label in read_pairs(source, ("name", "label"), columns):
        if label:
            labels.setdefault(name, label)
    return labels


def read_pairs(
    source: Source, roles: tuple[str, str], columns: Columns | None = None
) -> Iterator[tuple[str, str]]:
    """The lines of a file of two columns, which errors call by their roles."""
    separator, first = first_row(source)
    if first is None:
        return

    layout = Layout(separator, 2, (0, 1), roles, num_skipped=0)
    if columns is not None:
        layout = layout._replace(
            num_columns=len(first.cells),
            indices=find_columns(columns, first.cells, source.name),
            num_skipped=first.num_lines,
        )
    for block in read_blocks(source, layout):
        names, texts = (column.to_pylist() for column in block.columns)
        for name, text in zip(names, texts, strict=True):
            yield name.strip(), text.strip()


# -- layout ------------------------------------------------------------------


class Layout(NamedTuple):
    """The columns that every line must have, and the lines above the triples.

    The last `num_blank` columns must be empty. Of the `num_skipped` lines above the triples,
    `num_comments` are comments.
    """

    separator: str
    num_columns: int
    indices: Indices
    roles: tuple[str, ...]
    num_skipped: int
    num_blank: int = 0
    num_comments: int = 0

    @property
    def is_quoted(self) -> bool:
        return self.separator not in "\t "

    @property
    def column_names(self) -> list[str]:
        """The role of each column; others are numbered."""
        names = [f"column {number}" for number in range(self.num_columns)]
        for role, index in zip(self.roles, self.indices, strict=True):
            names[index] = role
        return names

    @property
    def blank_names(self) -> list[str]:
        """The names of the columns that must be empty."""
        return self.column_names[self.num_columns - self.num_blank :]


class Row(NamedTuple):
    """The cells of a row, which may take several lines; one with an unclosed quote has none."""

    cells: list[str]
    line: int
    num_lines: int  # from the beginning of the file to the end of the row


class Beginning(NamedTuple):
    """How a file of triples begins: its separator, and its first row below comments.

    `number` is a row above it with the number of triples alone, as in files of OpenKE.
    """

    separator: str
    row: Row | None
    number: Row | None = None
    comment_lines: tuple[int, ...] = ()  # above the row


def first_row(source: Source, delimiter: str | None = None) -> tuple[str, Row | None]:
    """The separator of a file, and its first row."""
    text = _first_text(source)
    beginnings = [
        Beginning(separator, next(_rows(io.StringIO(text, newline=""), separator), None))
        for separator in _separators(source, delimiter)
    ]
    beginning = _most_columns(text, beginnings)
    return beginning.separator, _checked_row(source, beginning.row)


def read_beginning(source: Source, delimiter: str | None = None) -> Beginning:
    """The beginning of a file of triples; three columns separated by spaces are recognized."""
    text = _first_text(source)
    separators = _separators(source, delimiter)
    if separators == ["\t"] and delimiter is None and _separated_by_spaces(text[:SNIFFED_BYTES]):
        separators = [" "]
    beginning = _most_columns(text, [_begin(text, separator) for separator in separators])
    return beginning._replace(row=_checked_row(source, beginning.row))


def _first_text(source: Source) -> str:
    """The first part of a file, with invalid bytes as surrogates."""
    with source.open() as stream:
        content = stream.read(FIRST_BYTES)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problem = "should be UTF-8, and it is written in UTF-16"
        raise UnusableData(source.name, problem, advice="Save it as UTF-8.")
    return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")


def _separators(source: Source, delimiter: str | None) -> list[str]:
    if delimiter is not None:
        return [delimiter]
    return [",", ";"] if source.suffix == ".csv" else ["\t"]


def _checked_row(source: Source, row: Row | None) -> Row | None:
    if row is None:
        return None
    if not row.cells:
        raise _bad_line(source, row.line, UNCLOSED_QUOTE)
    return row._replace(cells=[readable(cell) for cell in row.cells])


def _most_columns(text: str, beginnings: Sequence[Beginning]) -> Beginning:
    """The beginning whose separator divides the first row into most columns."""
    first_line = text.lstrip("\r\n").partition("\n")[0]

    def num_columns(beginning: Beginning) -> int:
        if beginning.row is None or not beginning.row.cells:  # a quote is not closed
            return first_line.count(beginning.separator) + 1
        return len(beginning.row.cells)

    return max(beginnings, key=num_columns)


def _begin(text: str, separator: str) -> Beginning:
    """Find the first row, below comments and perhaps the number of triples.

    A line that begins with # may also be a header or a triple: it is a comment if the first line
    without # has another number of columns.
    """
    rows = list(islice(_rows(io.StringIO(text, newline=""), separator), MAX_COMMENTS))
    if not rows:
        return Beginning(separator, None)

    number = None
    others = [row for row in rows if not _begins_with_sign(row.cells)]
    if len(others) > 1 and _is_number(others[0].cells) and len(others[1].cells) >= len(ROLES):
        number, *others = others

    num_columns = len(others[0].cells) if others else len(ROLES)
    below = [row for row in rows if number is None or row.line > number.line]
    fitting = [row for row in below if len(row.cells) == num_columns]
    first = (fitting or below)[0]
    comment_lines = tuple(
        row.line
        for row in rows
        if row.line < first.line
        and _begins_with_sign(row.cells)
        and len(row.cells) != len(first.cells)
    )
    return Beginning(separator, first, number, comment_lines)


def _begins_with_sign(cells: Sequence[str]) -> bool:
    return bool(cells) and cells[0].startswith(COMMENT)


def _is_number(cells: Sequence[str]) -> bool:
    """Whether a row is a number that stands alone, as in `5` or, if commas follow, `5,,`."""
    number, *others = cells or [""]
    return number.strip().isdecimal() and not any(cell.strip() for cell in others)


def _separated_by_spaces(text: str) -> bool:
    """Whether every line has three columns separated by spaces, and none has a tab.

    Comments, and a number of triples in the first line, may have other columns.
    """
    lines = text.splitlines()
    if len(text) == SNIFFED_BYTES:
        lines = lines[:-1]  # the last one may be cut
    rows = [line.split() for line in lines if line.strip()]
    rows = [row for row in rows if len(row) == len(ROLES) or not _begins_with_sign(row)]
    if rows and len(rows[0]) == 1 and _is_number(rows[0]):
        rows = rows[1:]
    if not rows or any("\t" in line for line in lines):
        return False
    return all(len(row) == len(ROLES) for row in rows)


def _rows(text: io.TextIOBase, separator: str) -> Iterator[Row]:
    """Each row that is not blank; one with an unclosed quote has no cells, and is the last."""
    if separator == "\t":
        return _split_rows(text, pattern="\t", blanks="\r\n")
    if separator == " ":
        return _split_rows(text, pattern="[ \t]+", blanks=" \t\r\n")
    return _quoted_rows(text, separator)


def _split_rows(text: io.TextIOBase, *, pattern: str, blanks: str) -> Iterator[Row]:
    for number, line in enumerate(text, start=1):
        content = line.rstrip(blanks) if pattern == "\t" else line.strip(blanks)
        if content:
            yield Row(re.split(pattern, content), number, number)


def _quoted_rows(text: io.TextIOBase, separator: str) -> Iterator[Row]:
    reader = csv.reader(chain(text, [END]), delimiter=separator)
    line = 1
    try:
        for cells in reader:
            if cells and cells[-1].endswith(END):
                if reader.line_num > line:
                    yield Row([], line, line)
                return
            if cells:
                yield Row(cells, line, reader.line_num)
            line = reader.line_num + 1
    except csv.Error:
        yield Row([], line, line)


def readable(text: str, errors: str = "replace") -> str:
    """A text with its invalid bytes, which were read as surrogates, replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", errors)


# -- blocks ------------------------------------------------------------------


def read_blocks(
    source: Source, layout: Layout, reader: Reader | None = None
) -> Iterator[pa.RecordBatch]:
    """Blocks of the columns of a layout.

    For a reader, names have no blanks around them, and it counts those that had some.
    """
    options = reader.options if reader else ReadOptions()
    with source.open() as stream:
        if stream.peek(3).startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        # A file of labels has no comments.
        num_columns = layout.num_columns if reader else None
        parts: Any = _Parts(stream, layout.separator, options.block_bytes, num_columns=num_columns)
        blocks: Any = None
        # A thread of Arrow may have the parts for a moment after an error. The `put` of this queue
        # may be called by a weak reference in any thread.
        released: queue.SimpleQueue[object] = queue.SimpleQueue()
        reference = weakref.ref(parts, released.put)
        last_names: list[str] = []
        try:
            with pa.csv.open_csv(parts, *_arrow_options(layout, options)) as blocks:
                for block in blocks:
                    names = _names_of(block, layout, reader)
                    if layout.is_quoted and names.num_rows:
                        last_names = [column[-1].as_py() for column in names.columns]
                    yield names
        except pa.ArrowInvalid as error:
            # The header ends with the file, or all lines are comments.
            if "Could not skip" in str(error) or "Empty CSV" in str(error):
                if reader:
                    reader.num_comments += parts.num_comments
                return
            # If Python ended while a thread of Arrow drops the last reference to an object of
            # Python, the process would be aborted (status 134). So nothing here keeps the parts,
            # neither a variable nor the frames of the traceback, and the thread is waited for.
            error.__traceback__ = None
            parts = blocks = None
            with suppress(queue.Empty):
                released.get(timeout=RELEASE_SECONDS)
            raise _unreadable_text(source, layout, str(error), options) from error
        del reference
        if reader:
            reader.num_comments += parts.num_comments

        # Arrow reads an unclosed quote as one long name, and would silently lose all lines below.
        is_suspicious = parts.num_quotes % 2 or any(
            "\n" in name or "\r" in name for name in last_names
        )
        bad_line = find_bad_line(source, layout) if is_suspicious else None
        if bad_line:
            raise bad_line


def _names_of(block: pa.RecordBatch, layout: Layout, reader: Reader | None) -> pa.RecordBatch:
    """The names of a block in the order of `ROLES`; other cells must be empty, and names not."""
    if not all(_is_blank(block[name]) for name in layout.blank_names):
        raise pa.ArrowInvalid("a line is longer than the first one")
    names = block.select(layout.roles)
    if reader:
        columns = [reader.strip(column) for column in names.columns]
        names = pa.RecordBatch.from_arrays(columns, names=layout.roles)
    if _has_empty_name(names):
        raise pa.ArrowInvalid("a name is empty")
    return names


def _arrow_options(layout: Layout, options: ReadOptions) -> tuple[Any, Any, Any]:
    names = layout.column_names
    included = [*layout.roles, *layout.blank_names]
    name_type = pa.dictionary(pa.int32(), pa.string())
    return (
        pa.csv.ReadOptions(
            block_size=options.block_bytes,
            column_names=names,
            # Comments are left out before Arrow reads the text.
            skip_rows=layout.num_skipped - layout.num_comments,
        ),
        pa.csv.ParseOptions(
            delimiter="\t" if layout.separator == " " else layout.separator,
            quote_char='"' if layout.is_quoted else False,
            escape_char=False,
            newlines_in_values=layout.is_quoted,
        ),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(included, name_type), include_columns=included
        ),
    )


def _has_empty_name(block: pa.RecordBatch) -> bool:
    """Whether a name is empty; a label may be."""
    named = [role for role in block.schema.names if role != "label"]
    return any(bool(is_empty(block[role].dictionary).any()) for role in named)


def _is_blank(column: pa.DictionaryArray) -> bool:
    return not any(name.strip() for name in column.dictionary.to_pylist())


class _Parts(io.RawIOBase):
    """A stream in large parts without comments, its quotes counted.

    Of columns separated by blanks, whole lines are read, with tabs instead of the blanks. A
    comment is a line that begins with # and has not `num_columns` columns. The parts are memory of
    Arrow, not of Python: see `read_blocks` for what happens after an error.
    """

    def __init__(
        self, stream: Any, separator: str, size: int, *, num_columns: int | None = None
    ) -> None:
        self._stream = stream
        self._separator = separator
        self._size = size
        self._num_columns = num_columns
        self._is_quoted = separator not in "\t "
        self._ends_line = True  # whether the last part did
        self.num_quotes = 0
        self.num_comments = 0

    def readable(self) -> bool:
        return True

    def read_buffer(self, size: int = -1, /) -> pa.Buffer:
        lines = self._read()
        content = self._without_comments(lines)
        while lines and not content:  # an empty part would be the end of the file
            lines = self._read()
            content = self._without_comments(lines)
        if self._is_quoted:
            self.num_quotes += content.count(b'"')

        buffer = pa.allocate_buffer(len(content))
        memoryview(buffer).cast("B")[:] = content
        return buffer

    def _read(self) -> bytes:
        """The next part; columns separated by blanks and comments are whole lines."""
        content: bytes = self._stream.read(self._size)
        last_line = content[max(content.rfind(b"\n"), content.rfind(b"\r")) + 1 :]
        if last_line and (self._separator == " " or last_line.startswith(b"#")):
            content += self._stream.readline()
        return _with_tabs(content) if self._separator == " " else content

    def _without_comments(self, content: bytes) -> bytes:
        begins_line = self._ends_line
        self._ends_line = content.endswith((b"\n", b"\r"))
        first_may_be = begins_line and content.startswith(b"#")
        if not (first_may_be or b"\n#" in content or b"\r#" in content):
            return content
        if self._num_columns is None:
            return content

        kept = []
        num_quotes = self.num_quotes
        for line in content.splitlines(keepends=True):
            # An odd number of quotes above means that the line is a part of a name.
            if begins_line and num_quotes % 2 == 0 and self._is_comment(line):
                self.num_comments += 1
            else:
                kept.append(line)
                num_quotes += line.count(b'"') if self._is_quoted else 0
            begins_line = True
        return b"".join(kept)

    def _is_comment(self, line: bytes) -> bool:
        if not line.startswith(b"#"):
            return False
        separator = "\t" if self._separator == " " else self._separator
        if self._is_quoted and line.count(b'"') % 2:
            # The last name goes on in the next line, if there is a column before it.
            outside_quotes = line.split(b'"')[::2]
            return not any(separator.encode() in part for part in outside_quotes)
        text = io.StringIO(line.decode("utf-8", "surrogateescape"), newline="")
        row = next(_rows(text, separator), None)
        return row is not None and len(row.cells) != self._num_columns


def _with_tabs(content: bytes) -> bytes:
    lines = [line.strip(b" \t\r") for line in content.split(b"\n")]
    return b"\n".join(re.sub(rb"[ \t]+", b"\t", line) for line in lines)


# -- errors ------------------------------------------------------------------


def _unreadable_text(
    source: Source, layout: Layout, detail: str, options: ReadOptions
) -> DataError:
    """The error about the first bad line; or, if no line is bad, about what Arrow says."""
    bad_line = find_bad_line(source, layout)
    if bad_line:
        return bad_line
    if "straddl" in detail:
        size = options.block_bytes >> 20
        return UnusableData(
            source.name,
            f"has a line longer than {size} MiB, too long for three names",
            advice="Look for line ends that are missing or a quote that is never closed.",
        )
    return UnusableData(source.name, f"cannot be read as lines of text: {detail}")


def find_bad_line(source: Source, layout: Layout) -> UnusableData | None:
    """The error about the first line that does not match the layout, or None."""
    with (
        source.open() as stream,
        io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text,
    ):
        for row in _rows(text, layout.separator):
            if row.line <= layout.num_skipped or _is_comment(row.cells, layout):
                continue
            problem = _problem(row.cells, layout)
            if problem:
                return _bad_line(source, row.line, problem)
    return None


def _is_comment(cells: Sequence[str], layout: Layout) -> bool:
    is_triple = len(cells) == layout.num_columns
    return layout.roles == ROLES and _begins_with_sign(cells) and not is_triple


def _bad_line(source: Source, line: int, problem: Problem) -> UnusableData:
    return UnusableData(source.name, problem.text, place=f"line {line:,}", advice=problem.advice)


def _problem(cells: Sequence[str], layout: Layout) -> Problem | None:
    """What is wrong with a row, if anything."""
    if not cells:
        return UNCLOSED_QUOTE

    beyond = cells[layout.num_columns - layout.num_blank :]
    if len(cells) != layout.num_columns or any(cell.strip() for cell in beyond):
        listed = ", ".join(quote(cell) for cell in cells[:6])
        if len(cells) > 6:
            listed += ", …"
        separators = SEPARATORS.get(layout.separator, f"'{layout.separator}'")
        expected = f"{layout.num_columns - layout.num_blank} columns separated by {separators}"
        if layout.num_blank:
            expected += f" and {layout.num_blank} empty at the end, as in the first line"
        text = f"expected {expected}, found {len(cells)}: {listed}"
        return Problem(text, _advice(cells, layout))

    for role, index in zip(layout.roles, layout.indices, strict=True):
        cell = cells[index]
        if not cell.strip() and role != "label":
            return Problem(f"the {role} is empty", "Give it a name, or remove the line.")
        if readable(cell) != cell:
            text = f"the {role} is not valid UTF-8 ({quote(cell)})"
            return Problem(text, "Save the file as UTF-8.")
    return None


def _advice(cells: Sequence[str], layout: Layout) -> str | Sentence:
    """What to do about a line with another number of columns."""
    line = layout.separator.join(cells)
    correct = "Correct the line, or remove it."
    if not line.strip():
        return "Remove the line."
    if layout.roles[0] != "head":
        return correct

    if len(cells) > layout.num_columns and not layout.num_skipped:
        return Sentence(
            "Correct the line, or choose three columns with {columns}, or by name if line 1 is a "
            "header.",
            {"columns": (1, 2, 3)},
        )

    if len(cells) == 1:
        if line.lstrip().startswith(("{", "[")):
            return "If each line is JSON, give the file a name that ends in .jsonl."
        for name, separator in DELIMITERS.items():
            if separator in line:
                return _use_delimiter(SEPARATORS[separator], name)
        if line.count(":") == len(ROLES) - 1:
            return _use_delimiter("colons", ":")
    return correct


def _use_delimiter(separators: str, delimiter: str) -> Sentence:
    return Sentence(
        f"If {separators} separate the columns, use {{delimiter}}.", {"delimiter": delimiter}
    )


def quote(cell: str) -> str:
    """A cell in quotes, at most 40 characters, with invalid bytes as `\\xff`."""
    text = readable(cell, "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    if len(visible) > 40:
        visible = f"{visible[:40]}…"
    return f"'{visible}'"

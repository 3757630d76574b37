"""Text in columns: separated by tabs or spaces, without quoting; in .csv by commas, with quotes."""

import codecs
import io
import re
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv

from dualkg.data.archives import Source, in_arrow_memory
from dualkg.data.columns import ROLES, Columns, Indices, find_columns, recognize_header
from dualkg.data.readers import Reader, ReadOptions, is_empty, reads, unclear_columns
from dualkg.data.sniffing import (
    DELIMITERS,
    Beginning,
    Row,
    begins_with_sign,
    first_row,
    parse_delimiter,
    read_beginning,
    readable,
    split_rows,
    unclosed_quote,
)
from dualkg.errors import DataError

SEPARATORS = {"\t": "tabs", " ": "spaces", ",": "commas", ";": "semicolons", "|": "vertical bars"}
OPENKE_INDICES = (0, 2, 1)  # of head, relation and tail
NAME_TYPE = pa.dictionary(pa.int32(), pa.string())
MAX_QUOTED = 40  # characters of a cell in a message


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

    def is_comment(self, cells: Sequence[str]) -> bool:
        """Whether a row is a comment; a file of labels has none."""
        is_triple = len(cells) == self.num_columns
        return self.roles == ROLES and begins_with_sign(cells) and not is_triple


@reads(".tsv", ".txt", ".csv")
class TextReader(Reader):
    """Lines of columns; a header is recognized by usual names."""

    takes_delimiter = True

    def __init__(self, data: Source, options: ReadOptions, *, name: str = "") -> None:
        super().__init__(data, options, name=name)
        self.delimiter: str | None = None
        if options.delimiter is not None:
            self.delimiter = parse_delimiter(options.delimiter)

    def blocks(self) -> Generator[pa.RecordBatch]:
        beginning = read_beginning(self.data, self.delimiter)
        if beginning.row is None:
            return
        if beginning.separator == " " and self.delimiter is None:
            self.notes.append(f"The columns of {self.name} are separated by spaces.")
        layout = self._layout(beginning, beginning.row)
        if beginning.number is None:
            yield from read_blocks(self.data, layout, self)
        else:
            yield from self._numbered_blocks(layout, int(beginning.number.cells[0]))

    def _layout(self, beginning: Beginning, first: Row) -> Layout:
        """The layout of the file by its first row."""
        cells = first.cells
        recognized = recognize_header(cells)
        columns = self.columns
        num_blank = 0
        num_columns = len(cells)
        if columns is not None:
            indices = find_columns(columns, cells, self.name)
        elif recognized:
            indices = recognized
        else:
            indices = (0, 1, 2)
            num_blank = self._num_blank(cells)
            num_columns = len(ROLES) + num_blank

        has_header = recognized is not None or any(
            isinstance(column, str) for column in columns or ()
        )
        if has_header and columns is None:
            # A first line such as `s r t` could also be a triple.
            self.notes.append(f"The first line of {self.name} was read as a header.")
        if not has_header and len(cells) == num_columns:
            # Columns 1, 2 and 3 of three say that the first line is a triple.
            is_said_to_be_triple = tuple(columns or ()) == (1, 2, 3) and num_columns == 3
            if not is_said_to_be_triple:
                self.first_line = tuple(cells[index].strip() for index in indices)

        last_skipped = first if has_header else beginning.number
        num_skipped = last_skipped.num_lines if last_skipped else 0
        if beginning.number and columns is None and not has_header:
            indices = OPENKE_INDICES
            self.is_openke_order = True
        return Layout(
            beginning.separator,
            num_columns,
            indices,
            ROLES,
            num_skipped,
            num_blank=num_blank,
            num_comments=sum(line <= num_skipped for line in beginning.comment_lines),
        )

    def _num_blank(self, cells: Sequence[str]) -> int:
        """The number of empty columns at the end, as of lines that end with a separator."""
        beyond = cells[len(ROLES) :]
        if not beyond or any(cell.strip() for cell in beyond):
            return 0
        if len(beyond) == 1:
            text = "has an empty column at its end, which was"
        else:
            text = f"has {len(beyond)} empty columns at its end, which were"
        self.notes.append(f"Each line of {self.name} {text} ignored.")
        return len(beyond)

    def _numbered_blocks(self, layout: Layout, expected: int) -> Generator[pa.RecordBatch]:
        """The blocks below the number of triples, which they must have."""
        if self.is_openke_order:
            self.notes.append(
                f"The first line of {self.name} is the number of its triples, as in files of "
                "OpenKE, so its columns were read as head, tail and relation. If they are head, "
                "relation and tail, use `columns=(1, 2, 3)`."
            )
        else:
            self.notes.append(
                f"The first line of {self.name}, the number of its triples, was skipped."
            )

        num_triples = 0
        for block in read_blocks(self.data, layout, self):
            num_triples += block.num_rows
            if self.is_openke_order and not all(_are_ids(column) for column in block.columns):
                raise unclear_columns(self.name)
            yield block
        self.check_number(num_triples, expected)


def _are_ids(column: pa.DictionaryArray) -> bool:
    return all(name.isdecimal() for name in column.dictionary.to_pylist())


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


# -- blocks ------------------------------------------------------------------


def read_blocks(
    source: Source, layout: Layout, reader: Reader | None = None
) -> Iterator[pa.RecordBatch]:
    """Blocks of the columns of a layout.

    For a reader, names have no blanks around them, and it counts those that had some.
    """
    size = (reader.options if reader else ReadOptions()).block_bytes
    num_comments = layout.num_comments
    num_skipped = layout.num_skipped
    num_quotes = 0
    is_suspicious = False
    with source.open() as stream:
        for part in _whole_rows(stream, source, layout, size):
            content = part
            if num_skipped:
                lines = content.splitlines(keepends=True)
                content = b"".join(lines[num_skipped:])
                num_skipped = max(0, num_skipped - len(lines))
            if layout.separator == " ":
                content = _with_tabs(content)
            content, num_removed = _without_comments(content, layout)
            num_comments += num_removed
            if layout.is_quoted:
                num_quotes += content.count(b'"')
                is_suspicious |= _ends_in_quotes(content, layout)
            try:
                for block in _parse(content, layout):
                    names = _names_of(block, layout, reader)
                    if layout.is_quoted and names.num_rows:
                        last_names = [column[-1].as_py() for column in names.columns]
                        is_suspicious |= any("\n" in name or "\r" in name for name in last_names)
                    yield names
            except pa.ArrowInvalid as error:
                raise find_bad_line(source, layout) or DataError(
                    f"{source.name} cannot be read as lines of text: {error}."
                ) from error
    if reader:
        reader.num_comments += num_comments

    # Arrow reads an unclosed quote as one long name, and would silently lose the lines below.
    is_suspicious |= num_quotes % 2 == 1
    bad_line = find_bad_line(source, layout) if is_suspicious else None
    if bad_line:
        raise bad_line


def _whole_rows(
    stream: io.BufferedReader, source: Source, layout: Layout, size: int
) -> Iterator[bytes]:
    """Parts of a file of about `size` bytes, each of whole rows."""
    if stream.peek(3).startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    rest = b""
    # A part without the end of a row is doubled.
    while part := stream.read(max(size, len(rest))):
        content = rest + part
        end = _end_of_rows(content, is_quoted=layout.is_quoted)
        if end:
            yield content[:end]
        elif not layout.is_quoted and len(content) > size:
            raise find_bad_line(source, layout) or DataError(
                f"{source.name} has a line longer than {size >> 20} MiB, too long for three names. "
                "Look for line ends that are missing or a quote that is never closed."
            )
        rest = content[end:]
    if rest:
        yield rest


def _end_of_rows(content: bytes, *, is_quoted: bool) -> int:
    """Where the last whole row of a part ends, 0 if there is none; a line end may be quoted."""
    end = _end_of_lines(content, len(content))
    if not is_quoted:
        return end
    num_quotes = content.count(b'"', 0, end)
    while num_quotes % 2:
        former = end
        end = _end_of_lines(content, former - 1)
        num_quotes -= content.count(b'"', end, former)
    return end


def _end_of_lines(content: bytes, stop: int) -> int:
    # A carriage return at the very end may be the first half of a line end.
    last_return = content.rfind(b"\r", 0, min(stop, len(content) - 1))
    return max(content.rfind(b"\n", 0, stop), last_return) + 1


def _ends_in_quotes(content: bytes, layout: Layout) -> bool:
    """Whether the last line has a quote that is not closed; quotes inside of names hide others."""
    last_line = content.rstrip(b"\r\n").rpartition(b"\n")[2]
    text = io.StringIO(last_line.decode("utf-8", "surrogateescape"), newline="")
    row = next(split_rows(text, layout.separator), None)
    return row is not None and not row.cells


def _with_tabs(content: bytes) -> bytes:
    lines = [line.strip(b" \t\r") for line in content.split(b"\n")]
    return b"\n".join(re.sub(rb"[ \t]+", b"\t", line) for line in lines)


def _without_comments(content: bytes, layout: Layout) -> tuple[bytes, int]:
    """Whole rows without comments, and the number of these."""
    may_have_comments = content.startswith(b"#") or b"\n#" in content or b"\r#" in content
    if not may_have_comments or layout.roles != ROLES:
        return content, 0

    kept = []
    num_comments = 0
    num_quotes = 0
    for line in content.splitlines(keepends=True):
        # An odd number of quotes above means that the line is a part of a name.
        if num_quotes % 2 == 0 and _is_comment(line, layout):
            num_comments += 1
        else:
            kept.append(line)
            num_quotes += line.count(b'"') if layout.is_quoted else 0
    return b"".join(kept), num_comments


def _is_comment(line: bytes, layout: Layout) -> bool:
    if not line.startswith(b"#"):
        return False
    separator = "\t" if layout.separator == " " else layout.separator
    if layout.is_quoted and line.count(b'"') % 2:
        # The last name goes on in the next line, if there is a column before it.
        outside_quotes = line.split(b'"')[::2]
        return not any(separator.encode() in part for part in outside_quotes)
    text = io.StringIO(line.decode("utf-8", "surrogateescape"), newline="")
    row = next(split_rows(text, separator), None)
    return row is not None and layout.is_comment(row.cells)


def _parse(content: bytes, layout: Layout) -> list[pa.RecordBatch]:
    """The columns of whole rows."""
    if not content.strip(b"\r\n"):
        return []
    included = [*layout.roles, *layout.blank_names]
    table = pa.csv.read_csv(
        in_arrow_memory(content),
        pa.csv.ReadOptions(block_size=len(content) + 1, column_names=layout.column_names),
        pa.csv.ParseOptions(
            delimiter="\t" if layout.separator == " " else layout.separator,
            quote_char='"' if layout.is_quoted else False,
            escape_char=False,
            newlines_in_values=layout.is_quoted,
        ),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(included, NAME_TYPE), include_columns=included
        ),
    )
    batches: list[pa.RecordBatch] = table.to_batches()
    return batches


def _names_of(block: pa.RecordBatch, layout: Layout, reader: Reader | None) -> pa.RecordBatch:
    """The names of a block in the order of `ROLES`; other cells must be empty, and names not."""
    if not all(_is_blank(block[name]) for name in layout.blank_names):
        raise pa.ArrowInvalid("a line is longer than the first one")
    names = block.select(layout.roles)
    if reader:
        columns = [reader.strip(column) for column in names.columns]
        names = pa.RecordBatch.from_arrays(columns, names=layout.roles)
    # A label may be empty.
    named = [role for role in layout.roles if role != "label"]
    if any(bool(is_empty(names[role].dictionary).any()) for role in named):
        raise pa.ArrowInvalid("a name is empty")
    return names


def _is_blank(column: pa.DictionaryArray) -> bool:
    return not any(name.strip() for name in column.dictionary.to_pylist())


# -- errors ------------------------------------------------------------------


def find_bad_line(source: Source, layout: Layout) -> DataError | None:
    """The error about the first line that does not match the layout, or None."""
    with (
        source.open() as stream,
        io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text,
    ):
        for row in split_rows(text, layout.separator):
            if row.line <= layout.num_skipped or layout.is_comment(row.cells):
                continue
            if not row.cells:
                return unclosed_quote(source, row.line)
            problem = _problem(row.cells, layout)
            if problem:
                return DataError(f"{source.name}, line {row.line:,}: {problem}")
    return None


def _problem(cells: Sequence[str], layout: Layout) -> str:
    """What is wrong with a row, if anything, and what to do about it."""
    beyond = cells[layout.num_columns - layout.num_blank :]
    if len(cells) != layout.num_columns or any(cell.strip() for cell in beyond):
        listed = ", ".join(quote(cell) for cell in cells[:6])
        if len(cells) > 6:
            listed += ", …"
        separators = SEPARATORS.get(layout.separator, f"'{layout.separator}'")
        expected = f"{layout.num_columns - layout.num_blank} columns separated by {separators}"
        if layout.num_blank:
            expected += f" and {layout.num_blank} empty at the end, as in the first line"
        advice = _advice(cells, layout)
        return f"expected {expected}, found {len(cells)}: {listed}. {advice}"

    for role, index in zip(layout.roles, layout.indices, strict=True):
        cell = cells[index]
        if not cell.strip() and role != "label":
            return f"the {role} is empty. Give it a name, or remove the line."
        if readable(cell) != cell:
            return f"the {role} is not valid UTF-8 ({quote(cell)}). Save the file as UTF-8."
    return ""


def _advice(cells: Sequence[str], layout: Layout) -> str:
    """What to do about a line with another number of columns."""
    line = layout.separator.join(cells)
    if not line.strip():
        return "Remove the line."
    if layout.roles == ROLES and len(cells) > layout.num_columns and not layout.num_skipped:
        return (
            "Correct the line, or choose three columns with `columns=(1, 2, 3)`, or by name if "
            "line 1 is a header."
        )
    if layout.roles == ROLES and len(cells) == 1:
        if line.lstrip().startswith(("{", "[")):
            return "If each line is JSON, give the file a name that ends in .jsonl."
        for name, separator in DELIMITERS.items():
            if separator in line:
                separators = SEPARATORS[separator]
                return f"If {separators} separate the columns, use `delimiter='{name}'`."
        if line.count(":") == len(ROLES) - 1:
            return "If colons separate the columns, use `delimiter=':'`."
    return "Correct the line, or remove it."


def quote(cell: str) -> str:
    """A cell in quotes, shortened, with invalid bytes as `\\xff`."""
    text = readable(cell, "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    if len(visible) > MAX_QUOTED:
        visible = f"{visible[:MAX_QUOTED]}…"
    return f"'{visible}'"

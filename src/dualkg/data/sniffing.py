"""How a file of columns begins: its separator, comments, a number of triples, and its first row."""

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from dualkg.data.archives import Source
from dualkg.data.columns import ROLES
from dualkg.errors import DataError, InvalidValue

FIRST_BYTES = 1 << 20  # in which the first row must end
SNIFFED_BYTES = 1 << 16  # that show whether columns are separated by spaces
MAX_COMMENTS = 1000  # lines above the first row
COMMENT = "#"
DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " ", "\\t": "\t"}
# Appended to the end of a file. It occurs in no text: a cell that ends with it was not closed.
END = "\ud800"


class Row(NamedTuple):
    """The cells of a row, which may take several lines; a row with an unclosed quote has none."""

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


def first_row(source: Source, delimiter: str | None = None) -> tuple[str, Row | None]:
    """The separator of a file, and its first row."""
    text = _first_text(source)
    beginnings = [
        Beginning(separator, next(split_rows(io.StringIO(text, newline=""), separator), None))
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
        raise DataError(
            f"{source.name} should be UTF-8, and it is written in UTF-16. Save it as UTF-8."
        )
    return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")


def _separators(source: Source, delimiter: str | None) -> list[str]:
    if delimiter is not None:
        return [delimiter]
    return [",", ";"] if source.suffix == ".csv" else ["\t"]


def _checked_row(source: Source, row: Row | None) -> Row | None:
    if row is None:
        return None
    if not row.cells:
        raise unclosed_quote(source, row.line)
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
    rows = list(islice(split_rows(io.StringIO(text, newline=""), separator), MAX_COMMENTS))
    if not rows:
        return Beginning(separator, None)

    number = None
    others = [row for row in rows if not begins_with_sign(row.cells)]
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
        and begins_with_sign(row.cells)
        and len(row.cells) != len(first.cells)
    )
    return Beginning(separator, first, number, comment_lines)


def begins_with_sign(cells: Sequence[str]) -> bool:
    """Whether a row begins as a comment does."""
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
        lines = lines[:-1]  # the last line may be cut
    rows = [line.split() for line in lines if line.strip()]
    rows = [row for row in rows if len(row) == len(ROLES) or not begins_with_sign(row)]
    if rows and len(rows[0]) == 1 and _is_number(rows[0]):
        rows = rows[1:]
    if not rows or any("\t" in line for line in lines):
        return False
    return all(len(row) == len(ROLES) for row in rows)


# -- rows --------------------------------------------------------------------


def split_rows(text: io.TextIOBase, separator: str) -> Iterator[Row]:
    """Each row that is not blank; a row with an unclosed quote has no cells, and is the last."""
    if separator not in "\t ":
        yield from _quoted_rows(text, separator)
        return
    blanks = "\r\n" if separator == "\t" else " \t\r\n"
    for number, line in enumerate(text, start=1):
        content = line.rstrip(blanks) if separator == "\t" else line.strip(blanks)
        if content:
            pattern = "\t" if separator == "\t" else "[ \t]+"
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


def unclosed_quote(source: Source, line: int) -> DataError:
    return DataError(
        f"{source.name}, line {line:,}: a quote is opened and not closed. Close it, or double each "
        "quote that belongs to a name."
    )


def readable(text: str, errors: str = "replace") -> str:
    """A text with its invalid bytes, which were read as surrogates, replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", errors)

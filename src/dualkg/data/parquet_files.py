"""Parquet files: what they expand to is known from the headers of their pages before they are read.

A few bytes can stand for very many: pages are compressed, rows repeat an entry of a dictionary, or
a row continues the one before. PyArrow limits none of that. It does not show the headers of pages,
and the sums at the end of a file may be wrong, so the headers are read here. So is the end of the
file, which says where they are: PyArrow aborts the process if a column is described wrongly there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.archives import expansion_limit
from dualkg.data.errors import UnusableData
from dualkg.files import open_regular

MAX_HEADER = 1 << 20  # bytes
MAX_FOOTER = 1 << 24
MAX_PLACE = 1 << 62  # of a byte in a file
TAIL_BYTES = 8  # the length of the footer, and PAR1
MAX_PAGES = 200_000
USUAL_HEADER = 1 << 12  # bytes that are read at first
MAX_NESTED = 16  # structures and lists inside a header or footer
VALUE_BYTES = 8  # of a number, or of the place of a text
# Encodings that store the lengths of texts, and what a text shares with the former one. PyArrow
# does not read them as entries of a dictionary.
DELTA_LENGTH_BYTE_ARRAY = 6
DELTA_BYTE_ARRAY = 7
DATA_PAGES = (0, 3)  # of version 1 and 2
DICTIONARY_PAGE = 2
CHECKED_ROWS = 1 << 16
MIB = 2**20


# -- headers of pages --------------------------------------------------------


class _Page(NamedTuple):
    """What the header of a page says, and where its content begins."""

    kind: int
    num_bytes: int  # decompressed
    stored: int
    num_values: int
    encoding: int
    content: int


@dataclass
class ColumnPages:
    """The pages of a column: their bytes when they are decompressed, and how they are encoded."""

    width: int  # bytes of a value in memory, without the letters of a text
    is_text: bool
    num_values: int = 0
    num_bytes: int = 0
    largest_page: int = 0
    has_dictionary: bool = False
    encodings: set[int] = field(default_factory=set)

    @property
    def can_be_dictionary(self) -> bool:
        """Whether PyArrow reads the column as entries of a dictionary, however it is stored."""
        return self.is_text and not self.encodings & {DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY}

    @property
    def size(self) -> int:
        """The bytes of the column in memory, if no text repeats."""
        return max(self.num_bytes, self.num_values * self.width)

    def add(self, page: _Page) -> None:
        self.num_bytes += page.num_bytes
        self.largest_page = max(self.largest_page, page.num_bytes)
        if page.kind in DATA_PAGES:
            self.num_values += page.num_values
            self.encodings.add(page.encoding)
        self.has_dictionary |= page.kind == DICTIONARY_PAGE


@dataclass
class FileContent:
    """What a file expands to: its rows, and the pages of each column by its path."""

    num_rows: int = 0
    columns: dict[str, ColumnPages] = field(default_factory=dict)

    def size_of(self, names: Iterable[str]) -> int:
        """The bytes of some columns in memory, each text counted once for an entry of a
        dictionary.
        """
        size = sum(self.columns[name].size for name in names)
        return max(3 * VALUE_BYTES * self.num_rows, size)


def content_of(stream: Any, schema: pq.ParquetSchema) -> FileContent:
    """The rows and pages of a file; what cannot be read raises ArrowInvalid."""
    footer = _read_footer(stream)
    content = FileContent()
    paths = []
    for place in range(len(schema)):
        leaf = schema.column(place)
        paths.append(leaf.path)
        is_fixed = leaf.physical_type == "FIXED_LEN_BYTE_ARRAY"
        width = leaf.length if is_fixed else VALUE_BYTES
        content.columns[leaf.path] = ColumnPages(width, is_text=leaf.physical_type == "BYTE_ARRAY")

    num_pages = 0
    num_rows = 0
    try:
        for group in footer.get(4) or []:
            num_rows += group[3]
            for path, page in _pages_of_group(stream, group, paths):
                content.columns[path].add(page)
                num_pages += 1
                if num_pages > MAX_PAGES:
                    raise pa.ArrowInvalid(f"it has more than {MAX_PAGES:,} pages")
        content.num_rows = max(footer[3], num_rows)
    except (KeyError, TypeError, AttributeError):
        raise pa.ArrowInvalid("the end of the file lacks the places of columns") from None
    return content


class _Chunk(NamedTuple):
    """Where the pages of a column of a group of rows are, as the end of the file says."""

    start: int
    stored: int
    num_values: int

    @classmethod
    def of(cls, fields: dict[int, Any]) -> "_Chunk":
        start = fields[9]
        if 0 < fields.get(11, 0) < start:  # a dictionary comes before
            start = fields[11]
        numbers = (start, fields[7], fields[5])
        if not all(isinstance(number, int) and 0 <= number <= MAX_PLACE for number in numbers):
            raise pa.ArrowInvalid("the end of the file has places that no file can have")
        return cls(*numbers)


def _pages_of_group(
    stream: Any, group: dict[int, Any], paths: list[str]
) -> Iterator[tuple[str, _Page]]:
    """The pages of a group of rows, each with the path of its column."""
    chunks = group[1] or []
    if len(chunks) != len(paths):
        raise pa.ArrowInvalid("a group of rows has another number of columns")
    for path, chunk in zip(paths, chunks, strict=True):
        for page in _pages(stream, _Chunk.of(chunk[3])):
            yield path, page


def _pages(stream: Any, chunk: _Chunk) -> Iterator[_Page]:
    """The pages of a column of a row group, as many as PyArrow would read."""
    start = chunk.start
    end = start + chunk.stored
    num_values = 0
    while start < end and num_values < chunk.num_values:
        page = _read_header(stream, start)
        if page.kind in DATA_PAGES:
            num_values += page.num_values
        yield page
        start = page.content + page.stored


def _read_footer(stream: Any) -> dict[int, Any]:
    """The end of a file, which PyArrow has opened, by the numbers of its fields."""
    end = stream.seek(0, 2) - TAIL_BYTES
    stream.seek(max(0, end))
    num_bytes = int.from_bytes(stream.read(4), "little")
    if num_bytes > min(end, MAX_FOOTER):
        raise pa.ArrowInvalid(f"its end has {num_bytes:,} bytes, more than {MAX_FOOTER:,}")
    stream.seek(end - num_bytes)
    try:
        footer, _ = _structure(stream.read(num_bytes), 0)
    except IndexError:
        raise pa.ArrowInvalid("the end of the file is incomplete") from None
    return footer


def _read_header(stream: Any, start: int) -> _Page:
    num_bytes = USUAL_HEADER
    while True:
        stream.seek(start)
        header = stream.read(num_bytes)
        try:
            fields, end = _structure(header, 0)
            break
        except IndexError:
            if len(header) < num_bytes or num_bytes > MAX_HEADER:
                raise pa.ArrowInvalid("the header of a page is incomplete") from None
            num_bytes *= 4

    # By the numbers of their fields: a page of version 1, of version 2, or a dictionary.
    about = fields.get(5) or fields.get(8) or fields.get(7) or {}
    encoding = about.get(2 if 5 in fields else 4, -1) if isinstance(about, dict) else None
    numbers = (fields.get(1), fields.get(2), fields.get(3), encoding)
    if not all(isinstance(number, int) for number in numbers) or fields[2] < 0 or fields[3] < 0:
        raise pa.ArrowInvalid("the header of a page has no sizes")
    num_values = about.get(1, 0)
    if not isinstance(num_values, int) or num_values < 0:
        raise pa.ArrowInvalid("the header of a page has no number of values")
    if fields[3] > MAX_PLACE:
        raise pa.ArrowInvalid("the header of a page has a size that no page can have")
    return _Page(fields[1], fields[2], fields[3], num_values, int(encoding or 0), start + end)


def _structure(header: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """A structure of Thrift's compact protocol by the numbers of its fields, and its end."""
    if depth > MAX_NESTED:
        raise pa.ArrowInvalid("a header is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while True:
        byte = header[at]
        at += 1
        if byte == 0:
            return fields, at
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _integer(header, at)
        kind = byte & 15
        if kind in (1, 2):  # true and false have no content
            fields[number] = kind == 1
        else:
            fields[number], at = _value(header, at, kind, depth)


def _value(header: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value by its type in Thrift, and its end; numbers with a point and texts are left out."""
    if kind in (1, 2, 3):
        return header[at], at + 1
    if kind in (4, 5, 6):
        return _integer(header, at)
    if kind == 7:
        header[at + 7]  # raises IndexError at the end
        return None, at + 8
    if kind == 8:
        num_bytes, at = _unsigned(header, at)
        return None, at + num_bytes
    if kind in (9, 10):
        return _list(header, at, depth + 1)
    if kind == 12:
        return _structure(header, at, depth + 1)
    raise pa.ArrowInvalid("a header has a field of an unknown type")


def _list(header: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    if depth > MAX_NESTED:
        raise pa.ArrowInvalid("a header is nested too deeply")
    first = header[at]
    num_items, at = (first >> 4, at + 1) if first >> 4 < 15 else _unsigned(header, at + 1)
    items = []
    for _ in range(num_items):  # each takes a byte or more, so the end of the header ends this
        item, at = _value(header, at, first & 15, depth)
        items.append(item)
    return items, at


def _integer(header: bytes, at: int) -> tuple[int, int]:
    zigzag, at = _unsigned(header, at)
    return (zigzag >> 1) ^ -(zigzag & 1), at


def _unsigned(header: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = header[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise pa.ArrowInvalid("a header has a number without end")


# -- sizes -------------------------------------------------------------------


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file that dualkg or a user wrote, unless it is far larger in memory.

    `pq.read_table` would load another library.
    """
    with (
        open_regular(path) as stream,
        pq.ParquetFile(stream, page_checksum_verification=True) as file,
    ):
        limit = expansion_limit(max(1, stream.seek(0, 2)))
        content = content_of(stream, file.schema)
        columns = content.columns
        _check_size(path, content.size_of(columns), limit)
        if any(DELTA_BYTE_ARRAY in column.encodings for column in columns.values()):
            problem = "has texts in the encoding DELTA_BYTE_ARRAY, whose size is not known"
            raise UnusableData(path, problem, advice="Write it with another encoding.")
        repeated = [
            name for name, column in columns.items() if column.is_text and column.has_dictionary
        ]
        if repeated:
            _check_size(path, _size_of_texts(stream, repeated, limit), limit)
        return file.read()


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        problem = f"expands to more than {limit // MIB:,} MiB, far more than it holds"
        raise UnusableData(path, problem, advice="Make it again.")


def _size_of_texts(stream: BinaryIO, columns: list[str], limit: int) -> int:
    """The bytes of texts whose rows name entries of a dictionary, or more than the limit."""
    import pyarrow.compute as pc

    size = 0
    with pq.ParquetFile(stream, read_dictionary=columns) as file:
        for batch in file.iter_batches(CHECKED_ROWS, columns=columns):
            for column in batch.columns:
                while pa.types.is_nested(column.type) and hasattr(column, "values"):
                    column = column.flatten()  # of lists
                if not pa.types.is_dictionary(column.type):
                    raise pa.ArrowInvalid(f"it has texts in a column of the type {column.type}")
                lengths = pc.binary_length(column.dictionary).fill_null(0).to_numpy()
                indices = column.indices.drop_null().to_numpy()
                size += int(lengths.astype(np.int64)[indices].sum())
            if size > limit:
                break
    return size

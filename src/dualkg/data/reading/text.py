"""TSV and CSV, read in blocks by Arrow; only a file that fails is read again line by line."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator

import pyarrow as pa
import pyarrow.csv

from dualkg.data.reading.blocks import NAMES, Reader, empty_among
from dualkg.data.reading.layout import Layout, label_layout, triple_layout
from dualkg.data.reading.scanning import first_bad_line
from dualkg.data.reading.sources import Source
from dualkg.errors import DataError

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

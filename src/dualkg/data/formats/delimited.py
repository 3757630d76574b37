"""Text in columns: separated by tabs or spaces, without quoting; in .csv by commas, with quotes."""

from collections.abc import Generator, Sequence

import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.data.columns import ROLES, find_columns, recognize_header
from dualkg.data.errors import UnclearColumns, literal
from dualkg.data.readers import Reader, ReadOptions, reads
from dualkg.data.text import (
    Beginning,
    Layout,
    Row,
    parse_delimiter,
    read_beginning,
    read_blocks,
)
from dualkg.errors import Sentence

OPENKE_INDICES = (0, 2, 1)  # of head, relation and tail


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
            self.remark(f"The columns of {self.name} are separated by spaces.")
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
        if columns is not None:
            indices = find_columns(columns, cells, self.name)
            num_columns = len(cells)
        elif recognized:
            indices = recognized
            num_columns = len(cells)
        else:
            indices = (0, 1, 2)
            num_blank = self._num_blank(cells)
            num_columns = len(ROLES) + num_blank

        has_header = recognized is not None or any(
            isinstance(column, str) for column in columns or ()
        )
        if has_header and columns is None:
            # A first line such as `s r t` could also be a triple.
            self.remark(f"The first line of {self.name} was read as a header.")
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
        self.remark(f"Each line of {self.name} {text} ignored.")
        return len(beyond)

    def _numbered_blocks(self, layout: Layout, expected: int) -> Generator[pa.RecordBatch]:
        """The blocks below the number of triples, which they must have."""
        if self.is_openke_order:
            template = (
                f"The first line of {literal(self.name)} is the number of its triples, as in files "
                "of OpenKE, so its columns were read as head, tail and relation. If they are head, "
                "relation and tail, use {columns}."
            )
            self.remarks.append(Sentence(template, {"columns": (1, 2, 3)}))
        else:
            self.remark(f"The first line of {self.name}, the number of its triples, was skipped.")

        num_triples = 0
        for block in read_blocks(self.data, layout, self):
            num_triples += block.num_rows
            if self.is_openke_order and not all(_are_ids(column) for column in block.columns):
                raise UnclearColumns(self.name)
            yield block
        if num_triples != expected:
            raise self.wrong_number(expected, num_triples)


def _are_ids(column: pa.DictionaryArray) -> bool:
    return all(name.isdecimal() for name in column.dictionary.to_pylist())

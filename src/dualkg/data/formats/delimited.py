"""Text in columns: separated by tabs or spaces, without quoting; in .csv by commas, with quotes."""

from collections.abc import Generator

import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.data.columns import ROLES, find_columns, recognize_header
from dualkg.data.readers import Reader, ReadOptions, reads
from dualkg.data.text import Layout, first_row, parse_delimiter, read_blocks


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
        separator, first = first_row(self.data, self.delimiter, sniff=True)
        if first is None:
            return
        if separator == " " and self.delimiter is None:
            self.remark(f"The columns of {self.name} are separated by spaces.")
        layout = self._layout(separator, first.cells, first.num_lines)
        yield from read_blocks(self.data, layout, self)

    def _layout(self, separator: str, cells: list[str], num_lines: int) -> Layout:
        """The layout of the file by its first row, which ends after `num_lines` lines."""
        recognized = recognize_header(cells)
        columns = self.columns
        if columns is None:
            indices = recognized or (0, 1, 2)
            num_columns = len(cells) if recognized else len(ROLES)
        else:
            indices = find_columns(columns, cells, self.name)
            num_columns = len(cells)

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

        return Layout(separator, num_columns, indices, ROLES, num_lines if has_header else 0)

"""Parquet: columns of strings, or of integers that stand for names."""

from collections.abc import Generator
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from dualkg.data.archives import unreadable
from dualkg.data.parquet_files import content_of
from dualkg.data.readers import TableReader, reads

MAX_EXPANDED = 64 << 20  # bytes of a block, of all texts that cannot be read as a dictionary


@reads(".parquet")
class ParquetReader(TableReader):
    """A Parquet file; a compressed one, or one in an archive, is read into memory first.

    Names are read as entries of a dictionary, which rows only point to. Where that cannot be,
    blocks are as small as names can be long.
    """

    def blocks(self) -> Generator[pa.RecordBatch]:
        is_plain = not self.data.compression and not self.data.in_archive
        with self.data.opener() if is_plain else self.data.open() as stream:
            seekable = stream if is_plain else pa.BufferReader(stream.read())
            try:
                yield from self._blocks(seekable)
            # The names of columns may be no valid text.
            except (pa.ArrowException, OSError, ValueError) as error:
                raise unreadable(error, self.data.path, self.name) from error

    def _blocks(self, seekable: Any) -> Generator[pa.RecordBatch]:
        with pa.parquet.ParquetFile(seekable) as table:
            names = self.column_names(table.schema_arrow)
            content = content_of(seekable, table.schema)
            columns = {name: content.columns[name] for name in names if name in content.columns}
            self.data.check_size(content.size_of(columns))

        # A name is not longer than a page of its column.
        longest_row = sum(
            column.largest_page
            for column in columns.values()
            if column.is_text and not column.can_be_dictionary
        )
        num_rows = self.options.block_rows
        if longest_row:
            num_rows = min(num_rows, max(1, MAX_EXPANDED // longest_row))
        texts = [name for name, column in columns.items() if column.can_be_dictionary]
        with pa.parquet.ParquetFile(seekable, read_dictionary=texts) as table:
            yield from self.table_blocks(names, table.iter_batches(num_rows, columns=names))

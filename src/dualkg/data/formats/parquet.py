"""Parquet: columns of strings, or of integers that stand for names."""

from collections.abc import Generator

import pyarrow as pa
import pyarrow.parquet

from dualkg.data.archives import parquet_size, unreadable
from dualkg.data.readers import TableReader, reads


@reads(".parquet")
class ParquetReader(TableReader):
    """A Parquet file; a compressed one, or one in an archive, is read into memory first."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        is_plain = not self.data.compression and not self.data.in_archive
        with self.data.opener() if is_plain else self.data.open() as stream:
            seekable = stream if is_plain else pa.BufferReader(stream.read())
            try:
                with pa.parquet.ParquetFile(seekable) as table:
                    self.data.check_size(parquet_size(table.metadata))
                    names = self.column_names(table.schema_arrow)
                    batches = table.iter_batches(self.options.block_rows, columns=names)
                    yield from self.table_blocks(names, batches)
            # The names of columns may be no valid text.
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise unreadable(error, self.data.path, self.name) from error

"""Parquet: columns of strings, or of integers that stand for names."""

from collections.abc import Generator

import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.archives import unreadable
from dualkg.data.readers import TableReader, reads


@reads(".parquet")
class ParquetReader(TableReader):
    """A Parquet file; a compressed file, or a member of an archive, is read into memory first."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        try:
            with self.data.open_for_arrow() as file:
                yield from self._blocks(file)
        # The names of columns may be no valid text.
        except (pa.ArrowException, OSError, ValueError) as error:
            raise unreadable(error, self.data.path, self.name) from error

    def _blocks(self, file: pa.NativeFile) -> Generator[pa.RecordBatch]:
        with pq.ParquetFile(file, page_checksum_verification=True) as table:
            metadata = table.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            self.data.check_size(sum(group.total_byte_size for group in groups))
            names = self.column_names(table.schema_arrow)
            batches = table.iter_batches(self.options.block_rows, columns=names)
            yield from self.table_blocks(names, batches)

"""Parquet files of runs, graphs, ranks and projections."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.files import open_regular

MAX_STORED = 16 << 30  # bytes of a file; all ranks of the largest benchmark are a thousandth


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file, and check the checksums of its pages.

    `pq.read_table` would load another library.
    """
    open_regular(path, max_bytes=MAX_STORED).close()
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()
